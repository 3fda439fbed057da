"""Belief: "FlashAttention is an approximation. It is fast because it skips some of the math."

It is exact, and the math still grows with the square of the length. What a fused kernel never builds is the score matrix:
its extra memory grows about linearly. And which kernel ran is a question for the run, not for the flags, which only say
what is allowed.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks import attention, workloads
from benchmarks.phases import Prompt
from benchmarks.traces import trace


@pytest.fixture(scope="module")
def table():
    """Rows by length, filled by the row tests and read by the claims about growth."""
    return {}


@pytest.fixture(scope="module")
def row_of(session, table):
    """The row of a length: measured once, whoever asks first."""

    def _row(length):
        if length not in table:
            table[length] = attention.measure_row(
                length, getattr(torch, session.rig.dtype), session.device, session.clock
            )
            session.ledger.cell(attention.cell(table[length], session.rig.reference))
        return table[length]

    return _row


@pytest.fixture(scope="module")
def rows(session, row_of):
    return [row_of(length) for length in attention.lengths(session.device)]


def test_attention_row(length, session, row_of, benchmark):
    row = row_of(length)
    if row.sdpa_s is not None:
        call = partial(attention.sdpa, *attention.qkv(length, getattr(torch, session.rig.dtype), session.device))
        benchmark.pedantic(lambda: session.clock.time(call), rounds=3, iterations=1, warmup_rounds=1)
    benchmark.extra_info.update(attention.cell(row, session.rig.reference).figures)


@pytest.mark.claim("attention.exact")
def test_fused_attention_is_exact(session, judge):
    judge(attention.exactness(getattr(torch, session.rig.dtype), session.device))


@pytest.mark.claim("attention.flops")
def test_the_math_grows_fourfold_when_the_length_doubles(rows, judge):
    judge(attention.flops_growth(rows))


@pytest.mark.claim("attention.naive_memory")
def test_naive_memory_grows_fourfold(rows, judge):
    judge(attention.naive_growth(rows))


@pytest.mark.claim("attention.sdpa_memory")
def test_fused_memory_grows_linearly_and_is_far_less(rows, judge):
    judge(attention.sdpa_growth(rows))


@pytest.mark.claim("attention.time_quadratic")
def test_fused_time_still_grows_towards_fourfold(session, judge):
    dtype = getattr(torch, session.rig.dtype)
    sides = {
        str(length): attention.device_timer(partial(attention.sdpa, *attention.qkv(length, dtype, session.device)))
        for length in (4096, 8192)
    }
    found = session.compare(sides, lambda r: {"attention.time_quadratic": attention.time_growth(r["4096"], r["8192"])})
    judge(found.observed["attention.time_quadratic"])


@pytest.mark.claim("attention.kernel")
def test_the_kernel_is_named_by_the_run(session, target, tokenizer, judge):
    traces = {}
    for name, workload in (
        ("one row", workloads.equal_rows(tokenizer, 1, 2)),
        ("padded rows", workloads.unequal_rows(tokenizer, 16, 2)),
    ):
        prompt = Prompt.of(workload.prompts, session.device)
        traces[f"prefill, {name}"] = trace(lambda p=prompt: target.prefill(p), session.device)
        state = target.prefill(prompt)
        traces[f"decode, {name}"] = trace(lambda s=state: target.step(s), session.device)
    dtype = getattr(torch, session.rig.dtype)
    traces["attention alone"] = trace(
        partial(attention.sdpa, *attention.qkv(1024, dtype, session.device)), session.device
    )
    judge(attention.kernels_named(traces, session.capability))
