"""Equal tokens: what counts as a near tie, what as a difference, and what proves nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.claims import CLAIMS, Verdict, Word, judge
from benchmarks.tokens import NEAR_TIE_FACTOR, Gap, Match, compare, share_explained, vacuous

quickly = settings(deadline=None, max_examples=60)
VOCAB = 8
varied = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=20).filter(lambda ids: len(set(ids)) > 1)


def verdict(*matches: Match) -> Verdict:
    return judge(CLAIMS["batching.same_tokens"], share_explained(matches))


def constant_gap(size: float) -> Gap:
    """Every token but the top one lies `size` under it; which one the top is doesn't matter here."""

    class Constant(Gap):
        def __call__(self, position: int, token: int) -> float:
            return size

    return Constant([])


@quickly
@given(varied, st.booleans(), st.sampled_from([0.0, 0.01, 10.0]))
def test_equal_tokens_hold_at_any_error(ids: list[int], forced: bool, error: float) -> None:
    match = compare(ids, ids, constant_gap(math.inf), error, forced=forced)
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
        match = compare(ids, liar, constant_gap(1.0), 0.01, forced=forced)
        assert [d.position for d in match.differences] == [position]
        told = verdict(match)
        assert told.word is Word.REFUTED
        assert f"position {position}: token {ids[position]} became {liar[position]}, gap 1, bound 0.04" in told.line


@quickly
@given(varied, st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_a_larger_gap_or_a_smaller_error_never_excuses_more(
    ids: list[int], gap: float, more: float, error: float
) -> None:
    liar = [(i + 1) % VOCAB for i in ids]
    near = compare(ids, liar, constant_gap(gap), error)
    assert near.explained == (gap <= NEAR_TIE_FACTOR * error)
    assert not compare(ids, liar, constant_gap(gap + more), error).explained or near.explained
    assert not near.explained or compare(ids, liar, constant_gap(gap), error + more).explained


def test_in_float32_any_difference_is_a_difference() -> None:
    match = compare([1, 2, 3], [1, 2, 4], constant_gap(1e-6), logit_error=0.0)
    assert verdict(match).word is Word.REFUTED


def test_a_proven_near_tie_is_excused_and_named() -> None:
    told = verdict(compare([1, 2, 3], [1, 2, 4], constant_gap(0.03), logit_error=0.01))
    assert told.word is Word.HOLDS
    assert "0 of 1 rows equal token for token" in told.line
    assert "near tie" in told.line


def test_free_text_is_compared_up_to_its_first_difference_and_forced_text_everywhere() -> None:
    reference, subject = [1, 2, 3, 4], [1, 9, 9, 4]
    free = compare(reference, subject, constant_gap(0.0), 0.01)
    assert (free.compared, [d.position for d in free.differences]) == (2, [1])
    forced = compare(reference, subject, constant_gap(0.0), 0.01, forced=True)
    assert (forced.compared, [d.position for d in forced.differences]) == (4, [1, 2])


def test_a_difference_behind_an_excused_one_is_found_when_tokens_are_forced() -> None:
    """Liar: wrong from the third position on, behind a near tie at the second."""
    gap = Gap([[0.0, 5.0], [5.0, 5.0], [5.0, 0.0]])
    assert compare([1, 0, 0], [1, 1, 1], gap, 0.01).explained
    told = verdict(compare([1, 0, 0], [1, 1, 1], gap, 0.01, forced=True))
    assert told.word is Word.REFUTED
    assert "position 2" in told.line


def test_a_gap_comes_from_the_references_own_logits() -> None:
    gap = Gap([[1.0, 3.0, 2.5], [0.0, -1.0, -4.0]])
    assert gap(0, 2) == 0.5
    assert gap(1, 2) == 4.0
    assert gap(0, 1) == 0.0


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_a_gap_that_is_no_number_excuses_nothing(gap: float) -> None:
    assert verdict(compare([1, 2], [1, 3], constant_gap(gap), 10.0)).word is Word.REFUTED


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_logits_that_are_no_numbers_prove_nothing(error: float) -> None:
    told = verdict(compare([1, 2], [1, 2], constant_gap(1.0), error))
    assert told.word is Word.INCONCLUSIVE
    assert "not numbers" in told.line


@pytest.mark.parametrize("ids", [[], [4], [7, 7, 7, 7]])
def test_too_few_tokens_or_one_over_and_over_are_vacuous_even_when_equal(ids: list[int]) -> None:
    assert vacuous(ids)
    told = verdict(compare([1, 2], [1, 2], constant_gap(1.0), 0.0), compare(ids, ids, constant_gap(1.0), 0.0))
    assert told.word is Word.INCONCLUSIVE
    assert "vacuous" in told.line


def test_no_rows_prove_nothing() -> None:
    assert verdict().word is Word.INCONCLUSIVE


def test_one_wrong_row_among_sixteen_is_enough() -> None:
    good = compare([1, 2, 3], [1, 2, 3], constant_gap(1.0), 0.0)
    bad = compare([1, 2, 3], [1, 2, 4], constant_gap(1.0), 0.0)
    assert verdict(*[good] * 15, bad).word is Word.REFUTED
    assert verdict(*[good] * 16).word is Word.HOLDS


def test_outputs_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths are fixed"):
        compare([1, 2], [1], constant_gap(1.0), 0.0)
