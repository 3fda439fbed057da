"""Prefix reuse: what a cached system prompt saves, what it leaves, and what breaks the match."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from benchmarks.estimates import Estimate, counted, paired_ratio, unusable
from benchmarks.ledger import Cell
from benchmarks.memory import OutOfMemory, attempt
from benchmarks.nimbusdb import SYSTEM_TEXT
from benchmarks.phases import (
    EagerEngine,
    Engine,
    Prompt,
    Reference,
    Request,
    StoredPrefix,
    forced_choices,
    in_turn,
    reference,
    tolerance,
)
from benchmarks.roofline import Roofline
from benchmarks.rows import Phases, Sampled, served_cells
from benchmarks.runs import Run, ratio
from benchmarks.session import Session
from benchmarks.timing import Clock
from benchmarks.tokens import Tolerance, compare, share_explained
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


Pair = tuple[Engine[Any], Engine[Any]]
"""What serves the full and the cached request: the eager engine twice, or a graph engine each."""


def both_ways(pair: Pair, prefix: StoredPrefix, asked: Hit) -> dict[str, Request]:
    """The question as a request with a full prefill, and as one that takes the stored prefix."""
    return {"full": Request(pair[0], asked.full), "cached": Request(pair[1], asked.suffix, prefix.take)}


def hit(tokenizer: Tokenizer, prefix: Ids, question: str, output_len: int) -> Hit:
    return Hit.of(prefix, question_ids(tokenizer, question), output_len, question)


def ratios(full: Sequence[Run], cached: Sequence[Run]) -> dict[str, Estimate]:
    """What requests with a full and with a cached prefill, served in turn, show: how much longer the first token takes
    without the cache (copying the prefix counts as part of a hit), what the whole request costs with it, and decode."""
    lens = f"{full[0].prompt_len - cached[0].prompt_len:,} of {full[0].prompt_len:,} tokens cached" if full else ""
    return {
        "prefix.prefill_1484": ratio("ttft_s", full, cached, ("full", "cached")).noted(lens),
        "prefix.not_free": ratio("e2e_s", cached, full, ("cached", "full")),
        "prefix.decode_unchanged": ratio("decode_s", cached, full, ("cached", "full")),
    }


PAIR_LEN = {"cuda": 16, "cpu": 17}
"""Output tokens of a round: every step is a pair of its own, so few a round and many rounds show the same as many a round,
and a noisy round spoils less. With fewer still, decode, which is what a cached request goes on costing, would be harder to
show."""


def build_ratio(build_s: Sequence[float], full_s: Sequence[float]) -> Estimate:
    return paired_ratio(build_s, full_s, ("build_s", "full prefill_s"))


@dataclass(frozen=True)
class Told:
    """What the eager engine answers after a full prefill, and what rounding explains there."""

    request: Hit
    answer: Reference
    rounding: Tolerance

    @staticmethod
    def of(eager: EagerEngine, request: Hit) -> Told:
        answer = reference(eager, request.full.prompts[0], request.full.output_len)
        return Told(request, answer, tolerance(eager, request.full.prompts, [answer]))


def same_answer(engine: Engine[Any], prefix: StoredPrefix, told: Sequence[Told]) -> Estimate:
    """Cached answers against full ones, at every position.

    The prefix is used for one request after another, and the first is asked once more at the end: a use that changed
    what is stored shows there. So does the length of each cache handed out, which is the prefix's and nothing else.
    """
    matches = []
    for wanted in (*told, told[0]):
        cache = prefix.take()
        fault = _wrong_length(prefix, cache)
        state = engine.prefill(Prompt.of(wanted.request.suffix.prompts, engine.device), cache)
        (said,) = forced_choices(engine, state, [wanted.answer])
        match = compare(
            wanted.answer.tokens, said.tokens, wanted.answer.gap, said.distances, wanted.rounding, forced=True
        )
        matches.append(replace(match, fault=fault or _wrong_length(prefix, prefix.take())))
    return share_explained(matches)


def _wrong_length(prefix: StoredPrefix, cache: Any) -> str | None:
    held_len = cache.get_seq_length()
    if held_len == len(prefix.ids):
        return None
    return f"a cache of {held_len} positions was handed out for a prefix of {len(prefix.ids)}"


def one_word(tokenizer: Tokenizer, prefix_len: int) -> Estimate:
    """Share of the system prompt still reusable when one word of its first sentence changes.

    Of the whole prompt, where the prefix is a part of it: in a short part no word is early.
    """
    whole_len = max(prefix_len, len(encode(tokenizer, SYSTEM_TEXT)))
    words = SYSTEM_TEXT.split(" ")
    place = len(SYSTEM_TEXT.split(".")[0].split(" ")) // 2
    changed = " ".join([*words[:place], words[place] + "ly", *words[place + 1 :]])
    kept = matching_prefix(prefix_ids(tokenizer, whole_len), prefix_ids(tokenizer, whole_len, changed))
    return counted(kept / whole_len, {"tokens": (float(kept),)}, f"{kept} of {whole_len:,} tokens match")


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

    observed = session.compare_in_turn(both_ways((engine, engine), stored, long_request), observe).observed
    found = observed["prefix.prefill_device_bound"]
    assert isinstance(found, Estimate)
    return found


def row_id(name: object, side: str) -> str:
    """The id of the request of one suffix with a "full" or a "cached" prefill."""
    return f"prefix.{name}.{side}"


def rows(
    pair: Pair,
    prefix: StoredPrefix,
    request: Hit,
    clock: Clock,
    precision: str,
    sampled: Sampled[dict[str, Run]],
    name: str,
    roofline: Roofline | None = None,
) -> list[Cell]:
    """One suffix of the prefix table: the request with a full prefill and with a cached one, and their phases."""
    both = in_turn(both_ways(pair, prefix, request), clock)
    # On CUDA the warm-up is whole, as for a batching row; the CPU has been warmed by building the prefix.
    pairs = sampled(both, both if pair[0].device == "cuda" else lambda: None)
    made = []
    for engine, side, workload, take in (
        (pair[0], "full", request.full, lambda: None),
        (pair[1], "cached", request.suffix, prefix.take),
    ):
        runs = [pair[side] for pair in pairs]
        figures = {"prefix_len": float(len(prefix.ids)), "decode_s": statistics.median(r.decode_s for r in runs)}
        if side == "cached":
            figures["prefill_speedup"] = statistics.median(p["full"].ttft_s / p["cached"].ttft_s for p in pairs)
        made += served_cells(
            row_id(name, side),
            workload,
            engine,
            precision,
            runs,
            Phases.of(engine, workload, take, roofline),
            figures=figures,
        )
    return made
