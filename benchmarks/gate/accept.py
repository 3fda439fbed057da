"""python -m benchmarks accept: make a run the baseline of its machine, and say what that changes.

Figures within the gate's tolerance keep the baseline's value, so that a bar can't sink by steps too small to be seen. A
bar that gets lower is written only when `--lower` names it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gate import Finding, Key, Outcome, compare
from benchmarks.gate.baseline import CARDS, Run, card_path, gateable, kept, known_at, refuse_article, unlike
from benchmarks.ledger import write_json
from benchmarks.run_file import RunFileError, read_run
from benchmarks.tables import finite, plain
from benchmarks.verdicts import Word


@dataclass(frozen=True)
class Change:
    """One line of what accepting a run changes; `lowers` says that the gate will afterwards let more pass."""

    key: Key
    said: str
    lowers: bool = False

    @property
    def line(self) -> str:
        return f"{'LOWERS' if self.lowers else 'changes'} {self.key[0]} ({self.key[1]}) {self.said}"


@dataclass(frozen=True)
class Accepted:
    """A baseline to be written, and what it changes."""

    baseline: dict[str, Any]
    changes: tuple[Change, ...]

    def unnamed(self, lower: Sequence[str]) -> list[Change]:
        """The changes that lower a bar which `lower` does not name: an id, or the beginning of ids up to a dot."""
        return [c for c in self.changes if c.lowers and not any(f"{c.key[0]}.".startswith(f"{id}.") for id in lower)]


def accepted(run: Run, old: Run | None) -> Accepted:
    """The baseline that a run makes, of the fields that kept() keeps; `old` is the one that it would replace.

    Raises RunFileError when the run can't be gated against, judged nothing, or is of another machine or rig than `old`.
    """
    fresh = kept(run)
    gateable(fresh)
    if not fresh["claims"] and not fresh["cells"]:
        raise RunFileError("the run measured nothing, so there is nothing to accept")
    if old is None:
        return Accepted(fresh, tuple(_first(fresh)))
    if why := unlike(run, old):
        raise RunFileError(
            f"the file to write is a baseline of something else: {'; '.join(why)}; name another with --to"
        )
    before = kept(old)
    changes: list[Change] = []
    by_key: dict[Key, list[Finding]] = {}
    for finding in compare(fresh, before):
        by_key.setdefault(finding.key, []).append(finding)
    for key, findings in by_key.items():
        if _undecided(key, findings, before):
            _entry(fresh["claims"], key).update(_entry(before["claims"], key))
            continue
        told = [f for f in findings if f.outcome not in (Outcome.SAME, Outcome.REPORTED) or f.metric == "cell"]
        changes += [_change(f, fresh, before) for f in told]
        _restore(fresh, before, key, findings)
    changes += _keep_floors(fresh["noise_floor"], before["noise_floor"])
    return Accepted(fresh, tuple(changes))


def _first(fresh: Run) -> Iterable[Change]:
    for claim in fresh["claims"]:
        undecided = claim["verdict"] == Word.INCONCLUSIVE
        note = ": not gated; a run with a larger --budget may decide it" if undecided else ""
        yield Change((claim["id"], claim["engine"]), f"verdict: {claim['verdict']}, new{note}")
    for cell in fresh["cells"]:
        yield Change((cell["id"], cell["engine"]), "cell: new")


def _undecided(key: Key, findings: Sequence[Finding], before: Run) -> bool:
    """Whether a claim was left undecided by the clock alone: the decided verdict of the baseline stands."""
    first = findings[0]
    left_open = first.metric == "verdict" and first.outcome is Outcome.INCONCLUSIVE
    by_clock = all(f.timed for f in findings if f.red)  # another limit or other parts are no noise
    return left_open and by_clock and _entry(before["claims"], key)["verdict"] != Word.INCONCLUSIVE


def _keep_floors(fresh: dict[str, float | None], before: Run) -> Iterable[Change]:
    """Of each noise floor the lower, since a noisier day is no reason to tolerate more. One that the baseline lacks lets
    more pass than before."""
    for name in dict.fromkeys([*before, *fresh]):
        now, then = finite(fresh.get(name)), finite(before.get(name))
        fresh[name] = _least(now, then)
        if now is not None and then is None:
            yield Change((f"noise_floor.{name}", "every engine"), f"new, {now:.2%}: it is tolerated from now on", True)


def _least(*values: object) -> float | None:
    return min((number for value in values if (number := finite(value)) is not None), default=None)


def _change(finding: Finding, fresh: Run, before: Run) -> Change:
    lowers = finding.outcome in (Outcome.WORSE, Outcome.CHANGED, Outcome.MISSING)
    if finding.metric == "verdict" and finding.outcome is not Outcome.MISSING and finding.outcome is not Outcome.NEW:
        old, new = (_entry(one["claims"], finding.key)["verdict"] for one in (before, fresh))
        lowers = old == Word.HOLDS or new == Word.NOT_JUDGED
    return Change(finding.key, f"{finding.metric}: {finding.outcome}, {finding.said}", lowers)


def _entry(entries: Sequence[dict[str, Any]], key: Key) -> dict[str, Any]:
    return next(entry for entry in entries if (entry["id"], entry["engine"]) == key)


def _restore(fresh: Run, before: Run, key: Key, findings: Sequence[Finding]) -> None:
    """Put back the baseline's own record of what has not changed: a claim whole, a cell's figures one by one. By what a
    cell's figures are judged gets no weaker."""
    if findings[0].metric == "verdict":
        if all(f.outcome is Outcome.SAME for f in findings):
            _entry(fresh["claims"], key).update(_entry(before["claims"], key))
        return
    if findings[0].metric in ("cell", "workload"):
        return
    new, old = (_entry(one["cells"], key) for one in (fresh, before))
    if old["host_bound"] is not None:
        new["host_bound"] = _least(old["host_bound"], new["host_bound"])
    for noise in [name for name in new["figures"] if name.endswith("_noise")]:
        held = new["figures"].pop(noise)
        if noise in old["figures"]:
            new["figures"][noise] = _least(old["figures"][noise], held)
    for finding in findings:
        if finding.outcome is Outcome.SAME:
            group, _, name = finding.metric.partition(".")
            if not name:
                new[group] = old[group]
            for field in {name, f"{name}_noise"} & set(old[group] if name else ()):
                new[group][field] = old[group][field]


# The command ----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks accept`."""
    parser.add_argument("run", type=Path, metavar="RUN.JSON", help="the run to accept, such as reports/run.json")
    parser.add_argument(
        "--to", type=Path, metavar="FILE", help="the baseline to write (default: this card's in benchmarks/cards)"
    )
    parser.add_argument(
        "--lower",
        action="append",
        default=[],
        metavar="ID",
        help="let this claim or cell get worse, or all that begin so up to a dot; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what changes and write it. Returns the exit code: 1 when a bar would get lower that `--lower` doesn't name."""
    new = read_run(arguments.run)
    refuse_article(arguments.run)
    path = arguments.to if arguments.to is not None else card_path(new, CARDS)
    found = accepted(new, known_at(path))
    for change in found.changes:
        print(plain(change.line, 400))
    if unnamed := found.unnamed(arguments.lower):
        ids = dict.fromkeys(change.key[0] for change in unnamed)
        named = " ".join(f"--lower {id}" for id in ids)
        print(f"not written: {len(unnamed)} bars would get lower; if that is meant, add {named}", file=sys.stderr)
        return 1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found.baseline)
    except OSError as error:
        raise RunFileError(f"{plain(path, 120)} can't be written: {error.strerror}; name another file") from None
    what = f"{len(found.changes)} changes" if found.changes else "nothing has changed beyond the tolerance"
    print(f"{what}; written to {plain(path, 200)}")
    of_cpu = found.baseline["machine"]["device"] == "cpu"
    if of_cpu and not any(cell["station"] == "yardstick" for cell in found.baseline["cells"]):
        print("no time is gated yet: on a CPU that begins with the next accepted run that had --baseline")
    return 0
