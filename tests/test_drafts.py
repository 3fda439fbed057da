"""Speculative decoding made of replays, with steps that run again on the CPU instead of being replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.drafts import DRAFT_STEPS, TARGET_STEPS, ReplayVerifier, generate
from benchmarks.phases import reference
from benchmarks.speculation import DRAFT_LEN
from benchmarks.timing import Clock
from benchmarks.workloads import Workload
from tests.test_graphs import SHAPES, engine_of, tiny

PROMPT = (5, 9, 33, 7, 2, 64)
CLOCK = Clock()


class Scripted:
    """A draft engine that proposes what it is told to: the target's own tokens where `right` says so, else another."""

    def __init__(self, engine: Any, told: tuple[int, ...], right: Any) -> None:
        self._engine, self._told, self._right = engine, told, right
        self.device = engine.device

    def prefill(self, prompt: Any) -> Any:
        self._read = 0
        return self._wrapped(self._engine.prefill(prompt))

    def step(self, state: Any, tokens: Any = None) -> Any:
        count = 1 if tokens is None or tokens.dim() == 1 else tokens.shape[1]
        forced = state.next_tokens if tokens is None else tokens
        self._read += count
        return self._wrapped(self._engine.step(state.inner, forced))

    def rewind(self, state: Any, count: int) -> Any:
        self._read -= count
        assert self._read >= 0
        return self._wrapped(self._engine.rewind(state.inner, count))

    def _wrapped(self, inner: Any) -> Any:
        token = self._told[min(self._read, len(self._told) - 1)]
        said = token if self._right(self._read) else (token + 1) % 128
        return type("State", (), {"inner": inner, "next_tokens": torch.tensor([said])})()


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return tiny(**SHAPES["qwen2"]), tiny(**{**SHAPES["qwen2"], "num_hidden_layers": 1})


@pytest.mark.parametrize(
    "right",
    [lambda n: True, lambda n: False, lambda n: n % 3 != 2, lambda n: n % 7 != 0, lambda n: n < 11],
    ids=["always right", "never", "two of three", "six of seven", "then never again"],
)
@pytest.mark.parametrize("output_len", [1, 2, 16])
def test_the_output_is_the_targets_whatever_the_draft_says(models: Any, right: Any, output_len: int) -> None:
    target = engine_of(models[0], 1, TARGET_STEPS)
    told = reference(target.eager, PROMPT, output_len + DRAFT_LEN + 1)
    draft = Scripted(engine_of(models[1], 1, DRAFT_STEPS), told.tokens, right)
    said = generate(target, PROMPT, output_len, CLOCK, draft, keep_logits=True)  # type: ignore[arg-type]
    assert said.tokens == told.tokens[:output_len]
    assert said.logits is not None
    assert torch.allclose(said.logits, told.logits[:output_len], atol=1e-4)
    kept = sum(right(n) for n in range(1, output_len))
    if kept == output_len - 1:
        assert said.accepted == said.drafted
    assert (said.accepted == 0) == (kept == 0 or output_len < 3)


def test_a_real_draft_gives_the_targets_output_and_reads_no_token_wrongly(models: Any) -> None:
    target, draft = engine_of(models[0], 1, TARGET_STEPS), engine_of(models[1], 1, DRAFT_STEPS)
    assert generate(target, PROMPT, 30, CLOCK, draft).tokens == generate(target, PROMPT, 30, CLOCK).tokens


def test_a_target_that_drafts_for_itself_is_always_right(models: Any) -> None:
    """Holds only if the draft's cache is cut back and caught up to the very token."""
    target, draft = engine_of(models[0], 1, TARGET_STEPS), engine_of(models[0], 1, DRAFT_STEPS)
    said = generate(target, PROMPT, 31, CLOCK, draft)
    assert said.tokens == reference(target.eager, PROMPT, 31).tokens
    assert said.accepted == said.drafted == 25
    assert said.target_forwards == 1 + 5


def test_alone_every_token_is_a_forward(models: Any) -> None:
    said = generate(engine_of(models[0], 1), PROMPT, 9, CLOCK)
    assert (said.target_forwards, said.drafted, said.logits) == (9, 0, None)


def test_a_check_leaves_the_cache_as_it_was(models: Any) -> None:
    engine = engine_of(models[0], 2, TARGET_STEPS)
    checker = ReplayVerifier(engine, Workload("two", (PROMPT, PROMPT), 1), CLOCK)
    assert min(checker.pair()) > 0
    assert engine.held.lengths.tolist() == [checker.cache_len] * 2
