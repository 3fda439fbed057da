"""prefill() and decode() on small random models: what they say is what transformers says, and liars are refuted."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache, GenerationConfig

from benchmarks import batching, prefix
from benchmarks.claims import CLAIMS
from benchmarks.phases import (
    EagerEngine,
    Prompt,
    Reference,
    Request,
    State,
    StoredPrefix,
    decode,
    forced_choices,
    logit_distance,
    logit_error,
    reference,
    serve,
    serve_in_turn,
    tolerance,
)
from benchmarks.prefix import Hit
from benchmarks.rigs import random_model
from benchmarks.timing import Clock
from benchmarks.verdicts import Verdict, Word, judge
from benchmarks.workloads import Ids, Workload

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
NEW = 12
ROWS = tuple(tuple((7 * row + 13 * i * i + i) % 320 for i in range(4 + 3 * row)) for row in range(6))
UNEQUAL = Workload("unequal", ROWS, NEW)
PREFIX: Ids = tuple((31 * i + 5 * i * i) % 320 for i in range(40))
SUFFIXES = tuple(tuple((11 * i + k) % 320 for i in range(5)) for k in (3, 90, 200))


def engine_of(kind: str, dtype: torch.dtype = torch.float32) -> EagerEngine:
    return EagerEngine(random_model(AutoConfig.for_model(kind, **SHAPE), dtype, "cpu"))


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def engine(request: pytest.FixtureRequest) -> EagerEngine:
    return engine_of(request.param)


@pytest.fixture(scope="module")
def qwen() -> EagerEngine:
    return engine_of("qwen2")


@pytest.fixture(scope="module")
def half() -> EagerEngine:
    return engine_of("qwen2", torch.bfloat16)


def generated(engine: EagerEngine, prompt: Ids) -> Ids:
    """What transformers itself generates, with every field that changes tokens set."""
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        pad_token_id=0,
        eos_token_id=None,
    )
    ids = torch.tensor([prompt])
    whole = engine.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return tuple(whole[0, len(prompt) :].tolist())


def test_prefill_and_decode_say_what_transformers_generates(engine: EagerEngine) -> None:
    said = []
    for prompt in ROWS:
        (alone,) = decode(engine, engine.prefill(Prompt.of([prompt], "cpu")), NEW)
        assert alone == generated(engine, prompt)
        said.append(alone)
    assert len(set(said)) > 3, "outputs that depend on the prompt, or the comparison proves nothing"


def test_a_served_request_gives_the_same_tokens_and_an_instant_for_each(qwen: EagerEngine) -> None:
    seconds = iter(range(1000))
    served = serve(Request(qwen, UNEQUAL), Clock(lambda: float(next(seconds))))
    assert served.tokens == decode(qwen, qwen.prefill(Prompt.of(ROWS, "cpu")), NEW)
    assert served.run.token_s == tuple(float(i) for i in range(1, NEW + 1)), "each token is billed its own two readings"
    assert (served.run.batch_size, served.run.prompt_len) == (6, len(ROWS[-1]))


def test_requests_served_in_turn_say_what_they_say_alone_and_pay_for_their_own_steps(qwen: EagerEngine) -> None:
    seconds = iter(range(1000))
    short = Workload("short", (ROWS[0],), 3)
    long, brief = serve_in_turn([Request(qwen, UNEQUAL), Request(qwen, short)], Clock(lambda: float(next(seconds))))
    assert long.tokens == serve(Request(qwen, UNEQUAL), Clock()).tokens
    assert brief.tokens == serve(Request(qwen, short), Clock()).tokens
    assert long.run.token_s == tuple(float(i) for i in range(1, NEW + 1))
    assert brief.run.token_s == (1.0, 2.0, 3.0)


def test_rows_of_a_left_padded_batch_say_what_they_say_alone(engine: EagerEngine) -> None:
    together = decode(engine, engine.prefill(Prompt.of(ROWS, "cpu")), NEW)
    assert together == tuple(reference(engine, prompt, NEW).tokens for prompt in ROWS)


def test_a_generation_default_of_the_checkpoint_changes_nothing(qwen: EagerEngine) -> None:
    told = reference(qwen, ROWS[3], NEW).tokens
    leaky = EagerEngine(copy.deepcopy(qwen.model))
    leaky.model.generation_config.repetition_penalty = 1.9
    leaky.model.generation_config.do_sample = True
    assert reference(leaky, ROWS[3], NEW).tokens == told


def test_a_model_in_training_mode_is_refused() -> None:
    model = engine_of("qwen2").model
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        EagerEngine(model)


def test_a_prompt_of_equal_rows_has_no_mask_and_one_of_unequal_rows_is_padded_on_the_left() -> None:
    assert Prompt.of([(1, 2), (3, 4)], "cpu").mask is None
    padded = Prompt.of([(1, 2, 3), (4,)], "cpu")
    assert padded.ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert padded.mask is not None
    assert padded.mask.tolist() == [[1, 1, 1], [0, 0, 1]]


# The stored prefix ----------------------------------------------------------------------------------------------------


def test_a_cached_prefix_gives_the_full_answer_and_is_not_changed_by_use(engine: EagerEngine) -> None:
    stored = StoredPrefix(engine, PREFIX)
    before = [layer.keys.clone() for layer in stored.take().layers]
    for suffix in SUFFIXES:
        (full,) = decode(engine, engine.prefill(Prompt.of([PREFIX + suffix], "cpu")), NEW)
        (cached,) = decode(engine, engine.prefill(Prompt.of([suffix], "cpu"), stored.take()), NEW)
        assert cached == full
    after = stored.take()
    assert after.get_seq_length() == len(PREFIX)
    assert all(torch.equal(a, layer.keys) for a, layer in zip(before, after.layers, strict=True))


def test_a_cached_prefix_serves_rows_of_unequal_suffixes(qwen: EagerEngine) -> None:
    rows = [SUFFIXES[0], SUFFIXES[1][:3]]
    cache = DynamicCache(config=qwen.model.config)
    qwen.prefill(Prompt.of([PREFIX, PREFIX], "cpu"), cache)
    together = decode(qwen, qwen.prefill(Prompt.of(rows, "cpu"), cache), NEW)
    assert together == tuple(reference(qwen, PREFIX + row, NEW).tokens for row in rows)


def test_a_stored_prefix_that_was_changed_is_never_handed_out(qwen: EagerEngine) -> None:
    stored = StoredPrefix(qwen, PREFIX)
    qwen.prefill(Prompt.of([SUFFIXES[0]], "cpu"), stored._cache)
    with pytest.raises(AssertionError, match="it was changed"):
        stored.take()


# Proofs ---------------------------------------------------------------------------------------------------------------


def test_forced_choices_of_the_reference_itself_are_the_reference(engine: EagerEngine) -> None:
    told = [reference(engine, prompt, NEW) for prompt in ROWS]
    chosen = forced_choices(engine, engine.prefill(Prompt.of(ROWS, "cpu")), told)
    assert [row.tokens for row in chosen] == [r.tokens for r in told]
    error = max(logit_error(engine, prompt, row) for prompt, row in zip(ROWS, told, strict=True))
    assert all(len(row.distances) == NEW and max(row.distances) < 4 * error for row in chosen)


def test_a_references_gap_is_none_for_its_own_token_and_some_for_every_other(qwen: EagerEngine) -> None:
    told = reference(qwen, ROWS[0], NEW)
    for position, token in enumerate(told.tokens):
        assert told.gap(position, token) == 0
        assert told.gap(position, (token + 1) % 320) > 0


def test_logit_error_is_measured_in_every_precision_and_only_float32_asks_for_exact_tokens(
    qwen: EagerEngine, half: EagerEngine
) -> None:
    exact, rounded = (reference(engine, PREFIX, NEW) for engine in (qwen, half))
    spread = float(exact.logits.std())
    assert 0 < logit_error(qwen, PREFIX, exact) < 1e-4 * spread
    assert 1e-3 * spread < logit_error(half, PREFIX, rounded) < spread
    assert tolerance(qwen, [PREFIX], [exact]).gap == 0 < tolerance(qwen, [PREFIX], [exact]).distance
    assert tolerance(half, [PREFIX], [rounded]).gap > 0


def test_two_ways_that_agree_to_the_last_bit_still_have_an_error(qwen: EagerEngine) -> None:
    """The reference's logits are taken from the single forward itself."""
    told = reference(qwen, PREFIX, NEW)
    with torch.inference_mode():
        again = qwen.model(torch.tensor([[*PREFIX, *told.tokens[:-1]]]), use_cache=False).logits[0, len(PREFIX) - 1 :]
    largest = float(again.abs().max())
    error = logit_error(qwen, PREFIX, Reference(told.tokens, again))
    assert 1e-7 * largest < error < 1e-5 * largest


def test_logits_of_any_row_that_are_not_numbers_leave_no_tolerance(qwen: EagerEngine) -> None:
    good = reference(qwen, PREFIX, NEW)
    bad = Reference(good.tokens, torch.full_like(good.logits, torch.nan))
    for rows in ([good, bad], [bad, good]):
        assert math.isnan(tolerance(qwen, [PREFIX, PREFIX], rows).distance)


def test_a_shift_of_all_logits_is_no_distance_and_one_changed_logit_is() -> None:
    logits = torch.randn(3, 50)
    moved = logits + torch.tensor([[1.0], [-20.0], [0.0]])
    moved[2, 7] += 5
    assert logit_distance(moved, logits).tolist() == pytest.approx([0, 0, 5 * 49 / 50], abs=1e-4)


def same_tokens(engine: EagerEngine) -> Verdict:
    return judge(
        CLAIMS["batching.same_tokens"],
        batching.same_tokens(engine, batching.Alone.of(EagerEngine(engine.model), UNEQUAL)),
    )


def test_an_honest_batch_holds_in_float32_and_in_bfloat16(engine: EagerEngine, half: EagerEngine) -> None:
    assert same_tokens(engine).word is Word.HOLDS
    assert same_tokens(half).word is Word.HOLDS


# Liars ----------------------------------------------------------------------------------------------------------------


class AllOnes(EagerEngine):
    """Left padding that nobody is told of."""

    def prefill(self, prompt: Prompt, cache: Any | None = None) -> State:
        return super().prefill(Prompt(prompt.ids, None), cache)


class RightPadded(EagerEngine):
    """Padding on the wrong side, with a mask that is right about it."""

    def prefill(self, prompt: Prompt, cache: Any | None = None) -> State:
        if prompt.mask is None:
            return super().prefill(prompt, cache)
        rows = [ids[mask.bool()] for ids, mask in zip(prompt.ids, prompt.mask, strict=True)]
        ids, mask = torch.zeros_like(prompt.ids), torch.zeros_like(prompt.mask)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
        return super().prefill(Prompt(ids, mask), cache)


class SwappedRows(EagerEngine):
    """Answers that reach the wrong user."""

    def prefill(self, prompt: Prompt, cache: Any | None = None) -> State:
        state = super().prefill(prompt, cache)
        return State(state.cache, state.mask, state.logits.roll(1, dims=0))


class NoNumbers(EagerEngine):
    def _forward(self, *arguments: Any) -> State:
        state = super()._forward(*arguments)
        return State(state.cache, state.mask, torch.full_like(state.logits, torch.nan))


@pytest.mark.parametrize("liar", [AllOnes, RightPadded, SwappedRows])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
def test_a_batch_that_mixes_up_its_rows_is_refuted(
    liar: Callable[[Any], EagerEngine], dtype: torch.dtype, qwen: EagerEngine, half: EagerEngine
) -> None:
    model = (qwen if dtype is torch.float32 else half).model
    told = same_tokens(liar(model))
    assert told.word is Word.REFUTED
    assert "position" in told.line


def test_logits_that_are_not_numbers_prove_nothing_and_only_the_subjects_are_refuted(
    qwen: EagerEngine, half: EagerEngine
) -> None:
    for model in (qwen.model, half.model):
        blind = NoNumbers(model)
        assert (
            judge(CLAIMS["batching.same_tokens"], batching.same_tokens(blind, batching.Alone.of(blind, UNEQUAL))).word
            is Word.INCONCLUSIVE
        )
        assert same_tokens(blind).word is Word.REFUTED


def hits() -> list[Hit]:
    return [Hit.of(PREFIX, suffix, NEW, "a question") for suffix in SUFFIXES]


def same_answer(engine: EagerEngine, stored: StoredPrefix) -> Verdict:
    return judge(
        CLAIMS["prefix.same_answer"], prefix.same_answer(engine, stored, [prefix.Told.of(engine, h) for h in hits()])
    )


class ReusedInPlace(StoredPrefix):
    """Hands out the stored cache itself, which the first use changes."""

    def take(self) -> Any:
        return self._cache


class CutTooFar(StoredPrefix):
    """A cache that is one token short, as after a crop that counts wrongly."""

    def take(self) -> Any:
        cache = super().take()
        cache.crop(-1)
        return cache


def test_an_honest_prefix_cache_holds_in_float32_and_in_bfloat16(engine: EagerEngine, half: EagerEngine) -> None:
    assert same_answer(engine, StoredPrefix(engine, PREFIX)).word is Word.HOLDS
    assert same_answer(half, StoredPrefix(half, PREFIX)).word is Word.HOLDS


@pytest.mark.parametrize("liar", [ReusedInPlace, CutTooFar])
def test_a_prefix_cache_that_was_changed_is_refuted(liar: type[StoredPrefix], engine: EagerEngine) -> None:
    told = same_answer(engine, liar(engine, PREFIX))
    assert told.word is Word.REFUTED
    assert "position" in told.line
    assert "was handed out for a prefix of 40" in told.line


def test_a_prefix_of_another_prompt_is_refuted(qwen: EagerEngine) -> None:
    other = tuple((i + 1) % 320 for i in PREFIX)
    assert same_answer(qwen, StoredPrefix(qwen, other)).word is Word.REFUTED
