"""Batching: what sixteen users get out of one card, and what each of them waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.estimates import Estimate, counted, unusable
from benchmarks.graphs import GraphEngine
from benchmarks.ledger import Cell
from benchmarks.memory import OutOfMemory, attempt, fits, kv_cache_bytes, tensor_bytes, watch_peak
from benchmarks.phases import (
    EagerEngine,
    Engine,
    Prompt,
    Reference,
    Request,
    decode,
    forced_choices,
    reference,
    serve,
    tolerance,
)
from benchmarks.roofline import Roofline
from benchmarks.rows import Phases, PlannedRow, Sampled, served_cells
from benchmarks.runs import Run, ratio
from benchmarks.timing import Clock
from benchmarks.tokens import Tolerance, compare, share_explained
from benchmarks.workloads import Workload


def sixteen_over_one(one: Sequence[Run], sixteen: Sequence[Run]) -> dict[str, Estimate]:
    """What paired runs of batch 1 and batch 16 show for the claims of this station."""
    names = ("batch 16", "batch 1")
    return {
        "batching.throughput": ratio("output_tokens_per_s", sixteen, one, names),
        "batching.latency": ratio("e2e_s", sixteen, one, names),
        "batching.nobody_gets_sixteenth": ratio("e2e_s", sixteen, one, names),
        "batching.tpot": ratio("tpot_s", sixteen, one, names),
    }


def ttft_grows(one: Sequence[Run], sixteen: Sequence[Run]) -> dict[str, Estimate]:
    """What paired prefills of one and of sixteen long prompts show."""
    seen = ratio("ttft_s", sixteen, one, ("16 prompts", "1 prompt"))
    return {"batching.ttft_grows": seen.noted(f"prompts of {one[0].prompt_len} tokens")}


def peak_bytes(engine: EagerEngine, workload: Workload) -> int | OutOfMemory | None:
    """Peak bytes of serving a batch over what was resident; None where nothing counts bytes."""
    prompt = Prompt.of(workload.prompts, engine.device)

    def measure() -> int | None:
        decode(engine, engine.prefill(prompt), 2)  # a short warm-up: what libraries keep is taken before the counting
        return watch_peak(lambda: decode(engine, engine.prefill(prompt), workload.output_len), engine.device)[1]

    return attempt(measure, engine.device)


def memory_growth(engine: EagerEngine, one: Workload, sixteen: Workload) -> Mapping[str, Estimate]:
    """Bytes that 16 chats need over 1, beside the weights and beside the KV cache that they must hold."""
    peaks = [peak_bytes(engine, workload) for workload in (one, sixteen)]
    small, large = peaks
    if not isinstance(small, int) or not isinstance(large, int):
        reason = next((p.reason for p in peaks if isinstance(p, OutOfMemory)), "no memory counter on this device")
        return {"growth over weights": unusable(reason), "growth over KV cache": unusable(reason)}
    # After generating n tokens from a prompt of p the cache holds p + n - 1 positions: the last token was never read.
    tokens = sixteen.batch_size * (sixteen.prompt_len + sixteen.output_len - 1)
    kv_bytes = kv_cache_bytes(engine.model.config, tokens, engine.model.dtype.itemsize)
    weight_bytes = tensor_bytes(engine.model)
    raw = {"peak of 1": (float(small),), "peak of 16": (float(large),), "KV of 16": (float(kv_bytes),)}
    return {
        "growth over weights": counted((large - small) / weight_bytes, raw),
        "growth over KV cache": counted(large / kv_bytes, raw),
    }


@dataclass(frozen=True)
class Alone:
    """What each row of a workload says when it is alone on the eager engine, and what rounding explains there."""

    workload: Workload
    told: tuple[Reference, ...]
    rounding: Tolerance

    @staticmethod
    def of(eager: EagerEngine, workload: Workload) -> Alone:
        told = tuple(reference(eager, prompt, workload.output_len) for prompt in workload.prompts)
        return Alone(workload, told, tolerance(eager, workload.prompts, told))


def same_tokens(engine: Engine[Any], alone: Alone) -> Estimate:
    """Each row of an unequal, left-padded batch against the same row alone, at every position."""
    state = engine.prefill(Prompt.of(alone.workload.prompts, engine.device))
    together = forced_choices(engine, state, alone.told)
    return share_explained(
        [
            compare(told.tokens, row.tokens, told.gap, row.distances, alone.rounding, forced=True)
            for told, row in zip(alone.told, together, strict=True)
        ]
    )


def row(
    engine: Engine[Any],
    workload: Workload,
    clock: Clock,
    precision: str,
    sampled: Sampled[Run],
    roofline: Roofline | None = None,
) -> list[Cell]:
    """One row of the batching table and its phases; a batch that doesn't fit is a row that says so."""

    asked = Request(engine, workload)
    beside = {"built_s": engine.built_s} if isinstance(engine, GraphEngine) else {}

    def warm_up() -> None:
        # A whole request on CUDA, where attention may prepare something for every length that it sees for the first time.
        if engine.device == "cuda":
            beside["first_tpot_s"] = serve(asked, clock).run.tpot_s
        else:
            engine.prefill(Prompt.of(workload.prompts, "cpu"))

    uncounted = "" if engine.device == "cuda" else "the CPU has no counter of peak bytes"
    if engine.name != "eager":
        uncounted = "a static cache is allocated before the request, so the request's peak isn't all it needs"

    def measure() -> list[Cell]:
        runs, peak = watch_peak(lambda: sampled(lambda: serve(asked, clock).run, warm_up), engine.device)
        missing = uncounted or ("the memory counter saw nothing" if peak is None else "")
        return served_cells(
            row_id(workload),
            workload,
            engine,
            precision,
            runs,
            Phases.of(engine, workload, roofline=roofline),
            bytes={} if missing or peak is None else {"peak": peak + tensor_bytes(engine.model)},
            figures=beside,
            unavailable={"peak": missing} if missing else {},
        )

    cells = attempt(measure, engine.device) if _cache_fits(engine, workload) else OutOfMemory()
    if isinstance(cells, OutOfMemory):
        return [PlannedRow(row_id(workload), workload, engine.name, precision).missing(cells.reason)]
    return cells


def _cache_fits(engine: Engine[Any], workload: Workload) -> bool:
    """Whether the KV cache that a request ends with could be had now. A graph engine has its own already."""
    if engine.name != "eager":
        return True
    tokens = workload.batch_size * (workload.total_len - 1)
    try:
        return fits(kv_cache_bytes(engine.model.config, tokens, engine.model.dtype.itemsize), engine.device)
    except ValueError:  # layers whose cache has another size: the allocator will tell
        return True


def row_id(workload: Workload) -> str:
    return f"batching.{workload.batch_size}"
