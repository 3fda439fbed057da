"""Intervals and what makes a figure unusable; and the error of all looks together, computed."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.estimates import (
    CONFIDENCE,
    EARLY_FACTOR,
    EARLY_LOOK,
    FULL_LOOK,
    LAST_LOOK,
    Estimate,
    _lower_rank,
    counted,
    looks,
    median_interval,
    paired_ratio,
    unusable,
)
from benchmarks.verdicts import Bound, Word

quickly = settings(deadline=None, max_examples=60)
times = st.floats(1e-6, 1e6)
many = st.lists(times, min_size=FULL_LOOK, max_size=80)


@quickly
@given(many)
def test_the_interval_holds_the_median_and_is_made_of_samples(values: list[float]) -> None:
    found = median_interval(values)
    assert found.value is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.value <= found.high
    assert {found.low, found.high} <= set(values)
    assert found.n == len(values)
    assert found.problem is None


@quickly
@given(many, st.randoms(use_true_random=False))
def test_the_order_of_the_rounds_does_not_matter(values: list[float], random: Random) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)
    ends = [(e.value, e.low, e.high) for e in (median_interval(values), median_interval(shuffled))]
    assert ends[0] == ends[1]


@quickly
@given(st.lists(st.tuples(times, times), min_size=FULL_LOOK, max_size=40))
def test_swapping_the_sides_inverts_the_ratio_and_its_interval(pairs: list[tuple[float, float]]) -> None:
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    there, back = paired_ratio(a, b), paired_ratio(b, a)
    assert there.low is not None
    assert there.high is not None
    assert back.low == pytest.approx(1 / there.high)
    assert back.high == pytest.approx(1 / there.low)


def test_one_spoilt_round_in_ten_moves_neither_median_nor_interval_of_forty() -> None:
    steady = [1 + 0.001 * i for i in range(36)]
    clean, spoilt = median_interval(steady * 1 + [1.018] * 4), median_interval(steady + [4.0] * 4)
    assert spoilt.value == pytest.approx(clean.value, rel=0.01)
    assert spoilt.high is not None
    assert spoilt.high < 1.05


def test_more_rounds_make_the_interval_narrower() -> None:
    random = Random(1)
    values = [math.exp(random.gauss(0, 0.1)) for _ in range(LAST_LOOK)]
    widths = []
    for n in looks():
        found = median_interval(values[:n])
        assert found.low is not None
        assert found.high is not None
        widths.append(found.high - found.low)
    assert widths == sorted(widths, reverse=True)


def test_an_early_look_takes_the_whole_range_made_wider_at_both_ends() -> None:
    found = median_interval([10.0, 11.0, 12.0, 13.0, 14.0])
    assert (found.low, found.value, found.high) == (10 / EARLY_FACTOR, 12, 14 * EARLY_FACTOR)


@pytest.mark.parametrize("n", range(1, EARLY_LOOK))
def test_fewer_rounds_than_an_early_look_needs_give_a_value_but_no_interval(n: int) -> None:
    found = paired_ratio([2.0] * n, [1.0] * n)
    assert found.value == 2
    assert found.low is None
    assert found.high is None
    assert found.problem == f"{n} round{'s' if n > 1 else ''}, an interval needs 5"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (math.nan, "not a number"),
        (math.inf, "not a number"),
        (0.0, "zero or negative"),
        (-0.1, "zero or negative"),
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_one_bad_sample_makes_the_ratio_unusable_and_says_whose_it_was(bad: float, reason: str, side: int) -> None:
    sides = [[1.0] * 20, [1.0] * 20]
    sides[side][7] = bad
    found = paired_ratio(sides[0], sides[1], ("cached", "full"))
    assert found.problem is not None
    assert reason in found.problem
    assert found.problem.startswith(("cached", "full")[side])
    assert found.value is None
    assert len(found.raw["cached"]) == 20


def test_a_ratio_that_no_float_can_hold_is_unusable() -> None:
    assert paired_ratio([1e308] * 20, [1e-308] * 20).problem
    assert paired_ratio([1e-308] * 20, [1e308] * 20).problem


def test_no_rounds_at_all_are_unusable() -> None:
    assert paired_ratio([], []).problem == "no rounds were measured"
    assert median_interval([]).problem == "no rounds were measured"


def test_samples_of_different_rounds_are_never_paired() -> None:
    with pytest.raises(ValueError, match="not paired rounds"):
        paired_ratio([1.0], [1.0, 2.0])


@quickly
@given(many, st.floats(0, 2), st.floats(0, 2))
def test_a_wider_floor_never_makes_the_interval_narrower(values: list[float], one: float, other: float) -> None:
    found = median_interval(values)
    narrow, wide = found.widened(min(one, other)), found.widened(max(one, other))
    assert found.value is not None
    assert narrow.low is not None
    assert wide.low is not None
    assert narrow.high is not None
    assert wide.high is not None
    assert wide.low <= narrow.low
    assert narrow.high <= wide.high
    assert wide.low <= found.value / (1 + max(one, other)) * (1 + 1e-12)


def test_samples_that_all_agree_are_widened_like_any_others() -> None:
    found = paired_ratio([2.1] * 20, [1.0] * 20).widened(0.1)
    assert found.low == pytest.approx(2.1 / 1.1)
    assert found.high == pytest.approx(2.1 * 1.1)


def test_without_a_floor_a_counted_figure_stays_as_it_is() -> None:
    assert counted(0.6).widened(0.0) == counted(0.6)
    assert counted(0.6).counted
    assert not unusable("why").counted
    assert unusable("why").widened(0.1) == unusable("why")


@pytest.mark.parametrize("floor", [-0.01, math.nan, math.inf])
def test_a_floor_that_is_no_share_is_refused(floor: float) -> None:
    with pytest.raises(ValueError, match="noise floor"):
        Estimate(1.0, 0.9, 1.1, 10).widened(floor)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_counted_figure_that_is_no_number_is_unusable(value: float) -> None:
    assert counted(value).problem
    assert counted(value).value is None


def test_notes_add_up() -> None:
    assert counted(1.0, note="one").noted("two").note == "one; two"
    assert counted(1.0).noted("two").note == "two"


def test_looks_double_and_stop_where_the_rounds_do() -> None:
    assert list(looks()) == [5, 10, 20, 40, 80, 160]
    assert list(looks(39)) == [5, 10, 20]
    assert list(looks(3)) == []


def wrong_at(n: int) -> int:
    """The most rounds that may lie under the limit, or over it, for the interval to be clear of it."""
    return _lower_rank(n, 1 - CONFIDENCE) - 1


def test_all_looks_together_are_wrong_with_a_chance_under_one_per_cent_whatever_the_noise() -> None:
    """For a true ratio on the limit a round lies over it or under it with even chance, and only that count decides."""
    alive, wrong, n = {0: 1.0}, 0.0, 0
    for look in [n for n in looks() if n >= FULL_LOOK]:
        for _ in range(look - n):
            grown: dict[int, float] = {}
            for over, chance in alive.items():
                grown[over] = grown.get(over, 0) + chance / 2
                grown[over + 1] = grown.get(over + 1, 0) + chance / 2
            alive = grown
        n = look
        decided = [over for over in alive if min(over, n - over) <= wrong_at(n)]
        wrong += sum(alive.pop(over) for over in decided)
    between = max(2 * sum(math.comb(n, k) for k in range(wrong_at(n) + 1)) / 2**n for n in range(FULL_LOOK, LAST_LOOK))
    assert wrong == pytest.approx(0.0027, abs=0.0001)
    assert between == pytest.approx(0.0034, abs=0.0001)
    assert wrong + between < 0.01


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["value", "low", "high"])
def test_an_estimate_of_what_is_no_number_says_so_and_passes_nothing(odd: float, place: str) -> None:
    made = Estimate(**{"value": 1.0, "low": 0.9, "high": 1.1, "n": 20} | {place: odd})  # type: ignore[arg-type]
    assert (made.low, made.high) == (None, None)
    assert made.problem is not None
    assert str(odd) in made.problem
    assert Bound("ratio", "why", at_most=100).verdict(made) is Word.INCONCLUSIVE


@pytest.mark.parametrize(
    ("value", "low", "high"), [(1.0, 1.1, 0.9), (2.0, 0.9, 1.1), (0.5, 0.9, 1.1), (None, 2.0, 1.0)]
)
def test_an_interval_upside_down_or_beside_its_value_is_refused(value: float | None, low: float, high: float) -> None:
    with pytest.raises(ValueError, match="holds its value"):
        Estimate(value, low, high, 20)


def test_half_an_interval_is_no_interval() -> None:
    made = Estimate(1.0, 0.9, None, 20)
    assert made.problem == "no interval could be drawn"
    assert Bound("ratio", "why", at_least=0.5).verdict(made) is Word.INCONCLUSIVE
