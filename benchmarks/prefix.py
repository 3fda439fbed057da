"""Prefix reuse: what a cached system prompt saves, what it leaves, and what breaks the match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from benchmarks.estimates import Estimate, counted, paired_ratio
from benchmarks.nimbusdb import SYSTEM_TEXT
from benchmarks.phases import EagerEngine, Prompt, StoredPrefix, forced_choices, logit_error, reference
from benchmarks.runs import Run, ratio
from benchmarks.timing import Clock, quiet
from benchmarks.tokens import compare, share_explained
from benchmarks.workloads import Ids, Tokenizer, Workload, encode, matching_prefix, prefix_ids, question_ids

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


def prefill_ratio(full: Sequence[Run], cached: Sequence[Run]) -> Estimate:
    """How many times longer the first token takes without the cache; the copy of the prefix counts as part of a hit."""
    return ratio("ttft_s", full, cached, ("full", "cached"))


def not_free(full: Sequence[Run], cached: Sequence[Run]) -> Estimate:
    return ratio("e2e_s", cached, full, ("cached", "full"))


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


def device_bound_len(engine: EagerEngine, clock: Clock, prefix: Ids, longest: int) -> tuple[int, dict[int, float]] | None:
    """The shortest prefix, found by doubling, whose prefill keeps the card busy; and the prefill times on the way.

    While the host is the bottleneck, prefill takes the same time at every length. The card is busy once doubling the
    length makes prefill at least 1.8 times as long. None when that never happens up to `longest` tokens.
    """
    seen: dict[int, float] = {}
    length = 512
    while length <= longest:
        prompt = Prompt.of([tuple(prefix[i % len(prefix)] for i in range(length))], engine.device)
        engine.prefill(prompt)
        seen[length] = min(clock.time(lambda p=prompt: engine.prefill(p)) for _ in range(3))  # type: ignore[misc]
        if length // 2 in seen and seen[length] >= 1.8 * seen[length // 2]:
            return length, seen
        length *= 2
    return None
