"""A served workload as cells of run.json: the request as a row of its table, and each of its phases with what ran."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from benchmarks.ledger import Cell
from benchmarks.phases import EagerEngine, Prompt
from benchmarks.runs import CLOCK_STOOD_STILL, Run
from benchmarks.traces import Trace, allowed_backends, trace
from benchmarks.workloads import Workload

T = TypeVar("T")


class Sampled(Protocol[T]):
    """Calls a measurement several times, after a short warm-up of the same shapes, and gives back what it returned."""

    def __call__(self, call: Callable[[], T], warm_up: Callable[[], object]) -> list[T]: ...


@dataclass(frozen=True)
class Phases:
    """One trace of each phase of a workload: a whole prefill, and one decode step after it.

    One is enough for a table: on an H200 three traces of a phase differed by at most 1 % of device time, and each took
    about a second to collect.
    """

    prefill: Trace
    decode: Trace

    @staticmethod
    def of(engine: EagerEngine, workload: Workload, take_cache: Callable[[], Any] = lambda: None) -> Phases:
        """Trace the very phases that were timed, apart from the timing: a profiled call is slower than a plain one."""
        prompt = Prompt.of(workload.prompts, engine.device)
        cache = take_cache()
        prefill = trace(lambda: engine.prefill(prompt, cache), engine.device)
        state = engine.prefill(prompt, take_cache())
        state = engine.step(state)  # the first step after a prefill pays for shapes not seen before
        return Phases(prefill, trace(lambda: engine.step(state), engine.device))


def kernels(traced: Trace) -> dict[str, object]:
    """What attention ran, how it met fewer KV heads, beside what the flags allow; and the longest kernels."""
    return {
        "attention": sorted({run.backend for run in traced.attention}),
        "gqa": sorted({run.gqa for run in traced.attention if run.gqa}),
        "proof": sorted({name for run in traced.attention for name in run.kernels}),
        "math_fallback": traced.math_fallback,
        "allowed": sorted(name for name, allowed in allowed_backends().items() if allowed),
        "n_kernels": traced.n_kernels,
        "longest": [{"name": k.name, "count": k.count, "total_s": k.total_s} for k in traced.kernels],
    }


def request_figures(runs: Sequence[Run]) -> dict[str, float]:
    """Medians over rounds of what people quote of a request."""
    names = ["ttft_s", "e2e_s", "wall_per_request_s", "output_tokens_per_s"]
    names += ["tpot_s"] if runs[0].output_len > 1 else []
    return {name: statistics.median(getattr(run, name) for run in runs) for name in names}


def served_cells(
    id: str,
    workload: Workload,
    engine: EagerEngine,
    precision: str,
    runs: Sequence[Run],
    phases: Phases,
    *,
    bytes: Mapping[str, float] | None = None,
    figures: Mapping[str, float] | None = None,
    unavailable: Mapping[str, str] | None = None,
    note: str = "",
) -> list[Cell]:
    """The request's row and its two phases. `id` begins with the station's name; `figures` are added to the row's."""
    station = id.split(".")[0]
    common = {"station": station, "workload": workload.record, "engine": engine.name, "precision": precision}
    row_figures = request_figures(runs) | dict(figures or {})
    row_missing = dict(unavailable or {}) | {"device_s": "of a request only its phases have one, in their own cells"}
    if not all(run.clock_advanced for run in runs):
        row_figures, row_missing["figures"] = {}, CLOCK_STOOD_STILL
    made = []
    for phase, walls, traced in (
        ("prefill", tuple(run.ttft_s for run in runs), phases.prefill),
        ("decode", tuple(run.tpot_s for run in runs if run.output_len > 1), phases.decode),
    ):
        if not walls:
            continue
        busy = None if traced.device_s is None else (traced.device_s,)
        missing = (
            {} if busy else dict.fromkeys(("device_s", "host_bound"), traced.reason or "the trace has no device time")
        )
        made.append(
            Cell(
                id=f"{id}.{phase}",
                phase=phase,
                wall_s=walls,
                device_s=busy,
                kernels=kernels(traced),
                unavailable=missing,
                **common,  # type: ignore[arg-type]
            )
        )
        if busy:
            row_figures[f"{phase}_device_s"] = busy[0]
            row_figures[f"{phase}_host_bound"] = made[-1].host_bound or 0.0
    row = Cell(
        id=id,
        phase="row",
        wall_s=tuple(run.e2e_s for run in runs),
        bytes=bytes or {},
        figures=row_figures,
        kernels={
            "prefill": kernels(phases.prefill)["attention"],
            "decode": kernels(phases.decode)["attention"],
            "allowed": kernels(phases.decode)["allowed"],
        },
        unavailable=row_missing,
        note=note,
        **common,  # type: ignore[arg-type]
    )
    return [row, *made]
