"""An observed figure with its uncertainty: the value, the interval that decides, and the samples behind both.

Ratios come from paired rounds: in each round both sides ran one after the other, so what drifts (clocks, heat,
neighbours) hits both and cancels in the round's ratio. The figure is the median of the rounds' ratios and the interval
is the bootstrap interval of that median: a burst that spoils one round in ten moves neither.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import truediv

CONFIDENCE = 0.9998
"""Coverage of one interval. At it a claim is looked at after 10, 20, 40, 80 and 160 rounds (after 5: EARLY_LOOK) and the first
clear look decides, so the errors of the looks add up: at 99.98 % a true ratio exactly on the limit gets a wrong verdict with
a chance of 0.27 % over all looks, whatever the noise, and at most 0.34 % more where a budget ends between two of them
(tests/test_estimates.py computes both, docs/verdict-quality.md shows it on synthetic series). At 99.95 % the looks
alone would take 0.53 % of the 1 % that is promised."""

FULL_LOOK = 10
"""Rounds from which an interval is the bootstrap's and not the early look's. Without an effect, ten rounds agree on a side once
in 512 times (0.2 %); nine already take 0.4 % of the 1 % promised above, however large the effect looked."""

LAST_LOOK = 160

EARLY_LOOK = 5
EARLY_FACTOR = 2.0
"""A look before the first, for effects too large to need it: after five rounds the interval is their whole range, made
wider by a factor of two at both ends. It errs only if five rounds in a row are off by more than that factor on the same
side; on the noisiest host seen a single time was off by up to four, in fewer than one round in ten."""


@dataclass(frozen=True)
class Estimate:
    """A figure, its interval and what it came from.

    `low` and `high` are None where no interval could be drawn; `problem` then says why, and no verdict may rest on the
    figure. A counted figure (bytes, tokens, FLOPs) has low == value == high.

    A figure or an end that is no finite number becomes None with a problem that says so. Raises ValueError for an
    interval that is upside down or doesn't hold its value.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int
    raw: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    problem: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        figures = {"figure": self.value, "low end": self.low, "high end": self.high}
        odd = {name: v for name, v in figures.items() if v is not None and not math.isfinite(v)}
        if odd:
            said = ", ".join(f"the {name} is {v}" for name, v in odd.items())
            known = {"problem": self.problem or said, "low": None, "high": None}
            known |= {"value": None} if "figure" in odd else {}
            for name, v in known.items():
                object.__setattr__(self, name, v)
        if self.low is not None and self.high is not None:
            middle = self.low if self.value is None else self.value
            if not self.low <= middle <= self.high:
                raise ValueError(f"an interval holds its value in order, not {self.low}, {self.value}, {self.high}")
        elif self.problem is None:
            object.__setattr__(self, "problem", "no interval could be drawn")

    @property
    def counted(self) -> bool:
        return self.value is not None and self.low == self.value == self.high

    def noted(self, note: str) -> Estimate:
        """The same figure with a remark for its reader."""
        return replace(self, note=f"{self.note}; {note}" if self.note else note)

    def widened(self, floor: float) -> Estimate:
        """The interval, made to hold every figure within a relative noise floor (0.02: two per cent) of the value.

        So a verdict never rests on a difference that this machine shows between equal things, not even when all samples
        agree. Raises ValueError for a floor that is no finite share.
        """
        if floor < 0 or not math.isfinite(floor):
            raise ValueError(f"a noise floor is a finite share >= 0, not {floor}")
        if not floor or self.value is None or self.low is None or self.high is None:
            return self
        ends = (self.value / (1 + floor), self.value * (1 + floor))
        return replace(self, low=min(self.low, *ends), high=max(self.high, *ends))


def unusable(problem: str, n: int = 0, raw: Mapping[str, tuple[float, ...]] | None = None) -> Estimate:
    """A figure that could not be had, with the reason: judged INCONCLUSIVE, never a pass."""
    return Estimate(None, None, None, n, raw or {}, problem)


def counted(value: float, raw: Mapping[str, tuple[float, ...]] | None = None, note: str = "") -> Estimate:
    """A figure without sampling noise: bytes, tokens, FLOPs, errors. A NaN is unusable."""
    if not math.isfinite(value):
        return unusable(f"the figure is {value}", 1, raw)
    return Estimate(value, value, value, 1, raw or {}, note=note)


def paired_ratio(
    numerator: Sequence[float], denominator: Sequence[float], names: tuple[str, str] = ("numerator", "denominator")
) -> Estimate:
    """Median of numerator[i] / denominator[i] over rounds i, with its bootstrap interval.

    Both are positive, finite and in the same unit; anything else makes the estimate unusable with the reason. Raises
    ValueError when the lengths differ: samples of different rounds must not be paired.
    """
    if len(numerator) != len(denominator):
        raise ValueError(f"{len(numerator)} {names[0]} and {len(denominator)} {names[1]} samples: not paired rounds")
    raw = {names[0]: tuple(numerator), names[1]: tuple(denominator)}
    n = len(numerator)
    for name, values in raw.items():
        if not _positive(values):
            if all(map(math.isfinite, values)):
                why = "a sample is zero or negative, so its clock or counter is not to be trusted"
            else:
                why = "a sample is not a number"
            return unusable(f"{name}: {why}", n, raw)
    return median_interval(list(map(truediv, numerator, denominator)), raw)


def _positive(values: Sequence[float]) -> bool:
    """Whether all are positive and finite. Finite first: a NaN has no place in an order."""
    return all(map(math.isfinite, values)) and min(values, default=1.0) > 0


def median_interval(
    values: Sequence[float], raw: Mapping[str, tuple[float, ...]] | None = None, confidence: float = CONFIDENCE
) -> Estimate:
    """The median of positive finite values and its bootstrap interval.

    From EARLY_LOOK to FULL_LOOK values the interval is the early look's; under that the estimate is unusable.
    """
    raw = raw if raw is not None else {"values": tuple(values)}
    n = len(values)
    if not n:
        return unusable("no rounds were measured", 0, raw)
    if not _positive(values):
        return unusable("a sample is not a positive number", n, raw)
    ordered = sorted(values)
    middle = statistics.median(ordered)
    if n < EARLY_LOOK:
        return Estimate(middle, None, None, n, raw, f"{n} round{'s' * (n > 1)}, an interval needs {EARLY_LOOK}")
    if n < FULL_LOOK:
        return Estimate(middle, ordered[0] / EARLY_FACTOR, ordered[-1] * EARLY_FACTOR, n, raw)
    rank = _lower_rank(n, 1 - confidence)
    return Estimate(middle, ordered[rank - 1], ordered[n - rank], n, raw)


@cache
def _lower_rank(n: int, alpha: float) -> int:
    """Rank (from 1) of the order statistic that bounds the bootstrap median from below at alpha / 2.

    The bootstrap distribution of a median needs no resampling (Maritz and Jarrett 1978; Efron 1979): a resample's lower
    median is at most x_(k) when at least half its n draws are, each with chance k / n. So equal samples always give the
    equal interval, and no seed can be chosen.
    """
    half = n // 2 if n % 2 == 0 else (n + 1) // 2
    for k in range(1, n + 1):
        p = k / n
        if sum(math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(half, n + 1)) >= alpha / 2:
            return k
    raise AssertionError("unreachable: at k = n every draw is at most x_(n)")


def looks(last: int = LAST_LOOK) -> Iterator[int]:
    """The numbers of rounds after which a claim is looked at: doubling, so that few looks share the error."""
    if last >= EARLY_LOOK:
        yield EARLY_LOOK
    n = FULL_LOOK
    while n <= last:
        yield n
        n *= 2
