"""What the gate found, in words: for a terminal, as Markdown for a pull request, and as annotations of a CI job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.gate import RED, Finding, Judgement, Outcome, inert
from benchmarks.gate.rules import CLAIMED, COUNTED, RATIO, RULES
from benchmarks.report import escaped
from benchmarks.tables import plain

_TOLD = (*RED, Outcome.INCONCLUSIVE, Outcome.BETTER)


def rules() -> list[str]:
    """What is gated how, a line each; the figures of a claim share one."""
    claimed: dict[str, list[str]] = {}
    for (id, what), better in CLAIMED.items():
        claimed.setdefault(id, []).append(f"{what} ({better})")
    return [
        *(rule.line for rule in RULES),
        *(rule.claims_line for rule in (RATIO, COUNTED)),
        *(f"figures of {id}: {'; '.join(said)}" for id, said in claimed.items()),
    ]


def lines(judgement: Judgement, accept: str) -> list[str]:
    """For a terminal: the word, then what is red, undecided or better, then the rules. `accept` is the command that makes
    this run the baseline."""
    return [
        _harmless(line)
        for line in (
            headline(judgement, accept),
            *(f"remark: {remark}" for remark in judgement.remarks),
            *(finding.line for finding in _told(judgement)),
            *(f"rule: {rule}" for rule in rules()),
        )
    ]


def headline(judgement: Judgement, accept: str) -> str:
    if judgement.baseline is None:
        return f"NO BASELINE for this machine, rig and engine, so nothing was gated; to make one: {accept}"
    counts = Counter(f.outcome for f in judgement.findings)
    said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])
    mend = f"; if the change is meant: {accept}" if judgement.reds else ""
    return f"{judgement.word} against {judgement.baseline}: {said or 'nothing was compared'}{mend}"


def _told(judgement: Judgement) -> Iterable[Finding]:
    """Reds first, a station that is missing whole as one."""
    told = (f for f in _by_station(judgement.findings) if f.outcome in _TOLD)
    return sorted(told, key=lambda f: (not f.red, _TOLD.index(f.outcome)))


def _by_station(findings: Iterable[Finding]) -> Iterable[Finding]:
    """The findings, with one line for a station of whose claims, or cells, this run has none at all."""
    stations: dict[str, list[Finding]] = {}
    for finding in findings:
        stations.setdefault(finding.id.split(".")[0], []).append(finding)
    for name, found in stations.items():
        claims = {f.key for f in found if f.metric == "verdict"}
        gone = [f for kind in (True, False) for f in _all_missing([f for f in found if (f.key in claims) is kind])]
        if len(gone) < 2:
            yield from found
            continue
        engines = ", ".join(dict.fromkeys(f.engine for f in gone))
        judged = sum(f.key in claims for f in gone)
        counts = [f"{n} {kind}" for n, kind in ((judged, "claims"), (len(gone) - judged, "cells")) if n]
        said = f"{' and '.join(counts)} in the baseline, of which this run has none"
        yield Finding(name, engines, "station", Outcome.MISSING, said)
        yield from (f for f in found if f not in gone)


def _all_missing(found: Sequence[Finding]) -> list[Finding]:
    """Those that are missing, if no other was found. A search by the clock has cells that are no loss."""
    missing = [f for f in found if f.outcome is Outcome.MISSING and f.metric in ("verdict", "cell")]
    searched = [f for f in found if f.outcome is Outcome.REPORTED and f.metric == "cell"]
    return missing if len(missing) + len(searched) == len(found) else []


def _harmless(line: str) -> str:
    return inert(plain(line, 600))


def markdown(judgement: Judgement, accept: str) -> str:
    """For a pull request: the same as GitHub-flavoured Markdown."""
    out = [f"## Gate: {judgement.word}", "", escaped(plain(headline(judgement, accept), 400)), ""]
    out += [f"- {escaped(plain(remark))}" for remark in judgement.remarks]
    told = list(_told(judgement))
    if told:
        out += ["", "| outcome | claim or cell | engine | figure | |", "| --- | --- | --- | --- | --- |"]
        out += [
            f"| {f.outcome} | {' | '.join(escaped(plain(text, 400)) for text in (f.id, f.engine, f.metric, f.said))} |"
            for f in told
        ]
    out += ["", "<details><summary>What is gated how</summary>", ""]
    out += [f"- {escaped(rule)}" for rule in rules()]
    return "\n".join([*out, "", "</details>", ""])


def github_errors(judgement: Judgement) -> list[str]:
    """A GitHub Actions command for each red line."""
    return [
        f"::error title={_property(f'{f.outcome}: {f.id}')}::{_data(f'{f.id} ({f.engine}) {f.metric}: {f.said}')}"
        for f in _told(judgement)
        if f.red
    ]


def _data(text: str) -> str:
    """Text as a workflow command's message: https://github.com/actions/toolkit, core/src/command.ts."""
    return _harmless(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
