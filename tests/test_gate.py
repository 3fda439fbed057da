"""The gate: what it calls a loss, what noise, what it refuses, and how a test run ends because of it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import benchmarks.gate
import benchmarks.gate.yardstick
import benchmarks.prefix
import benchmarks.session
from benchmarks.claims import CLAIMS
from benchmarks.estimates import counted
from benchmarks.gate import (
    LOOKS,
    RED,
    Finding,
    Judgement,
    Outcome,
    accept,
    baseline,
    compare,
    confirmed,
    doubtful,
    summary,
    times_to_come,
)
from benchmarks.gate.rules import CLAIMED, RULES, figures, rule_of
from benchmarks.ledger import Cell
from benchmarks.run_file import read_run
from benchmarks.verdicts import Word
from tests.gated import Run, changed, entry, some_run, written

ROOT = Path(__file__).parents[1]
RUN = some_run()


def _found(change: Callable[[Run], object], id: str, metric: str, engine: str = "eager") -> Finding:
    """What the gate says of one figure when a run differs from its baseline by a change."""
    findings = compare(changed(RUN, change), RUN)
    (found,) = [f for f in findings if (f.id, f.engine, f.metric) == (id, engine, metric)]
    return found


def _times(id: str, group: str, name: str, factor: float, engine: str = "eager") -> Callable[[Run], object]:
    def change(run: Run) -> None:
        cell = entry(run, id, engine)
        if not name:
            cell[group] = [factor * value for value in cell[group]]
        else:
            cell[group][name] *= factor

    return change


# Figures --------------------------------------------------------------------------------------------------------------


def test_a_run_is_no_worse_than_itself():
    assert {f.outcome for f in compare(RUN, RUN)} <= {Outcome.SAME, Outcome.REPORTED}


@pytest.mark.parametrize(
    ("id", "group", "name", "tolerated", "loss", "gain"),
    [
        ("batching.1.prefill", "device_s", "", 1.035, 1.05, 0.95),
        ("batching.1.decode", "device_s", "", 0.98, 1.05, 0.9),
        ("yardstick.prefill", "figures", "cpu_over_yardstick", 1.04, 1.10, 0.9),
        ("batching.1", "bytes", "peak", 1.009, 1.10, 0.9),
        ("batching.1", "bytes", "freed", 0.98, 0.9, 1.1),
        ("speculation.with_draft", "figures", "acceptance_rate", 0.99, 0.9, 1.1),
        ("quant.quality.nf4", "figures", "kl", 1.01, 1.2, 0.8),
        ("quant.quality.nf4", "figures", "top1_agreement", 0.997, 0.98, 1.02),
    ],
)
def test_a_loss_is_red_a_gain_is_reported_and_the_tolerance_holds(id, group, name, tolerated, loss, gain):
    metric = f"{group}.{name}" if name else group
    outcomes = [_found(_times(id, group, name, factor), id, metric).outcome for factor in (tolerated, loss, gain)]
    assert outcomes == [Outcome.SAME, Outcome.WORSE, Outcome.BETTER]


def test_what_is_red_says_both_figures_the_rule_and_what_was_tolerated():
    line = _found(_times("batching.1", "bytes", "peak", 1.1), "batching.1", "bytes.peak").line
    for part in (
        "worse: batching.1 (eager) bytes.peak",
        "3,300,000,000",
        "3,000,000,000",
        "1.1x",
        "lower is better",
        "1%",
    ):
        assert part in line


def _noisy(name: str, floor: float) -> Run:
    return changed(RUN, lambda run: run["noise_floor"].update({name: floor}))


def _beside(here: Run, there: Run, id: str, metric: str, engine: str = "eager") -> Finding:
    (found,) = [f for f in compare(here, there) if (f.id, f.engine, f.metric) == (id, engine, metric)]
    return found


@pytest.mark.parametrize(("side", "factor"), [("run", 1.05), ("baseline", 1.1)])
def test_the_noise_that_either_side_measured_is_tolerated_and_said(side, factor):
    noisy = _noisy("prefill_device", 0.2)
    slower = _times("batching.1.prefill", "device_s", "", factor)
    here, there = (changed(noisy, slower), RUN) if side == "run" else (changed(RUN, slower), noisy)
    found = _beside(here, there, "batching.1.prefill", "device_s")
    assert found.outcome is Outcome.SAME
    assert "a loss of 4% would not show" in found.said


@pytest.mark.parametrize(
    "noise",
    [
        lambda run: run["noise_floor"].update(prefill_device=0.5),
        lambda run: entry(run, "batching.1.prefill")["figures"].update(device_s_noise=0.5),
    ],
)
def test_a_run_cannot_excuse_its_own_loss_by_its_own_noise(noise):
    slower = changed(changed(RUN, noise), _times("batching.1.prefill", "device_s", "", 1.3))
    assert _beside(slower, RUN, "batching.1.prefill", "device_s").red


def test_another_engine_is_held_to_noise_of_its_own():
    slower = _times("batching.1.decode", "device_s", "", 1.2, "graph")
    for name, red in (("decode_device", True), ("graph.decode_device", False)):
        noisy = _noisy(name, 0.4)
        assert _beside(changed(noisy, slower), noisy, "batching.1.decode", "device_s", "graph").red is red


def test_wall_times_of_the_host_are_reported_and_never_red():
    for name in ("batching.1", "batching.1.decode"):
        assert _found(_times(name, "wall_s", "", 30), name, "wall_s").outcome is Outcome.REPORTED


def test_the_wall_time_of_a_phase_that_keeps_the_card_busy_is_gated_widely():
    outcomes = [
        _found(_times("batching.1.prefill", "wall_s", "", f), "batching.1.prefill", "wall_s").outcome
        for f in (1.2, 1.4)
    ]
    assert outcomes == [Outcome.SAME, Outcome.WORSE]


@pytest.mark.parametrize("idle", [0.9, None])
def test_a_run_cannot_free_its_wall_time_by_saying_that_its_host_is_slow(idle):
    slow = changed(RUN, _times("batching.1.prefill", "wall_s", "", 2))
    entry(slow, "batching.1.prefill")["host_bound"] = idle
    assert _beside(slow, RUN, "batching.1.prefill", "wall_s").red


def test_a_fall_back_to_math_is_named():
    found = _found(
        lambda run: entry(run, "batching.1.prefill")["kernels"].update(attention=["math"]),
        "batching.1.prefill",
        "kernels.attention",
    )
    assert found.red
    assert "math, in the baseline flash" in found.said


def test_engines_are_told_apart():
    slower = _times("batching.1.decode", "device_s", "", 1.5, "graph")
    assert _found(slower, "batching.1.decode", "device_s", "graph").red
    assert not _found(slower, "batching.1.decode", "device_s", "eager").red


def test_another_workload_is_not_compared():
    found = _found(lambda run: entry(run, "batching.1")["workload"].update(prompt_len=512), "batching.1", "workload")
    assert (found.outcome, found.said) == (Outcome.CHANGED, "prompt_len 512, in the baseline 37")


@settings(max_examples=8)
@given(st.sampled_from([c["id"] for c in RUN["cells"] if c["engine"] == "eager"]), st.floats(0.5, 2), st.floats(0.5, 2))
def test_what_is_worse_than_a_loss_is_a_loss(id, one, other):
    """Of every gated figure, in its own direction."""
    for metric, value in baseline_figures(id).items():
        group, _, name = metric.partition(".")
        rule = rule_of(metric, entry(RUN, id))
        if isinstance(value, str) or not rule.gated or rule.better == "any change counts":
            continue
        ends = sorted((one, other), reverse=rule.better == "higher is better")
        milder, stronger = (_found(_times(id, group, name, f), id, metric).red for f in ends)
        assert stronger or not milder


def baseline_figures(id: str) -> dict[str, float | str]:
    return figures(entry(RUN, id))


def test_every_figure_has_a_rule_and_every_rule_says_what_it_tolerates():
    assert rule_of("figures.never_heard_of", entry(RUN, "batching.1")).gated is False
    for rule, line in zip(RULES, summary.rules(), strict=False):
        assert f"{100 * rule.relative:g}%" in line or rule.relative == 0
        assert rule.why in line


# Several GPUs ---------------------------------------------------------------------------------------------------------

TWO_GPUS = json.loads((baseline.CARDS / "nvidia-h200-x2.json").read_text(encoding="utf-8"))


def _reds_of_two(change: Callable[[Run], object]) -> set[tuple[str, str]]:
    return {(f.id, f.metric) for f in compare(changed(TWO_GPUS, change), TWO_GPUS) if f.red}


def _figures_times(name: str, factor: float) -> Callable[[Run], object]:
    def change(run: Run) -> None:
        for cell in run["cells"]:
            if name in cell["figures"]:
                cell["figures"][name] *= factor

    return change


def test_a_run_over_two_gpus_is_no_worse_than_itself():
    assert not _reds_of_two(lambda _: None)


def test_a_loss_of_the_steps_that_gpus_share_and_of_what_they_exchange_is_red_in_each_cell():
    ways = ("tensor_target", "tensor_wide", "pipeline")
    steps = {(f"parallel.{way}_{side}", "figures.decode_device_s") for way in ways for side in ("one", "split")}
    assert _reds_of_two(_figures_times("decode_device_s", 1.05)) == steps
    assert not _reds_of_two(_figures_times("decode_device_s", 1.035))
    exchanges = {(f"parallel.{way}_split", "figures.sync_device_s") for way in ("tensor_target", "tensor_wide")}
    assert _reds_of_two(_figures_times("sync_device_s", 1.2)) == exchanges
    assert not _reds_of_two(_figures_times("sync_device_s", 1.1))


def test_a_decode_step_that_has_a_cell_of_its_own_is_gated_once():
    beside = changed(RUN, lambda run: entry(run, "batching.1")["figures"].update(decode_device_s=0.003))
    slower = changed(beside, _times("batching.1", "figures", "decode_device_s", 2))
    assert not [f for f in compare(slower, beside) if f.red]


def test_the_step_of_one_gpu_beside_several_is_held_to_the_noise_of_its_engines_decode_steps():
    noisy = changed(TWO_GPUS, lambda run: run["noise_floor"].update(decode_device=0.2))
    slower = changed(noisy, _figures_times("decode_device_s", 1.1))
    assert {f.engine for f in compare(slower, noisy) if f.red} == {"tensor parallel", "pipeline"}


@pytest.mark.parametrize(
    ("id", "factor", "reds"),
    [
        ("parallel.tp_not_linear", 0.5, {"wall", "device", "wide, device"}),
        ("parallel.tp_not_linear", 2, set()),
        ("parallel.tp_pays_for_sync", 1.2, {"all-reduces per layer", "share of the step"}),
        ("parallel.tp_memory", 1.025, {"held over predicted"}),
        ("parallel.pp_same_latency", 1.3, {"wall", "device", "idle share at one request", "idle share left"}),
        ("parallel.replicas_scale", 0.5, {"tokens per second"}),
    ],
)
def test_what_gpus_gain_is_a_bar_although_the_limits_are_far_below_it(id, factor, reds):
    def change(run: Run) -> None:
        for part in entry(run, id)["parts"]:
            part["interval"] = [factor * end for end in part["interval"]]

    assert _reds_of_two(change) == {(id, what) for what in reds}


def test_runs_over_another_number_of_gpus_are_not_compared_and_what_is_accepted_says_how_many():
    accepted = baseline.kept(TWO_GPUS)
    more = changed(accepted, lambda run: entry(run, "parallel.pipeline_split", "pipeline")["workload"].update(gpus=4))
    (red,) = [f for f in compare(more, accepted) if f.red]
    assert (red.id, red.metric, red.said) == ("parallel.pipeline_split", "workload", "gpus 4, in the baseline 2")


# What is missing ------------------------------------------------------------------------------------------------------


def _without(kind: str, id: str) -> Callable[[Run], object]:
    return lambda run: run[kind].remove(entry(run, id))


@pytest.mark.parametrize(("kind", "id"), [("claims", "prefix.one_word"), ("cells", "batching.1")])
def test_what_is_missing_from_either_side_is_red_by_its_name(kind, id):
    less = changed(RUN, _without(kind, id))
    for here, there, outcome in ((less, RUN, Outcome.MISSING), (RUN, less, Outcome.NEW)):
        (red,) = [f for f in compare(here, there) if f.red]
        assert (red.id, red.outcome) == (id, outcome)


def test_how_far_a_search_by_the_clock_went_is_no_loss():
    less = changed(RUN, _without("cells", "batching.curve.64"))
    assert not [f for f in (*compare(less, RUN), *compare(RUN, less)) if f.red]


def test_only_a_searched_cell_may_say_that_it_is_one():
    there = changed(RUN, lambda run: entry(run, "batching.1").update(phase="curve"))
    less = changed(RUN, _without("cells", "batching.1"))
    assert [f.id for f in (*compare(less, there), *compare(there, less)) if f.red] == ["batching.1"] * 2


def test_a_yardstick_that_the_baseline_lacks_is_no_loss_but_one_that_went_is():
    less = changed(RUN, _without("cells", "yardstick.prefill"))
    assert not [f for f in compare(RUN, less) if f.red]
    assert "gated from the next accepted gated run on" in times_to_come(compare(RUN, less))[0]
    assert times_to_come(compare(RUN, RUN)) == []
    assert [f.id for f in compare(less, RUN) if f.red] == ["yardstick.prefill"]


def test_a_figure_missing_from_either_side_is_red_by_its_name():
    less = changed(RUN, lambda run: entry(run, "batching.1")["bytes"].pop("peak"))
    for here, there, outcome in ((less, RUN, Outcome.MISSING), (RUN, less, Outcome.NEW)):
        (red,) = [f for f in compare(here, there) if f.red]
        assert (red.id, red.metric, red.outcome) == ("batching.1", "bytes.peak", outcome)


def test_what_is_judged_on_neither_side_is_no_loss():
    less = changed(RUN, _without("claims", "batching.memory"))
    assert not [f for f in (*compare(less, RUN), *compare(RUN, less)) if f.red]


# Verdicts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "now", "before", "outcome", "timed"),
    [
        ("prefix.one_word", Word.REFUTED, Word.HOLDS, Outcome.CHANGED, False),
        ("prefix.one_word", Word.HOLDS, Word.REFUTED, Outcome.CHANGED, False),
        ("prefix.one_word", Word.INCONCLUSIVE, Word.HOLDS, Outcome.CHANGED, False),
        ("prefix.one_word", Word.NOT_JUDGED, Word.HOLDS, Outcome.CHANGED, False),
        ("prefix.one_word", Word.HOLDS, Word.NOT_JUDGED, Outcome.CHANGED, False),
        ("prefix.one_word", Word.REFUTED, Word.REFUTED, Outcome.SAME, False),
        ("prefix.prefill_1484", Word.REFUTED, Word.HOLDS, Outcome.CHANGED, True),
        ("prefix.prefill_1484", Word.INCONCLUSIVE, Word.HOLDS, Outcome.INCONCLUSIVE, True),
        ("prefix.prefill_1484", Word.HOLDS, Word.INCONCLUSIVE, Outcome.INCONCLUSIVE, True),
        ("prefix.prefill_1484", Word.NOT_JUDGED, Word.HOLDS, Outcome.CHANGED, False),
        ("prefix.prefill_1484", Word.NOT_JUDGED, Word.INCONCLUSIVE, Outcome.CHANGED, False),
        ("prefix.prefill_1484", Word.INCONCLUSIVE, Word.NOT_JUDGED, Outcome.CHANGED, False),
    ],
)
def test_a_changed_verdict_is_red_either_way_and_only_a_clock_excuses_an_undecided_one(id, now, before, outcome, timed):
    there = changed(RUN, lambda run: entry(run, id).update(verdict=str(before)))
    here = changed(RUN, lambda run: entry(run, id).update(verdict=str(now)))
    (found,) = [f for f in compare(here, there) if f.id == id and f.metric == "verdict"]
    assert (found.outcome, found.timed) == (outcome, timed)


def test_a_ratio_is_worse_once_its_interval_has_left_the_baselines_behind():
    def to(low: float, high: float) -> Callable[[Run], object]:
        return lambda run: entry(run, "prefix.prefill_1484")["parts"][0].update(interval=[low, high])

    spans = {
        (9.6, 9.9): Outcome.SAME,
        (6.0, 11.0): Outcome.SAME,
        (7.0, 8.0): Outcome.WORSE,
        (12.0, 13.0): Outcome.BETTER,
    }
    for span, outcome in spans.items():
        assert _found(to(*span), "prefix.prefill_1484", "full over cached").outcome is outcome


def _parts_of(id: str, **new: object) -> Callable[[Run], object]:
    return lambda run: entry(run, id)["parts"][0].update(new)


@pytest.mark.parametrize("id", ["prefix.one_word", "prefix.prefill_1484"])
def test_another_limit_is_red_at_once_although_the_verdict_is_the_same(id):
    looser = changed(RUN, lambda run: entry(run, id).update(required=">= 0.001x"))
    (red,) = [f for f in compare(looser, RUN) if f.red]
    assert (red.id, red.metric, red.outcome, red.timed) == (id, "required", Outcome.CHANGED, False)
    assert "0.001x, in the baseline" in red.said


def test_another_limit_of_what_neither_side_judged_waits_for_a_verdict():
    looser = changed(RUN, lambda run: entry(run, "batching.memory").update(required=">= 0.001x"))
    assert not [f for f in compare(looser, RUN) if f.red]
    entry(looser, "batching.memory").update(verdict="HOLDS")
    assert [f.metric for f in compare(looser, RUN) if f.red] == ["verdict", "required"]


def test_another_limit_of_a_part_alone_is_red():
    looser = changed(RUN, _parts_of("prefix.prefill_1484", required=">= 0.001x"))
    assert [(f.id, f.metric) for f in compare(looser, RUN) if f.red] == [("prefix.prefill_1484", "required")]


def test_a_part_that_goes_or_comes_or_is_renamed_is_red_by_its_name():
    less = changed(RUN, lambda run: entry(run, "prefix.prefill_1484")["parts"].clear())
    other = changed(RUN, _parts_of("prefix.prefill_1484", what="x"))
    for here, there, outcomes in (
        (less, RUN, {"full over cached": Outcome.MISSING}),
        (RUN, less, {"full over cached": Outcome.NEW}),
        (other, RUN, {"full over cached": Outcome.MISSING, "x": Outcome.NEW}),
    ):
        assert {f.metric: f.outcome for f in compare(here, there) if f.red} == outcomes


@pytest.mark.parametrize("id", ["prefix.prefill_1484", "quant.not_always_faster"])
def test_a_claim_by_the_clock_that_has_no_figure_any_more_is_red_when_no_look_has_one(id):
    def lose(run: Run) -> None:
        lost = {"verdict": "INCONCLUSIVE", "observed": None, "interval": [None, None]}
        entry(run, id).update(lost)
        entry(run, id)["parts"][0].update(lost, problem="a sample is zero")

    lost = compare(changed(RUN, lose), RUN)
    assert (id, "eager") in doubtful(lost, RUN)
    (red,) = [f for f in confirmed([lost] * LOOKS) if f.red]
    assert (red.id, red.outcome) == (id, Outcome.CHANGED)
    assert "a sample is zero" in red.said
    assert not [f for f in confirmed([lost, lost, compare(RUN, RUN)]) if f.red]


# Measured again -------------------------------------------------------------------------------------------------------


def _look(outcome: Outcome, timed: bool = True) -> list[Finding]:
    return [Finding("yardstick.prefill", "eager", "figures.cpu_over_yardstick", outcome, "said", timed)]


@given(st.lists(st.sampled_from([Outcome.WORSE, Outcome.SAME]), max_size=LOOKS - 1))
def test_only_a_loss_that_every_look_shows_is_red(later):
    (found,) = confirmed([_look(Outcome.WORSE), *map(_look, later)])
    assert found.red is (len(later) == LOOKS - 1 and Outcome.SAME not in later)
    assert found.red or found.outcome is Outcome.INCONCLUSIVE


def test_a_counted_loss_is_red_at_once():
    assert confirmed([_look(Outcome.WORSE, timed=False)])[0].red


def test_an_undecided_verdict_that_is_decided_as_before_stands():
    assert confirmed([_look(Outcome.INCONCLUSIVE), _look(Outcome.SAME)])[0].outcome is Outcome.SAME
    assert confirmed([_look(Outcome.INCONCLUSIVE), _look(Outcome.CHANGED)])[0].outcome is Outcome.INCONCLUSIVE


def test_only_what_noise_may_have_made_is_measured_again():
    worse = changed(RUN, _times("batching.1.decode", "device_s", "", 1.5))
    worse["claims"].remove(entry(worse, "prefix.one_word"))
    entry(worse, "prefix.prefill_1484")["verdict"] = "INCONCLUSIVE"
    assert doubtful(compare(worse, RUN), RUN) == [("batching.1.decode", "eager"), ("prefix.prefill_1484", "eager")]
    undecided = changed(RUN, lambda run: entry(run, "prefix.prefill_1484").update(verdict="INCONCLUSIVE"))
    assert doubtful(compare(RUN, undecided), undecided) == []


# In words -------------------------------------------------------------------------------------------------------------

EVIL = Judgement(
    "a::b.json",
    (
        Finding("x\x1b[2J<script>", "eager", "::error::y", Outcome.WORSE, "100% of\r\n::stop-commands::z ##[add-path]"),
        Finding("x", "eager", ":::error", Outcome.WORSE, "###[add-path]x ##vso[task.setvariable]"),
    ),
)
COMMAND = re.compile(r"::|##\w*\[")
"""What a runner takes for a command, wherever it stands in a line."""


def test_annotations_are_one_escaped_line_for_each_red_finding():
    lines = summary.github_errors(EVIL)
    for line in lines:
        assert re.fullmatch(r"::error title=[^:,\n]*::[^\r\n\x1b]*", line)
        assert not COMMAND.search(line.split("::", 2)[2])
    assert "100%25 of" in lines[0]


def test_no_line_for_a_terminal_holds_a_command_of_a_runner_or_an_escape():
    for line in summary.lines(EVIL, "accept"):
        assert line.isprintable()
        assert not COMMAND.search(line)


def test_no_message_of_a_failure_or_junit_case_holds_a_command_of_a_runner():
    assert not [finding.line for finding in EVIL.findings if COMMAND.search(finding.line)]


def test_every_rule_is_printed_whole():
    assert [line[6:] for line in summary.lines(EVIL, "accept") if line.startswith("rule: ")] == summary.rules()
    said = "\n".join(summary.rules())
    assert not [(id, what) for id, what in CLAIMED if id not in said or what not in said]


def test_markdown_shows_the_findings_and_nothing_else_of_them():
    shown = MarkdownIt("gfm-like", {"linkify": False}).render(summary.markdown(EVIL, "accept"))
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert shown.count("<table>") == 1


def test_a_station_of_which_nothing_is_left_is_one_line_and_one_annotation():
    gone = {kind: [e for e in RUN[kind] if e["station"] != "batching"] for kind in ("claims", "cells")}
    judged = Judgement("card.json", tuple(compare(changed(RUN, lambda run: run.update(gone)), RUN)))
    assert sum(f.outcome is Outcome.MISSING for f in judged.findings) == 4
    (line,) = [line for line in summary.lines(judged, "accept") if line.startswith("missing")]
    assert line.startswith("missing: batching (eager, graph) station: 4 cells in the baseline")
    assert len(summary.github_errors(judged)) == 1
    assert summary.markdown(judged, "accept").count("| missing |") == 1
    partly = Judgement("card.json", tuple(compare(changed(RUN, _without("cells", "batching.1")), RUN)))
    assert [line.split(" (")[0] for line in summary.lines(partly, "") if line[:7] == "missing"] == [
        "missing: batching.1"
    ]


# In a test run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    code: int
    said: str
    report: Path

    @property
    def gate(self) -> list[str]:
        """What the terminal says under 'the gate', without the rules."""
        below = re.split("=+ the gate =+", self.said)[-1]
        return [line for line in re.split("\n=+ ", below)[0].splitlines() if line and not line.startswith("rule: ")]


def _ran(folder: Path, *arguments: object) -> Ran:
    """Three claims of the prefix station, two of which need no model, in this process."""
    said = io.StringIO()
    names = ("cacheprovider", "faulthandler", "unraisableexception", "threadexception")
    chosen = ["--rootdir", ROOT, *(f"-pno:{name}" for name in names), ROOT / "myths" / "test_prefix_reuse.py"]
    chosen += ["-k", "one_changed_word or timestamp", *arguments, "--report", folder]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main([str(a) for a in chosen])
    return Ran(int(code), said.getvalue(), folder)


class Pace:
    """A stand-in for the yardstick: its ratio in each measurement, and how often it was measured."""

    def __init__(self) -> None:
        self.ratios = [1.0]
        self.calls = 0

    def replaces(self, patch: pytest.MonkeyPatch) -> None:
        """The yardstick from now on; no model is loaded for it."""
        patch.setattr(benchmarks.gate.yardstick, "measure", self.measure)
        patch.setattr(benchmarks.session.Session, "load", lambda *_: None)

    def measure(self, *_: object) -> list[Cell]:
        self.calls += 1
        ratio = self.ratios[min(self.calls, len(self.ratios)) - 1]
        return [
            Cell(
                "yardstick.prefill",
                "yardstick",
                "prefill",
                {"batch_size": 1},
                "eager",
                "fp32",
                figures={"cpu_over_yardstick": ratio, "cpu_over_yardstick_noise": 0.01},
                unavailable={"wall_s": "pretended", "device_s": "pretended"},
            )
        ]


@pytest.fixture(scope="module", autouse=True)
def no_cuda() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("COLUMNS", "200")
        for name in ("PYTEST_XDIST_WORKER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Pace:
    chosen = Pace()
    chosen.replaces(monkeypatch)
    return chosen


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run without a baseline."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        Pace().replaces(patch)
        patch.setattr(baseline, "CARDS", folder)
        return _ran(folder / "reports", "--baseline", "auto")


@pytest.fixture
def known(first: Ran, tmp_path: Path) -> Path:
    """The baseline that the first run makes."""
    path = tmp_path / "card.json"
    return written(accept.accepted(read_run(first.report / "run.json"), None).baseline, path)


def test_without_a_baseline_the_run_ends_in_a_way_of_its_own_and_says_how_to_make_one(first):
    assert first.code == 6
    assert "NO BASELINE" in first.gate[0]
    assert f"python -m benchmarks accept {first.report / 'run.json'}" in first.gate[0]


def test_a_file_that_is_not_there_yet_is_no_baseline_and_where_the_first_goes(pace, tmp_path):
    ran = _ran(tmp_path / "r", "--baseline", tmp_path / "mine.json")
    assert ran.code == 6
    assert ran.gate[0].endswith(f"accept {tmp_path / 'r' / 'run.json'} --to {tmp_path / 'mine.json'}")


def test_a_run_like_its_baseline_is_green(known, pace, tmp_path):
    ran = _ran(tmp_path / "r", "--baseline", known)
    assert ran.code == 0, ran.said
    assert ran.gate[0].startswith("GREEN against ")
    assert json.loads((tmp_path / "r" / "run.json").read_text())["gate"]["word"] == "GREEN"
    assert pace.calls == 1


def test_a_first_gated_run_after_a_plain_one_was_accepted_is_green_and_says_what_is_to_come(known, pace, tmp_path):
    plain = changed(json.loads(known.read_text()), lambda run: run.update(cells=[]))
    ran = _ran(tmp_path / "r", "--baseline", written(plain, tmp_path / "plain.json"))
    assert ran.code == 0, ran.said
    assert "remark: the baseline has no times of this CPU" in ran.gate[1]


def test_a_loss_in_every_look_is_red_and_named_in_junit_summary_and_annotations(known, pace, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    pace.ratios = [1.2]
    ran = _ran(tmp_path / "r", "--baseline", known, "--junitxml", tmp_path / "j.xml")
    assert (ran.code, pace.calls) == (1, LOOKS)
    assert "worse: yardstick.prefill (eager) figures.cpu_over_yardstick: 1.2, in the baseline 1, 1.2x" in ran.gate[1]
    assert "::error title=worse%3A yardstick.prefill::" in ran.said
    assert "| worse | yardstick.prefill |" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    cases = {case.get("name"): case for case in ElementTree.parse(tmp_path / "j.xml").getroot().iter("testcase")}
    assert cases["prefix.one_word (eager)"].get("classname") == "gate"
    assert cases["prefix.one_word (eager)"].find("failure") is None
    assert "worse: yardstick.prefill" in cases["yardstick.prefill (eager)"].find("failure").get("message")


def test_a_loss_that_does_not_come_back_is_inconclusive_listed_and_no_failure(known, pace, tmp_path):
    pace.ratios = [1.2, 1.2, 1.0]
    ran = _ran(tmp_path / "r", "--baseline", known)
    assert (ran.code, pace.calls) == (0, 3)
    assert ran.gate[1].startswith("INCONCLUSIVE: yardstick.prefill (eager)")
    assert "worse in 2 of 3 looks" in ran.gate[1]


def test_a_claim_that_no_test_judges_any_more_is_red_by_name(known, pace, tmp_path):
    ran = _ran(
        tmp_path / "r", "--baseline", known, "--deselect", ROOT / "myths/test_prefix_reuse.py", "-k", "changed_word"
    )
    ran = _ran(tmp_path / "r", "--baseline", known, "-k", "one_changed_word")
    assert ran.code == 1
    assert ran.gate[1].startswith("missing: prefix.timestamp_first (eager) verdict: HOLDS in the baseline")


def test_a_known_refutation_is_expected_and_a_changed_verdict_red_either_way_round(known, pace, tmp_path, monkeypatch):
    was = json.loads(known.read_text(encoding="utf-8"))
    refuted = written(
        changed(was, lambda run: entry(run, "prefix.one_word").update(verdict="REFUTED")), tmp_path / "x.json"
    )
    ran = _ran(tmp_path / "r", "--baseline", refuted)
    assert ran.code == 1
    assert ran.gate[1].startswith("changed: prefix.one_word (eager) verdict: HOLDS, in the baseline REFUTED")
    monkeypatch.setattr(benchmarks.prefix, "one_word", lambda *_: counted(0.5))
    ran = _ran(tmp_path / "r", "--baseline", known)
    assert ran.code == 1
    assert ran.gate[1].startswith("changed: prefix.one_word (eager) verdict: REFUTED, in the baseline HOLDS")
    itself = accept.accepted(read_run(tmp_path / "r" / "run.json"), None).baseline
    ran = _ran(tmp_path / "r", "--baseline", written(itself, tmp_path / "y.json"))
    assert ran.code == 0
    assert "1 xfailed" in ran.said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--benchmark-disable",), "benchmarks are disabled"),
        (("--benchmark-skip",), "benchmarks are disabled"),
        (("-n", "2"), "several processes"),
    ],
)
def test_a_run_that_cannot_be_gated_is_refused(arguments, said, known, tmp_path):
    ran = _ran(tmp_path / "r", "--baseline", known, *arguments)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in ran.said.splitlines() if line.startswith("ERROR")]
    assert said in line


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_baseline_that_cannot_be_used_ends_the_run_before_it_measures(content, tmp_path, pace):
    path = tmp_path / "b.json"
    path.write_text(content, encoding="utf-8")
    ran = _ran(tmp_path / "r", "--baseline", path)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in ran.said.splitlines() if line.startswith("ERROR")]
    assert "b.json" in line
    assert not (tmp_path / "r").exists()


def test_a_baseline_of_another_machine_is_refused_not_compared(known, pace, tmp_path):
    other = changed(json.loads(known.read_text()), lambda run: run["machine"].update(name="Tesla T4"))
    ran = _ran(tmp_path / "r", "--baseline", written(other, tmp_path / "t4.json"))
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert "name is" in ran.said
    assert "Tesla T4 in the baseline" in ran.said


def test_a_gated_run_whose_gate_never_judged_does_not_end_well(known, pace, tmp_path):
    """Fixtures alone are set up: no test runs, so there is nothing that could fail."""
    ran = _ran(tmp_path / "r", "--baseline", known, "--setup-only")
    assert ran.code == 1


def test_all_that_is_red_is_an_outcome():
    assert {Outcome.SAME, Outcome.BETTER, Outcome.REPORTED, Outcome.INCONCLUSIVE} == set(Outcome) - RED


def test_the_page_about_the_gate_has_every_rule():
    page = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    assert [
        line[2:] for line in page.split("<!-- rules -->")[1].split("<!-- end")[0].strip().splitlines()
    ] == summary.rules()


def test_the_tests_behind_what_looks_worse_are_run_again_in_turn(known, pace, tmp_path, monkeypatch):
    asked: list[str] = []

    def noted(name: str, call: Callable[..., object]) -> Callable[..., object]:
        return lambda *arguments: (asked.append(name), call(*arguments))[1]

    for name in ("one_word", "timestamp"):
        monkeypatch.setattr(benchmarks.prefix, name, noted(name, getattr(benchmarks.prefix, name)))
    doubted = [("prefix.one_word", "eager"), ("prefix.timestamp_first", "eager"), ("yardstick.prefill", "eager")]
    monkeypatch.setattr(benchmarks.gate, "doubtful", lambda *_: doubted)
    ran = _ran(tmp_path / "r", "--baseline", known)
    assert ran.code == 0, ran.said
    assert asked == ["one_word", "timestamp", "one_word", "timestamp", "timestamp", "one_word"]
    assert pace.calls == LOOKS


def test_a_test_that_breaks_when_it_is_run_again_is_a_remark(known, pace, tmp_path, monkeypatch):
    def breaks(*_: object) -> object:
        if pace.calls:  # the yardstick comes after the myths, and before they are run again
            raise OSError("gone")
        return benchmarks.prefix.counted(0.004)

    monkeypatch.setattr(benchmarks.prefix, "one_word", breaks)
    monkeypatch.setattr(benchmarks.gate, "doubtful", lambda *_: [("prefix.one_word", "eager")])
    ran = _ran(tmp_path / "r", "--baseline", known)
    assert any(line.startswith("remark: ") and "broke when it was run again" in line for line in ran.gate), ran.gate


def test_each_figure_of_a_claim_that_is_gated_is_one_that_the_claim_has():
    for id, what in CLAIMED:
        assert what in {bound.what for bound in CLAIMS[id].bounds}


def test_int8_that_got_faster_is_no_loss_although_the_claim_is_that_it_is_slow():
    faster = changed(RUN, lambda run: entry(run, "quant.not_always_faster")["parts"][0].update(interval=[0.01, 0.02]))
    assert not [f for f in compare(faster, RUN) if f.red]
