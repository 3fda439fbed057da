"""Equal tokens: what counts as a near tie, what as a difference, how far logits may lie apart, and what proves nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.claims import CLAIMS
from benchmarks.tokens import (
    DISTANCE_FACTOR,
    NEAR_TIE_FACTOR,
    Gap,
    Match,
    Tolerance,
    compare,
    cyclic,
    share_explained,
    vacuous,
)
from benchmarks.verdicts import Verdict, Word, judge

quickly = settings(deadline=None, max_examples=40)
VOCAB = 8
varied = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=20).filter(
    lambda ids: len(set(ids)) > 1 and not cyclic(ids)
)
errors = st.floats(1e-6, 10)


def verdict(*matches: Match) -> Verdict:
    return judge(CLAIMS["batching.same_tokens"], share_explained(matches))


def constant_gap(size: float) -> Gap:
    """Every token but the top one lies `size` under it; which one the top is doesn't matter here."""
    return lambda position, token: size


def of_tokens(
    reference: Sequence[int], subject: Sequence[int], gap: float, error: float, *, forced: bool = False
) -> Match:
    """Compared in half precision, with logits that don't lie apart."""
    rounding = Tolerance.of(error, exact=False)
    return compare(reference, subject, constant_gap(gap), [0.0] * len(subject), rounding, forced=forced)


@quickly
@given(varied, st.booleans(), st.booleans(), errors)
def test_equal_tokens_hold_at_any_error(ids: list[int], forced: bool, exact: bool, error: float) -> None:
    rounding = Tolerance.of(error, exact=exact)
    match = compare(ids, ids, constant_gap(math.inf), [error] * len(ids), rounding, forced=forced)
    assert match.differences == ()
    assert match.compared == len(ids)
    assert verdict(match).word is Word.HOLDS


@quickly
@given(varied, st.data())
def test_one_wrong_token_is_refuted_wherever_it_stands(ids: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(ids) - 1))
    liar = list(ids)
    liar[position] = (liar[position] + 1) % VOCAB
    for forced in (True, False):
        match = of_tokens(ids, liar, 1.0, 0.01, forced=forced)
        assert [d.position for d in match.differences] == [position]
        told = verdict(match)
        assert told.word is Word.REFUTED
        assert f"position {position}: token {ids[position]} became {liar[position]}, gap 1, bound 0.04" in told.line


@quickly
@given(varied, errors, st.booleans(), st.floats(0.01, 100), st.data())
def test_logits_that_lie_too_far_apart_at_one_position_are_refuted_though_no_token_changes(
    ids: list[int], error: float, exact: bool, errors_apart: float, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(ids) - 1))
    distances = [0.0] * len(ids)
    distances[position] = errors_apart * error
    match = compare(ids, ids, constant_gap(math.inf), distances, Tolerance.of(error, exact=exact), forced=True)
    assert match.furthest is not None and match.furthest.position == position
    within = distances[position] <= DISTANCE_FACTOR * error
    assert match.explained == within
    told = verdict(match)
    assert told.word is (Word.HOLDS if within else Word.REFUTED)
    assert f"position {position}: logits" in told.line, "a reader sees how far, whatever the verdict"


@quickly
@given(varied, st.floats(0, 10), st.floats(0, 10), errors, st.floats(0, 10))
def test_a_larger_gap_or_a_smaller_error_never_excuses_more(
    ids: list[int], gap: float, more: float, error: float, distance: float
) -> None:
    liar = [(i + 1) % VOCAB for i in ids]

    def seen(gap: float, error: float, distance: float) -> Match:
        return compare(ids, liar, constant_gap(gap), [distance] * len(ids), Tolerance.of(error, exact=False))

    near = seen(gap, error, distance)
    assert near.explained == (gap <= NEAR_TIE_FACTOR * error and distance <= DISTANCE_FACTOR * error)
    for worse in (seen(gap + more, error, distance), seen(gap, error, distance + more)):
        assert not worse.explained or near.explained
    assert not near.explained or seen(gap, error + more, distance).explained


def test_in_float32_any_difference_is_a_difference_however_large_the_error() -> None:
    rounding = Tolerance.of(1.0, exact=True)
    assert verdict(compare([1, 2, 3], [1, 2, 4], constant_gap(1e-6), [0.0] * 3, rounding)).word is Word.REFUTED
    assert verdict(compare([1, 2, 3], [1, 2, 3], constant_gap(1e-6), [1.0] * 3, rounding)).word is Word.HOLDS


def test_a_proven_near_tie_is_excused_and_named() -> None:
    told = verdict(of_tokens([1, 2, 3], [1, 2, 4], 0.03, 0.01))
    assert told.word is Word.HOLDS
    assert "0 of 1 rows equal token for token" in told.line
    assert "near tie" in told.line


def test_free_text_is_compared_up_to_its_first_difference_and_forced_text_everywhere() -> None:
    reference, subject, far = [1, 2, 3, 4], [1, 9, 9, 4], [0.0, 0.01, 5.0, 5.0]
    rounding = Tolerance.of(0.01, exact=False)
    free = compare(reference, subject, constant_gap(0.0), far, rounding)
    assert (free.compared, [d.position for d in free.differences]) == (2, [1])
    assert free.explained, "what follows is another text, and its logits are others"
    forced = compare(reference, subject, constant_gap(0.0), far, rounding, forced=True)
    assert (forced.compared, [d.position for d in forced.differences]) == (4, [1, 2])
    assert not forced.explained


def test_a_difference_behind_an_excused_one_is_found_when_tokens_are_forced() -> None:
    """Liar: wrong from the third position on, behind a near tie at the second."""
    gaps, rounding = (5.0, 0.0, 5.0), Tolerance.of(0.01, exact=False)

    def gap(position: int, _token: int) -> float:
        return gaps[position]

    assert compare([1, 0, 0], [1, 1, 1], gap, [0.0] * 3, rounding).explained
    told = verdict(compare([1, 0, 0], [1, 1, 1], gap, [0.0] * 3, rounding, forced=True))
    assert told.word is Word.REFUTED
    assert "position 2" in told.line


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_a_gap_or_a_distance_that_is_no_number_excuses_nothing(figure: float) -> None:
    assert verdict(of_tokens([1, 2], [1, 3], figure, 10.0)).word is Word.REFUTED
    rounding = Tolerance.of(10.0, exact=False)
    assert verdict(compare([1, 2], [1, 2], constant_gap(0.0), [0.0, figure], rounding)).word is Word.REFUTED


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_logits_that_are_no_numbers_prove_nothing(error: float, exact: bool) -> None:
    told = verdict(compare([1, 2], [1, 2], constant_gap(1.0), [0.0, 0.0], Tolerance.of(error, exact=exact)))
    assert told.word is Word.INCONCLUSIVE
    assert "not numbers" in told.line


@pytest.mark.parametrize("ids", [[], [4], [7, 7, 7, 7]])
def test_too_few_tokens_or_one_over_and_over_are_vacuous_even_when_equal(ids: list[int]) -> None:
    assert vacuous(ids)
    told = verdict(of_tokens([1, 2, 3], [1, 2, 3], 1.0, 0.1), of_tokens(ids, ids, 1.0, 0.1))
    assert told.word is Word.INCONCLUSIVE
    assert "vacuous" in told.line


@pytest.mark.parametrize("ids", [[1, 2, 1, 2], [1, 2, 1, 2, 1], [5, 3] * 8])
def test_to_and_fro_between_two_tokens_is_a_cycle(ids: list[int]) -> None:
    assert cyclic(ids)


@pytest.mark.parametrize(
    "ids", [[1, 2], [1, 2, 1], [1, 0, 2, 0, 3, 0], [9, 1, 2, 1, 2], [1, 2, 1, 2, 3], [1, 2, 3] * 4]
)
def test_counting_and_outputs_that_only_end_in_a_cycle_are_none(ids: list[int]) -> None:
    assert not cyclic(ids) and not vacuous(ids)


@quickly
@given(st.integers(0, 12), st.integers(0, 12))
def test_rows_that_all_go_to_and_fro_prove_nothing_and_some_may(cycles: int, others: int) -> None:
    row, cycle = of_tokens([1, 2, 3], [1, 2, 3], 1.0, 0.1), of_tokens([1, 2] * 4, [1, 2] * 4, 1.0, 0.1)
    told = verdict(*[cycle] * cycles, *[row] * others)
    assert told.word is (Word.HOLDS if others else Word.INCONCLUSIVE)


def test_a_cycle_that_differs_is_a_difference_like_any_other() -> None:
    good, bad = of_tokens([1, 2, 3], [1, 2, 3], 1.0, 0.1), of_tokens([1, 2] * 2, [1, 2, 1, 3], 1.0, 0.1)
    assert verdict(good, good, bad).word is Word.REFUTED


def test_no_rows_prove_nothing() -> None:
    assert verdict().word is Word.INCONCLUSIVE


def test_one_wrong_row_among_sixteen_is_enough() -> None:
    good, bad = of_tokens([1, 2, 3], [1, 2, 3], 1.0, 0.0), of_tokens([1, 2, 3], [1, 2, 4], 1.0, 0.0)
    assert verdict(*[good] * 15, bad).word is Word.REFUTED
    assert verdict(*[good] * 16).word is Word.HOLDS


def test_a_fault_is_refuted_whatever_was_said() -> None:
    good = of_tokens([1, 2, 3], [1, 2, 3], 1.0, 0.0)
    told = verdict(good, replace(good, fault="the cache has 9 positions"))
    assert told.word is Word.REFUTED and "the cache has 9 positions" in told.line


def test_outputs_of_different_length_are_refused() -> None:
    rounding = Tolerance.of(0.0, exact=True)
    for subject, distances in (([1], [0.0]), ([1, 2], [0.0])):
        with pytest.raises(ValueError, match="lengths are fixed"):
            compare([1, 2], subject, constant_gap(1.0), distances, rounding)
