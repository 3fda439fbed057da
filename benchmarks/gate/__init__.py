"""The gate: this run against the baseline that was accepted for its machine. Red for a loss, never for noise.

Runs are compared as run.json keeps them, by claim and by cell, each under (id, engine): verdicts word by word, figures
by the first rule of rules.py that fits their name. What rests on a clock and looks worse is measured again before it is
red. No torch, no pytest: gate_plugin.py brings this into a test run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from benchmarks.claims import CLAIMS
from benchmarks.gate.baseline import Run, shown
from benchmarks.gate.rules import CLAIMED, COUNTED, DECODE_STEP, RATIO, Better, Entry, Figure, Rule, figures, rule_of
from benchmarks.tables import finite, plain
from benchmarks.verdicts import Word, format_figure

Key = tuple[str, str]
"""What tells claims and cells of a run apart: id and engine."""


SEARCHED = "curve"
"""The phase of cells that a search makes, which ends where the clock says so: one may have points that another lacks.
Their ids say so too: '.curve' is in each."""

YARDSTICK = "yardstick"
"""The station that only gated runs on a CPU measure."""

MOST_OF_OWN = 2
"""To how many times the tolerance of the baseline this run's own noise may raise it. More would let the run that is judged
say what it is judged by; less would be red for a busy day: in three runs of one card the noise of its own time differed by
1.8x, that of an eager decode step by 1.6x."""


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
        return inert(f"{self.outcome}: {self.id} ({self.engine}) {self.metric}: {self.said}")


_COMMAND_START = re.compile(r":(?=:)|#(?=#+\w*\[)")
"""Of what a CI runner would take for a command ('::error', '##[add-path]', '##vso[') all but the last ':' or '#'."""


def inert(text: str) -> str:
    """Text that commands no CI runner, wherever in a log it is printed."""
    return _COMMAND_START.sub("", text)


# Comparing ------------------------------------------------------------------------------------------------------------


def compare(run: Run, baseline: Run) -> list[Finding]:
    """Every claim and every figure of both, in the baseline's order, new ones last. Both are as read_baseline gives them."""
    floors = Floors(run.get("noise_floor", {}), baseline.get("noise_floor", {}))
    findings: list[Finding] = []
    for kind, beside in (("claims", _claim), ("cells", _cell)):
        here, there = ({(e["id"], e["engine"]): e for e in one[kind]} for one in (run, baseline))
        for key in dict.fromkeys([*there, *here]):
            findings += beside(key, here.get(key), there.get(key), floors)
    return findings


@dataclass(frozen=True)
class Noise:
    """Relative noise of one figure: what this run measured, and what was accepted with the baseline."""

    own: float = 0.0
    accepted: float = 0.0

    def share(self, rule: Rule) -> float:
        """What a rule tolerates of the baseline's figure: its own share or the accepted noise; this run's noise raises
        that to MOST_OF_OWN times as much at most."""
        if not rule.floors:
            return rule.relative
        tolerated = max(rule.relative, self.accepted)
        return max(tolerated, min(self.own, MOST_OF_OWN * tolerated))

    def beside(self, other: Noise) -> Noise:
        """The larger of two."""
        return Noise(max(self.own, other.own), max(self.accepted, other.accepted))


@dataclass(frozen=True)
class Floors:
    """The noise floors of both sides, by metric."""

    own: Mapping[str, float | None]
    accepted: Mapping[str, float | None]

    def of(self, metric: str, engine: str) -> Noise:
        """A metric's noise under an engine: metrics of another than the eager one bear its name."""
        name = metric if engine == "eager" else f"{engine}.{metric}"
        return Noise(finite(self.own.get(name)) or 0.0, finite(self.accepted.get(name)) or 0.0)


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
    judged = Word.NOT_JUDGED not in (now, before)
    if now == before:
        yield say(Outcome.SAME, now, timed)
    elif timed and judged and Word.INCONCLUSIVE in (now, before):
        yield say(Outcome.INCONCLUSIVE, f"{now}, in the baseline {before}; {_observed(here)}", timed)
    elif not judged:
        yield say(Outcome.CHANGED, f"{now}, in the baseline {before}; {plain(here['reason'] or there['reason'], 160)}")
    else:
        yield say(Outcome.CHANGED, f"{now}, in the baseline {before}; {_observed(here)}", timed)
    if (judged or now != before) and (limits := _limits(here, there)):
        yield Finding(*key, "required", Outcome.CHANGED, f"{limits}: another limit")
    if judged:
        noise = floors.of(claim.noise, key[1]) if claim is not None and claim.noise is not None else Noise()
        yield from _parts(key, here, there, timed, noise)


def _limits(here: Entry, there: Entry) -> str:
    """The limits that are not the baseline's, a claim's own or else those of its parts; empty when all are."""
    before = {part["what"]: part for part in there["parts"]}
    sides = [(here, there), *((part, before[part["what"]]) for part in here["parts"] if part["what"] in before)]
    moved = [(a["required"], b["required"]) for a, b in sides if a["required"] != b["required"]]
    return "".join(f"{plain(now, 160)}, in the baseline {plain(then, 160)}" for now, then in moved[:1])


def _observed(claim: Entry) -> str:
    """What a claim observed, in words: the parts that do not hold, or all."""
    parts = [part for part in claim["parts"] if part["verdict"] != Word.HOLDS] or claim["parts"]
    said = [
        f"{plain(p['what'], 60)} {format_figure(finite(p['observed']), plain(p['unit'] or '', 12))}, "
        f"required {plain(p['required'], 60)}"
        for p in parts
    ]
    return "; ".join([*said, *([plain(claim["reason"], 160)] if claim["reason"] else [])])


def _parts(key: Key, here: Entry, there: Entry, timed: bool, noise: Noise) -> Iterable[Finding]:
    """The parts of a claim's verdict: none may come, go or lose its figure, and of some one way is a loss."""
    now, before = ({part["what"]: part for part in one["parts"]} for one in (here, there))
    for what in dict.fromkeys([*before, *now]):
        say = partial(Finding, *key, plain(what, 60))
        if what not in now:
            yield say(Outcome.MISSING, f"required {plain(before[what]['required'], 60)} in the baseline; not here")
        elif what not in before:
            yield say(Outcome.NEW, f"required {plain(now[what]['required'], 60)}; the baseline has no such part")
        else:
            yield from _part(say, CLAIMED.get((key[0], what)), now[what], before[what], timed, noise)


def _part(
    say: Callable[..., Finding], better: Better | None, here: Entry, there: Entry, timed: bool, noise: Noise
) -> Iterable[Finding]:
    now, then = _interval(here), _interval(there)
    if then is None:
        return
    if now is None:
        why = plain(here["problem"] or "no interval", 120)
        yield say(Outcome.CHANGED, f"no figure: {why}; in the baseline {_span(then)}", timed)
    elif better is None:
        yield say(Outcome.SAME, f"{_span(now)}, in the baseline {_span(then)}", timed)
    else:
        rule = replace(RATIO if timed else COUNTED, better=better)
        # The ends that are nearest to each other: only intervals apart by more than the tolerance differ.
        worse = (now[1], then[0]) if better is Better.HIGHER else (now[0], then[1])
        finer = (now[0], then[1]) if better is Better.HIGHER else (now[1], then[0])
        outcome = _outcome(*worse, rule, noise)[0]
        if outcome is not Outcome.WORSE:
            outcome = Outcome.BETTER if _outcome(*finer, rule, noise)[0] is Outcome.BETTER else Outcome.SAME
        yield say(outcome, f"{_span(now)}, in the baseline {_span(then)} ({rule.name}, {better})", timed)


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
        phases = {side["phase"] for side in (here, there) if side is not None}
        searched = SEARCHED in phases and f".{SEARCHED}" in key[0]
        # A baseline of a run that was not gated has none, and a first gated run must not be red for that.
        unasked = there is None and key[0].startswith(f"{YARDSTICK}.")
        yield say("cell", Outcome.REPORTED if searched or unasked else outcome, said)
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
        if name not in now or name not in before:
            yield _one_sided(say, name, now.get(name), before.get(name), here, there)
        else:
            noise = _noise(name, here, there, floors)
            yield _judged(say, name, now[name], before[name], rule_of(name, there), noise)


def _one_sided(
    say: Callable[..., Finding], name: str, now: Figure | None, before: Figure | None, here: Entry, there: Entry
) -> Finding:
    """A figure that only one side has. Only of one that is never red may the other side say why it lacks it."""
    rule = rule_of(name, there)
    lacking = here if now is None else there
    why = plain(lacking["unavailable"].get(name.split(".")[-1]) or "", 120)
    excused = not rule.gated and (why or name.endswith("_noise"))  # noise is no figure, but what one is held to
    outcome = Outcome.REPORTED if excused else Outcome.MISSING if now is None else Outcome.NEW
    sides = f"{_figure(now)}, in the baseline {_figure(before)}"
    return say(name, outcome, f"{sides}{': ' * bool(why)}{why}", outcome is Outcome.MISSING and rule.timed)


def _settings(here: Entry, there: Entry) -> Iterable[tuple[str, object, object]]:
    yield "precision", here["precision"], there["precision"]
    for name in ("batch_size", "prompt_len", "output_len", "gpus"):
        yield name, here["workload"].get(name), there["workload"].get(name)


def _noise(name: str, here: Entry, there: Entry, floors: Floors) -> Noise:
    """The noise that each run measured for a figure: beside it, or as the floor of its phase, which the baseline says."""
    beside = Noise(*(finite(one["figures"].get(f"{name.split('.')[-1]}_noise")) or 0.0 for one in (here, there)))
    if YARDSTICK in name:
        return beside
    kind = "attention" if there["station"] == "attention" else there["phase"]
    if name == DECODE_STEP:
        kind = "decode"
    clock = "device" if "device_s" in name else "wall"
    return beside.beside(floors.of(f"{kind}_{clock}", there["engine"]))


def _judged(say: Callable[..., Finding], name: str, now: Figure, before: Figure, rule: Rule, noise: Noise) -> Finding:
    if isinstance(now, str) or isinstance(before, str):
        outcome = Outcome.SAME if now == before else Outcome.CHANGED
        return say(name, outcome, f"{_figure(now)}, in the baseline {_figure(before)}", rule.timed)
    beside = f"{_figure(now)}, in the baseline {_figure(before)}{_times(now, before)}"
    if not rule.gated:
        return say(name, Outcome.REPORTED, f"{beside} ({rule.name})")
    outcome, tolerated = _outcome(now, before, rule, noise)
    limit = f"tolerated {_figure(tolerated)}" + (f" or {100 * tolerated / abs(before):.3g}%" if before else "")
    if noise.share(rule) > rule.relative:
        limit += f", which is this machine's noise: a loss of {100 * rule.relative:g}% would not show"
    return say(name, outcome, f"{beside} ({rule.name}, {rule.better}, {limit})", rule.timed)


def _outcome(now: float, before: float, rule: Rule, noise: Noise) -> tuple[Outcome, float]:
    """The outcome and what was tolerated, in the figure's unit."""
    tolerated = max(noise.share(rule) * abs(before), rule.absolute)
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


def times_to_come(findings: Iterable[Finding]) -> list[str]:
    """A line that says so where a CPU's times could not be gated, because the baseline was made by a run that wasn't."""
    cells = (f for f in findings if f.metric == "cell" and f.outcome is Outcome.REPORTED)
    if any(f.id.startswith(f"{YARDSTICK}.") for f in cells):
        return ["the baseline has no times of this CPU: they are gated from the next accepted gated run on"]
    return []


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
