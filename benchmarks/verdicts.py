"""What a claim is, and judge(): what was observed against what is required gives a verdict.

`judge` is the only place where a verdict is made, so that every claim meets the same rules: an interval that straddles the
limit is INCONCLUSIVE, a difference smaller than this machine's noise floor is never claimed, and what could not be measured
is never a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

from benchmarks.estimates import Estimate


class Word(StrEnum):
    """The four ends that a claim can come to."""

    HOLDS = "HOLDS"
    REFUTED = "REFUTED"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_JUDGED = "NOT JUDGED"


@dataclass(frozen=True)
class Bound:
    """One condition on one observed figure. `above` and `below` exclude the limit, `at_least` and `at_most` don't.

    Raises ValueError for no limit, for two on the same side and for limits that nothing meets.
    """

    what: str
    reason: str
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = "x"

    def __post_init__(self) -> None:
        if all(limit is None for limit in (self.at_least, self.at_most, self.above, self.below)):
            raise ValueError(f"the bound on {self.what} has no limit")
        if None not in (self.at_least, self.above) or None not in (self.at_most, self.below):
            raise ValueError(f"the bound on {self.what} has two limits on one side")
        low = self.at_least if self.at_least is not None else self.above
        high = self.at_most if self.at_most is not None else self.below
        excluded = self.above is not None or self.below is not None
        if low is not None and high is not None and (low > high or (low == high and excluded)):
            raise ValueError(f"nothing can meet the bound on {self.what}: {self.required}")

    def meets(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def _violates(self, low: float, high: float) -> bool:
        """No value of [low, high] meets the bound."""
        return (
            (self.at_least is not None and high < self.at_least)
            or (self.at_most is not None and low > self.at_most)
            or (self.above is not None and high <= self.above)
            or (self.below is not None and low >= self.below)
        )

    def verdict(self, observed: Estimate) -> Word:
        if observed.problem is not None or observed.low is None or observed.high is None:
            return Word.INCONCLUSIVE
        if self.meets(observed.low) and self.meets(observed.high):
            return Word.HOLDS
        return Word.REFUTED if self._violates(observed.low, observed.high) else Word.INCONCLUSIVE

    @property
    def required(self) -> str:
        """The condition as a reader writes it: '>= 10x', '0.95x to 1.05x', '> 0% and < 100%', '= 1'."""
        low = self.at_least if self.at_least is not None else self.above
        high = self.at_most if self.at_most is not None else self.below
        show = partial(format_figure, unit=self.unit)
        if low is not None and low == high:
            return f"= {show(low)}"
        if low is not None and self.below is not None:
            return f"{'>=' if self.above is None else '>'} {show(low)} and < {show(self.below)}"
        if low is not None and high is not None:
            return f"{'> ' if self.above is not None else ''}{show(low)} to {show(high)}"
        if low is not None:
            return f"{'>=' if self.at_least is not None else '>'} {show(low)}"
        assert high is not None
        return f"{'<=' if self.at_most is not None else '<'} {show(high)}"


def format_figure(value: float | None, unit: str) -> str:
    """A figure for a person: three digits and its unit; shares in per cent."""
    if value is None:
        return "none"
    digits = _digits(100 * value if unit == "%" else value)
    return f"{digits}{unit}" if unit in ("x", "%", "") else f"{digits} {unit}"


def _digits(value: float) -> str:
    """Three digits, and all of the whole ones: 0.0123, 12.3, 1,234."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


@dataclass(frozen=True)
class Claim:
    """One belief, made testable.

    `bounds` must all hold; `needs` are conditions of judging it at all (see Setting.lacks); `noise` names the metric
    whose noise floor widens the interval, None for counted figures. `timing` says that the verdict rests on a clock.
    `t4` is the article's figure, None where it gives none.
    """

    id: str
    statement: str
    bounds: tuple[Bound, ...]
    needs: frozenset[str] = frozenset()
    noise: str | None = None
    t4: str | None = None

    @property
    def station(self) -> str:
        return self.id.split(".")[0]

    @property
    def timing(self) -> bool:
        return self.noise is not None

    @property
    def required(self) -> str:
        return " and ".join(f"{b.what} {b.required}" if len(self.bounds) > 1 else b.required for b in self.bounds)


@dataclass(frozen=True)
class Part:
    """One bound's share of a verdict."""

    what: str
    required: str
    unit: str
    verdict: Word
    observed: Estimate

    @property
    def text(self) -> str:
        """Observed with its interval: '0.93x [0.91, 0.95]'."""
        if self.observed.value is None:
            return self.observed.problem or "nothing"
        shown = format_figure(self.observed.value, self.unit)
        if self.observed.counted or self.observed.low is None or self.observed.high is None:
            return shown
        unit = "%" if self.unit == "%" else ""
        return f"{shown} [{format_figure(self.observed.low, unit)}, {format_figure(self.observed.high, unit)}]"


@dataclass(frozen=True)
class Verdict:
    """What became of a claim on this machine, with everything that a sceptic needs."""

    claim: Claim
    word: Word
    parts: tuple[Part, ...] = ()
    reason: str = ""
    setting: str = ""

    @property
    def deciding(self) -> Part | None:
        """The part that a one-line account shows: the one that decided against, else the first."""
        against = next((p for p in self.parts if p.verdict is self.word), None)
        return against or next(iter(self.parts), None)

    @property
    def line(self) -> str:
        """All in one line: claim, required, observed with its interval, raw values, n, card, rig and engine."""
        if self.word is Word.NOT_JUDGED:
            return f"{self.word} {self.claim.id}: {self.reason}"
        said = [f"{self.word} {self.claim.id}: {self.claim.statement}"]
        for part in self.parts:
            name = f"{part.what} " if len(self.parts) > 1 else ""
            said.append(f"{name}observed {part.text}, required {part.required}{_raw(part.observed)}")
        if self.claim.t4:
            said.append(f"T4 {self.claim.t4}")
        if self.reason:
            said.append(self.reason)
        if self.setting:
            said.append(f"on {self.setting}")
        return "; ".join(said)


def _raw(observed: Estimate) -> str:
    """The middle of each side's samples and their number, for the reader who recomputes the ratio."""
    if not observed.raw:
        return ""
    middles = ", ".join(
        f"{name} {sorted(values)[len(values) // 2]:.4g}" for name, values in observed.raw.items() if values
    )
    return f" ({middles}; n={observed.n})"


@dataclass(frozen=True)
class Setting:
    """Where a claim is judged: what is lacking here (by need, with the reason), the noise floors, and a description.

    `lacks` maps a need ("cuda", "trained", ..., and "engine", which every claim needs) to why it isn't met; `floors` a
    metric to its relative noise floor, and a claim whose metric is missing there is not decided; `no_floors` says why it
    is missing, where that is known. None: a setting without noise, as in a calculation.
    """

    lacks: Mapping[str, str] = field(default_factory=dict)
    floors: Mapping[str, float] | None = None
    description: str = ""
    no_floors: Mapping[str, str] = field(default_factory=dict)

    def unknown_floor(self, claim: Claim) -> str | None:
        """Why this claim can't be decided although it can be measured: its metric's noise isn't known. Else None."""
        if claim.noise is None or self.floors is None or claim.noise in self.floors:
            return None
        why = self.no_floors.get(claim.noise, "run `python -m benchmarks calibrate`")
        return f"the noise floor of {claim.noise} is not known here: {why}"

    def why_not(self, claim: Claim) -> str | None:
        """The first reason for which this claim can't be judged here, None when it can."""
        needs = claim.needs | {"engine"}
        return next((reason for need, reason in self.lacks.items() if need in needs), None)


def judge(claim: Claim, observed: Estimate | Mapping[str, Estimate], setting: Setting = Setting()) -> Verdict:
    """The verdict on a claim: the worst of its bounds (REFUTED over INCONCLUSIVE over HOLDS).

    `observed` maps each bound's name to its estimate; a lone estimate stands for the only bound. Raises KeyError when a
    bound has no estimate or an estimate no bound: a figure that nobody judges would be a check that can't fail.
    """
    if reason := setting.why_not(claim):
        return not_judged(claim, reason, setting)
    if isinstance(observed, Estimate):
        observed = {claim.bounds[0].what: observed}
    if set(observed) != {b.what for b in claim.bounds}:
        raise KeyError(f"{claim.id} is judged by {[b.what for b in claim.bounds]}, observed were {list(observed)}")
    floor = 0.0
    if claim.noise is not None and setting.floors is not None:
        if unknown := setting.unknown_floor(claim):
            observed = {what: replace(seen, problem=seen.problem or unknown) for what, seen in observed.items()}
        floor = setting.floors.get(claim.noise, 0.0)
    parts = tuple(
        Part(b.what, b.required, b.unit, b.verdict(observed[b.what].widened(floor)), observed[b.what])
        for b in claim.bounds
    )
    words = {part.verdict for part in parts}
    word = next(w for w in (Word.REFUTED, Word.INCONCLUSIVE, Word.HOLDS) if w in words)
    # Taken apart as Estimate.noted joined them: several figures may have the same remark.
    notes = dict.fromkeys(said for p in parts for said in p.observed.note.split("; ") if said)
    problems = dict.fromkeys(p.observed.problem for p in parts if p.observed.problem)
    reason = "; ".join([*problems, *notes])
    if word is Word.INCONCLUSIVE and not problems:
        floor_decided = any(p.observed.widened(floor) != p.observed for p in parts if p.verdict is word)
        straddles = "the interval"
        if floor_decided:
            straddles += f", widened to this machine's noise floor of {floor:.2%},"
        reason = "; ".join(filter(None, (f"{straddles} straddles the limit", reason)))
    return Verdict(claim, word, parts, reason, setting.description)


def not_judged(claim: Claim, reason: str, setting: Setting = Setting()) -> Verdict:
    return Verdict(claim, Word.NOT_JUDGED, (), reason, setting.description)
