"""Belief: "Serve each request alone. Batching makes every user wait longer."

A decode step reads all weights whether one user waits for it or sixteen. So sixteen get many times the tokens per second
of one, and each of them waits about as long as before; nobody gets faster either. What does grow is the time to the first
token, since sixteen prompts are read at once, and a little memory, which is KV cache.
"""

from __future__ import annotations

import pytest

from benchmarks import batching, workloads
from benchmarks.phases import Request


def test_batching_row(batch_size, session, target, tokenizer, sampled, benchmark):
    workload = workloads.equal_rows(tokenizer, batch_size, session.options.new_tokens)
    cells = batching.row(target, workload, session.clock, session.rig.reference, sampled)
    for cell in cells:
        session.ledger.cell(cell)
    benchmark.extra_info.update(cells[0].figures)
    if not cells[0].figures:
        pytest.fail(f"batch {batch_size}: {cells[0].note or cells[0].unavailable['figures']}", pytrace=False)


@pytest.fixture(scope="module")
def one_and_sixteen(session, target, tokenizer):
    """Batch 1 and batch 16 of 37-token prompts, in turn."""
    output_len = round(session.options.new_tokens * workloads.COMPARED_SHARE[session.device])
    asked = {
        name: Request(target, workloads.equal_rows(tokenizer, rows, output_len))
        for name, rows in (("one", 1), ("sixteen", 16))
    }
    return session.compare_in_turn(asked, batching.sixteen_over_one)


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


@pytest.mark.claim("batching.same_tokens")
def test_a_row_says_the_same_among_fifteen_others(session, target, tokenizer, judge):
    judge(batching.same_tokens(target, workloads.unequal_rows(tokenizer, 16, session.options.new_tokens // 3)))
