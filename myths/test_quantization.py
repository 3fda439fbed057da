"""Belief: "Quantization only shrinks the download, and quality always dies."

Fewer bits free memory, though not exactly half or three quarters of it: embeddings, norms and the constants of the
quantization stay wide. What is freed holds more chats. It is no speed-up by itself, since weights must be unpacked in
every step. And quality is not yes or no: it is a number on your own eval set.
"""

from __future__ import annotations

import pytest

from benchmarks import quantization, workloads
from benchmarks.claims import CLAIMS
from benchmarks.phases import Request
from benchmarks.rows import PlannedRow

STEPS = 8
"""Output tokens of a timed request: enough steps for a time per token, and int8 takes three times as long as fp16."""


@pytest.fixture(scope="module")
def fixture_of(session):
    """The session fixture that holds a precision."""
    return {"reference": "target", "int8": "int8", "nf4": "nf4"}


@pytest.fixture(scope="module")
def eval_rows(tokenizer):
    return quantization.eval_rows(tokenizer)


@pytest.fixture
def planned_rows(precision, engine_name, session, tokenizer):
    name = session.rig.reference if precision == "reference" else precision
    return [PlannedRow(quantization.row_id(name), workloads.equal_rows(tokenizer, 1, STEPS), engine_name, name)]


@pytest.mark.parametrize("precision", ["reference", "int8", "nf4"])
def test_quant_row(
    planned_rows, precision, engine_name, session, fixture_of, tokenizer, roofline, sampled, benchmark, request
):
    eager = request.getfixturevalue(fixture_of[precision])
    name, workload = planned_rows[0].precision, planned_rows[0].workload
    engine = session.engine(engine_name, eager, 1, workload.total_len)
    said = None
    if session.rig.weights == "trained":
        said = quantization.answer(eager, tokenizer, session.options.quant_prompt, workloads.ANSWER_LEN)
    cells = quantization.row(
        engine,
        workload,
        session.clock,
        name,
        session.load_bytes.get(f"target {name}"),
        said,
        sampled,
        roofline,
    )
    for cell in cells:
        session.ledger.cell(cell)
    benchmark.extra_info[cells[0].id] = dict(cells[0].figures)


@pytest.mark.claim("quant.int8_memory")
def test_int8_is_not_exactly_half(session, target, int8, judge):
    judge(quantization.loaded_ratio(session.load_bytes, target.model, "target int8", f"target {session.rig.reference}"))


@pytest.mark.claim("quant.nf4_memory")
def test_nf4_is_not_exactly_a_quarter(session, target, nf4, judge):
    judge(quantization.loaded_ratio(session.load_bytes, target.model, "target nf4", f"target {session.rig.reference}"))


@pytest.mark.claim("quant.bytes_explained")
def test_every_byte_is_a_low_bit_a_constant_or_left_as_it_was(target, int8, nf4, judge):
    judge(quantization.bytes_explained(target.model, {"int8": int8.model, "nf4": nf4.model}))


@pytest.mark.claim("quant.not_always_faster")
def test_int8_is_not_faster_for_one_user(engine_name, session, target, int8, tokenizer, judge):
    workload = workloads.equal_rows(tokenizer, 1, STEPS)
    asked = {
        name: Request(session.engine(engine_name, eager, 1, workload.total_len), workload)
        for name, eager in (("reference", target), ("int8", int8))
    }
    found = session.compare_in_turn(asked, quantization.slower, engine_name)
    judge(found.observed["quant.not_always_faster"])


@pytest.mark.claim("quant.quality_not_binary")
def test_nf4_loses_some_quality_and_not_all(session, target, int8, nf4, eval_rows, judge):
    seen = {}
    for name, engine in (("int8", int8), ("nf4", nf4)):
        seen[name] = quantization.quality(target, engine, eval_rows)
        session.ledger.cell(quantization.quality_cell(name, seen[name], engine))
    judge(quantization.not_binary(seen["nf4"]))


@pytest.mark.claim("quant.more_chats")
def test_freed_memory_holds_the_chats_that_it_should(session, target, int8, nf4, tokenizer, judge):
    reference = f"target {session.rig.reference}"
    planned = {
        name: quantization.room(engine, session.load_bytes, f"target {name}", reference)
        for name, engine in (("int8", int8), ("nf4", nf4))
    }
    if planned["nf4"].computed < 1:
        reason = f"nf4 frees {planned['nf4'].freed_bytes:,} bytes here, less than one chat takes"
        session.skip(CLAIMS["quant.more_chats"], reason)
        pytest.skip(reason)
    held = quantization.hold_chats(nf4, tokenizer, planned["nf4"])
    session.ledger.cell(quantization.room_cell("int8", planned["int8"], planned["int8"], int8))
    session.ledger.cell(quantization.room_cell("nf4", planned["nf4"], held, nf4))
    judge(quantization.more_chats(held))
