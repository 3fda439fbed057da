"""Prefix reuse: what a cached system prompt saves, what it leaves, and what breaks the match."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from benchmarks.estimates import Estimate, counted, paired_ratio, unusable
from benchmarks.ledger import Cell
from benchmarks.memory import OutOfMemory, attempt
from benchmarks.nimbusdb import SYSTEM_TEXT
from benchmarks.phases import EagerEngine, Prompt, StoredPrefix, forced_choices, logit_error, reference, serve
from benchmarks.rows import Phases, served_cells
from benchmarks.runs import Run, ratio
from benchmarks.session import Session
from benchmarks.timing import Clock, Rounds, quiet
from benchmarks.tokens import compare, share_explained
from benchmarks.traces import trace
from benchmarks.workloads import Ids, Tokenizer, Workload, encode, exactly, matching_prefix, prefix_ids, question_ids

STAMP = "Current time: {:%Y-%m-%d %H:%M:%S}\n"


@dataclass(frozen=True)
class Hit:
    """One request over a stored prefix: the whole prompt for the full prefill, its suffix for the cached one."""

    full: Workload
    suffix: Workload

    @staticmethod
    def of(prefix: Ids, suffix: Ids, output_len: int, name: str) -> Hit:
        return Hit(Workload(f"full: {name}", (prefix + suffix,), output_len), Workload(f"cached: {name}", (suffix,), output_len))


def hit(tokenizer: Tokenizer, prefix: Ids, question: str, output_len: int) -> Hit:
    return Hit.of(prefix, question_ids(tokenizer, question), output_len, question)


def full_over_cached(full: Sequence[Run], cached: Sequence[Run]) -> dict[str, Estimate]:
    """What paired requests with and without the cache show. Copying the prefix counts as part of a hit."""
    return {
        "prefix.prefill_1484": ratio("ttft_s", full, cached, ("full", "cached")),
        "prefix.not_free": ratio("e2e_s", cached, full, ("cached", "full")),
    }


def decode_pair(engine: EagerEngine, prefix: StoredPrefix, request: Hit, clock: Clock) -> tuple[float, float]:
    """Decode seconds after a full and after a cached prefill, step by step in turn.

    Both requests are prefilled first and then decode in lockstep, the order swapping at every step: two decodes one
    after the other would each meet other neighbours, and the claim is that they differ by nothing.
    """
    states = [
        engine.prefill(Prompt.of(request.full.prompts, engine.device)),
        engine.prefill(Prompt.of(request.suffix.prompts, engine.device), prefix.take()),
    ]
    spent = [0.0, 0.0]
    with quiet():
        for step in range(request.full.output_len - 1):
            for side in (0, 1) if step % 2 == 0 else (1, 0):
                start = clock.read()
                states[side] = engine.step(states[side])
                spent[side] += clock.read() - start
    return spent[0], spent[1]


def decode_ratio(pairs: Sequence[tuple[float, float]]) -> Estimate:
    return paired_ratio([cached for _, cached in pairs], [full for full, _ in pairs], ("cached decode_s", "full decode_s"))


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


def timestamp(tokenizer: Tokenizer, prefix_len: int) -> dict[str, Estimate]:
    """Share of the shared system prompt that two requests, a minute apart, have in common with a timestamp first or last."""
    now = datetime(2026, 11, 9, 9, 30, 15, tzinfo=UTC)
    stamps = [encode(tokenizer, STAMP.format(t)) for t in (now, now + timedelta(minutes=1, seconds=7))]
    shared = prefix_ids(tokenizer, prefix_len)
    first = matching_prefix(stamps[0] + shared, stamps[1] + shared)
    last = matching_prefix(shared + stamps[0], shared + stamps[1])
    return {
        "reusable, timestamp first": counted(first / prefix_len, {"tokens": (float(first),)}),
        "reusable, timestamp last": counted(min(last, prefix_len) / prefix_len, {"tokens": (float(last),)}),
    }


LONGEST_PREFIX = 32768
"""Where the search for a prefix that keeps the card busy ends; fewer when the model has fewer positions."""

HOST_BOUND_SHARE = 0.2
"""A prefill counts as keeping the card busy when the card is idle for less than this share of it."""


def device_bound_len(engine: EagerEngine, clock: Clock, prefix: Ids) -> int | None:
    """The shortest prefix, found by doubling, whose prefill keeps the card busy; None when there is none or none fits.

    While the host is the bottleneck a prefill takes as long as its launches, whatever its length, and a cache saves
    nothing that the host doesn't spend again.
    """
    limit = min(LONGEST_PREFIX, getattr(engine.model.config, "max_position_embeddings", LONGEST_PREFIX) - 256)
    length = 512
    while length <= limit:
        prompt = Prompt.of([exactly(prefix, length)], engine.device)
        wall_s = attempt(lambda p=prompt: [clock.time(lambda: engine.prefill(p)) for _ in range(4)], engine.device)  # type: ignore[misc]
        if isinstance(wall_s, OutOfMemory):
            return None
        busy_s = trace(lambda p=prompt: engine.prefill(p), engine.device).device_s  # type: ignore[misc]
        if busy_s is not None and 1 - busy_s / statistics.median(wall_s[1:]) < HOST_BOUND_SHARE:
            return length
        length *= 2
    return None


def when_device_bound(session: Session, engine: EagerEngine, prefix: Ids, request: Hit) -> Estimate:
    """Full over cached prefill at the length where the card is the bottleneck."""
    length = device_bound_len(engine, session.clock, prefix)
    if length is None:
        return unusable("no prefix that fits keeps this card busy, so there is no length to judge")
    longer = exactly(prefix, length)
    stored = StoredPrefix(engine, longer)
    long_request = Hit.of(longer, request.suffix.prompts[0], 1, f"{length} tokens")
    sides = {
        "full": lambda: serve(engine, long_request.full, session.clock).run,
        "cached": lambda: serve(engine, long_request.suffix, session.clock, stored.take).run,
    }

    def observe(rounds: Rounds[Run]) -> dict[str, Estimate]:
        seen = ratio("ttft_s", rounds["full"], rounds["cached"], ("full", "cached"))
        return {"prefix.prefill_device_bound": seen.noted(f"at {length} tokens, found by doubling")}

    found = session.compare(sides, observe).observed["prefix.prefill_device_bound"]
    assert isinstance(found, Estimate)
    return found


def rows(
    engine: EagerEngine,
    prefix: StoredPrefix,
    request: Hit,
    clock: Clock,
    precision: str,
    sampled: Callable[[Callable[[], tuple[Run, Run]]], list[tuple[Run, Run]]],
    name: str,
) -> list[Cell]:
    """One suffix of the prefix table: the request with a full prefill and with a cached one, and their phases."""
    full_prompt = Prompt.of(request.full.prompts, engine.device)
    suffix_prompt = Prompt.of(request.suffix.prompts, engine.device)

    def both() -> tuple[Run, Run]:
        return (
            serve(engine, request.full, clock, prompt=full_prompt).run,
            serve(engine, request.suffix, clock, prefix.take, suffix_prompt).run,
        )

    pairs = sampled(both)
    made = []
    for side, workload, take in (("full", request.full, lambda: None), ("cached", request.suffix, prefix.take)):
        runs = [pair[0 if side == "full" else 1] for pair in pairs]
        figures = {"prefix_len": float(len(prefix.ids)), "decode_s": statistics.median(r.decode_s for r in runs)}
        if side == "cached":
            figures["prefill_speedup"] = statistics.median(full.ttft_s / cached.ttft_s for full, cached in pairs)
        made += served_cells(
            f"prefix.{name}.{side}", workload, engine, precision, runs, Phases.of(engine, workload, take), figures=figures
        )
    return made
