"""More GPUs: what tensor parallel, a pipeline and replicas each do for a request, and what each costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from benchmarks.claims import CLAIMS
from benchmarks.estimates import Estimate, counted, median_interval, paired_ratio, unusable
from benchmarks.ledger import Cell
from benchmarks.parallel.pipeline import Flight, idle_share
from benchmarks.parallel.ranks import PIPELINE, TENSOR_PARALLEL
from benchmarks.parallel.tensor_parallel import Shares, StepCost, StepTrace
from benchmarks.parallel.workers import Workers
from benchmarks.rows import request_figures
from benchmarks.runs import Run, ratio
from benchmarks.timing import Rounds
from benchmarks.tokens import Match, share_explained
from benchmarks.workloads import Ids, Workload

T = TypeVar("T")

IN_FLIGHT_PER_STAGE = 4
"""Prefills in flight for each stage. GPipe's own advice: with four times as many as stages the bubble is small."""


# One round of each comparison -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """A request served by one GPU and by all, in turn, and one traced decode step of each."""

    one: Run
    split: Run
    one_step: StepTrace
    split_step: tuple[StepTrace, ...]


def beside(workers: Workers, alone: str, split: str, workload: Workload) -> Callable[[], Beside]:
    """A call that measures one round; which side comes first swaps from call to call."""
    split_first = False

    def one_round() -> Beside:
        nonlocal split_first
        runs = workers.call("serve_beside", alone, split, workload, split_first)[0]
        split_first = not split_first
        one_step = workers.call("trace_step", alone, workload, ranks=[0])[0]
        return Beside(runs[alone], runs[split], one_step, tuple(workers.call("trace_step", split, workload)))

    return one_round


def in_flight(world_size: int) -> tuple[int, ...]:
    """Prefills in flight that are measured: one, one a stage, and IN_FLIGHT_PER_STAGE a stage."""
    return (1, world_size, IN_FLIGHT_PER_STAGE * world_size)


def fly(workers: Workers, prompts: Sequence[Ids], numbers: Sequence[int]) -> dict[int, tuple[Flight, ...]]:
    """A round of prefills in flight: by their number, the flight as each stage saw it."""
    stages = workers.call("fly", prompts, numbers)
    return {n: tuple(flights[n] for flights in stages) for n in numbers}


# What rounds show -----------------------------------------------------------------------------------------------------


def _times(estimate: Estimate, factor: float) -> Estimate:
    """The figure in another unit: its value and interval by a constant."""
    value, low, high = (None if x is None else x * factor for x in (estimate.value, estimate.low, estimate.high))
    return replace(estimate, value=value, low=low, high=high)


def _device_ratio(rounds: Sequence[Beside], speed_up: bool, cost: Callable[[Beside], float | str]) -> Estimate:
    """One GPU's step over the split one's (`speed_up`) or the other way round, in device time."""
    split = [cost(r) for r in rounds]
    one = [r.one_step.compute_s if r.one_step.compute_s is not None else r.one_step.reason or "" for r in rounds]
    if reason := next((s for s in (*one, *split) if isinstance(s, str)), None):
        return unusable(reason, len(rounds))
    sides = {"one GPU's step": [float(s) for s in one], "all GPUs' step": [float(s) for s in split]}
    names = list(sides) if speed_up else list(sides)[::-1]
    return paired_ratio(sides[names[0]], sides[names[1]], (names[0], names[1]))


def _step_s(r: Beside) -> float | str:
    cost = StepCost.of(r.split_step)
    return cost if isinstance(cost, str) else cost.device_s


def _stages_s(r: Beside) -> float | str:
    """A token passes all stages: their work in a row. What they send each other is left out."""
    missing = next((t.reason for t in r.split_step if t.compute_s is None), None)
    return missing or sum(t.compute_s or 0.0 for t in r.split_step)


def tensor_parallel_shows(
    target: Sequence[Beside], wide: Sequence[Beside], world_size: int, n_layers: int
) -> dict[str, dict[str, Estimate]]:
    """What paired rounds at the rig's shape and at the wide one show."""
    sides = {"": target, "wide, ": wide}
    seen = {}
    for prefix, rounds in sides.items():
        names = ("one GPU", "all GPUs")
        seen[f"{prefix}wall"] = ratio("tpot_s", [r.one for r in rounds], [r.split for r in rounds], names)
        seen[f"{prefix}device"] = _device_ratio(rounds, True, _step_s)
    known = ", ".join(f"{what} {e.value:.3g}x" for what, e in seen.items() if e.value is not None)
    line = {what: _times(e, 1 / world_size) for what, e in seen.items()}
    return {
        "parallel.tp_not_linear": line | {"wall": line["wall"].noted(f"{world_size} GPUs, speed-up: {known}")},
        "parallel.tp_pays_for_sync": _sync(target, n_layers),
    }


def _sync(rounds: Sequence[Beside], n_layers: int) -> dict[str, Estimate]:
    counts = {t.all_reduces for r in rounds for t in r.split_step}
    if len(counts) == 1:
        (count,) = counts
        per_layer = counted(count / n_layers, note=f"{count} all-reduces a step, {n_layers} layers")
    else:
        per_layer = unusable(f"steps of the same model made {sorted(counts)} all-reduces", len(rounds))
    costs = [StepCost.of(r.split_step) for r in rounds]
    if reason := next((c for c in costs if isinstance(c, str)), None):
        return {"all-reduces per layer": per_layer, "share of the step": unusable(reason, len(rounds))}
    known = [c for c in costs if isinstance(c, StepCost)]
    raw = {"all-reduce": tuple(c.sync_s for c in known), "step": tuple(c.device_s for c in known)}
    return {
        "all-reduces per layer": per_layer,
        "share of the step": median_interval([c.sync_s / c.device_s for c in known], raw),
    }


def memory_shows(shares: Shares, held: Sequence[int]) -> dict[str, Estimate]:
    """Bytes on each GPU against what its slices and the replicated rest should be."""
    whole = ", ".join(sorted({name.split(".")[-2] for name in shares.replicated_bytes})) or "nothing"
    off = max((h / shares.total_bytes for h in held), key=lambda r: abs(r - 1))
    raw = {"held": tuple(map(float, held)), "predicted": (float(shares.total_bytes),)}
    note = f"replicated: {whole}, {sum(shares.replicated_bytes.values()) / shares.total_bytes:.2%} of a GPU's bytes"
    return {"parallel.tp_memory": counted(off, raw, note)}


def pipeline_shows(
    rounds: Sequence[Beside], flights: Sequence[Mapping[int, Sequence[Flight]]], world_size: int
) -> dict[str, dict[str, Estimate]]:
    """What paired rounds of one request, and of prefills in flight, show. A flight has one entry a stage."""
    most = IN_FLIGHT_PER_STAGE * world_size
    idle = {n: [statistics.fmean(f.idle_share for f in flown[n]) for flown in flights] for n in (1, most)}
    must = idle_share(world_size, 1)
    return {
        "parallel.pp_same_latency": {
            "wall": ratio("e2e_s", [r.split for r in rounds], [r.one for r in rounds], ("pipeline", "one GPU")),
            "device": _device_ratio(rounds, False, _stages_s),
            "idle share at one request": paired_ratio(idle[1], [must] * len(flights), ("idle", "GPipe's formula")),
            "idle share left": paired_ratio(idle[most], idle[1], (f"{most} in flight", "1 in flight")),
        }
    }


def replicas_show(rounds: Rounds[list[Run]]) -> dict[str, dict[str, Estimate] | Estimate]:
    """What rounds of one batched replica alone, all of them together, and all unbatched show."""
    alone, together, unbatched = rounds["alone"], rounds["together"], rounds["unbatched"]
    one = [runs[0] for runs in alone]
    n = len(together[0])
    scale = paired_ratio(
        [_tokens_per_s(runs) for runs in together],
        [n * r.output_tokens_per_s for r in one],
        ("together", f"{n} x alone"),
    )
    worst = [max(runs, key=lambda r: r.tpot_s) for runs in together]
    return {
        "parallel.replicas_scale": {
            "tokens per second": scale,
            "tpot": ratio("tpot_s", worst, one, ("worst replica", "alone")),
        },
        "parallel.idle_replica_is_idle": paired_ratio(
            [r.output_tokens_per_s for r in one],
            [_tokens_per_s(runs) for runs in unbatched],
            ("one replica, batch 16", f"{n} replicas, batch 1"),
        ),
    }


def _tokens_per_s(runs: Sequence[Run]) -> float:
    """Of replicas that started together: all their tokens until the last one is done."""
    return sum(r.batch_size * r.output_len for r in runs) / max(r.e2e_s for r in runs)


def same_tokens_show(tensor_parallel: Sequence[Match], pipeline: Sequence[Match]) -> dict[str, dict[str, Estimate]]:
    return {
        "parallel.same_tokens": {
            "tensor parallel rows explained": share_explained(tensor_parallel),
            "pipeline rows explained": share_explained(pipeline),
        }
    }


def failed(error: Exception, *claim_ids: str) -> dict[str, dict[str, Estimate]]:
    """What is known of these claims when their workers failed, or found no room: nothing, and why."""
    return {i: {b.what: unusable(str(error)) for b in CLAIMS[i].bounds} for i in claim_ids}


# Cells ----------------------------------------------------------------------------------------------------------------


def request_cell(
    id: str, engine: str, gpus: int, workload: Workload, precision: str, runs: Sequence[Run], **more: Any
) -> Cell:
    """A request served by so many GPUs, as a row. `figures` among `more` are added to its own."""
    figures = request_figures(runs) | dict(more.pop("figures", {}))
    return Cell(
        id=f"parallel.{id}",
        station="parallel",
        phase="row",
        workload=workload.record | {"gpus": gpus},
        engine=engine,
        precision=precision,
        wall_s=tuple(r.e2e_s for r in runs),
        figures=figures,
        unavailable={"device_s": "of a request only its decode step has one, among the figures"},
        **more,
    )


def beside_cells(
    id: str,
    engine: str,
    world_size: int,
    workload: Workload,
    precision: str,
    rounds: Sequence[Beside],
    bytes: float | None,
) -> list[Cell]:
    """One GPU's request and the split one's, with the device time of a decode step."""
    one = [r.one_step.compute_s for r in rounds if r.one_step.compute_s is not None]
    split: dict[str, float] = {}
    costs = [c for c in (StepCost.of(r.split_step) for r in rounds) if isinstance(c, StepCost)]
    if engine == TENSOR_PARALLEL and costs:
        split = {
            "decode_device_s": statistics.median(c.device_s for c in costs),
            "sync_device_s": statistics.median(c.sync_s for c in costs),
        }
    elif stages := [s for s in map(_stages_s, rounds) if isinstance(s, float)]:
        split = {"decode_device_s": statistics.median(stages)}
    common = (workload, precision)
    return [
        request_cell(
            f"{id}_one",
            "eager",
            1,
            *common,
            [r.one for r in rounds],
            figures={"decode_device_s": statistics.median(one)} if one else {},
        ),
        request_cell(
            f"{id}_split",
            engine,
            world_size,
            *common,
            [r.split for r in rounds],
            figures=split,
            bytes={} if bytes is None else {"weights_per_gpu": bytes},
        ),
    ]


def flight_cells(
    prompt_len: int, precision: str, flights: Sequence[Mapping[int, Sequence[Flight]]], world_size: int
) -> list[Cell]:
    """Prefills in flight: how long all took, and how long a stage idled beside what it must."""
    return [
        Cell(
            id=f"parallel.in_flight_{n}",
            station="parallel",
            phase="pipeline",
            workload={
                "name": f"{n} prefill{'s' * (n > 1)}",
                "batch_size": n,
                "prompt_len": prompt_len,
                "output_len": 1,
                "gpus": world_size,
            },
            engine=PIPELINE,
            precision=precision,
            wall_s=tuple(max(f.wall_s for f in flown[n]) for flown in flights),
            figures={
                "idle_share": statistics.median(statistics.fmean(f.idle_share for f in flown[n]) for flown in flights),
                "must_idle_share": idle_share(world_size, n),
            },
            unavailable={"device_s": "a stage's own time is in idle_share"},
        )
        for n in flights[0]
    ]


def replica_cells(
    rounds: Rounds[list[Run]], one: Workload, sixteen: Workload, precision: str, engine: str
) -> list[Cell]:
    """The three ways as rows. `engine` is what each replica runs its steps by."""
    name = "replicas" if engine == "eager" else f"replicas, {engine}"
    n = len(rounds["together"][0])
    made = []
    for id, side, gpus, workload in (
        ("replica_alone", "alone", 1, sixteen),
        ("replicas_together", "together", n, sixteen),
        ("replicas_unbatched", "unbatched", n, one),
    ):
        worst = [max(runs, key=lambda r: r.e2e_s) for runs in rounds[side]]
        total = statistics.median(_tokens_per_s(runs) for runs in rounds[side])
        made.append(request_cell(id, name, gpus, workload, precision, worst, figures={"output_tokens_per_s": total}))
    return made
