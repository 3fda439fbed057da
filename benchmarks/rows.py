"""A served workload as cells of run.json: the request as a row of its table, and each of its phases with what ran."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ledger import Cell
from benchmarks.phases import EagerEngine, Prompt
from benchmarks.runs import Run
from benchmarks.traces import Trace, allowed_backends, trace
from benchmarks.workloads import Workload

TRACES = 3
"""Profiler traces of a phase: device times repeat within a per cent, so three show that and cost little."""


@dataclass(frozen=True)
class Phases:
    """Traces of the two phases of one workload: a whole prefill, and one decode step after it."""

    prefill: tuple[Trace, ...]
    decode: tuple[Trace, ...]

    @staticmethod
    def of(
        engine: EagerEngine, workload: Workload, take_cache: Callable[[], Any] = lambda: None, repeats: int = TRACES
    ) -> Phases:
        """Trace the very phases that were timed, apart from the timing: a profiled call is slower than a plain one."""
        prompt = Prompt.of(workload.prompts, engine.device)
        repeats = repeats if engine.device == "cuda" else 1  # on CPU a trace names kernels and has no device time
        prefills, steps = [], []
        for _ in range(repeats):
            cache = take_cache()
            prefills.append(trace(lambda c=cache: engine.prefill(prompt, c), engine.device))  # type: ignore[misc]
            state = engine.prefill(prompt, take_cache())
            state = engine.step(state)  # the first step after a prefill pays for shapes not seen before
            steps.append(trace(lambda s=state: engine.step(s), engine.device))  # type: ignore[misc]
        return Phases(tuple(prefills), tuple(steps))


def device_s(traces: Sequence[Trace]) -> tuple[float, ...] | None:
    """Busy seconds of each trace; None unless all have them."""
    seen = [t.device_s for t in traces]
    return tuple(s for s in seen if s is not None) if seen and all(s is not None for s in seen) else None


def kernels(traces: Sequence[Trace]) -> dict[str, object]:
    """What attention ran, how it met fewer KV heads, beside what the flags allow; and the longest kernels."""
    last = traces[-1]
    return {
        "attention": sorted({run.backend for run in last.attention}),
        "gqa": sorted({run.gqa for run in last.attention if run.gqa}),
        "proof": sorted({name for run in last.attention for name in run.kernels}),
        "math_fallback": last.math_fallback,
        "allowed": sorted(name for name, allowed in allowed_backends().items() if allowed),
        "n_kernels": last.n_kernels,
        "longest": [{"name": k.name, "count": k.count, "total_s": k.total_s} for k in last.kernels],
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
    made = []
    for phase, walls, traces in (
        ("prefill", tuple(run.ttft_s for run in runs), phases.prefill),
        ("decode", tuple(run.tpot_s for run in runs if run.output_len > 1), phases.decode),
    ):
        if not walls:
            continue
        busy = device_s(traces)
        missing = {} if busy else {"device_s": traces[-1].reason or "no trace", "host_bound": traces[-1].reason or "no trace"}
        made.append(
            Cell(
                id=f"{id}.{phase}",
                phase=phase,
                wall_s=walls,
                device_s=busy,
                kernels=kernels(traces),
                unavailable=missing,
                **common,  # type: ignore[arg-type]
            )
        )
        if busy:
            row_figures[f"{phase}_device_s"] = statistics.median(busy)
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
        unavailable=dict(unavailable or {}) | {"device_s": "of a request only its phases have one, in their own cells"},
        note=note,
        **common,  # type: ignore[arg-type]
    )
    return [row, *made]
