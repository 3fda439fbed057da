"""The decision map with one run's path: what is high, what to try for it before new hardware, and when to buy. No torch.

TTFT high, TPOT high, throughput low, memory full: each question is answered by the run's own figures, against a target or,
without targets, by how much of the figure the run shows to be avoidable. docs/diagnose.md has the arithmetic.

    evidence     what the run says, as numbers
    fixes        what can be done on this card, each with its gain and its cap
                 smaller_models: a draft, fewer bits; scale_out: a server, more cards
    questions    the four questions
    diagnose     (here) the path, the ranking, the question of hardware, and all of it as text
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.diagnose.evidence import Evidence, times
from benchmarks.diagnose.fixes import Fix, Metric, Untold, number, percent, ranked
from benchmarks.diagnose.questions import Finding, Step, Targets, memory, throughput, tpot, ttft
from benchmarks.run_file import RunFileError, read_run
from benchmarks.tables import plain

__all__ = ["BiggerGpu", "Diagnosis", "Fix", "Step", "Targets", "Untold", "diagnose", "diagnosis_lines"]

NO_TARGETS = Targets()


@dataclass(frozen=True)
class BiggerGpu:
    """Whether new hardware is the right answer. `at_most` is how many times faster twice the card would make a decode step
    at most, None where the run can't bound it."""

    buy: bool
    reason: str
    at_most: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """All texts are plain: no control characters, and not escaped for any markup."""

    path: tuple[Step, ...]
    fixes: tuple[Fix, ...]
    untold: tuple[Untold, ...]
    bigger_gpu: BiggerGpu


def diagnose(run: Mapping[str, Any], targets: Targets = NO_TARGETS) -> Diagnosis:
    """The map's path for a run as `run_file.read_run` gives it or a Ledger holds it.

    Fixes are those of lit questions, ranked by stage and gain; with targets, questions without one are not asked.
    """
    seen = Evidence(run)
    first, each = ttft(seen, targets), tpot(seen, targets)
    found = [first, each, throughput(seen, targets, first, each), memory(seen, targets)]
    if targets.given:
        found = [finding for finding in found if finding.asked]
    told = [finding for finding in found if finding.step.lit or not finding.known]
    fixes: dict[tuple[str, Metric | None], Fix] = {}
    for finding in found:
        for fix in finding.kept if finding.step.lit else ():
            # An engine without the host's waits stands once, with what it does for a token.
            fixes.setdefault((fix.name, None if fix.device_share else fix.metric), fix)
    return Diagnosis(
        tuple(finding.step for finding in found),
        ranked(fixes.values()),
        _merged(note for finding in told for note in finding.untold),
        _bigger_gpu(seen, targets, found),
    )


def _merged(notes: Iterable[Untold]) -> tuple[Untold, ...]:
    """Each once; what is unknown for one reason, and told by one command, in one note."""
    whats: dict[tuple[str, str], dict[str, None]] = {}
    for note in notes:
        whats.setdefault((note.why, note.command), {})[note.what] = None
    return tuple(Untold(", ".join(what), *known) for known, what in whats.items())


# New hardware ---------------------------------------------------------------------------------------------------------


def amdahl(device_share: float, faster: float) -> float:
    """How many times faster a step gets when the `device_share` of it that the card works goes `faster` times as fast.

    Amdahl 1967: the host's share stays. `faster` may be infinite.
    """
    return 1 / max(1 - device_share + device_share / faster, 1e-12)


def _bigger_gpu(seen: Evidence, targets: Targets, found: Sequence[Finding]) -> BiggerGpu:
    share = _decode_share(seen)
    at_most = amdahl(share, 2.0) if share is not None else None
    what = "machine" if seen.on_cpu else "card"
    unmet = [finding for finding in found if finding.asked and finding.step.lit]
    untold = [finding for finding in found if finding.asked and not finding.known]
    # No run on a CPU tells how many chats fit: what the others tell must not wait for it.
    beyond_cpu = [finding for finding in untold if seen.on_cpu and finding.metric is Metric.CHATS]
    unknown = [finding.question for finding in untold if finding not in beyond_cpu]
    stuck = [finding for finding in unmet if finding.together < (finding.needed or 1.0)]
    if not targets.given:
        why = f"no target was given, so nothing says that this {what} is too slow"
    elif unknown:
        why = f"first it has to be known: {' '.join(unknown)} (the commands above tell)"
    elif not unmet and beyond_cpu:
        why = "whether the chats fit takes a run on a GPU to tell, and no other target is missed"
    elif not unmet:
        return BiggerGpu(False, "every target is met: there is nothing to buy", at_most)
    elif not stuck:
        why = "the fixes above may be enough, alone or together: try them first"
    else:
        answers = sorted((_hardware(finding, what) for finding in stuck), key=lambda answer: not answer[0])
        return BiggerGpu(answers[0][0], "; ".join(said for _, said in answers), at_most)
    return BiggerGpu(False, f"{why}; {_doubled(seen, found, share, what)}", at_most)


def _doubled(seen: Evidence, found: Sequence[Finding], share: float | None, what: str) -> str:
    """What a faster card could do for a decode step at most, beside the best that software does."""
    said = f"a {what} twice as fast would make a decode step at most {times(amdahl(share or 1.0, 2.0))} as fast"
    if seen.on_cpu:
        return f"{said}: here the CPU is the device, and never waits for a host"
    if share is None:
        return f"{said}, and less where it waits for the host, which this run can't tell"
    limit = amdahl(share, math.inf)
    if limit < 1000:
        said += f", an infinitely fast one {times(limit)}, since this one works {percent(share)} of it"
    steps = [fix for finding in found for fix in finding.fixes if fix.metric is Metric.TPOT and fix.device_share]
    return f"{said}; {steps[0].name} gives {steps[0].gain.text}" if steps else said


def _hardware(finding: Finding, what: str) -> tuple[bool, str]:
    """(whether new hardware is what is left for a question that fixes don't settle, why)."""
    needed, together = finding.needed or 1.0, finding.together
    left = needed / together
    given = f"all fixes together give at most {times(together)}" if finding.fixes else "no fix of this run helps"
    short = f"{finding.metric}: {times(needed)} better is needed and {given}"
    beyond = finding.hard and finding.ceiling is not None and needed > finding.ceiling
    if finding.open_ended and not beyond:
        return False, f"{short}, but {finding.open_ended}: measure that first"
    if beyond:
        short += (
            f"; the target lies beyond this {what}'s roofline ({times(finding.ceiling or 1.0)}), fewer bits included"
        )
    if finding.metric is Metric.CHATS:
        return True, f"{short}: {finding.wanted}"
    if finding.metric is Metric.THROUGHPUT:
        return (
            True,
            f"{short}: {times(left)} more, from {number(math.ceil(min(left, 1e9)))} tuned replicas or a faster {what}",
        )
    if finding.share is None:
        return False, f"{short}, but how long the {what} works in it isn't in this run: measure that first"
    limit = amdahl(finding.share, math.inf)
    if left >= 0.999 * limit:  # so near that only a rounding error lies between
        return (
            False,
            f"{short}: no {what} closes that, an infinitely fast one gives {times(limit)}; the host has to get faster",
        )
    faster = finding.share / (1 / left - (1 - finding.share))
    return True, f"{short}: a {what} at least {times(faster)} as fast is what is left"


def _decode_share(seen: Evidence) -> float | None:
    """Share of a stock decode step in which the device works; 1 where the CPU is the device."""
    if seen.on_cpu:
        return 1.0
    rows = seen.batches(seen.engine)
    if not rows and (one := seen.request("parallel.tensor_target_one")):
        rows = [one[0]]  # what the GPUs together were compared with: one of them, at batch 1
    return next((row.decode.device_share for row in rows if row.decode), None)


# As text ------------------------------------------------------------------------------------------------------------


def diagnosis_lines(diagnosis: Diagnosis, width: int = 100) -> list[str]:
    """The diagnosis as lines of at most `width` columns (40 or more), without control characters or backquotes."""
    width = max(40, width)
    lines = [*_entry("", "The path through the map", width, 0), ""]
    for step in diagnosis.path:
        lines += _entry(f"{'->' if step.lit else '  '} {step.question}", step.answer, width, 21)
        lines += _entry("", step.evidence, width, 21)
    lines += ["", *_entry("", "To try before new hardware, in this order", width, 0)]
    for place, fix in enumerate(diagnosis.fixes, 1):
        reached = f", {fix.reaches}" if fix.reaches else ""
        lines += ["", *_entry(f"{place:2}.", f"{fix.name}: {fix.metric} {fix.gain.text}{reached}", width, 4)]
        lines += _entry("", fix.basis, width, 4)
        lines += _entry("", f"$ {fix.command}", width, 4)
    if not diagnosis.fixes:
        lines += ["", *_entry("", "nothing: no question above leads to a fix that this run shows to help", width, 4)]
    if diagnosis.untold:
        lines += ["", *_entry("", "What this run can't tell", width, 0)]
    for note in diagnosis.untold:
        lines += ["", *_entry("  -", f"{note.what}: {note.why}", width, 4), *_entry("", f"$ {note.command}", width, 4)]
    bought = "yes" if diagnosis.bigger_gpu.buy else "no"
    lines += ["", "A bigger GPU?", "", *_entry("", f"{bought}: {diagnosis.bigger_gpu.reason}", width, 4)]
    return lines


def _entry(label: str, text: str, width: int, indent: int) -> Iterator[str]:
    safe = plain(text, 1000).replace("`", "'")
    rows = textwrap.wrap(safe, width - indent, break_on_hyphens=False) or [""]
    for place, row in enumerate(rows):
        yield f"{'' if place else label:{indent}}{row}".rstrip()


# The command ----------------------------------------------------------------------------------------------------------


TARGETS = (
    ("--ttft-target-ms", "MS", "time to first token that users accept"),
    ("--tpot-target-ms", "MS", "time per output token that users accept"),
    ("--throughput-target", "N", "output tokens per second over all users"),
    ("--chats", "N", "chats at once"),
    ("--context", "TOKENS", "tokens of a chat, answers included"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN.JSON", help="a run of this suite, such as reports/run.json")
    for name, metavar, help in TARGETS:
        parser.add_argument(name, metavar=metavar, help=help)


def run(arguments: argparse.Namespace) -> int:
    """Prints the diagnosis of a run. Raises RunFileError for a file that is no run and for targets that are no figures."""
    ttft_ms, tpot_ms, rate, chats, context_len = (_target(arguments, name) for name, _, _ in TARGETS)
    targets = Targets(_seconds(ttft_ms), _seconds(tpot_ms), rate, chats, context_len)
    sys.stdout.write("\n".join(diagnosis_lines(diagnose(read_run(arguments.run), targets))) + "\n")
    return 0


def _target(arguments: argparse.Namespace, name: str) -> float | None:
    text = getattr(arguments, name.removeprefix("--").replace("-", "_"))
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # As far from the ends of what a float holds as no target is: the arithmetic stays finite.
    if not 1e-9 <= value <= 1e15:
        raise RunFileError(f"{name} must be a positive number of a sane size, such as 50, not {plain(text, 40)!r}")
    return value


def _seconds(milliseconds: float | None) -> float | None:
    return milliseconds / 1e3 if milliseconds is not None else None
