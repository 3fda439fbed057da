"""Belief: "A draft model makes decoding twice as fast."

The target checks what the draft proposes, so the output stays the target's own. Whether that is faster depends on how
often the draft is right and on what a draft step costs beside a target step: checking five tokens costs about one step,
but five draft steps are not free. Predictable text is accepted more often than open text.
"""

from __future__ import annotations

import pytest

from benchmarks import speculation, workloads
from benchmarks.speculation import DRAFT_LEN, Verifier, generate

CHECKED_LEN = 24
"""Output tokens of each compared text; four texts make some thirty cycles of drafting and checking."""

ROUNDS_LEN = 16
"""Output tokens in the rounds that settle the speed claims: enough cycles to average over, and rounds stay short."""


@pytest.fixture(scope="module")
def helper(session, request):
    """The draft, where the rig has one."""
    if session.rig.draft is None:
        pytest.skip(f"rig {session.rig.name} has no draft model; give --target and --draft")
    return request.getfixturevalue("draft")


@pytest.fixture(scope="module")
def checked(session, target, helper, tokenizer):
    """Assisted outputs beside the target's own, by text."""
    texts = speculation.conversations(tokenizer, min(CHECKED_LEN, session.options.new_tokens))
    return {name: speculation.check(target, helper, workload, session.clock) for name, workload in texts.items()}


@pytest.fixture(scope="module")
def in_turn(session, target, helper, tokenizer):
    """The target alone, the target with its draft, and the draft alone, in turn."""
    (prompt,) = workloads.equal_rows(tokenizer, 1, 1).prompts
    length = min(ROUNDS_LEN, session.options.new_tokens)
    sides = {
        "alone": lambda: generate(target, prompt, length, session.clock),
        "with draft": lambda: generate(target, prompt, length, session.clock, helper),
        "draft alone": lambda: generate(helper, prompt, length, session.clock),
    }
    return session.compare(sides, lambda r: speculation.speed(r["alone"], r["with draft"], r["draft alone"]))


def test_speculation_row(session, target, helper, tokenizer, sampled, benchmark):
    workload = workloads.equal_rows(tokenizer, 1, session.options.new_tokens)
    (prompt,) = workload.prompts
    rounds = sampled(
        lambda: (
            generate(target, prompt, workload.output_len, session.clock),
            generate(target, prompt, workload.output_len, session.clock, helper),
            generate(helper, prompt, workload.output_len, session.clock),
        ),
        warm_up=lambda: generate(target, prompt, 4, session.clock, helper),
    )
    alone, with_draft, draft_alone = (list(side) for side in zip(*rounds, strict=True))
    reference = session.rig.reference
    for cell in (
        speculation.row("alone", workload, target, reference, alone),
        speculation.draft_row(workload, target, helper, reference, alone, with_draft, draft_alone),
    ):
        session.ledger.cell(cell)
        benchmark.extra_info[cell.id] = dict(cell.figures)


@pytest.mark.claim("speculation.same_tokens")
def test_the_output_is_the_targets_own(checked, judge):
    judge(speculation.same_tokens(list(checked.values())))


@pytest.mark.claim("speculation.predictable")
def test_predictable_text_is_accepted_more_often(checked, judge):
    judge(speculation.predictable(checked))


@pytest.mark.claim("speculation.not_free_speed")
def test_a_draft_is_no_free_doubling(in_turn, judge):
    judge(in_turn.observed["speculation.not_free_speed"])


@pytest.mark.claim("speculation.cost_model")
def test_speed_follows_acceptance_and_draft_cost(in_turn, judge):
    judge(in_turn.observed["speculation.cost_model"])


def _verify_sides(session, target, workload):
    checker = Verifier(target, workload, session.clock)
    return {"many": lambda: checker.seconds(DRAFT_LEN), "one": lambda: checker.seconds(1)}


@pytest.mark.claim("speculation.verify_cheap")
def test_checking_five_tokens_costs_about_one_step(session, target, tokenizer, judge):
    workload = workloads.equal_rows(tokenizer, 1, 1)
    found = session.compare(
        _verify_sides(session, target, workload),
        lambda r: {"speculation.verify_cheap": speculation.verify_ratio(r["many"], r["one"])},
    )
    seen = found.rounds
    session.ledger.cell(speculation.verify_cell(workload, target, session.rig.reference, seen["many"], seen["one"]))
    judge(found.observed["speculation.verify_cheap"])


def test_verify_row(session, target, tokenizer, sampled, benchmark):
    """The same at batch 16, where a step is less of a wait for weights: a figure, not a claim."""
    workload = workloads.equal_rows(tokenizer, 16, 1)
    sides = _verify_sides(session, target, workload)

    def both():
        return sides["many"](), sides["one"]()

    rounds = sampled(both, both)
    many, one = (list(side) for side in zip(*rounds, strict=True))
    cell = speculation.verify_cell(workload, target, session.rig.reference, many, one)
    session.ledger.cell(cell)
    benchmark.extra_info[cell.id] = dict(cell.figures)
