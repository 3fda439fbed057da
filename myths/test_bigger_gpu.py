"""Belief: "Inference is slow. Buy a bigger GPU."

A bigger card has more bandwidth and more arithmetic, and helps a step that waits for either. Stock decode of a small model
mostly waits for the host, which launches a thousand kernels a token, so many times the bandwidth buys little speed. Once the
step is recorded and replayed, the card works all the time, software has gained more than a card of twice the bandwidth
could have, and only then does a token cost what memory takes to be read.
"""

from __future__ import annotations

import pytest

from benchmarks import bigger_gpu, workloads
from benchmarks.claims import CLAIMS
from benchmarks.phases import Request
from benchmarks.session import NotCaptured

PAIR_LEN = 17
"""Output tokens of a round: each step is a pair of its own, so short rounds show as much as long ones."""


@pytest.fixture(scope="module")
def alone(tokenizer):
    """One user's request."""
    return workloads.equal_rows(tokenizer, 1, PAIR_LEN)


@pytest.fixture(scope="module")
def busy_s(target, alone):
    """Device seconds of stock decode steps, traced apart from the timing."""
    return bigger_gpu.stock_step_s(target, alone)


@pytest.fixture(scope="module")
def graph(session, target, alone):
    if "graph" not in session.engine_names:
        raise NotCaptured("the graph engine was not asked for: leave --engine out, or give both")
    return session.graph(target, 1, alone.total_len)


@pytest.mark.claim("bigger_gpu.card_is_idle")
def test_the_card_waits_for_most_of_a_stock_step(session, target, alone, busy_s, judge):
    def observe(stock):
        return {"bigger_gpu.card_is_idle": bigger_gpu.idle_share(stock, busy_s)}

    judge(session.compare_in_turn({"stock": Request(target, alone)}, observe).observed["bigger_gpu.card_is_idle"])


@pytest.mark.claim("bigger_gpu.software_first")
def test_software_gains_more_than_a_card_of_twice_the_bandwidth(session, target, graph, alone, busy_s, judge):
    def observe(stock, graph):
        return {"bigger_gpu.software_first": bigger_gpu.software_first(stock, graph, busy_s)}

    asked = {"stock": Request(target, alone), "graph": Request(graph, alone)}
    judge(session.compare_in_turn(asked, observe).observed["bigger_gpu.software_first"])


@pytest.mark.claim("bigger_gpu.bandwidth_is_not_speed")
def test_many_times_the_bandwidth_is_not_as_many_times_the_speed(engine_name, session, target, alone, roofline, judge):
    claim, t4 = CLAIMS["bigger_gpu.bandwidth_is_not_speed"], bigger_gpu.Published.t4()
    engine = session.engine(engine_name, target, 1, alone.total_len)

    def observe(runs):
        return {claim.id: bigger_gpu.speed_over_bandwidth(runs, roofline.bandwidth_bytes_per_s, t4)}

    found = session.compare_in_turn({"runs": Request(engine, alone)}, observe, engine_name)
    seen = found.observed[claim.id]
    runs = [served["runs"] for served in found.rounds["all"]]
    session.ledger.cell(bigger_gpu.t4_cell(engine_name, session.rig.reference, alone, runs, seen))
    if reason := bigger_gpu.no_comparison(engine_name, roofline.bandwidth_bytes_per_s, t4, seen):
        session.skip(claim, reason, engine_name)
        pytest.skip(f"{claim.id}: {reason}")
    judge(seen)


@pytest.mark.claim("bigger_gpu.memory_bound_when_fed")
@pytest.mark.parametrize("engine_name", ["graph"], scope="module")
def test_a_recorded_step_takes_as_long_as_memory(engine_name, session, target, draft, graph, roofline, judge):
    claim = CLAIMS["bigger_gpu.memory_bound_when_fed"]
    short, long = (
        session.graph(target, bigger_gpu.FED_ROWS, cache_len)
        for cache_len in (bigger_gpu.SHORT_CACHE_LEN, bigger_gpu.LONG_CACHE_LEN)
    )
    pairs = {
        bigger_gpu.WEIGHTS: bigger_gpu.Pair(session.graph(draft, 1, graph.cache_len), graph),
        bigger_gpu.KV_CACHE: bigger_gpu.Pair(short, long),
    }

    def observe(rounds):
        return {claim.id: bigger_gpu.memory_bound(pairs, rounds.samples, roofline.bandwidth_bytes_per_s)}

    found = session.compare(bigger_gpu.sides(pairs), observe, engine_name)
    for cell in bigger_gpu.fed_cells(pairs, found.rounds.samples, roofline, session.rig.reference):
        session.ledger.cell(cell)
    judge(found.observed[claim.id])
