"""The gate: this run against the baseline that was accepted for its machine. Red for a loss, never for noise.

Runs are compared as run.json keeps them, by claim and by cell, each under (id, engine): verdicts word by word, figures
by the first rule of rules.py that fits their name. What rests on a clock and looks worse is measured again before it is
red. No torch, no pytest: gate_plugin.py brings this into a test run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from benchmarks.claims import CLAIMS, Word, format_figure
from benchmarks.gate.baseline import Run, shown
from benchmarks.gate.rules import CLAIMED, COUNTED, RATIO, Better, Entry, Figure, Rule, figures, rule_of
from benchmarks.tables import finite, plain

Key = tuple[str, str]
"""What tells claims and cells of a run apart: id and engine."""


SEARCHED = "curve"
"""The phase of cells that a search makes, which ends where the clock says so: one may have points that another lacks."""


class Outcome(StrEnum):
    """What became of a verdict or figure."""

    SAME = "same"
    BETTER = "better"
    WORSE = "worse"
    CHANGED = "changed"
    MISSING = "missing"
    NEW = "new"
    REPORTED = "reported"
    INCONCLUSIVE = "INCONCLUSIVE"


RED = frozenset({Outcome.WORSE, Outcome.CHANGED, Outcome.MISSING, Outcome.NEW})


@dataclass(frozen=True)
class Finding:
    """One verdict or figure of this run beside the baseline's. `metric` is "verdict" or the figure's name; `said` one
    plain line. `timed` says that noise may have made it so."""

    id: str
    engine: str
    metric: str
    outcome: Outcome
    said: str
    timed: bool = False

    @property
    def key(self) -> Key:
        return self.id, self.engine

    @property
    def red(self) -> bool:
        return self.outcome in RED

    @property
    def line(self) -> str:
        return f"{self.outcome}: {self.id} ({self.engine}) {self.metric}: {self.said}"


# Comparing ------------------------------------------------------------------------------------------------------------


def compare(run: Run, baseline: Run) -> list[Finding]:
    """Every claim and every figure of both, in the baseline's order, new ones last. Both are as read_baseline gives them."""
    floors = {
        name: max(finite(one.get("noise_floor", {}).get(name)) or 0.0 for one in (run, baseline))
        for name in {**run.get("noise_floor", {}), **baseline.get("noise_floor", {})}
    }
    findings: list[Finding] = []
    for kind, beside in (("claims", _claim), ("cells", _cell)):
        here, there = ({(e["id"], e["engine"]): e for e in one[kind]} for one in (run, baseline))
        for key in dict.fromkeys([*there, *here]):
            findings += beside(key, here.get(key), there.get(key), floors)
    return findings


Floors = Mapping[str, float]


def _claim(key: Key, here: Entry | None, there: Entry | None, floors: Floors) -> Iterable[Finding]:
    say = partial(Finding, *key, "verdict")
    if there is None:
        assert here is not None
        if here["verdict"] != Word.NOT_JUDGED:
            yield say(Outcome.NEW, f"{here['verdict']}; the baseline has no such claim")
        return
    if here is None:
        if there["verdict"] != Word.NOT_JUDGED:
            yield say(Outcome.MISSING, f"{there['verdict']} in the baseline; this run has no verdict on it")
        return
    claim = CLAIMS.get(key[0])
    timed = claim is not None and claim.timing
    now, before = here["verdict"], there["verdict"]
    if now == before:
        yield say(Outcome.SAME, now, timed)
    elif timed and Word.INCONCLUSIVE in (now, before):
        yield say(Outcome.INCONCLUSIVE, f"{now}, in the baseline {before}; {_observed(here)}", timed)
    elif Word.NOT_JUDGED in (now, before):
        yield say(Outcome.CHANGED, f"{now}, in the baseline {before}; {plain(here['reason'] or there['reason'], 160)}")
    else:
        yield say(Outcome.CHANGED, f"{now}, in the baseline {before}; {_observed(here)}", timed)
    if claim is not None and Word.NOT_JUDGED not in (now, before):
        yield from _parts(key, here, there, timed, floors.get(claim.noise or "", 0.0))


def _observed(claim: Entry) -> str:
    """What a claim observed, in words: the parts that do not hold, or all."""
    parts = [part for part in claim["parts"] if part["verdict"] != Word.HOLDS] or claim["parts"]
    said = [
        f"{plain(p['what'], 60)} {format_figure(finite(p['observed']), plain(p['unit'] or '', 12))}, "
        f"required {plain(p['required'], 60)}"
        for p in parts
    ]
    return "; ".join([*said, *([plain(claim["reason"], 160)] if claim["reason"] else [])])


def _parts(key: Key, here: Entry, there: Entry, timed: bool, floor: float) -> Iterable[Finding]:
    """The figures behind a claim's verdict of which one way is a loss."""
    before = {part["what"]: part for part in there["parts"]}
    for part in here["parts"]:
        better, old = CLAIMED.get((key[0], part["what"])), before.get(part["what"])
        now, then = (_interval(one) if one is not None else None for one in (part, old))
        if better is None or now is None or then is None:
            continue
        rule = replace(RATIO if timed else COUNTED, better=better)
        # The ends that are nearest to each other: only intervals apart by more than the tolerance differ.
        worse = (now[1], then[0]) if better is Better.HIGHER else (now[0], then[1])
        finer = (now[0], then[1]) if better is Better.HIGHER else (now[1], then[0])
        outcome = _outcome(*worse, rule, floor)[0]
        if outcome is not Outcome.WORSE:
            outcome = Outcome.BETTER if _outcome(*finer, rule, floor)[0] is Outcome.BETTER else Outcome.SAME
        said = f"{_span(now)}, in the baseline {_span(then)} ({rule.name}, {better})"
        yield Finding(*key, part["what"], outcome, said, timed)


def _interval(part: Entry) -> tuple[float, float] | None:
    low, high = (finite(end) for end in part["interval"] or (None, None))
    return None if low is None or high is None else (low, high)


def _span(interval: tuple[float, float]) -> str:
    low, high = interval
    return _figure(low) if low == high else f"[{_figure(low)}, {_figure(high)}]"


def _cell(key: Key, here: Entry | None, there: Entry | None, floors: Floors) -> Iterable[Finding]:
    say = partial(Finding, *key)
    if here is None or there is None:
        outcome, said = (
            (Outcome.NEW, "measured here, and the baseline has no such cell")
            if there is None
            else (Outcome.MISSING, "in the baseline, and not measured by this run")
        )
        searched = any(side is not None and side["phase"] == SEARCHED for side in (here, there))
        yield say("cell", Outcome.REPORTED if searched else outcome, said)
        return
    another = [
        f"{name} {shown(now)}, in the baseline {shown(then)}"
        for name, now, then in _settings(here, there)
        if now != then
    ]
    if another:
        yield say("workload", Outcome.CHANGED, "; ".join(another))
        return
    now, before = (figures(one) for one in (here, there))
    for name in dict.fromkeys([*before, *now]):
        rule = rule_of(name, here, there)
        if name not in now or name not in before:
            yield _one_sided(say, name, now.get(name), before.get(name), here, there)
        else:
            yield _judged(say, name, now[name], before[name], rule, _floor(name, here, there, floors))


def _one_sided(
    say: Callable[..., Finding], name: str, now: Figure | None, before: Figure | None, here: Entry, there: Entry
) -> Finding:
    """A figure that only one side has. Only of one that is never red may the other side say why it lacks it."""
    rule = rule_of(name, here, there)
    lacking = here if now is None else there
    why = plain(lacking["unavailable"].get(name.split(".")[-1]) or "", 120)
    outcome = Outcome.REPORTED if why and not rule.gated else Outcome.MISSING if now is None else Outcome.NEW
    sides = f"{_figure(now)}, in the baseline {_figure(before)}"
    return say(name, outcome, f"{sides}{': ' * bool(why)}{why}", outcome is Outcome.MISSING and rule.timed)


def _settings(here: Entry, there: Entry) -> Iterable[tuple[str, object, object]]:
    yield "precision", here["precision"], there["precision"]
    for name in ("batch_size", "prompt_len", "output_len"):
        yield name, here["workload"].get(name), there["workload"].get(name)


def _floor(name: str, here: Entry, there: Entry, floors: Floors) -> float:
    """The noise that either run measured for a figure: beside it, or as the floor of its phase."""
    beside = [finite(one["figures"].get(f"{name.split('.')[-1]}_noise")) or 0.0 for one in (here, there)]
    kind = "attention" if here["station"] == "attention" else here["phase"]
    clock = "device" if "device_s" in name else "wall"
    return max(*beside, floors.get(f"{kind}_{clock}", 0.0) if "yardstick" not in name else 0.0)


def _judged(say: Callable[..., Finding], name: str, now: Figure, before: Figure, rule: Rule, floor: float) -> Finding:
    if isinstance(now, str) or isinstance(before, str):
        outcome = Outcome.SAME if now == before else Outcome.CHANGED
        return say(name, outcome, f"{_figure(now)}, in the baseline {_figure(before)}", rule.timed)
    beside = f"{_figure(now)}, in the baseline {_figure(before)}{_times(now, before)}"
    if not rule.gated:
        return say(name, Outcome.REPORTED, f"{beside} ({rule.name})")
    outcome, tolerated = _outcome(now, before, rule, floor)
    limit = f"tolerated {_figure(tolerated)}" + (f" or {100 * tolerated / abs(before):.3g}%" if before else "")
    if rule.floors and floor > rule.relative:
        limit += f", which is this machine's noise: a loss of {100 * rule.relative:g}% would not show"
    return say(name, outcome, f"{beside} ({rule.name}, {rule.better}, {limit})", rule.timed)


def _outcome(now: float, before: float, rule: Rule, floor: float) -> tuple[Outcome, float]:
    """The outcome and what was tolerated, in the figure's unit."""
    tolerated = max(max(rule.relative, floor if rule.floors else 0.0) * abs(before), rule.absolute)
    gain = before - now if rule.better is Better.LOWER else now - before
    if abs(gain) <= tolerated:
        return Outcome.SAME, tolerated
    if rule.better is Better.SAME:
        return Outcome.CHANGED, tolerated
    return (Outcome.BETTER if gain > 0 else Outcome.WORSE), tolerated


def _figure(value: Figure | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return plain(value, 60) or "none"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _times(now: float, before: float) -> str:
    return f", {now / before:.3g}x" if before and now / before != 1 else ""


# Measured again -------------------------------------------------------------------------------------------------------

LOOKS = 3
"""A loss by the clock is red when this many looks in a row show it."""

MOST_AGAIN = 8
"""Tests that are run again at most: when more look worse, these are enough to tell a loss from noise."""


def doubtful(findings: Iterable[Finding], baseline: Run) -> list[Key]:
    """What noise may have made look worse, then what it left undecided that the baseline had decided."""
    undecided = {(c["id"], c["engine"]) for c in baseline["claims"] if c["verdict"] == Word.INCONCLUSIVE}
    timed = [f for f in findings if f.timed]
    worse = [f.key for f in timed if f.red]
    open_again = [f.key for f in timed if f.outcome is Outcome.INCONCLUSIVE and f.key not in undecided]
    return list(dict.fromkeys([*worse, *open_again]))


def confirmed(looks: Sequence[Sequence[Finding]]) -> list[Finding]:
    """What the findings of the first look come to after the later ones, which hold only what was measured again.

    By the clock red is what LOOKS looks in a row have shown; what they have not is INCONCLUSIVE. A verdict that was
    undecided at first stands when the last look has the baseline's: it needed more rounds.
    """
    later = [{(f.key, f.metric): f for f in look} for look in looks[1:]]
    return [
        _settled(first, [look[first.key, first.metric] for look in later if (first.key, first.metric) in look])
        for first in looks[0]
    ]


def _settled(first: Finding, again: Sequence[Finding]) -> Finding:
    if not first.timed or not (first.red or first.outcome is Outcome.INCONCLUSIVE):
        return first
    if first.outcome is Outcome.INCONCLUSIVE:
        return again[-1] if again and again[-1].outcome is Outcome.SAME else first
    seen = [first, *again]
    red = sum(look.red for look in seen)
    if len(seen) >= LOOKS and red == len(seen):
        return replace(seen[-1], said=f"{seen[-1].said}; so in {red} looks of {len(seen)}")
    why = f"{first.outcome} in {red} of {len(seen)} looks" if again else f"{first.outcome} once, not measured again"
    return replace(first, outcome=Outcome.INCONCLUSIVE, said=f"{why}: {first.said}")


@dataclass(frozen=True)
class Judgement:
    """What the gate says of a run. `baseline` names the file, None where there is none for this machine; `remarks` are
    what a reader must know about the comparison."""

    baseline: str | None
    findings: tuple[Finding, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def reds(self) -> list[Finding]:
        return [f for f in self.findings if f.red]

    @property
    def word(self) -> str:
        if self.baseline is None:
            return "NO BASELINE"
        return "RED" if self.reds else "GREEN"

    def of(self, outcome: Outcome) -> list[Finding]:
        return [f for f in self.findings if f.outcome is outcome]

    @property
    def record(self) -> dict[str, object]:
        """For run.json: the word, and every finding that is not the same as in the baseline or only reported."""
        told = [f for f in self.findings if f.outcome not in (Outcome.SAME, Outcome.REPORTED)]
        return {
            "baseline": self.baseline,
            "word": self.word,
            "remarks": list(self.remarks),
            "findings": [
                {"id": f.id, "engine": f.engine, "metric": f.metric, "outcome": str(f.outcome), "said": f.said}
                for f in told
            ],
        }
