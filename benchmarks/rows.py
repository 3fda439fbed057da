"""A served workload as cells of run.json: the request as a row of its table, and each of its phases with what ran."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from benchmarks.ledger import Cell
from benchmarks.phases import Engine, Prompt
from benchmarks.roofline import Roofline, Work, forward_work
from benchmarks.runs import CLOCK_STOOD_STILL, Run
from benchmarks.traces import Trace, allowed_backends, trace_each
from benchmarks.workloads import Workload

T = TypeVar("T")


class Sampled(Protocol[T]):
    """Calls a measurement several times, after a short warm-up of the same shapes, and gives back what it returned."""

    def __call__(self, call: Callable[[], T], warm_up: Callable[[], object]) -> list[T]: ...


@dataclass(frozen=True)
class Needed:
    """What the two traced phases can't do without, and the roofs that make floors of it."""

    roofline: Roofline
    prefill: Work
    decode: Work


@dataclass(frozen=True)
class Phases:
    """One trace of each phase of a workload: a whole prefill, and one decode step after it.

    One is enough for a table: on an H200 three traces of a phase differed by at most 1 % of device time, and each took
    about a second to collect. `needed` is the reason as text where no floor can be computed, None where none was asked
    for.
    """

    prefill: Trace
    decode: Trace
    needed: Needed | str | None = None

    @staticmethod
    def of(
        engine: Engine[Any],
        workload: Workload,
        take_cache: Callable[[], Any] = lambda: None,
        roofline: Roofline | None = None,
    ) -> Phases:
        """Trace the very phases that were timed, apart from the timing: a profiled call is slower than a plain one."""
        prompt = Prompt.of(workload.prompts, engine.device)
        cache = take_cache()
        needed = _needed(engine, workload, cache, roofline) if roofline is not None else None
        states: list[Any] = []

        def step() -> None:
            states.append(engine.step(states.pop()))

        prefill, decode = trace_each([lambda: states.append(engine.prefill(prompt, cache)), step], engine.device)
        return Phases(prefill, decode, needed)


def _needed(engine: Engine[Any], workload: Workload, cache: Any, roofline: Roofline) -> Needed | str:
    """Each row of the traced decode step holds its prompt."""
    lens = [len(row) for row in workload.prompts]
    past_len = cache.get_seq_length() if cache is not None else 0
    try:
        return Needed(
            roofline,
            forward_work(engine.model, [(past_len, length) for length in lens]),
            forward_work(engine.model, [(past_len + length, 1) for length in lens]),
        )
    except ValueError as error:
        return str(error)


@dataclass(frozen=True)
class Floor:
    """A phase beside its floor: figures for a cell, and what holds it back in words."""

    figures: Mapping[str, float]
    regime: str


ROW_FLOOR = ("floor_s", "share_of_floor")
"""What of a phase's floor also stands in its request's row."""


def _floor(needed: Needed | str | None, phase: str, wall_s: float, traced: Trace, device: str) -> Floor | str | None:
    """`share_of_floor` is the floor over the time that the device worked, `wall_share_of_floor` over what the caller
    waited; on a CPU, which is its own host, they are one. Or the reason why there is neither."""
    if not isinstance(needed, Needed):
        return needed
    if device != "cpu" and traced.device_s is None:
        return traced.reason or "the trace has no device time"
    if wall_s <= 0:
        return CLOCK_STOOD_STILL
    work = needed.prefill if phase == "prefill" else needed.decode
    floor_s = needed.roofline.floor_s(work)
    busy_s = wall_s if traced.device_s is None else traced.device_s
    figures = {"floor_s": floor_s, "share_of_floor": floor_s / busy_s, "wall_share_of_floor": floor_s / wall_s}
    return Floor(figures, needed.roofline.regime(work, wall_s, traced.device_s))


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


@dataclass(frozen=True)
class PlannedRow:
    """A row that a test is to measure, and what stands in its place where it can't be."""

    id: str
    workload: Workload
    engine: str
    precision: str
    phase: str = "row"

    def missing(self, reason: str) -> Cell:
        """The row without figures, for this reason."""
        gone = dict.fromkeys(("wall_s", "device_s", "host_bound", "figures"), reason)
        return Cell(
            self.id,
            self.id.split(".")[0],
            self.phase,
            self.workload.record,
            self.engine,
            self.precision,
            unavailable=gone,
            note=reason,
        )


def served_cells(
    id: str,
    workload: Workload,
    engine: Engine[Any],
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
    made: list[Cell] = []
    regimes = []
    for phase, walls, traced in (
        ("prefill", tuple(run.ttft_s for run in runs), phases.prefill),
        ("decode", tuple(run.tpot_s for run in runs if run.output_len > 1), phases.decode),
    ):
        if not walls:
            continue
        busy = None if traced.device_s is None else (traced.device_s,)
        why = traced.reason or "the trace has no device time"
        missing = {} if busy else dict.fromkeys(("device_s", "host_bound"), why)
        floor = _floor(phases.needed, phase, statistics.median(walls), traced, engine.device)
        if isinstance(floor, str):
            missing["floor_s"] = row_missing["floor_s"] = floor
        made.append(
            Cell(
                id=f"{id}.{phase}",
                phase=phase,
                wall_s=walls,
                device_s=busy,
                figures=floor.figures if isinstance(floor, Floor) else {},
                kernels=kernels(traced),
                unavailable=missing,
                note=floor.regime if isinstance(floor, Floor) else "",
                **common,  # type: ignore[arg-type]
            )
        )
        if isinstance(floor, Floor) and row_figures:
            row_figures |= {f"{phase}_{name}": value for name, value in floor.figures.items() if name in ROW_FLOOR}
            regimes.append(f"{phase} {floor.regime}")
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
        note="; ".join(filter(None, (note, ", ".join(regimes)))),
        **common,  # type: ignore[arg-type]
    )
    return [row, *made]
