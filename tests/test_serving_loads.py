"""Load shapes, a server's counters, and what the claims about serving make of them; each claim refutes a server that lies."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import serving
from benchmarks.claims import CLAIMS
from benchmarks.serving import measures
from benchmarks.serving.answers import Answer, Ask, Outcome
from benchmarks.serving.loads import (
    MOST_RATES,
    Rate,
    Stretch,
    Targets,
    arriving,
    bursts,
    closed,
    groups,
    held_up,
    mixed_lens,
    poisson,
    repeated,
    sweep,
)
from benchmarks.serving.metrics import Change, Snapshot
from benchmarks.timing import Rounds
from benchmarks.verdicts import Word
from tests.pretend import verdict

# A server on paper ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paper:
    """A server whose times are computed: `seats` answers at once, each with its prefill and its steps."""

    seats: int = 16
    prefill_s: float = 0.02
    step_s: float = 0.01

    def serve(self, lens: Sequence[int], *, users: int | None = None, group: int | None = None) -> Stretch:
        """All wanted at 0; sent by that many users in a loop, or in groups that wait for their longest (None: at once)."""
        free_users = [0.0] * (users or len(lens))
        free_seats = [0.0] * self.seats
        heapq.heapify(free_users)
        heapq.heapify(free_seats)
        answers: list[Answer] = []
        gate_s = 0.0
        for number, n in enumerate(lens):
            if group and number % group == 0:
                gate_s = max((a.end_s for a in answers), default=0.0)
            submit_s = gate_s if group else heapq.heappop(free_users)
            begin_s = max(submit_s, heapq.heappop(free_seats)) + self.prefill_s
            text_s = tuple(begin_s + i * self.step_s for i in range(n))
            heapq.heappush(free_users, text_s[-1])
            heapq.heappush(free_seats, text_s[-1])
            answers.append(answered(f"p{number}", n, submit_s, text_s))
        return Stretch(tuple(answers), 0.0, max(a.end_s for a in answers), 0.0)


def answered(prompt: str, n: int, submit_s: float, text_s: tuple[float, ...], due_s: float = 0.0) -> Answer:
    text = f"about {prompt}"
    return Answer(Ask(prompt, n), Outcome.OK, due_s, submit_s, text_s[-1], text_s, text, 40, n)


def rounds(**sides: Stretch | float) -> Rounds[object]:
    """Twenty equal rounds."""
    return Rounds({name: [sample] * 20 for name, sample in sides.items()}, "settled")


def word(claim_id: str, observed: Mapping[str, object] | object) -> Word:
    seen = observed[claim_id] if isinstance(observed, Mapping) and claim_id in observed else observed
    return verdict(claim_id, seen).word  # type: ignore[arg-type]


def one_user(ttft_s: float, tpot_s: float) -> Stretch:
    return Stretch((answered("p", 9, 0.0, tuple(ttft_s + i * tpot_s for i in range(9))),), 0.0, 1.0, 0.0)


# Each claim with a server that bears it out and one that lies ---------------------------------------------------------


BATCHING, IN_LINE = Paper(), Paper(seats=1)


@pytest.mark.parametrize(("server", "wanted"), [(BATCHING, Word.HOLDS), (IN_LINE, Word.REFUTED)])
@pytest.mark.parametrize("claim_id", ["serving.batching_throughput", "serving.batching_latency"])
def test_batching_is_told_from_a_line(server: Paper, wanted: Word, claim_id: str) -> None:
    seen = measures.batching(rounds(one=server.serve([24]), sixteen=server.serve([24] * 16)))
    assert word(claim_id, seen) is wanted


@pytest.mark.parametrize(("alone", "wanted"), [(IN_LINE, Word.HOLDS), (BATCHING, Word.REFUTED)])
def test_a_server_that_batches_is_told_from_one_that_only_says_so(alone: Paper, wanted: Word) -> None:
    seen = measures.server_batches(rounds(together=BATCHING.serve([24] * 16), alone=alone.serve([24] * 16)))
    assert word("serving.server_batches", seen) is wanted


PREFIX = {"cold": one_user(0.5, 0.01), "warm": one_user(0.1, 0.01), "changed": one_user(0.5, 0.01)}


@pytest.mark.parametrize(
    ("claim_id", "lie"),
    [
        ("serving.prefix_ttft", {"warm": one_user(0.5, 0.01)}),
        ("serving.prefix_decode_unchanged", {"warm": one_user(0.1, 0.005)}),
        ("serving.prefix_decode_unchanged", {"warm": one_user(0.1, 0.02)}),
        ("serving.prefix_one_word", {"changed": one_user(0.1, 0.01)}),
    ],
)
def test_prefix_claims_refute_a_server_without_the_effect(claim_id: str, lie: dict[str, Stretch]) -> None:
    assert word(claim_id, measures.prefix(rounds(**PREFIX))) is Word.HOLDS
    assert word(claim_id, measures.prefix(rounds(**{**PREFIX, **lie}))) is Word.REFUTED


def test_a_server_that_reuses_nothing_has_no_hit_to_lose() -> None:
    measures.needs_reuse(measures.prefix(rounds(**PREFIX)))
    with pytest.raises(serving.NotServed, match="reuses no prefix"):
        measures.needs_reuse(measures.prefix(rounds(**{**PREFIX, "warm": PREFIX["cold"]})))


LENS = mixed_lens(measures.MIXED, measures.SEED)


def test_filled_seats_are_told_from_groups() -> None:
    claim = "serving.continuous_beats_static"
    static = BATCHING.serve(LENS, group=measures.BATCH)
    seen = measures.continuous(rounds(static=static, continuous=BATCHING.serve(LENS, users=measures.BATCH)))
    assert word(claim, seen) is Word.HOLDS
    assert static.empty_seats(measures.BATCH) > 0.4
    assert "seats, empty" in str(verdict(claim, seen[claim]).reason)  # type: ignore[arg-type]
    # A server that batches statically itself: whoever comes early waits for the group's end all the same.
    lying = measures.continuous(rounds(static=static, continuous=static))
    assert word(claim, lying) is Word.REFUTED


def test_a_queue_in_the_first_token_is_told_from_one_everywhere() -> None:
    claim = "serving.queue_is_in_ttft"
    fits, crowd = BATCHING.serve([24] * 16), BATCHING.serve([24] * 48)
    assert word(claim, measures.queue(rounds(fits=fits, crowd=crowd))) is Word.HOLDS
    roomy = replace(BATCHING, seats=48).serve([24] * 48)
    assert word(claim, measures.queue(rounds(fits=fits, crowd=roomy))) is Word.REFUTED
    # Everybody is let in at once and slowed down: the wait is in the tokens after the first.
    shared = replace(BATCHING, seats=48, step_s=0.03).serve([24] * 48)
    assert word(claim, measures.queue(rounds(fits=fits, crowd=shared))) is Word.REFUTED


def test_freezes_and_chunks_are_told_from_none() -> None:
    assert word("serving.long_prompt_freezes", measures.freezes(rounds(long=1.0, none=0.05))) is Word.HOLDS  # type: ignore[arg-type]
    assert word("serving.long_prompt_freezes", measures.freezes(rounds(long=0.06, none=0.05))) is Word.REFUTED  # type: ignore[arg-type]
    assert word("serving.chunks_shorten_freeze", measures.chunks(rounds(whole=1.0, chunked=0.1))) is Word.HOLDS  # type: ignore[arg-type]
    assert word("serving.chunks_shorten_freeze", measures.chunks(rounds(whole=1.0, chunked=0.9))) is Word.REFUTED  # type: ignore[arg-type]


def test_the_worst_gap_is_of_the_time_in_which_the_long_prompt_was_read() -> None:
    stream = answered("p", 4, 0.0, (1.0, 1.1, 3.1, 3.2))
    assert measures.worst_gap_s([stream], 1.05, 1.2) == pytest.approx(2.0)
    assert measures.worst_gap_s([stream], 0.5, 1.05) == pytest.approx(0.1)
    assert measures.worst_gap_s([stream], 4.0, 5.0) is None


def test_a_tail_is_told_from_an_even_server() -> None:
    def load(ttft_s: Callable[[int], float]) -> Stretch:
        answers = [answered(f"p{i}", 2, 0.0, (ttft_s(i), ttft_s(i) + 0.1)) for i in range(100)]
        return Stretch(tuple(answers), 0.0, 10.0, 0.0)

    claim = "serving.average_hides"
    tailed, even = load(lambda i: 2.0 if i > 90 else 0.1), load(lambda i: 0.1 + i / 1e4)
    assert word(claim, measures.average(rounds(load=tailed), 9.0)) is Word.HOLDS
    assert word(claim, measures.average(rounds(load=even), 9.0)) is Word.REFUTED
    assert (
        "mean 0.271 s, p50 0.1 s, p99 2 s" in verdict(claim, measures.average(rounds(load=tailed), 9.0)[claim]).reason
    )


@dataclass
class Told:
    """A server that gives these stretches one after the other."""

    stretches: list[Stretch]
    prompts: serving.Prompts
    dtype: str | None = "float32"

    def closed(self, asks: Sequence[Ask], users: int) -> Stretch:
        return self.stretches.pop(0)


@pytest.mark.parametrize(
    ("again_s", "wanted", "said"), [(0.2, Word.HOLDS, "16 of 16"), (0.01, Word.INCONCLUSIVE, "stored")]
)
def test_answers_out_of_a_store_prove_nothing(again_s: float, wanted: Word, said: str) -> None:
    pair = [Paper(prefill_s=0.0, step_s=step_s).serve([16] * 16) for step_s in (0.02, again_s / 15)]
    seen = verdict("serving.same_tokens", measures.same_tokens(Told(pair, serving.Prompts(4.0))))  # type: ignore[arg-type]
    assert seen.word is wanted
    assert said in seen.line


def test_near_ties_are_excused_by_logprobs_and_other_differences_are_not() -> None:
    def answers(second: str, gap: float) -> Stretch:
        tops = ({"a": -0.1, "b": -3.0}, {"x": -1.0, "y": -1.0 - gap}, {"z": -0.5})
        whole = answered("p", 3, 0.0, (0.1, 0.2, 0.3))
        return Stretch((replace(whole, text=f"a{second}z", tokens=("a", second, "z"), top_logprobs=tops),), 0, 1, 0)

    for gap, dtype, wanted in (
        (0.01, "bfloat16", Word.HOLDS),
        (0.5, "bfloat16", Word.INCONCLUSIVE),  # rounding was seen to do that, and to do less
        (9.0, "bfloat16", Word.REFUTED),
        (0.5, "float16", Word.INCONCLUSIVE),
        (2.0, "float16", Word.REFUTED),
        (0.01, "float32", Word.REFUTED),
    ):
        told = Told([answers("x", gap), answers("y", gap)], serving.Prompts(4.0), dtype)
        assert verdict("serving.same_tokens", measures.same_tokens(told)).word is wanted  # type: ignore[arg-type]


def test_tokens_that_come_all_at_once_have_no_time_of_their_own_and_are_asked_for_again() -> None:
    held, streamed = (answered("p", 3, 0.0, at) for at in ((0.3, 0.3, 0.3), (0.1, 0.2, 0.3)))
    assert held.tpot_s is None and streamed.tpot_s == pytest.approx(0.1)
    assert held_up([held, held, streamed]) and not held_up([held, streamed, streamed])
    assert held_up([answered("p", 1, 0.0, (0.1,))]) is None  # one token comes at once by itself


@pytest.mark.parametrize("late", [0, 2, 3])
def test_a_client_that_was_late_tries_other_seeds_and_then_says_so(late: int) -> None:
    class Late:
        tries = 0
        prompts = serving.Prompts(4.0)

        def load(self, make: object) -> Stretch:
            self.tries += 1
            if self.tries <= late:
                raise serving.ClientBusy("the client was late")
            return GOOD

    (side,) = measures.busy_sides(Late(), 5.0).values()  # type: ignore[arg-type]
    if late < measures.TRIES:
        assert side() is GOOD
    else:
        with pytest.raises(serving.Broken, match="late"):
            side()


def test_every_claim_about_serving_needs_a_server_and_says_so() -> None:
    found = [claim for claim in CLAIMS.values() if claim.station == "serving"]
    assert len(found) == 14
    assert all("served" in claim.needs for claim in found)


def test_a_broken_load_decides_nothing_and_says_why() -> None:
    for claim in (c for c in CLAIMS.values() if c.station == "serving"):
        seen = verdict(claim.id, serving.broken(claim.id, "3 of 16 requests failed: 3 refused"))  # type: ignore[arg-type]
        assert seen.word is Word.INCONCLUSIVE
        assert "3 refused" in seen.line


# What makes a stretch unusable ----------------------------------------------------------------------------------------


GOOD = BATCHING.serve([8] * 10)


def with_one(**changes: object) -> Stretch:
    first, *others = GOOD.answers
    return replace(GOOD, answers=(replace(first, **changes), *others))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stretch", "said"),
    [
        (with_one(outcome=Outcome.REFUSED, detail="429, retry after 1 s"), "1 of 10 requests failed: 1 refused (429"),
        (with_one(outcome=Outcome.TRUNCATED), "1 truncated"),
        (with_one(output_tokens=3), "1 of 10 answers: 3 tokens instead of 8"),
        (with_one(output_tokens=None), "tells no token counts"),
        (replace(GOOD, unsent=2), "2 requests were never sent"),
        (replace(GOOD, client_cpu_s=0.99 * GOOD.wall_s), "the client, not the server"),
        (replace(GOOD, answers=tuple(replace(a, text="the same answer") for a in GOOD.answers)), "cached or made up"),
        (
            replace(GOOD, answers=tuple(replace(a, submit_s=0.9, due_s=0.0) for a in GOOD.answers), gap_s=1.0),
            "900 ms late",
        ),
        (
            replace(GOOD, answers=tuple(replace(a, submit_s=0.05) for a in GOOD.answers), gap_s=0.0),
            "50 ms late",
        ),
    ],
)
def test_a_stretch_says_why_it_gives_no_figure(stretch: Stretch, said: str) -> None:
    assert GOOD.problem is None
    assert said in str(stretch.problem)


def test_equal_short_answers_and_repeated_questions_are_no_sign_of_a_store() -> None:
    assert repeated([replace(a, text="yes") for a in GOOD.answers]) is None
    assert repeated([replace(a, text="the same answer", ask=Ask("p", 8)) for a in GOOD.answers]) is None


# Shapes ---------------------------------------------------------------------------------------------------------------


@given(st.floats(0.1, 100), st.integers(0, 50), st.integers(0, 9))
def test_poisson_arrivals_are_seeded_and_in_order(rate: float, n: int, seed: int) -> None:
    arrivals = poisson(rate, n, seed)
    assert arrivals == poisson(rate, n, seed)
    assert list(arrivals) == sorted(arrivals)
    assert len(arrivals) == n


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    assert poisson(8.0, 24, 1)[-1] == pytest.approx(3.0)
    arrivals = poisson(8.0, 4000, 1)
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.1)  # of a Poisson process, as large as the mean
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive"):
            poisson(rate, 3, 1)


@given(st.integers(1, 6), st.floats(0, 3), st.integers(0, 20), st.integers(0, 9))
def test_bursts_come_together(size: int, gap_s: float, n: int, seed: int) -> None:
    arrivals = bursts(size, gap_s, n, seed)
    assert len(arrivals) == n
    assert all(arrivals[i] == arrivals[i - i % size] for i in range(n))
    assert arrivals == bursts(size, gap_s, n, seed)


@given(st.integers(1, 40), st.integers(0, 99))
def test_mixed_lengths_stay_within_their_ends(n: int, seed: int) -> None:
    assert all(8 <= length <= 256 for length in mixed_lens(n, seed))


async def _echo(ask: Ask, due_s: float) -> Answer:
    now_s = time.perf_counter()
    await asyncio.sleep(0.001 * ask.output_len)
    end_s = time.perf_counter()
    return Answer(ask, Outcome.OK, due_s, now_s, end_s, (end_s,), f"about {ask.prompt}", 1, ask.output_len)


ASKS = [Ask(f"p{i}", 1 + 9 * (i % 3 == 0)) for i in range(9)]


def test_every_ask_is_answered_once_and_in_order() -> None:
    for load in (closed(_echo, ASKS, 3), groups(_echo, ASKS, 3), arriving(_echo, ASKS, poisson(500, 9, 1))):
        stretch = asyncio.run(load)
        assert [a.ask for a in stretch.answers] == ASKS
        assert stretch.unsent == 0
        assert stretch.output_tokens == sum(a.output_len for a in ASKS)


def test_only_arrivals_have_a_gap_that_a_client_can_miss() -> None:
    assert asyncio.run(arriving(_echo, ASKS, poisson(500, 9, 1))).gap_s == pytest.approx(1 / 500, rel=0.5)
    assert asyncio.run(arriving(_echo, ASKS, [0.0] * 9)).gap_s == 0
    assert asyncio.run(closed(_echo, ASKS, 3)).gap_s is None


def test_a_group_begins_when_the_one_before_is_done() -> None:
    stretch = asyncio.run(groups(_echo, ASKS, 3))
    assert stretch.answers[3].submit_s >= max(a.end_s for a in stretch.answers[:3])


def test_loads_are_bounded_in_seconds() -> None:
    assert asyncio.run(closed(_echo, ASKS, 1, limit_s=0.0)).unsent >= 8
    assert asyncio.run(groups(_echo, ASKS, 1, limit_s=0.0)).unsent >= 8
    assert asyncio.run(arriving(_echo, ASKS, [9.0] * 9, limit_s=0.1)).unsent == 9
    with pytest.raises(ValueError, match="arrivals"):
        asyncio.run(arriving(_echo, ASKS, [0.0]))
    with pytest.raises(ValueError, match="user"):
        asyncio.run(closed(_echo, ASKS, 0))


# The sweep ------------------------------------------------------------------------------------------------------------


TARGETS = Targets(ttft_s=0.5, tpot_s=0.1)


def at(rate_per_s: float) -> Rate:
    """A server that is good up to 10 arrivals a second."""
    slow = 5.0 if rate_per_s > 10 else 0.1
    answers = [
        answered(f"p{i}", 2, i / rate_per_s, (i / rate_per_s + slow, i / rate_per_s + slow + 0.01)) for i in range(8)
    ]
    answers = [replace(a, due_s=a.submit_s) for a in answers]
    return Rate(rate_per_s, Stretch(tuple(answers), 0.0, answers[-1].end_s, 0.0), TARGETS)


def test_a_sweep_stops_at_saturation() -> None:
    found = sweep(at, 2.0, 60.0, lambda: 0.0)
    assert [r.offered_per_s for r in found] == [2, 4, 8, 16]
    assert [r.saturated for r in found] == [False, False, False, True]
    assert found[2].goodput_per_s == pytest.approx(found[2].answered_per_s)
    assert found[3].goodput_per_s == 0
    assert found[1].sent_per_s == pytest.approx(4, rel=0.2)


def test_a_sweep_is_bounded_where_nothing_saturates() -> None:
    assert len(sweep(lambda _: at(1.0), 2.0, 60.0, lambda: 0.0)) == MOST_RATES
    assert len(sweep(at, 2.0, -1.0, lambda: 0.0)) == 1


def test_a_failed_request_is_not_good_however_fast_it_failed() -> None:
    failed = replace(at(2.0).stretch.answers[0], outcome=Outcome.REFUSED)
    assert not TARGETS.met(failed)
    rate = at(2.0)
    with_failure = replace(rate, stretch=replace(rate.stretch, answers=(failed, *rate.stretch.answers[1:])))
    assert with_failure.saturated
    assert with_failure.goodput_per_s < rate.goodput_per_s


# Counters -------------------------------------------------------------------------------------------------------------


BEFORE = """# HELP vllm:num_requests_running n
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 1
vllm:request_queue_time_seconds_sum{engine="0"} 2.5
vllm:request_queue_time_seconds_count{engine="0"} 5
vllm:prefix_cache_hits_total{engine="0"} 10
vllm:prefix_cache_queries_total{engine="0"} 100
vllm:cache_config_info{block_size="32",num_gpu_blocks="192"} 1.0
broken line without a value
vllm:kv_cache_usage_perc NaN 1234
"""


def test_counters_are_read_and_summed() -> None:
    shot = Snapshot.of(BEFORE)
    assert shot.figure("running") == 4
    assert shot.kv_tokens == 6144
    assert shot.figure("kv_use") is None
    assert shot.figure("waiting") is None
    assert shot.record["queue_s"] == 2.5


def test_what_happened_in_between_is_the_difference() -> None:
    after = BEFORE.replace(" 2.5", " 8.5").replace('_count{engine="0"} 5', '_count{engine="0"} 8')
    after = after.replace('hits_total{engine="0"} 10', 'hits_total{engine="0"} 100')
    after = after.replace('queries_total{engine="0"} 100', 'queries_total{engine="0"} 200')
    change = Change(Snapshot.of(BEFORE), Snapshot.of(after))
    assert change.mean_queue_s == pytest.approx(2.0)
    assert change.hit_share == pytest.approx(0.9)
    assert Change(Snapshot.of(after), Snapshot.of(BEFORE)).mean_queue_s is None
    assert Change(Snapshot(), Snapshot()).hit_share is None


@given(st.text(max_size=200))
def test_no_text_of_a_server_breaks_the_reader(text: str) -> None:
    Snapshot.of(text)
