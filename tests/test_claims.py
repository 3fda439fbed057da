"""The table of claims, and judge(): the only place where a verdict is made."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.claims import CLAIMS
from benchmarks.estimates import Estimate, counted, paired_ratio, unusable
from benchmarks.verdicts import Bound, Claim, Setting, Word, format_figure, judge, not_judged

quickly = settings(deadline=None, max_examples=50)
ratios = st.floats(0.01, 100)
AT_LEAST = Claim("synthetic.at_least", "it is twice as fast", (Bound("ratio", "a limit", at_least=2.0),), noise="wall")
UNCHANGED = Claim("synthetic.unchanged", "same", (Bound("ratio", "5 %", at_least=0.95, at_most=1.05),), noise="wall")
BOTH = Claim("synthetic.both", "both", (Bound("one", "a", at_least=2.0), Bound("other", "b", at_most=1.0)))


def estimate(low: float, high: float) -> Estimate:
    return Estimate((low + high) / 2, low, high, 20)


def floor(share: float) -> Setting:
    return Setting(floors={"wall": share})


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda c: c.id)
def test_every_claim_has_a_statement_and_bounds_with_a_reason(claim: Claim) -> None:
    assert CLAIMS[claim.id] is claim
    assert claim.station == claim.id.split(".")[0]
    assert claim.statement
    assert claim.required
    assert claim.bounds
    assert all(bound.reason and bound.what for bound in claim.bounds)
    assert len({bound.what for bound in claim.bounds}) == len(claim.bounds)
    known = {"cuda", "gpus2", "tensor_plan", "pipeline_plan", "trained", "article_sizes", "draft", "served", "kv_bytes"}
    assert claim.needs <= known


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda c: c.id)
def test_every_claim_can_hold_and_can_be_refuted(claim: Claim) -> None:
    """No claim is a check that can't fail: some figure meets each of its bounds, and some other breaks one."""
    figures = [0.0, 1e-9, 0.01, 0.3, 0.5, 0.501, 0.55, 0.9, 1.0, 1.01, 1.5, 2.5, 3.99, 4.0, 60.0, 1e6]
    good = {b.what: next(counted(f) for f in figures if b.meets(f)) for b in claim.bounds}
    assert judge(claim, good).word is Word.HOLDS
    for bound in claim.bounds:
        bad = next(counted(f) for f in figures if not bound.meets(f))
        assert judge(claim, {**good, bound.what: bad}).word is Word.REFUTED


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda c: c.id)
@pytest.mark.parametrize("problem", ["a sample is not a number", "no memory counter on this device"])
def test_no_claim_holds_on_a_figure_that_could_not_be_had(claim: Claim, problem: str) -> None:
    verdict = judge(claim, {b.what: unusable(problem) for b in claim.bounds})
    assert verdict.word is Word.INCONCLUSIVE
    assert problem in verdict.reason
    assert problem in verdict.line


@quickly
@given(ratios, ratios)
def test_an_interval_that_straddles_the_limit_decides_nothing(a: float, b: float) -> None:
    low, high = sorted((a, b))
    word = judge(AT_LEAST, estimate(low, high)).word
    if low < 2 <= high:
        assert word is Word.INCONCLUSIVE
    else:
        assert word is (Word.HOLDS if low >= 2 else Word.REFUTED)


@quickly
@given(ratios, ratios)
def test_unchanged_needs_both_ends_of_the_interval_inside_the_band(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert (judge(UNCHANGED, estimate(low, high)).word is Word.HOLDS) == (low >= 0.95 and high <= 1.05)


@quickly
@given(st.sampled_from(list(CLAIMS.values())), ratios, ratios)
def test_nothing_with_a_problem_is_ever_held_or_refuted(claim: Claim, a: float, b: float) -> None:
    low, high = sorted((a, b))
    spoilt = Estimate(low, low, high, 20, problem="the clock ran backwards")
    assert judge(claim, {bound.what: spoilt for bound in claim.bounds}).word is Word.INCONCLUSIVE


@quickly
@given(ratios, ratios, st.floats(0, 10))
def test_a_higher_figure_never_loses_a_lower_limit(a: float, b: float, more: float) -> None:
    rank = {Word.REFUTED: 0, Word.INCONCLUSIVE: 1, Word.HOLDS: 2}
    low, high = sorted((a, b))
    before, after = (judge(AT_LEAST, estimate(low + d, high + d)).word for d in (0.0, more))
    assert rank[after] >= rank[before]


@quickly
@given(st.sampled_from([AT_LEAST, UNCHANGED]), ratios, ratios, st.floats(0, 3), st.floats(0, 3))
def test_a_larger_noise_floor_only_ever_takes_a_verdict_away(
    claim: Claim, a: float, b: float, one: float, other: float
) -> None:
    low, high = sorted((a, b))
    quiet, noisy = (judge(claim, estimate(low, high), floor(f)).word for f in sorted((one, other)))
    assert noisy in (quiet, Word.INCONCLUSIVE)


def test_a_difference_smaller_than_the_noise_floor_is_not_claimed() -> None:
    seen = paired_ratio([2.1] * 20, [1.0] * 20)
    assert judge(AT_LEAST, seen, floor(0.01)).word is Word.HOLDS
    verdict = judge(AT_LEAST, seen, floor(0.10))
    assert verdict.word is Word.INCONCLUSIVE
    assert "noise floor of 10.00%" in verdict.line


def test_a_claim_on_a_clock_is_not_decided_where_its_noise_floor_is_unknown() -> None:
    seen = paired_ratio([3.0] * 20, [1.0] * 20)
    unknown = judge(AT_LEAST, seen, Setting(floors={"another metric": 0.01}))
    assert unknown.word is Word.INCONCLUSIVE
    assert "noise floor of wall is not known here: run `python -m benchmarks calibrate`" in unknown.line
    assert judge(AT_LEAST, seen, floor(0.01)).word is Word.HOLDS
    assert judge(AT_LEAST, seen).word is Word.HOLDS, "a calculation has no machine and no noise"


@pytest.mark.parametrize("low", [math.nan, -math.inf])
def test_ends_that_are_no_numbers_never_hold(low: float) -> None:
    assert judge(AT_LEAST, Estimate(3.0, low, 4.0, 9)).word is Word.INCONCLUSIVE


def test_limits_are_inside_or_outside_as_their_name_says() -> None:
    edge = counted(1.0)
    words = [
        judge(Claim("x.y", "", (Bound("r", "r", **{limit: 1.0}),)), edge).word  # type: ignore[arg-type]
        for limit in ("at_least", "at_most", "above", "below")
    ]
    assert words == [Word.HOLDS, Word.HOLDS, Word.REFUTED, Word.REFUTED]


def test_a_bound_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="has no limit"):
        Bound("ratio", "none")


def test_the_worst_bound_decides() -> None:
    good, bad, unclear = counted(3.0), counted(1.5), estimate(1.0, 3.0)
    fine = counted(0.5)
    assert judge(BOTH, {"one": good, "other": fine}).word is Word.HOLDS
    assert judge(BOTH, {"one": unclear, "other": fine}).word is Word.INCONCLUSIVE
    verdict = judge(BOTH, {"one": unclear, "other": bad})
    assert verdict.word is Word.REFUTED
    assert verdict.deciding is not None
    assert verdict.deciding.what == "other"


@pytest.mark.parametrize("names", [["one"], ["one", "other", "third"]])
def test_every_bound_needs_its_figure_and_every_figure_its_bound(names: list[str]) -> None:
    with pytest.raises(KeyError, match="is judged by"):
        judge(BOTH, dict.fromkeys(names, counted(1.0)))


def test_what_this_machine_lacks_is_not_judged_whatever_was_observed() -> None:
    lacking = Setting(lacks={"cuda": "no CUDA on this machine"})
    verdict = judge(CLAIMS["batching.throughput"], counted(100.0), lacking)
    assert verdict.word is Word.NOT_JUDGED
    assert verdict.line == "NOT JUDGED batching.throughput: no CUDA on this machine"
    assert verdict.parts == ()
    assert verdict.deciding is None
    assert judge(CLAIMS["batching.same_tokens"], counted(1.0), lacking).word is Word.HOLDS
    assert not_judged(AT_LEAST, "why").reason == "why"


def test_what_several_figures_note_is_said_once() -> None:
    seen = {
        "one": counted(3.0, note="8 seats").noted("the budget ended"),
        "other": counted(0.5, note="the budget ended"),
    }
    assert judge(BOTH, seen).reason == "8 seats; the budget ended"


def test_a_verdict_says_all_in_one_line() -> None:
    sixteen = [9.0] * 5 + [10.0] * 10 + [11.0] * 5
    seen = paired_ratio(sixteen, [1.0] * 20, ("sixteen e2e", "one e2e")).noted("the budget ended after 20 rounds")
    line = judge(CLAIMS["batching.latency"], seen, Setting({}, {"decode_wall": 0.02}, "a card, a rig, eager")).line
    assert "\n" not in line
    for part in (
        "REFUTED batching.latency",
        "observed 10x [9, 11]",
        "required <= 1.25x",
        "sixteen e2e 10, one e2e 1",
        "n=20",
        "T4 1.09x",
        "the budget ended",
        "on a card, a rig, eager",
    ):
        assert part in line, part


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (None, "x", "none"),
        (14.74, "x", "14.7x"),
        (999.6, "x", "1,000x"),
        (999.4, "x", "999x"),
        (-1234.5, "", "-1,234"),
        (0.059, "%", "5.9%"),
        (12.0, "%", "1,200%"),
        (0.0123, "nats", "0.0123 nats"),
        (math.nan, "x", "nanx"),
    ],
)
def test_figures_have_three_digits_and_never_an_exponent_where_people_read(value: float, unit: str, shown: str) -> None:
    assert format_figure(value, unit) == shown


@pytest.mark.parametrize(
    ("limits", "required"),
    [
        ({"at_least": 10}, ">= 10x"),
        ({"below": 1.5}, "< 1.5x"),
        ({"at_least": 0.95, "at_most": 1.05}, "0.95x to 1.05x"),
        ({"above": 0.5, "at_most": 0.65}, "> 0.5x to 0.65x"),
        ({"above": 0.0, "below": 1.0}, "> 0x and < 1x"),
        ({"at_least": 0.5, "below": 1.0}, ">= 0.5x and < 1x"),
        ({"at_least": 1, "at_most": 1}, "= 1x"),
    ],
)
def test_a_bound_reads_as_people_write_it(limits: dict[str, float], required: str) -> None:
    assert Bound("ratio", "why", **limits).required == required  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({}, "no limit"),
        ({"above": 1, "at_least": 2}, "two limits on one side"),
        ({"below": 1, "at_most": 2}, "two limits on one side"),
        ({"at_least": 2, "at_most": 1}, "nothing can meet"),
        ({"above": 1, "at_most": 1}, "nothing can meet"),
    ],
)
def test_a_bound_that_judges_nothing_is_refused(limits: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Bound("ratio", "why", **limits)  # type: ignore[arg-type]
