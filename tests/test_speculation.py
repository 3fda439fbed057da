"""Speculation: greedy that nothing leaks into, real counts, equal tokens with restarts, the cost model, the liars."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, GenerationConfig

from benchmarks import speculation
from benchmarks.claims import CLAIMS
from benchmarks.estimates import FULL_LOOK
from benchmarks.phases import EagerEngine, Reference, reference, tolerance
from benchmarks.rigs import random_model
from benchmarks.speculation import DRAFT_LEN, Checked, EagerVerifier, Generated, Loop, generate
from benchmarks.timing import Clock
from benchmarks.tokens import Match, Tolerance
from benchmarks.verdicts import Word, judge
from benchmarks.workloads import Ids, Workload

QUICK = settings(deadline=None, max_examples=20)
PROMPT: Ids = (3, 141, 59, 26, 53, 58, 97, 93)
PROMPTS = (PROMPT, (2, 71, 82, 81), (16, 18, 33, 98, 87, 49))
LENGTH = 24
CLOCK = Clock()


def engine(layers: int, hidden_size: int = 64) -> EagerEngine:
    shape = {
        "vocab_size": 320,
        "hidden_size": hidden_size,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    return EagerEngine(random_model(AutoConfig.for_model("qwen2", **shape), torch.float32, "cpu"))


@pytest.fixture(scope="module")
def target() -> EagerEngine:
    return engine(3)


@pytest.fixture(scope="module")
def draft() -> EagerEngine:
    return engine(1)


def never_accepted(target: EagerEngine) -> EagerEngine:
    """A draft that always names the token that the target likes least."""
    model = copy.deepcopy(target.model)
    model.register_forward_hook(lambda _module, _args, output: output.__setitem__("logits", -output.logits))
    return EagerEngine(model)


def gullible(target: EagerEngine, refuse_after: int) -> EagerEngine:
    """A target that takes the first drafted tokens for its own, whatever they are.

    Only a check has the logits of several positions; one-token steps and prefills of the reference stay honest.
    """
    model = copy.deepcopy(target.model)
    lies: list[int] = []

    def believe(_module: Any, _args: Any, kwargs: Any, output: Any) -> None:
        positions = output.logits.shape[1]
        if positions > 1 and len(lies) < refuse_after:
            lies.append(1)
            drafted = kwargs["input_ids"][0, -(positions - 1) :]
            output.logits[0, torch.arange(positions - 1), drafted] = 1e4

    model.register_forward_hook(believe, with_kwargs=True)
    return EagerEngine(model)


# Greedy ---------------------------------------------------------------------------------------------------------------


def test_generate_is_an_argmax_loop_whatever_the_checkpoint_brings(target: EagerEngine) -> None:
    hostile = EagerEngine(copy.deepcopy(target.model))
    told = reference(target, PROMPT, LENGTH).tokens
    own = GenerationConfig(
        do_sample=True,
        temperature=3.0,
        repetition_penalty=1.3,
        no_repeat_ngram_size=1,
        suppress_tokens=[told[0]],
        eos_token_id=told[4],
        max_length=11,
        min_length=2,
        guidance_scale=2.0,
    )
    hostile.model.generation_config = own
    said = generate(hostile, PROMPT, LENGTH, CLOCK)
    assert said.tokens == told
    assert (said.target_forwards, said.drafted, said.accepted, said.acceptance_rate) == (LENGTH, 0, 0, None)
    assert hostile.model.generation_config is own and own.repetition_penalty == 1.3, "the model's own defaults are back"
    ids = torch.tensor([PROMPT])
    torch.manual_seed(0)
    leaky = hostile.model.generate(ids, generation_config=speculation.greedy_config(LENGTH))
    assert tuple(leaky[0, len(PROMPT) :].tolist()) != told, "without lending the config, its unset fields are filled"


def test_nothing_stays_behind_on_either_model(target: EagerEngine, draft: EagerEngine) -> None:
    before = [e.model.generation_config for e in (target, draft)]
    contents = [config.to_dict() for config in before]
    generate(target, PROMPT, LENGTH, CLOCK, draft)
    with pytest.raises(IndexError):
        generate(target, (10**6,), LENGTH, CLOCK, draft)
    assert [e.model.generation_config for e in (target, draft)] == before
    assert [config.to_dict() for config in before] == contents
    assert not target.model._forward_pre_hooks and not draft.model._forward_pre_hooks


def test_an_output_of_another_length_is_refused() -> None:
    class Short(torch.nn.Module):
        generation_config = None

        def generate(self, ids: torch.Tensor, **_: Any) -> Any:
            return SimpleNamespace(sequences=torch.cat([ids, ids[:, :2]], dim=1))

    short: Any = SimpleNamespace(model=Short(), device="cpu")
    with pytest.raises(RuntimeError, match="4 tokens were asked for and 2 generated"):
        generate(short, PROMPT, 4, CLOCK)


def test_a_draft_that_runs_more_often_than_it_is_checked_is_refused(target: EagerEngine, draft: EagerEngine) -> None:
    twice = EagerEngine(copy.deepcopy(draft.model))
    model, ids = twice.model, torch.tensor([PROMPT])
    own_generate = model.generate
    model.generate = lambda *args, **kwargs: (model(ids), own_generate(*args, **kwargs))[1]
    with pytest.raises(RuntimeError, match="counts differ"):
        generate(target, PROMPT, LENGTH, CLOCK, twice)


# Acceptance and equality ----------------------------------------------------------------------------------------------


def test_a_draft_saves_target_forwards_and_changes_no_token(target: EagerEngine, draft: EagerEngine) -> None:
    said = generate(target, PROMPT, LENGTH, CLOCK, draft)
    assert said.tokens == reference(target, PROMPT, LENGTH).tokens
    assert 0 < said.accepted < said.drafted and said.accepted + said.target_forwards == LENGTH
    assert 1 < said.mean_acceptance_length < DRAFT_LEN + 1


def test_a_draft_equal_to_its_target_is_always_accepted(target: EagerEngine) -> None:
    said = generate(target, PROMPT, LENGTH, CLOCK, EagerEngine(copy.deepcopy(target.model)))
    assert (said.acceptance_rate, said.target_forwards) == (1.0, LENGTH // (DRAFT_LEN + 1))


def test_a_draft_that_is_never_right_drafts_five_a_cycle_to_the_end_whatever_its_own_config_says(
    target: EagerEngine,
) -> None:
    wrong = never_accepted(target)
    wrong.model.generation_config = GenerationConfig(
        num_assistant_tokens=20, num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.9
    )
    said = generate(target, PROMPT, LENGTH, CLOCK, wrong)
    assert said.tokens == reference(target, PROMPT, LENGTH).tokens
    # The last token of an output is always the target's own, so the draft's room shrinks towards the end.
    assert said.drafted == sum(min(DRAFT_LEN, LENGTH - cycle - 1) for cycle in range(LENGTH))
    assert (said.acceptance_rate, said.mean_acceptance_length) == (0.0, 1.0)


def checked(
    target: EagerEngine, draft: EagerEngine, prompts: tuple[Ids, ...] = PROMPTS[:1], liar: EagerEngine | None = None
) -> list[Checked]:
    """The draft with its target, or with a liar in the target's place, against the target alone."""
    loop = Loop("transformers generate", liar or target, draft, CLOCK)
    return [speculation.check(loop, target, Workload("tiny", (p,), LENGTH)) for p in prompts]


def test_the_output_is_the_targets_own_and_liars_are_refuted_and_empty_proofs_decide_nothing(
    target: EagerEngine, draft: EagerEngine
) -> None:
    claim = CLAIMS["speculation.same_tokens"]
    honest = judge(claim, speculation.same_tokens(checked(target, draft, PROMPTS)))
    assert honest.word is Word.HOLDS and "3 of 3 rows equal" in honest.reason
    one_lie = judge(claim, speculation.same_tokens(checked(target, never_accepted(target), liar=gullible(target, 1))))
    assert one_lie.word is Word.REFUTED and one_lie.parts[0].verdict is Word.REFUTED
    assert "position 0" in one_lie.line and "not a tie" in one_lie.line
    assert "logits" in honest.reason
    for proof_of_nothing in (EagerEngine(copy.deepcopy(target.model)), never_accepted(target)):
        verdict = judge(claim, speculation.same_tokens(checked(target, proof_of_nothing)))
        assert [part.verdict for part in verdict.parts] == [Word.HOLDS, Word.INCONCLUSIVE]
        assert "prove nothing" in verdict.line


def test_a_check_that_sees_a_little_of_something_else_is_refuted_though_no_token_changes(
    target: EagerEngine, draft: EagerEngine
) -> None:
    def disturbed(size: float) -> EagerEngine:
        """A target whose checks of several tokens are off by a share of the logits of the position before."""
        model = copy.deepcopy(target.model)

        def disturb(_module: Any, _args: Any, output: Any) -> None:
            if output.logits.shape[1] > 1:
                output.logits = output.logits + size * output.logits.roll(1, dims=1)

        model.register_forward_hook(disturb)
        return EagerEngine(model)

    claim = CLAIMS["speculation.same_tokens"]
    for size, word in ((0.0, Word.HOLDS), (0.01, Word.REFUTED)):
        seen = checked(target, draft, liar=disturbed(size))
        assert all(not c.match.differences for c in seen)
        assert judge(claim, speculation.same_tokens(seen)).word is word


def test_a_lie_in_the_middle_is_found_where_it_is(target: EagerEngine, draft: EagerEngine) -> None:
    told = reference(target, PROMPT, LENGTH)
    lied = told.tokens[9] ^ 1
    logits = told.logits.clone()
    logits[9, lied] = logits[9].max() + 1  # the reference was sure of another token
    forged = Reference((*told.tokens[:9], lied, *told.tokens[10:]), logits)
    seen = speculation.follow(
        Loop("transformers generate", target, draft, CLOCK), PROMPT, forged, Tolerance(0.4, 100.0)
    )
    assert [d.position for d in seen.match.differences] == [9] and not seen.match.explained
    assert len(seen.pieces) == 1, "after a difference that is no tie nothing more is asked"


def test_after_a_near_tie_the_rest_is_compared_too(target: EagerEngine, draft: EagerEngine) -> None:
    """The reference took the second-best token at position 5, as rounding can make it do, and went on from there."""
    best = reference(target, PROMPT, LENGTH)
    other = int(best.logits[5].topk(2).indices[1])
    rest = reference(target, (*PROMPT, *best.tokens[:5], other), LENGTH - 6)
    told = Reference((*best.tokens[:5], other, *rest.tokens), torch.cat([best.logits[:6], rest.logits]))
    seen = speculation.follow(
        Loop("transformers generate", target, draft, CLOCK), PROMPT, told, tolerance(target, [PROMPT], [best])
    )
    assert [d.position for d in seen.match.differences] == [5] and seen.match.explained
    assert (seen.match.compared, [p.output_len for p in seen.pieces]) == (LENGTH, [LENGTH, LENGTH - 6])


def test_an_output_of_one_repeated_token_proves_nothing(target: EagerEngine, draft: EagerEngine) -> None:
    told = Reference((7,) * LENGTH, torch.zeros(LENGTH, 320))
    seen = speculation.follow(
        Loop("transformers generate", target, draft, CLOCK), PROMPT, told, Tolerance(100.0, 100.0)
    )
    assert seen.match.vacuous
    verdict = judge(CLAIMS["speculation.same_tokens"], speculation.same_tokens([seen]))
    assert verdict.word is not Word.HOLDS


def output(wall_s: float, length: int = 32, forwards: int = 12, drafted: int = 50) -> Generated:
    return Generated(tuple(range(length)), wall_s, forwards, drafted)


def test_predictable_text_is_accepted_more_and_the_reverse_is_refuted() -> None:
    def seen(forwards: int) -> Checked:
        return Checked(Match(32), (output(1.0, forwards=forwards),))

    claim = CLAIMS["speculation.predictable"]
    assert judge(claim, speculation.predictable({"counting": seen(8), "open": seen(20)})).word is Word.HOLDS
    assert judge(claim, speculation.predictable({"counting": seen(20), "open": seen(8)})).word is Word.REFUTED
    assert judge(claim, speculation.predictable({"counting": seen(8), "open": seen(8)})).word is Word.INCONCLUSIVE
    same = Checked(Match(32), (output(1.0, 36, 6, 30),))  # a draft that is the target: all 30 accepted
    equal = speculation.predictable({"counting": same, "open": same})
    assert equal.problem == "all of the drafted tokens were accepted on both texts: this pair can't tell them apart"
    nothing = Checked(Match(32), (output(1.0, forwards=32, drafted=0),))
    assert judge(claim, speculation.predictable({"counting": nothing, "open": seen(8)})).word is Word.INCONCLUSIVE
    assert speculation.acceptance([nothing.pieces[0]]).problem == "nothing was drafted"


# Speed ----------------------------------------------------------------------------------------------------------------


@QUICK
@given(st.integers(1, 8), st.floats(0.01, 2.0))
def test_with_every_token_accepted_the_prediction_is_the_theorems(cycles: int, c: float) -> None:
    """Theorem 3.8 at alpha = 1: (gamma + 1) / (gamma c + 1)."""
    said = output(1.0, cycles * (DRAFT_LEN + 1), cycles, cycles * DRAFT_LEN)
    assert speculation.predicted_speed(said, c) == pytest.approx((DRAFT_LEN + 1) / (DRAFT_LEN * c + 1))


@QUICK
@given(st.floats(0.05, 1.5), st.integers(1, 32), st.integers(1, 150), st.floats(0.001, 0.1))
def test_an_output_that_costs_what_its_forwards_cost_fits_the_model_exactly(
    c: float, forwards: int, drafted: int, step_s: float
) -> None:
    seen = speculation.speed(*rounds(step_s, c, forwards, drafted, overhead=1.0))
    assert seen["speculation.cost_model"].value == pytest.approx(1.0)
    assert judge(CLAIMS["speculation.cost_model"], seen["speculation.cost_model"]).word is Word.HOLDS


def rounds(
    step_s: float, c: float, forwards: int, drafted: int, overhead: float
) -> tuple[list[Generated], list[Generated], list[Generated]]:
    """Alone, with draft, draft alone. `overhead` is what the assisted loop costs over its forwards."""
    alone = output(32 * step_s, forwards=32, drafted=0)
    with_draft = output(overhead * step_s * (forwards + c * drafted), forwards=forwards, drafted=drafted)
    sides = (alone, with_draft, replace(alone, wall_s=alone.wall_s * c))
    first, second, third = ([side] * FULL_LOOK for side in sides)
    return first, second, third


def test_a_loop_that_costs_half_more_than_its_forwards_refutes_the_cost_model() -> None:
    for overhead in (1.5, 0.6):
        seen = speculation.speed(*rounds(0.02, 0.8, 12, 50, overhead))
        assert judge(CLAIMS["speculation.cost_model"], seen["speculation.cost_model"]).word is Word.REFUTED


def test_a_draft_that_doubles_speed_refutes_that_it_is_not_free() -> None:
    claim = CLAIMS["speculation.not_free_speed"]
    dear = speculation.speed(*rounds(0.02, 0.8, 12, 50, 1.0))["speculation.not_free_speed"]
    assert (round(dear.value or 0, 2), judge(claim, dear).word) == (0.62, Word.HOLDS)
    cheap = speculation.speed(*rounds(0.02, 0.05, 8, 40, 1.0))["speculation.not_free_speed"]
    assert (round(cheap.value or 0, 2), judge(claim, cheap).word) == (3.2, Word.REFUTED)


def test_times_that_are_no_times_settle_nothing() -> None:
    alone, with_draft, draft_alone = rounds(0.02, 0.8, 12, 50, 1.0)
    for sides in (
        ([replace(a, wall_s=0.0) for a in alone], with_draft, draft_alone),
        (alone, with_draft, [replace(d, wall_s=0.0) for d in draft_alone]),
        (alone, [replace(w, wall_s=float("nan")) for w in with_draft], draft_alone),
    ):
        cost = speculation.speed(*sides)["speculation.cost_model"]
        assert judge(CLAIMS["speculation.cost_model"], cost).word is Word.INCONCLUSIVE


def test_checking_five_tokens_at_five_times_the_price_is_refuted() -> None:
    claim = CLAIMS["speculation.verify_cheap"]
    assert judge(claim, speculation.verify_ratio([(0.019, 0.018)] * FULL_LOOK)).word is Word.HOLDS
    assert judge(claim, speculation.verify_ratio([(0.090, 0.018)] * FULL_LOOK)).word is Word.REFUTED


def test_a_verifier_times_forwards_of_the_asked_size_over_a_cache_of_one_length(target: EagerEngine) -> None:
    seen: list[tuple[int, int]] = []
    spied = EagerEngine(copy.deepcopy(target.model))
    verifier = EagerVerifier(spied, Workload("two", (PROMPT, PROMPT[::-1]), 1), CLOCK)

    def note(_module: Any, _args: Any, kwargs: Any, result: Any) -> None:
        seen.append((result.logits.shape[1], kwargs["cache"].get_seq_length()))

    spied.model.register_forward_hook(note, with_kwargs=True)
    assert min(verifier.pair()) > 0
    n = len(PROMPT)
    assert seen == [(1, n + 1), (5, n + 5), (5, n + 5), (1, n + 1)] * (speculation.VERIFY_REPEATS // 2)
    verifier.forward(1)
    with pytest.raises(RuntimeError, match="the cache holds 9 positions instead of 8"):
        verifier.restore(0)


# Cells ----------------------------------------------------------------------------------------------------------------


def test_rows_carry_time_acceptance_and_the_whole_generation_config(target: EagerEngine, draft: EagerEngine) -> None:
    workload = Workload("tiny", (PROMPT,), LENGTH)
    alone, with_draft, draft_alone = (
        [generate(e, PROMPT, LENGTH, CLOCK, helper)] for e, helper in ((target, None), (target, draft), (draft, None))
    )
    loop, checker = Loop("transformers generate", target, draft, CLOCK), EagerVerifier(target, workload, CLOCK)
    plain = speculation.row(workload, loop, "fp32", alone)
    assisted = speculation.draft_row(workload, loop, checker.traced(), "fp32", alone, with_draft, draft_alone)
    assert (plain.id, assisted.id) == ("speculation.alone", "speculation.with_draft")
    assert plain.unavailable["acceptance_rate"] == "no draft"
    wanted = {"speed_over_alone", "acceptance_rate", "mean_acceptance_length", "c", "predicted_speed"}
    assert wanted <= set(assisted.figures)
    settings_: Any = assisted.workload["generation"]
    assert settings_["num_assistant_tokens"] == DRAFT_LEN and settings_["max_new_tokens"] == LENGTH
    verify = speculation.verify_cell(workload, checker, "fp32", [(0.02, 0.01), (0.03, 0.01)])
    assert (verify.id, verify.figures["over_one_step"]) == ("speculation.verify.1", 2.5)
