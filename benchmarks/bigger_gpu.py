"""A bigger GPU: how much of this one waits, what software gains beside it, and whether decode follows bandwidth at all."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.estimates import Estimate, counted, median_interval, paired_ratio, unusable
from benchmarks.graphs import GraphEngine
from benchmarks.ledger import Cell
from benchmarks.memory import tensor_bytes
from benchmarks.phases import EagerEngine, Prompt
from benchmarks.roofline import Roofline, Work, burst_s, forward_work
from benchmarks.runs import CLOCK_STOOD_STILL, Run, ratio
from benchmarks.series import ARTICLE
from benchmarks.traces import trace
from benchmarks.workloads import Workload

BIGGER_X = 2.0
"""A card of less than twice the T4's bandwidth is no bigger one, and says nothing about what a bigger one brings."""

LONG_CACHE_LEN = 4096
SHORT_CACHE_LEN = 256
FED_ROWS = 16
"""Where decode's time is compared with bytes of KV cache: 16 rows of 256 and of 4,096 positions lie 1.8 GB apart with
Qwen2.5-1.5B, over half its weights. At one row they would lie 0.1 GB apart, and what a few more kernels take would hide it."""


TRACED_STEPS = 3


def stock_step_s(engine: EagerEngine, workload: Workload) -> list[float]:
    """Device seconds of a few decode steps, each traced on its own; none where no trace can be had."""
    state = engine.step(engine.prefill(Prompt.of(workload.prompts, engine.device)))
    traced = [trace(lambda: engine.step(state), engine.device).device_s for _ in range(TRACED_STEPS)]
    return [seconds for seconds in traced if seconds is not None]


# The card is idle -----------------------------------------------------------------------------------------------------


def idle_share(stock: Sequence[Run], device_s: Sequence[float]) -> Estimate:
    """Share of a stock decode step in which the card waits for the host.

    `device_s` are a few traced steps. A card's own time of a step hardly moves (1 % on an H200) and a trace takes a second,
    so their median stands beside each round's wall time.
    """
    if not stock or not all(run.clock_advanced for run in stock):
        return unusable(CLOCK_STOOD_STILL if stock else "no rounds were measured", len(stock))
    if not device_s:
        return unusable("the trace has no device time", len(stock))
    busy = paired_ratio([statistics.median(device_s)] * len(stock), [run.tpot_s for run in stock], ("busy_s", "tpot_s"))
    if busy.value is None:
        return busy
    ends = [None if end is None else max(0.0, 1 - end) for end in (busy.high, busy.low)]
    return replace(busy, value=max(0.0, 1 - busy.value), low=ends[0], high=ends[1])


# Software first -------------------------------------------------------------------------------------------------------


def doubled_card(busy_share: float) -> float:
    """The most that a card of twice the bandwidth could speed a step up, if it halved all that the card does (Amdahl 1967).
    Where the card is busy all the time, that is twice."""
    return 1 / (1 - min(1.0, busy_share) / 2)


def software_first(stock: Sequence[Run], graph: Sequence[Run], device_s: Sequence[float]) -> Estimate:
    """A graph's speed-up over what a doubled card could give the stock engine: above 1, software comes first.

    Round by round, so that a slow stretch of the host speaks for both.
    """
    if not device_s:
        return unusable("the trace has no device time", len(stock))
    speedup = ratio("tpot_s", stock, graph, ("stock", "graph"))
    if speedup.value is None:
        return speedup
    busy_s = statistics.median(device_s)
    doubled = [doubled_card(busy_s / run.tpot_s) for run in stock]
    gained = [a.tpot_s / b.tpot_s for a, b in zip(stock, graph, strict=True)]
    seen = paired_ratio(gained, doubled, ("graph speed-up", "doubled card's speed-up"))
    return seen.noted(
        f"a graph makes a step {speedup.value:.3g}x as fast, a card of twice the bandwidth could make it "
        f"{statistics.median(doubled):.3g}x at most"
    )


# Bandwidth is not speed -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """The T4's figures: seconds a token at batch 1 as the article published them, and the maker's bandwidth."""

    tpot_s: float
    bandwidth_bytes_per_s: float

    @staticmethod
    def t4() -> Published:
        card = json.loads(ARTICLE.read_text(encoding="utf-8"))
        tpot_s = next(cell["figures"]["tpot_s"] for cell in card["cells"] if cell["id"] == "batching.1")
        return Published(float(tpot_s), float(card["roofline"]["bandwidth_bytes_per_s"]))


def speed_over_bandwidth(runs: Sequence[Run], bandwidth_bytes_per_s: float, t4: Published) -> Estimate:
    """How many times the T4's speed this engine has here, over how many times its bandwidth this card has.

    1 where x times the bandwidth is x times the speed. This card's bandwidth is a measured copy's, the T4's the maker's
    figure, which no copy reaches: the ratio of bandwidths is a little too low, and the share a little too high.
    """
    if not runs or not all(run.clock_advanced for run in runs):
        return unusable(CLOCK_STOOD_STILL if runs else "no rounds were measured", len(runs))
    more = bandwidth_bytes_per_s / t4.bandwidth_bytes_per_s
    faster = [t4.tpot_s / run.tpot_s for run in runs]
    seen = median_interval([x / more for x in faster], {"speed over T4": tuple(faster), "bandwidth over T4": (more,)})
    middle = statistics.median(faster)
    return seen.noted(f"{more:.3g}x the bandwidth of the T4 (published) gives {middle:.3g}x its speed (published)")


def no_comparison(engine: str, bandwidth_bytes_per_s: float, t4: Published, seen: Estimate) -> str | None:
    """Why this engine and card say nothing about what a bigger card brings, None when they do."""
    more = bandwidth_bytes_per_s / t4.bandwidth_bytes_per_s
    if more < BIGGER_X:
        return f"this card has {more:.2g}x the T4's bandwidth: it is no bigger card"
    if engine != "eager":
        return f"the T4's figure is of the stock engine, and other software is no other card ({seen.note})"
    return None


def t4_cell(engine: str, precision: str, workload: Workload, runs: Sequence[Run], seen: Estimate) -> Cell:
    """This card over the T4, for the table."""
    figures: dict[str, float] = {}
    if seen.value is not None:
        speeds, (bandwidth_ratio,) = seen.raw["speed over T4"], seen.raw["bandwidth over T4"]
        figures = {
            "tpot_s": statistics.median(run.tpot_s for run in runs),
            "bandwidth_ratio": bandwidth_ratio,
            "speed_ratio": statistics.median(speeds),
        }
    return Cell(
        "bigger_gpu.over_t4",
        "bigger_gpu",
        "over_t4",
        workload.record,
        engine,
        precision,
        wall_s=tuple(run.tpot_s for run in runs),
        figures=figures,
        unavailable={"device_s": "not published for the T4"} | ({"figures": seen.problem} if seen.problem else {}),
        note="the T4's figures are published ones, of the stock engine with trained weights",
    )


# Memory-bound when fed ------------------------------------------------------------------------------------------------

WEIGHTS = "a byte of weights over a copied byte"
KV_CACHE = "a byte of KV cache over a copied byte"
"""The bounds of the claim, each judged by a pair of steps."""

REPLAYS = 50
"""Recorded steps in a burst between two CUDA events."""


@dataclass(frozen=True)
class Pair:
    """Two engines whose steps differ in what they read: other weights, or another length of the KV cache."""

    small: GraphEngine
    large: GraphEngine

    @property
    def more_bytes(self) -> int:
        """What a step of the second reads more."""
        return replay_work(self.large).bytes - replay_work(self.small).bytes

    @property
    def problem(self) -> str | None:
        """Why the two may not be compared, None when they may: other kernels take other times for the same bytes."""
        if self.small.kernels == self.large.kernels:
            return None
        made = f"{self.small.kernels} and {self.large.kernels}"
        return f"the two steps are made of different kernels, {made}: {self.small.note or self.large.note}"


def steps(pairs: Mapping[str, Pair]) -> dict[str, GraphEngine]:
    """The engines of all pairs, by name."""
    return {
        f"{what}, {size}": engine
        for what, pair in pairs.items()
        for size, engine in (("less", pair.small), ("more", pair.large))
    }


def sides(pairs: Mapping[str, Pair]) -> dict[str, Callable[[], float]]:
    """The steps to be measured in turn, each a call that gives its device seconds."""
    return {side: partial(replay_s, engine) for side, engine in steps(pairs).items()}


def memory_bound(
    pairs: Mapping[str, Pair], took_s: Mapping[str, Sequence[float]], bandwidth_bytes_per_s: float
) -> dict[str, Estimate]:
    """What a further byte costs in a step, over what it costs in a copy, for each pair. `took_s` are the rounds of
    `sides`."""
    found = {}
    for what, pair in pairs.items():
        small_s, large_s = took_s[f"{what}, less"], took_s[f"{what}, more"]
        if pair.problem is not None:
            found[what] = unusable(pair.problem, len(small_s))
        else:
            found[what] = byte_cost(small_s, large_s, pair.more_bytes, bandwidth_bytes_per_s)
    return found


def byte_cost(
    small_s: Sequence[float], large_s: Sequence[float], more_bytes: int, bandwidth_bytes_per_s: float
) -> Estimate:
    """Seconds that each further byte took, over what it takes a copy: 1 where a step is as fast as memory, 0 where what it
    reads costs nothing. The two steps are of the same rounds. Raises ValueError when the second reads no more."""
    if more_bytes <= 0 or len(small_s) != len(large_s):
        raise ValueError(f"steps of the same rounds, the second of which reads more, not {more_bytes:,} bytes more")
    raw = {"small_s": tuple(small_s), "large_s": tuple(large_s)}
    if not small_s:
        return unusable("no rounds were measured", 0, raw)
    more_s = [b - a for a, b in zip(small_s, large_s, strict=True)]
    middle_s = statistics.median(more_s)
    said = f"{more_bytes / 1e9:.3g} GB more took {1e6 * middle_s:.4g} us more"
    if middle_s <= 0:
        return counted(0.0, raw, said)
    return median_interval([s / more_bytes * bandwidth_bytes_per_s for s in more_s], raw).noted(said)


def fed_cells(
    pairs: Mapping[str, Pair], took_s: Mapping[str, Sequence[float]], roofline: Roofline, precision: str
) -> list[Cell]:
    """The steps that were compared, each beside its own floor."""
    made = []
    for side, engine in steps(pairs).items():
        work = replay_work(engine)
        floor_s, device_s = roofline.floor_s(work), statistics.median(took_s[side])
        held_len = _start_len(engine) + REPLAYS // 2
        weights = f"{tensor_bytes(engine.model) / 1e9:.3g} GB of weights"
        made.append(
            Cell(
                f"bigger_gpu.step.{side}",
                "bigger_gpu",
                "recorded_step",
                {"name": weights, "batch_size": engine.batch_size, "prompt_len": held_len, "output_len": 1},
                engine.name,
                precision,
                device_s=tuple(took_s[side]),
                bytes={"read": float(work.bytes)},
                figures={"floor_s": floor_s, "share_of_floor": floor_s / device_s},
                unavailable=dict.fromkeys(("wall_s", "host_bound"), "bursts of replays are timed by the card itself"),
                note=" ".join(filter(None, (f"{engine.kernels} kernels", engine.note))),
            )
        )
    return made


def replay_work(engine: GraphEngine) -> Work:
    """What a step needs in the middle of its burst."""
    return forward_work(engine.model, [(_start_len(engine) + REPLAYS // 2, 1)] * engine.batch_size)


def _start_len(engine: GraphEngine) -> int:
    """Filled positions from which a burst ends just short of the cache's end. Raises ValueError for a cache shorter than
    a burst: past its end a replay would write over other memory."""
    start_len = engine.cache_len - 1 - REPLAYS
    if start_len < 0:
        raise ValueError(f"a cache of {engine.cache_len} is shorter than a burst of {REPLAYS} steps")
    return start_len


@torch.inference_mode()
def replay_s(engine: GraphEngine) -> float:
    """Device seconds of one recorded step. Nothing is prefilled: what a cache holds costs no time, only how much."""
    engine.held.lengths.fill_(_start_len(engine))
    engine.turn += 1  # whoever holds a state of this engine holds one of the past
    return burst_s(engine.steps[1].replay, engine.device, REPLAYS)
