"""Belief: "A draft model makes decoding twice as fast."

The target checks what the draft proposes, so the output stays the target's own. Whether that is faster depends on how
often the draft is right and on what a draft step costs beside a target step: checking five tokens costs about one step,
but five draft steps are not free. Predictable text is accepted more often than open text.
"""

from __future__ import annotations

import pytest

from benchmarks import drafts, speculation, workloads
from benchmarks.drafts import DRAFT_STEPS, TARGET_STEPS, verifier
from benchmarks.rows import PlannedRow
from benchmarks.speculation import DRAFT_LEN, Loop

CHECKED_LEN = 16
"""Output tokens of each compared text; four texts make some twenty cycles of drafting and checking. The two that are compared by
acceptance get all new tokens where weights are trained: where few tokens are drafted, luck decides much."""

ROUNDS_LEN = {"cpu": 16, "cuda": 10}
REPLAYED_LEN = 96
"""Output tokens in the rounds that settle the speed claims: enough cycles to average over, and rounds stay short. Replays
take so little that beside a few of them the prefills would be judged, of which a draft adds one."""

LOOPS = {"eager": "transformers generate", "graph": "graph"}
"""The engine that a loop's rows bear."""


@pytest.fixture(scope="module")
def helper(session, request):
    """The draft, where the rig has one."""
    if session.rig.draft is None:
        pytest.skip(f"rig {session.rig.name} has no draft model; give --target and --draft")
    return request.getfixturevalue("draft")


@pytest.fixture(scope="module")
def rounds_len(engine_name, session):
    wanted = REPLAYED_LEN if engine_name == "graph" else ROUNDS_LEN[session.device]
    return min(wanted, 2 * session.options.new_tokens)


@pytest.fixture(scope="module")
def loop(engine_name, session, target, helper, texts, rounds_len):
    """The library's assisted generation on the eager engine, or the same loop of replays."""
    if engine_name == "eager":
        return Loop(LOOPS[engine_name], target, helper, session.clock)
    longest = max(len(w.prompts[0]) + max(w.output_len, rounds_len) for w in texts.values()) + DRAFT_LEN
    return Loop(
        LOOPS[engine_name],
        session.graph(target, 1, longest, step_lens=TARGET_STEPS),
        session.graph(helper, 1, longest, step_lens=DRAFT_STEPS),
        session.clock,
        drafts.generate,
    )


@pytest.fixture(scope="module")
def texts(session, tokenizer):
    """What is asked: questions, counting and open text, and the workload of the table."""
    short = min(CHECKED_LEN, session.options.new_tokens)
    told_apart = session.options.new_tokens if session.rig.weights == "trained" else short
    asked = speculation.conversations(tokenizer, short, told_apart)
    new_tokens = session.options.new_tokens
    shown = new_tokens if session.device == "cpu" else -(-new_tokens // 2)  # eager outputs take seconds on a card
    return asked | {"table": workloads.equal_rows(tokenizer, 1, shown)}


@pytest.fixture(scope="module")
def checked(loop, target, texts):
    """Assisted outputs beside the target's own, by text."""
    return {name: speculation.check(loop, target, asked) for name, asked in texts.items() if name != "table"}


@pytest.fixture(scope="module")
def in_turn(engine_name, session, loop, texts, rounds_len):
    """The target alone, the target with its draft, and the draft alone, in turn."""
    (prompt,) = texts["table"].prompts
    sides = {
        "alone": lambda: loop.alone(prompt, rounds_len),
        "with draft": lambda: loop.with_draft(prompt, rounds_len),
        "draft alone": lambda: loop.draft_alone(prompt, rounds_len),
    }
    return session.compare(
        sides, lambda r: speculation.speed(r["alone"], r["with draft"], r["draft alone"]), engine_name
    )


@pytest.fixture
def planned_rows(engine_name, session, texts):
    return [
        PlannedRow(id, texts["table"], LOOPS[engine_name], session.rig.reference)
        for id in (speculation.ALONE, speculation.WITH_DRAFT)
    ]


def test_speculation_row(planned_rows, session, loop, texts, sampled, benchmark):
    workload = texts["table"]
    (prompt,) = workload.prompts

    def three():
        return tuple(side(prompt, workload.output_len) for side in (loop.alone, loop.with_draft, loop.draft_alone))

    # One round, of three whole outputs; the claims about speed have rounds of their own.
    rounds = sampled(three, warm_up=three, rounds=1)
    alone, with_draft, draft_alone = (list(side) for side in zip(*rounds, strict=True))
    reference = session.rig.reference
    check = verifier(loop.target, workload, session.clock).traced()
    for cell in (
        speculation.row(workload, loop, reference, alone),
        speculation.draft_row(workload, loop, check, reference, alone, with_draft, draft_alone),
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


@pytest.fixture
def checker(engine_name, session, target, tokenizer):
    """What times checks at a batch size, on either engine."""

    def _checker(batch_size):
        workload = workloads.equal_rows(tokenizer, batch_size, 1)
        cache_len = workload.prompt_len + DRAFT_LEN
        engine = session.engine(engine_name, target, batch_size, cache_len, step_lens=TARGET_STEPS)
        return workload, verifier(engine, workload, session.clock)

    return _checker


@pytest.mark.claim("speculation.verify_cheap")
def test_checking_five_tokens_costs_about_one_step(engine_name, session, checker, judge):
    workload, checks = checker(1)
    found = session.compare(
        {"pair": checks.pair},
        lambda r: {"speculation.verify_cheap": speculation.verify_ratio(r["pair"])},
        engine_name,
    )
    session.ledger.cell(speculation.verify_cell(workload, checks, session.rig.reference, found.rounds["pair"]))
    judge(found.observed["speculation.verify_cheap"])


@pytest.fixture
def planned_checks(engine_name, session, tokenizer):
    workload = workloads.equal_rows(tokenizer, 16, 1)
    return [PlannedRow(speculation.verify_id(workload), workload, engine_name, session.rig.reference, phase="verify")]


def test_verify_row(planned_checks, session, checker, sampled, benchmark):
    """The same at batch 16, where a step is less of a wait for weights: a figure, not a claim."""
    workload, checks = checker(planned_checks[0].workload.batch_size)
    cell = speculation.verify_cell(workload, checks, session.rig.reference, sampled(checks.pair, checks.pair))
    session.ledger.cell(cell)
    benchmark.extra_info[cell.id] = dict(cell.figures)
