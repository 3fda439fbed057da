"""Prefix reuse: what a cached system prompt saves, what it leaves, and what breaks the match."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from benchmarks.estimates import Estimate, counted, paired_ratio, unusable
from benchmarks.ledger import Cell
from benchmarks.memory import OutOfMemory, attempt
from benchmarks.nimbusdb import SYSTEM_TEXT
from benchmarks.phases import (
    EagerEngine,
    Prompt,
    Request,
    StoredPrefix,
    forced_choices,
    in_turn,
    logit_error,
    reference,
)
from benchmarks.rows import Phases, Sampled, served_cells
from benchmarks.runs import Run, ratio
from benchmarks.session import Session
from benchmarks.timing import Clock
from benchmarks.tokens import compare, share_explained
from benchmarks.traces import trace
from benchmarks.workloads import Ids, Tokenizer, Workload, encode, exactly, matching_prefix, prefix_ids, question_ids

STAMP = "Current time: {:%Y-%m-%d %H:%M:%S}\n"


@dataclass(frozen=True)
class Hit:
    """One question over a stored prefix: the whole prompt for the full prefill, its suffix for the cached one."""

    full: Workload
    suffix: Workload

    @staticmethod
    def of(prefix: Ids, suffix: Ids, output_len: int, name: str) -> Hit:
        return Hit(
            Workload(f"full: {name}", (prefix + suffix,), output_len),
            Workload(f"cached: {name}", (suffix,), output_len),
        )


def both_ways(engine: EagerEngine, prefix: StoredPrefix, asked: Hit) -> dict[str, Request]:
    """The question as a request with a full prefill, and as one that takes the stored prefix."""
    return {"full": Request(engine, asked.full), "cached": Request(engine, asked.suffix, prefix.take)}


def hit(tokenizer: Tokenizer, prefix: Ids, question: str, output_len: int) -> Hit:
    return Hit.of(prefix, question_ids(tokenizer, question), output_len, question)


def prefill_ratio(full: Sequence[Run], cached: Sequence[Run]) -> dict[str, Estimate]:
    """How much longer the first token takes without the cache. Copying the prefix counts as part of a hit."""
    return {"prefix.prefill_1484": ratio("ttft_s", full, cached, ("full", "cached"))}


def request_ratio(full: Sequence[Run], cached: Sequence[Run]) -> dict[str, Estimate]:
    """What the whole request costs with the cache, over without."""
    return {"prefix.not_free": ratio("e2e_s", cached, full, ("cached", "full"))}


PAIR_LEN = 17
"""Output tokens of a round that compares decodes: every step is a pair of its own, so few a round and many rounds show
the same as many a round, and a noisy round spoils less."""


def decode_ratio(full: Sequence[Run], cached: Sequence[Run]) -> dict[str, Estimate]:
    return {"prefix.decode_unchanged": ratio("decode_s", cached, full, ("cached", "full"))}


def build_ratio(build_s: Sequence[float], full_s: Sequence[float]) -> Estimate:
    return paired_ratio(build_s, full_s, ("build_s", "full prefill_s"))


def same_answer(engine: EagerEngine, prefix: StoredPrefix, requests: Sequence[Hit]) -> Estimate:
    """Cached answers against full ones at every position; the prefix is used for one request after another, so a cache
    that the first use changed would show in the second."""
    matches = []
    for request in requests:
        told = reference(engine, request.full.prompts[0], request.full.output_len)
        error = logit_error(engine, request.full.prompts[0], told)
        state = engine.prefill(Prompt.of(request.suffix.prompts, engine.device), prefix.take())
        (chosen,) = forced_choices(engine, state, [told])
        matches.append(compare(told.tokens, chosen, told.gap, error, forced=True))
    return share_explained(matches)


def one_word(tokenizer: Tokenizer, prefix_len: int) -> Estimate:
    """Share of the prefix still reusable when one word of the system prompt's first sentence changes."""
    words = SYSTEM_TEXT.split(" ")
    place = len(SYSTEM_TEXT.split(".")[0].split(" ")) // 2
    changed = " ".join([*words[:place], words[place] + "ly", *words[place + 1 :]])
    kept = matching_prefix(prefix_ids(tokenizer, prefix_len), prefix_ids(tokenizer, prefix_len, changed))
    return counted(kept / prefix_len, {"tokens": (float(kept),)}, f"{kept} of {prefix_len} tokens match")


def timestamp(tokenizer: Tokenizer) -> dict[str, Estimate]:
    """Share of the system prompt's tokens that two requests, a minute apart, have in common with a timestamp first or last.

    Stamp and prompt are one text before they become tokens, as a server gets them: tokens may merge across the seam.
    """
    now = datetime(2026, 11, 9, 9, 30, 15, tzinfo=UTC)
    stamps = [STAMP.format(t) for t in (now, now + timedelta(minutes=1, seconds=7))]
    system_len = len(encode(tokenizer, SYSTEM_TEXT))
    first = matching_prefix(*(encode(tokenizer, stamp + SYSTEM_TEXT) for stamp in stamps))
    last = matching_prefix(*(encode(tokenizer, SYSTEM_TEXT + "\n" + stamp) for stamp in stamps))
    return {
        "reusable, timestamp first": counted(first / system_len, {"tokens": (float(first),)}),
        "reusable, timestamp last": counted(min(last, system_len) / system_len, {"tokens": (float(last),)}),
    }


LONGEST_PREFIX = 32768
"""Where the search for a prefix that keeps the card busy ends; fewer when the model has fewer positions."""

BUSY_OVER_LAUNCHES = 3.0
"""A prefill counts as keeping the card busy when the card works this many times as long as a short prefill takes the
host. Where the two are near each other, a cached prefill costs its launches and saves nothing that shows: on an H200 a
prefill of 4,096 tokens keeps the card busy 80 % of the time, and caching it gained 7 %."""


def device_bound_len(engine: EagerEngine, clock: Clock, prefix: Ids) -> int | None:
    """The shortest prefix, found by doubling, whose prefill keeps the card busy; None when there is none or none fits.

    While the host is the bottleneck a prefill takes as long as its launches, whatever its length.
    """
    limit = min(LONGEST_PREFIX, getattr(engine.model.config, "max_position_embeddings", LONGEST_PREFIX) - 256)
    short = Prompt.of([exactly(prefix, 16)], engine.device)
    engine.prefill(short)
    launches_s = statistics.median(clock.time(lambda: engine.prefill(short)) for _ in range(5))
    length = 512
    while length <= limit:
        busy_s = attempt(partial(_busy_s, engine, exactly(prefix, length)), engine.device)
        if isinstance(busy_s, OutOfMemory):
            return None
        if busy_s is not None and busy_s >= BUSY_OVER_LAUNCHES * launches_s:
            return length
        length *= 2
    return None


def _busy_s(engine: EagerEngine, prompt: Ids) -> float | None:
    """Device seconds of one prefill."""
    ids = Prompt.of([prompt], engine.device)
    return trace(lambda: engine.prefill(ids), engine.device).device_s


def when_device_bound(session: Session, engine: EagerEngine, prefix: Ids, request: Hit) -> Estimate:
    """Full over cached prefill at the length where the card is the bottleneck."""
    length = device_bound_len(engine, session.clock, prefix)
    if length is None:
        return unusable("no prefix that fits keeps this card busy, so there is no length to judge")
    longer = exactly(prefix, length)
    stored = StoredPrefix(engine, longer)
    long_request = Hit.of(longer, request.suffix.prompts[0], 1, f"{length} tokens")

    def observe(full: Sequence[Run], cached: Sequence[Run]) -> dict[str, Estimate]:
        seen = ratio("ttft_s", full, cached, ("full", "cached"))
        return {"prefix.prefill_device_bound": seen.noted(f"at {length} tokens, found by doubling")}

    observed = session.compare_in_turn(both_ways(engine, stored, long_request), observe).observed
    found = observed["prefix.prefill_device_bound"]
    assert isinstance(found, Estimate)
    return found


def rows(
    engine: EagerEngine,
    prefix: StoredPrefix,
    request: Hit,
    clock: Clock,
    precision: str,
    sampled: Sampled[dict[str, Run]],
    name: str,
) -> list[Cell]:
    """One suffix of the prefix table: the request with a full prefill and with a cached one, and their phases."""
    both = in_turn(both_ways(engine, prefix, request), clock)
    # On CUDA the warm-up is whole, as for a batching row; the CPU has been warmed by building the prefix.
    pairs = sampled(both, both if engine.device == "cuda" else lambda: None)
    made = []
    for side, workload, take in (("full", request.full, lambda: None), ("cached", request.suffix, prefix.take)):
        runs = [pair[side] for pair in pairs]
        figures = {"prefix_len": float(len(prefix.ids)), "decode_s": statistics.median(r.decode_s for r in runs)}
        if side == "cached":
            figures["prefill_speedup"] = statistics.median(p["full"].ttft_s / p["cached"].ttft_s for p in pairs)
        made += served_cells(
            f"prefix.{name}.{side}",
            workload,
            engine,
            precision,
            runs,
            Phases.of(engine, workload, take),
            figures=figures,
        )
    return made
