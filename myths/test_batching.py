"""Belief: "Serve each request alone. Batching makes every user wait longer."

A decode step reads all weights whether one user waits for it or sixteen. So sixteen get many times the tokens per second
of one, and each of them waits about as long as before; nobody gets faster either. What does grow is the time to the first
token, since sixteen prompts are read at once, and a little memory, which is KV cache.
"""

from __future__ import annotations

import pytest

from benchmarks import batching, curves, workloads
from benchmarks.phases import Request
from benchmarks.rows import PlannedRow


@pytest.fixture
def planned_rows(batch_size, engine_name, session, tokenizer):
    workload = workloads.equal_rows(tokenizer, batch_size, session.options.new_tokens)
    return [PlannedRow(batching.row_id(workload), workload, engine_name, session.rig.reference)]


def test_batching_row(planned_rows, batch_size, engine_name, session, target, roofline, sampled, benchmark):
    workload = planned_rows[0].workload
    engine = session.engine(engine_name, target, batch_size, workload.total_len)
    cells = batching.row(engine, workload, session.clock, session.rig.reference, sampled, roofline)
    for cell in cells:
        session.ledger.cell(cell)
    benchmark.extra_info.update(cells[0].figures)
    if not cells[0].figures:
        pytest.fail(f"batch {batch_size}: {cells[0].note or cells[0].unavailable['figures']}", pytrace=False)


def test_the_batch_size_at_which_a_further_user_stops_being_cheap(engine_name, session, target, tokenizer):
    engine_for, limits = (lambda rows: target), curves.BATCH_LIMITS[session.device]
    if engine_name == "graph":
        engine_for, limits = curves.recorded(target), curves.GRAPH_LIMITS
    tokens = workloads.prefix_ids(tokenizer, 256)
    curve = curves.batch_curve(engine_for, session.device, session.clock, tokens, limits)
    for cell in curves.curve_cells(curves.BATCHING, curve, engine_name, session.rig.reference):
        session.ledger.cell(cell)


@pytest.fixture(scope="module")
def one_and_sixteen(engine_name, session, target, tokenizer):
    """Batch 1 and batch 16 of 37-token prompts, in turn."""
    output_len = round(session.options.new_tokens * workloads.COMPARED_SHARE[engine_name])
    asked = {}
    for name, rows in (("one", 1), ("sixteen", 16)):
        workload = workloads.equal_rows(tokenizer, rows, output_len)
        asked[name] = Request(session.engine(engine_name, target, rows, workload.total_len), workload)
    return session.compare_in_turn(asked, batching.sixteen_over_one, engine_name)


@pytest.mark.claim("batching.throughput")
def test_sixteen_rows_give_many_times_the_tokens_per_second(one_and_sixteen, judge):
    judge(one_and_sixteen.observed["batching.throughput"])


@pytest.mark.claim("batching.latency")
def test_each_user_of_sixteen_waits_hardly_longer(one_and_sixteen, judge):
    judge(one_and_sixteen.observed["batching.latency"])


@pytest.mark.claim("batching.nobody_gets_sixteenth")
def test_nobody_of_sixteen_waits_a_sixteenth(one_and_sixteen, judge):
    judge(one_and_sixteen.observed["batching.nobody_gets_sixteenth"])


@pytest.mark.claim("batching.tpot")
def test_a_token_takes_hardly_longer_for_sixteen(one_and_sixteen, judge):
    judge(one_and_sixteen.observed["batching.tpot"])


@pytest.mark.claim("batching.ttft_grows")
def test_the_first_token_comes_later_for_sixteen_long_prompts(session, target, tokenizer, judge):
    asked = {
        name: Request(target, workloads.equal_rows(tokenizer, rows, 1, workloads.LONG_PROMPT_LEN[session.device]))
        for name, rows in (("one", 1), ("sixteen", 16))
    }
    found = session.compare_in_turn(asked, batching.ttft_grows)
    judge(found.observed["batching.ttft_grows"])


@pytest.mark.claim("batching.memory")
def test_sixteen_chats_cost_little_memory(session, target, tokenizer, judge):
    one, sixteen = (workloads.equal_rows(tokenizer, n, session.options.new_tokens) for n in (1, 16))
    judge(batching.memory_growth(target, one, sixteen))


@pytest.fixture(scope="module")
def alone(session, target, tokenizer):
    """Sixteen rows of unequal length, each asked alone."""
    return batching.Alone.of(target, workloads.unequal_rows(tokenizer, 16, session.options.new_tokens // 3))


@pytest.mark.claim("batching.same_tokens")
def test_a_row_says_the_same_among_fifteen_others(engine_name, session, target, alone, judge):
    together = session.engine(engine_name, target, 16, alone.workload.total_len)
    judge(batching.same_tokens(together, alone))
