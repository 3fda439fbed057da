"""A served request: what is derived from its instants agrees with them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.runs import Run, ratio

quickly = settings(deadline=None, max_examples=60)
gaps = st.lists(st.floats(1e-5, 10), min_size=2, max_size=40)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    return Run(draw(st.integers(1, 64)), draw(st.integers(1, 4096)), tuple(itertools.accumulate(draw(gaps))))


@quickly
@given(runs())
def test_the_first_token_and_the_others_make_up_the_whole_wait(run: Run) -> None:
    assert run.ttft_s + (run.output_len - 1) * run.tpot_s == pytest.approx(run.e2e_s)
    assert run.ttft_s + run.decode_s == pytest.approx(run.e2e_s)
    assert run.ttft_s + sum(run.itl_s) == pytest.approx(run.e2e_s)
    assert len(run.itl_s) == run.output_len - 1


@quickly
@given(runs())
def test_throughput_counts_the_tokens_of_all_rows(run: Run) -> None:
    assert run.output_tokens_per_s * run.e2e_s == pytest.approx(run.batch_size * run.output_len)
    assert run.wall_per_request_s * run.batch_size == pytest.approx(run.e2e_s)


@quickly
@given(runs(), st.floats(0.1, 10))
def test_a_machine_twice_as_slow_shows_twice_the_times_and_half_the_rate(run: Run, slower: float) -> None:
    slow = Run(run.batch_size, run.prompt_len, tuple(slower * t for t in run.token_s))
    for name in ("ttft_s", "tpot_s", "e2e_s", "decode_s"):
        assert getattr(slow, name) == pytest.approx(slower * getattr(run, name))
    assert slow.output_tokens_per_s == pytest.approx(run.output_tokens_per_s / slower)


def test_a_single_token_has_no_time_per_output_token() -> None:
    with pytest.raises(ValueError, match="no tpot"):
        _ = Run(1, 37, (0.1,)).tpot_s


@pytest.mark.parametrize("broken", [(0, 37, (0.1,)), (1, 37, ())])
def test_a_run_without_rows_or_tokens_is_refused(broken: tuple[int, int, tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Run(*broken)


def test_ratios_pair_the_rounds_and_name_the_samples() -> None:
    slow, fast = ([Run(1, 37, (k, k * 3.0)) for k in (1.0 * s, 2.0 * s)] * 5 for s in (2.0, 1.0))
    found = ratio("e2e_s", slow, fast, ("slow", "fast"))
    assert (found.low, found.value, found.high) == (2, 2, 2)
    assert set(found.raw) == {"slow e2e_s", "fast e2e_s"}


@pytest.mark.parametrize("token_s", [(1.0, 1.0), (2.0, 1.0), (0.0, 1.0), (1.0, float("nan"))])
def test_a_clock_that_stands_still_or_runs_backwards_decides_nothing(token_s: tuple[float, ...]) -> None:
    good, bad = [Run(1, 37, (1.0, 2.0))] * 10, [Run(1, 37, token_s)] * 10
    for over, under in ((good, bad), (bad, good)):
        found = ratio("e2e_s", over, under, ("over", "under"))
        assert found.problem == "the clock stood still or ran backwards between two tokens"
