"""Noise floors: what differs between equal things on this machine, so that no verdict claims less than that.

A/A: one side is measured as both sides of a comparison, with the suite's own interleaved rounds. What its ratio still
shows is this machine's doing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import workloads
from benchmarks.estimates import FULL_LOOK, LAST_LOOK, Estimate, median_interval, paired_ratio
from benchmarks.ledger import write_json
from benchmarks.rigs import DTYPES, RIGS, WEIGHTS, RigError
from benchmarks.tables import plain
from benchmarks.timing import Rounds, interleave
from benchmarks.verdicts import format_figure

if TYPE_CHECKING:
    from benchmarks.memory import Device
    from benchmarks.phases import EagerEngine, Engine, State
    from benchmarks.runs import Run
    from benchmarks.session import Session

QUICK_S = {"cuda": 9.0, "cpu": 4.0}
"""Seconds of rounds that a suite run spends on this when no earlier calibration fits."""

THOROUGH_S = {"cuda": 100.0, "cpu": 30.0}
"""The same for `python -m benchmarks calibrate`. On CUDA half of it goes to profiler traces, of which one takes about a
second (seen on an H200: 4.4 s for a round of four)."""

QUIET_ENOUGH = 0.005
"""A floor at which no more rounds are added: a tenth of the narrowest band that a claim has."""

FLOOR_CONFIDENCE = 0.95
"""Coverage of the A/A median's interval. A verdict's own interval already covers its own rounds' noise, and far more
strictly; the floor stands beside it for what a machine shows between equal things on the whole."""

PROMPT_LEN = 128
"""Tokens of a calibrating prompt: the claims about prefill are of as many and more, and the noise of a prefill that
lasts a few milliseconds says little about theirs."""

OUTPUT_LEN = 5
"""Tokens of a calibrating request: short, since more rounds tell more about noise than longer ones."""

TRACED_STEPS = 2
ATTENTION_LEN = 4096


@dataclass(frozen=True)
class Floor:
    """The noise floor of a metric, a relative share, and the A/A rounds behind it.

    `floor` is how far the interval of the A/A median reaches from 1 after `n` rounds: the larger of high - 1 and
    1 / low - 1, at FLOOR_CONFIDENCE. That is the smallest change that the metric could have shown with these rounds, and
    none that is smaller is claimed. `median_s` is the median sample in seconds.
    """

    metric: str
    floor: float
    n: int
    ratio: float
    low: float
    high: float
    median_s: float


@dataclass(frozen=True)
class Calibration:
    """The floors by metric, and for each metric without one the reason. `made_at` is an ISO time in UTC; `quick` says that
    a suite run made it for itself."""

    floors: Mapping[str, Floor]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    made_at: str = ""
    quick: bool = False

    @property
    def noise_floor(self) -> dict[str, float]:
        """What verdicts need of it, by metric."""
        return {metric: floor.floor for metric, floor in self.floors.items()}

    @property
    def record(self) -> dict[str, object]:
        """For run.json."""
        floors = {metric: asdict(floor) for metric, floor in self.floors.items()}
        return {
            "made_at": self.made_at,
            "quick": self.quick,
            "metrics": floors,
            "unavailable": dict(self.unavailable),
        }

    @staticmethod
    def of_run(run: Mapping[str, Any], machine: Mapping[str, Any], rig: Mapping[str, Any]) -> Calibration | None:
        """The calibration that a run.json holds, None unless it is a thorough one of this very machine and rig: a quick
        one tells of the minutes in which it was made."""
        try:
            if not same_subject(run, machine, rig):
                return None
            kept = run["calibration"]
            floors = {str(metric): Floor(**values) for metric, values in kept["metrics"].items()}
            known = Calibration(floors, dict(kept["unavailable"]), str(kept["made_at"]))
            sound = floors and kept["quick"] is False and all(0 < f.floor < math.inf for f in floors.values())
        except (KeyError, TypeError, AttributeError, ValueError):
            return None  # written by hand or by another version: this run measures its own
        return known if sound else None


def same_subject(run: Mapping[str, Any], machine: Mapping[str, Any], rig: Mapping[str, Any]) -> bool:
    """Whether a run was made on this card or CPU, with this driver and these versions, and of this rig."""
    return all(run["machine"][key] == machine[key] for key in ("name", "driver", "versions")) and run["rig"] == rig


def floor_of(metric: str, observed: Estimate) -> Floor | str:
    """The floor that an A/A ratio shows, or why it shows none.

    Samples so equal that the floor would be 0 give none: the clock is too coarse for the metric, and a floor of 0 would
    let every difference pass for a real one.
    """
    if observed.problem is not None or observed.value is None or observed.low is None or observed.high is None:
        return observed.problem or "no interval could be drawn"
    if observed.n < FULL_LOOK:
        return f"{observed.n} rounds within the budget, a floor needs {FULL_LOOK}"
    first, second = observed.raw.values()
    reach = median_interval([a / b for a, b in zip(first, second, strict=True)], confidence=FLOOR_CONFIDENCE)
    assert reach.low is not None
    assert reach.high is not None
    floor = max(reach.high - 1, 1 / reach.low - 1)
    if floor <= 0:
        return "the samples are identical: the clock is too coarse to show this metric's noise"
    samples = sorted(value for side in observed.raw.values() for value in side)
    return Floor(metric, floor, observed.n, observed.value, reach.low, reach.high, samples[len(samples) // 2])


def a_a(
    side: Callable[[], Mapping[str, float]],
    budget_s: float,
    rounds: int = LAST_LOOK,
    disturbance: Callable[[], str | None] = lambda: None,
) -> dict[str, Floor | str]:
    """The floors, or the reasons for none, of all metrics that one call of `side` samples together (in seconds).

    Ends before the budget when every floor is QUIET_ENOUGH.
    """

    def observe(seen: Rounds[Mapping[str, float]]) -> dict[str, Floor | str]:
        metrics = seen["A"][0]
        return {
            m: floor_of(m, paired_ratio([s[m] for s in seen["A"]], [s[m] for s in seen["again"]], ("A", "again")))
            for m in metrics
        }

    def settled(seen: Rounds[Mapping[str, float]]) -> bool:
        return all(map(_quiet_enough, observe(seen).values()))

    sides = {"A": side, "again": side}
    return observe(
        interleave(sides, settled, budget_s, disturbance=disturbance, min_rounds=FULL_LOOK, max_rounds=rounds)
    )


def _in_turn(
    pair: tuple[Engine[Any], Engine[Any]],
    figures: Mapping[str, str],
    workload: workloads.Workload,
    session: Session,
    budget_s: float,
    rounds: int,
) -> dict[str, Floor | str]:
    """The floors of two equal requests served in turn, which are far lower than of one after the other. `figures` maps a
    metric to the figure of a run that it is about."""
    from benchmarks.phases import Request, in_turn
    from benchmarks.runs import ratio

    asked = {name: Request(engine, workload) for name, engine in zip(("A", "again"), pair, strict=True)}

    def observe(seen: Rounds[dict[str, Run]]) -> dict[str, Floor | str]:
        first, second = ([runs[name] for runs in seen["both"]] for name in asked)
        return {
            metric: floor_of(metric, ratio(figure, first, second, ("A", "again"))) for metric, figure in figures.items()
        }

    def settled(seen: Rounds[dict[str, Run]]) -> bool:
        return all(map(_quiet_enough, observe(seen).values()))

    both = {"both": in_turn(asked, session.clock)}
    return observe(
        interleave(both, settled, budget_s, disturbance=session.disturbance, min_rounds=FULL_LOOK, max_rounds=rounds)
    )


def _quiet_enough(found: Floor | str) -> bool:
    return isinstance(found, Floor) and found.floor <= QUIET_ENOUGH


def quick(session: Session, engine: EagerEngine, tokenizer: workloads.Tokenizer) -> Calibration:
    """What a suite run does for itself when no earlier calibration fits."""
    return replace(calibrate(session, engine, tokenizer, QUICK_S[session.device], traces=False), quick=True)


def calibrate(
    session: Session,
    engine: EagerEngine,
    tokenizer: workloads.Tokenizer,
    budget_s: float,
    rounds: int = LAST_LOOK,
    *,
    traces: bool = True,
) -> Calibration:
    """The noise floor of every metric, within about `budget_s` seconds.

    Metrics: "prefill_wall" and "decode_wall" of requests at batch 1 served in turn; "request_wall" of whole requests one
    after the other; "graph.decode_wall" and "graph.request_wall" of graph engines, when the session judges on them; on
    CUDA also "prefill_device" and "decode_device" (profiler traces of a prefill and of a few steps) and
    "attention_device" (4,096 tokens of SDPA). Without `traces` the two that no verdict rests on are left out.
    """
    from benchmarks.phases import Request, serve

    workload = workloads.equal_rows(tokenizer, 1, OUTPUT_LEN, PROMPT_LEN)

    def request() -> dict[str, float]:
        return {"request_wall": serve(Request(engine, workload), session.clock).run.e2e_s}

    measured = partial(a_a, rounds=rounds, disturbance=session.disturbance)
    traces_s, attention_s = (budget_s / 2 * traces, budget_s / 10) if session.device == "cuda" else (0.0, 0.0)
    wall_s = budget_s - traces_s - attention_s
    pair, figures = (engine, engine), {"prefill_wall": "ttft_s", "decode_wall": "decode_s"}
    if session.device == "cpu" and not traces:
        found = _in_turn(pair, figures, workload, session, wall_s, rounds)
        found["request_wall"] = "no claim that a CPU judges rests on it: run `python -m benchmarks calibrate`"
    else:
        found = _in_turn(pair, figures, workload, session, 0.5 * wall_s, rounds) | measured(request, 0.3 * wall_s)
    if "graph" in session.engine_names:
        found |= _graph_floors(engine, workload, session, measured, 0.2 * wall_s, rounds)
    if session.device != "cuda":
        lacking = "the CPU has no time of its own beside the wall's"
        found |= {metric: lacking for metric in ("prefill_device", "decode_device", "attention_device")}
    else:
        found |= measured(_attention(engine), attention_s)
        if traces:
            found |= _device_floors(engine, workload, partial(measured, budget_s=traces_s))
        else:
            left_out = "traces take long and no verdict rests on it: run `python -m benchmarks calibrate`"
            found |= {"prefill_device": left_out, "decode_device": left_out}
    return Calibration(
        {metric: floor for metric, floor in found.items() if isinstance(floor, Floor)},
        {metric: reason for metric, reason in found.items() if isinstance(reason, str)},
        datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _graph_floors(
    engine: EagerEngine,
    workload: workloads.Workload,
    session: Session,
    measured: Callable[..., dict[str, Floor | str]],
    budget_s: float,
    rounds: int,
) -> dict[str, Floor | str]:
    """The floors of decoding by replays and of whole requests, or why there are none."""
    from benchmarks.phases import Request, serve
    from benchmarks.session import NotCaptured

    reason = session.setting("graph").lacks.get("engine")
    try:
        pair = None if reason else [session.graph(engine, 1, workload.total_len, side) for side in (0, 1)]
    except NotCaptured as error:
        pair, reason = None, str(error)
    if pair is None:
        return dict.fromkeys(("graph.decode_wall", "graph.request_wall"), reason or "")
    first, second = pair

    def request() -> dict[str, float]:
        return {"graph.request_wall": serve(Request(first, workload), session.clock).run.e2e_s}

    decode = _in_turn((first, second), {"graph.decode_wall": "decode_s"}, workload, session, budget_s / 2, rounds)
    return decode | measured(request, budget_s / 2)


def _device_floors(
    engine: EagerEngine, workload: workloads.Workload, measured: Callable[..., dict[str, Floor | str]]
) -> dict[str, Floor | str]:
    """The floors of device seconds of a prefill and of a few steps after it, or the profiler's reason for none."""
    from benchmarks.phases import Prompt
    from benchmarks.traces import trace

    prompt = Prompt.of(workload.prompts, engine.device)
    probe = trace(lambda: engine.prefill(prompt), "cuda")
    if probe.device_s is None:
        reason = probe.reason or "the profiler saw nothing on the card"
        return {"prefill_device": reason, "decode_device": reason}

    def phases() -> dict[str, float]:
        states: list[State] = []

        def steps() -> None:
            for _ in range(TRACED_STEPS):
                states.append(engine.step(states.pop()))

        prefill = trace(lambda: states.append(engine.prefill(prompt)), "cuda").device_s
        decode = trace(steps, "cuda").device_s if states else None
        return {"prefill_device": _number(prefill), "decode_device": _number(decode)}

    return measured(phases)


def _number(device_s: float | None) -> float:
    """A profiler that fails in a later round makes the metric unusable: its sample is no number."""
    return math.nan if device_s is None else device_s


def _attention(engine: EagerEngine) -> Callable[[], dict[str, float]]:
    from benchmarks import attention

    timer = attention.device_timer(partial(attention.sdpa, *attention.qkv(ATTENTION_LEN, engine.model.dtype, "cuda")))
    return lambda: {"attention_device": timer()}


# The command ----------------------------------------------------------------------------------------------------------


def table(calibration: Calibration) -> list[str]:
    """The calibration for a person, one line a metric."""
    lines = [f"{'metric':<17}{'rounds':>6}  {'A/A ratio':<24}{'noise floor':>11}  smallest change it could show"]
    for metric, f in calibration.floors.items():
        ratio = f"{f.ratio:.4f} [{f.low:.4f}, {f.high:.4f}]"
        change = f"{format_figure(f.floor, '%')} of {1e3 * f.median_s:.3g} ms"
        lines.append(f"{metric:<17}{f.n:>6}  {ratio:<24}{format_figure(f.floor, '%'):>11}  {change}")
    return lines + [f"{metric:<17}  none: {reason}" for metric, reason in calibration.unavailable.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks calibrate`."""
    parser.add_argument("--rig", metavar="NAME", help=", ".join(RIGS))
    parser.add_argument("--target", metavar="ID_OR_DIR", help="your own causal language model instead of a rig")
    parser.add_argument("--weights", default="trained", metavar="KIND", help=" or ".join(WEIGHTS))
    parser.add_argument("--dtype", default="auto", metavar="DTYPE", help=", ".join(DTYPES))
    parser.add_argument("--report", type=Path, default=Path("reports"), metavar="DIR", help="folder of run.json")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="for all metrics together (default: 100 with CUDA, else 30)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Calibrate, print the table and keep it in run.json. Returns the exit code: 2 when the rig can't be had or doesn't fit
    into memory, or the report can't be written."""
    import torch

    from benchmarks.memory import is_out_of_memory
    from benchmarks.session import Options, Session

    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        options = Options(
            rig=arguments.rig,
            target=arguments.target,
            weights=arguments.weights,
            dtype=arguments.dtype,
            report=arguments.report,
            budget_s=arguments.budget,
        )
        session = Session(options, device)
        session.open()
        budget_s = options.budget_s or THOROUGH_S[device]
        try:
            found = calibrate(session, session.load("target"), session.loader.tokenizer(), budget_s)
        finally:
            session.close()
        print(f"A/A on {session.description}")
        print("\n".join(table(found)))
        keep(session, found)
    except (RigError, OSError) as error:
        print(plain(error, 500), file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print("out of memory: give a smaller --target", file=sys.stderr)
        return 2
    print(f"kept in {session.ledger.path}")
    return 0 if found.floors else 1


def keep(session: Session, calibration: Calibration) -> None:
    """Write the calibration: into the report folder's run when that is of this machine and rig, else into a new run
    beside which the old one is kept."""
    session.set_floors(calibration)
    try:
        run = json.loads(session.ledger.path.read_text(encoding="utf-8"))
        fits = same_subject(run, session.machine, session.rig.record)
    except (OSError, ValueError, KeyError, TypeError):
        fits = False  # there is no run, or none that can be read: it is moved aside like any other
    if fits:
        entries = {key: session.ledger.run[key] for key in ("calibration", "noise_floor", "unavailable")}
        write_json(session.ledger.path, {**run, **entries})
    else:
        session.ledger.note("calibration", calibration.record)
