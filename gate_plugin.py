"""pytest's side of the gate, `--baseline FILE|auto`: the run's last items are the gate's, one a claim and one a cell.

Before the first of them the run is compared with the baseline, and the tests behind what looks worse are run again
(benchmarks/gate/ says what of it is red). While there is a baseline a myth's own test fails only where it breaks:
verdicts are judged by the gate's items, known REFUTED is expected there and a changed verdict red.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.runner import runtestprotocol

from benchmarks import gate
from benchmarks.gate import baseline, summary
from benchmarks.run_file import RunFileError
from benchmarks.tables import plain
from benchmarks.verdicts import Word

if TYPE_CHECKING:
    from benchmarks.session import Session

NO_BASELINE = 6
"""Exit code of a run that nothing but the lack of a baseline is wrong with; pytest's own end at 5."""

GATE = pytest.StashKey["Gate"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("inference-myths").addoption(
        "--baseline",
        metavar="FILE|auto",
        help="gate this run against an accepted baseline: a file, or this machine's in benchmarks/cards",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--baseline") is None:
        return
    if os.environ.get("PYTEST_XDIST_WORKER") or any(config.getoption(name, None) for name in ("numprocesses", "tx")):
        raise pytest.UsageError("--baseline can't gate a run over several processes: leave out -n")
    if config.getoption("benchmark_disable", False) or config.getoption("benchmark_skip", False):
        raise pytest.UsageError("--baseline can't gate a run whose benchmarks are disabled: leave out that option")


def arm(session: pytest.Session, suite: Session) -> None:
    """Find the baseline and put the gate's items behind the myths. Raises UsageError before anything is measured when it
    can't be read or is of another machine, rig or engine."""
    asked = session.config.getoption("--baseline")
    if asked is None:
        return
    run = suite.ledger.run
    try:
        path = baseline.find(run, baseline.CARDS) if asked == "auto" else Path(asked)
        known = baseline.known_at(path) if path is not None else None
    except RunFileError as error:
        raise pytest.UsageError(f"--baseline: {plain(error, 400)}") from None
    if known is not None and (why := baseline.unlike(run, known)):
        said = f"--baseline {plain(path, 120)} is not of this machine and rig: {plain('; '.join(why), 400)}"
        raise pytest.UsageError(f"{said}; name another file, and accept a run of this one into it")
    if known is None and path is not None:
        said = f"--baseline {plain(path, 120)}: no such file yet, so nothing will be gated"
        if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
            reporter.write_line(said)
    here = Gate(suite, path, known)
    session.config.stash[GATE] = here
    session.items.extend(here.items(session))


class Gate:
    """One gated run. `known` is the baseline, None where there is none yet; `path` its file, as far as one is known."""

    def __init__(self, suite: Session, path: Path | None, known: baseline.Run | None) -> None:
        self.suite = suite
        self.path = path
        self.known = known
        self.judgement: gate.Judgement | None = None
        self.measured_by: dict[gate.Key, pytest.Item] = {}

    def items(self, session: pytest.Session) -> Iterator[pytest.Item]:
        if self.suite.device == "cpu":
            # Of another parent than the cases: between the two nothing is set up, so that myths can be run again there.
            apart = _Cases.from_parent(session, name="yardstick", nodeid="yardstick")
            yield pytest.Function.from_parent(apart, name="prefill_and_decode", callobj=measure_yardstick)
        parent = _Cases.from_parent(session, name="gate", nodeid="gate")
        if self.known is None:
            yield _Case.from_parent(parent, name="baseline", gate=self, key=None)
            return
        entries = [entry for kind in ("claims", "cells") for entry in self.known[kind]]
        for key in dict.fromkeys((entry["id"], entry["engine"]) for entry in entries):
            yield _Case.from_parent(parent, name=f"{key[0]} ({key[1]})", gate=self, key=key)
        yield _Case.from_parent(parent, name="nothing is new", gate=self, key=None)

    @property
    def entries(self) -> dict[tuple[str, gate.Key], Any]:
        """All claims and cells that are in the run so far; one that is measured anew is another object."""
        run: Any = self.suite.ledger.run
        return {(kind, (e["id"], e["engine"])): e for kind in ("claims", "cells") for e in run[kind]}

    def anew(self, before: dict[tuple[str, gate.Key], Any]) -> set[gate.Key]:
        """The claims and cells that were measured since `entries` was `before`."""
        return {at[1] for at, entry in self.entries.items() if before.get(at) is not entry}

    def conclude(self, case: pytest.Item) -> None:
        """Compare, and run again what looks worse. `case` is the item that pytest is about to run."""
        if self.known is None:
            self.judgement = gate.Judgement(None)
        else:
            remarks = baseline.other_software(self.suite.ledger.run, self.known)
            looks = [gate.compare(self.suite.ledger.run, self.known)]
            while len(looks) < gate.LOOKS and (wanted := self._tests_of(looks)):
                found, broken = self._look_again(wanted if len(looks) % 2 else wanted[::-1], case)
                looks.append(found)
                remarks += broken
            remarks += gate.times_to_come(looks[0])
            self.judgement = gate.Judgement(plain(self.path, 120), tuple(gate.confirmed(looks)), tuple(remarks))
        self.suite.ledger.note("gate", self.judgement.record)

    def _tests_of(self, looks: list[list[gate.Finding]]) -> list[pytest.Item]:
        """The tests behind what every look so far left in doubt."""
        assert self.known is not None
        keys = gate.doubtful(looks[-1], self.known)
        return list(dict.fromkeys(self.measured_by[key] for key in keys if key in self.measured_by))[: gate.MOST_AGAIN]

    def _look_again(self, tests: list[pytest.Item], case: pytest.Item) -> tuple[list[gate.Finding], list[str]]:
        """Run tests once more: what is found about the claims and cells that they measured anew, and which broke."""
        assert self.known is not None
        before = self.entries
        broken = [
            f"{test.nodeid} broke when it was run again: {plain(report.longreprtext.splitlines()[-1], 160)}"
            for test, following in zip(tests, [*tests[1:], case], strict=True)
            for report in runtestprotocol(test, log=False, nextitem=following)
            if report.failed
        ]
        anew = self.anew(before)
        return [f for f in gate.compare(self.suite.ledger.run, self.known) if f.key in anew], broken

    @property
    def accept(self) -> str:
        """The command that makes this run the baseline."""
        to = ("--to", plain(self.path, 200)) if self.path else ()
        return shlex.join(("python", "-m", "benchmarks", "accept", plain(self.suite.ledger.path, 200), *to))


class _Cases(pytest.Collector):
    def collect(self) -> list[pytest.Item]:
        return []


class _Case(pytest.Item):
    """What the gate says of one claim or cell; without a key of what the baseline lacks."""

    def __init__(self, *, gate: Gate, key: gate.Key | None, **rest: Any) -> None:
        super().__init__(**rest)
        self.gate = gate
        self.key = key

    def runtest(self) -> None:
        judgement = self.gate.judgement
        assert judgement is not None
        if judgement.baseline is None:
            pytest.skip(summary.headline(judgement, self.gate.accept))
        known = {item.key for item in self.parent.session.items if isinstance(item, _Case)} if self.key is None else ()
        mine = [f for f in judgement.findings if (f.key not in known if self.key is None else f.key == self.key)]
        if reds := [f.line for f in mine if f.red]:
            pytest.fail("\n".join(reds), pytrace=False)
        if undecided := [f.line for f in mine if f.outcome is gate.Outcome.INCONCLUSIVE]:
            pytest.xfail("; ".join(undecided))

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"gate: {self.name}"


def measure_yardstick(session, target, tokenizer):  # fixtures of conftest.py
    """Times of a CPU that can be compared between runs; on a card the device's own can."""
    from benchmarks.gate import yardstick

    for cell in yardstick.measure(target, tokenizer, session.rig.reference):
        session.ledger.cell(cell)


# Hooks ----------------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    here = item.config.stash.get(GATE, None)
    if here is None:
        return (yield)
    if isinstance(item, _Case) and here.judgement is None:
        here.conclude(item)
    before = here.entries
    try:
        return (yield)
    finally:
        here.measured_by |= dict.fromkeys(here.anew(before), item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A verdict is no failure of its test while a baseline says what to expect: the gate's item judges it."""
    report: Any = yield
    here = item.config.stash.get(GATE, None)
    verdict = str(dict(item.user_properties).get("verdict", ""))
    judged = here is not None and here.known is not None and verdict.startswith((Word.REFUTED, Word.INCONCLUSIVE))
    if judged and report.failed and call.excinfo is not None and call.excinfo.errisinstance(pytest.fail.Exception):
        report.outcome = "skipped"
        report.wasxfail = f"the gate judges it: {verdict}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that was to be gated and wasn't must not end well, whatever kept it from it."""
    config = session.config
    if config.getoption("--baseline") is None or config.getoption("collectonly") or session.exitstatus != 0:
        return
    here = config.stash.get(GATE, None)
    if here is None or here.judgement is None or here.judgement.reds:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif here.judgement.baseline is None:
        session.exitstatus = NO_BASELINE


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Below the card: what a job that went red ends with. A run that ended as a usage error ends with the line that says
    why."""
    here = config.stash.get(GATE, None)
    if config.getoption("--baseline") is None or config.getoption("collectonly"):
        return
    if here is None or here.judgement is None:
        if exitstatus != pytest.ExitCode.USAGE_ERROR:
            terminalreporter.section("the gate")
            terminalreporter.write_line("RED: the run ended before the gate could judge it")
        return
    terminalreporter.section("the gate")
    for line in summary.lines(here.judgement, here.accept):
        terminalreporter.write_line(line)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in summary.github_errors(here.judgement):
            terminalreporter.write_line(line)
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(summary.markdown(here.judgement, here.accept))
        except OSError as error:
            terminalreporter.write_line(f"the summary can't be written to GITHUB_STEP_SUMMARY: {plain(error)}")
