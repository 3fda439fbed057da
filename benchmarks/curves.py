"""Where regimes change: the prefix length from which a cache wins, and the batch size at which a further user stops being
cheap. Both are found by doubling, in a bounded time; every point on the way is kept."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.ledger import Cell
from benchmarks.memory import Device, OutOfMemory, attempt
from benchmarks.phases import EagerEngine, Engine, Prompt, Request, StoredPrefix, serve
from benchmarks.timing import Clock, quiet, set_aside
from benchmarks.workloads import Ids, Workload, exactly

WINS_X = 2.0
"""A cache wins where half the wait for the first token is gone: less is no reason to keep one."""

CHEAP_SHARE = 0.5
"""A further user is cheap while it brings at least half the tokens per second that the first one had alone."""

TIMES = 3
"""Measurements of a point, after a warm-up of its shapes; their median counts. A point is there to be seen beside its
neighbours, no verdict rests on it."""

STEPS = 4
"""Decode steps in one measurement of a batch."""

SUFFIX_LEN = 16
BATCH_PROMPT_LEN = 16

LEAST_CACHE_LEN = 64
"""Positions of a recorded point's static cache: a block of the fused attention."""


@dataclass(frozen=True)
class Limits:
    """How far a search goes: from the first size, times `factor`, to the last one, while `budget_s` seconds aren't over.

    A point that was begun is finished, so a search takes the budget and its last point.
    """

    first: int
    last: int
    budget_s: float
    factor: int = 2


PREFIX_LIMITS = {"cuda": Limits(128, 32768, 4.0), "cpu": Limits(32, 512, 1.0)}
BATCH_LIMITS = {"cuda": Limits(1, 8192, 4.0), "cpu": Limits(1, 32, 1.0)}
GRAPH_LIMITS = Limits(1, 1024, 5.0, factor=4)
"""Each size of a graph engine costs a recording of seconds, so there are fewer of them."""


@dataclass(frozen=True)
class Point:
    """One size and what was measured there, in seconds and by name."""

    size: int
    figures: dict[str, float]


@dataclass(frozen=True)
class Curve:
    """The points in order, the size at which the regime changed (None: not seen), and why the search ended."""

    points: tuple[Point, ...]
    turned: int | None
    ended: str


def search(
    measure: Callable[[int], dict[str, float] | str],
    turned: Callable[[Point], bool],
    limits: Limits,
    device: Device,
    now: Callable[[], float] = time.perf_counter,
) -> Curve:
    """Measure ever larger sizes until two in a row have turned, memory or time is over, or the last size is done.

    The answer is the first of the two: one alone may be a slow moment of the host. `measure` gives a size's figures, or the
    reason why there are none, which ends the search.
    """
    points: list[Point] = []
    ended = _search(points, measure, turned, limits, device, now)
    found = next((a.size for a, b in itertools.pairwise(points) if turned(a) and turned(b)), None)
    if found is None and points and turned(points[-1]):
        ended = f"only seen at {points[-1].size:,}, the last size: {ended}"
    return Curve(tuple(points), found, ended)


def _search(
    points: list[Point],
    measure: Callable[[int], dict[str, float] | str],
    turned: Callable[[Point], bool],
    limits: Limits,
    device: Device,
    now: Callable[[], float],
) -> str:
    """Adds to `points`; returns why it ended."""
    start = now()
    for size in _sizes(limits):
        if points and now() - start > limits.budget_s:
            return f"the budget of {limits.budget_s:.3g} s was over before {size:,}"
        figures = attempt(partial(measure, size), device)
        if isinstance(figures, OutOfMemory):
            return f"{figures.reason} at {size:,}"
        if isinstance(figures, str):
            return f"{figures} at {size:,}"
        points.append(Point(size, figures))
        if len(points) > 1 and turned(points[-2]) and turned(points[-1]):
            return "found"
    return f"not found up to {limits.last:,}"


def _sizes(limits: Limits) -> Iterator[int]:
    size = limits.first
    while size <= limits.last:
        yield size
        size *= limits.factor


# Prefix ---------------------------------------------------------------------------------------------------------------


def prefix_curve(
    engine: EagerEngine, clock: Clock, prefix: Ids, limits: Limits, now: Callable[[], float] = time.perf_counter
) -> Curve:
    """Seconds to the first token with a full and with a cached prefill, by the prefix's length.

    The suffix is SUFFIX_LEN tokens. Taking a copy of the cache is part of a hit. The model's positions end the search.
    """
    positions = getattr(engine.model.config, "max_position_embeddings", limits.last)
    suffix = exactly(prefix[::-1], SUFFIX_LEN)

    def measure(length: int) -> dict[str, float] | str:
        if length + SUFFIX_LEN > positions:
            return f"the model has {positions:,} positions, which ends the search"
        whole = exactly(prefix, length)
        stored = StoredPrefix(engine, whole)
        full, short = (Prompt.of([ids], engine.device) for ids in (whole + suffix, suffix))
        sides = (lambda: engine.prefill(full), lambda: engine.prefill(short, stored.take()))
        full_s, cached_s = _in_turn(clock, sides)
        return {"full_s": full_s, "cached_s": cached_s, "prefill_speedup": full_s / cached_s}

    def turned(point: Point) -> bool:
        return point.figures["prefill_speedup"] >= WINS_X

    with set_aside():
        return search(measure, turned, limits, engine.device, now)


def _in_turn(clock: Clock, sides: Sequence[Callable[[], object]]) -> list[float]:
    """The median seconds of each side, measured in alternating order."""
    took: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side()
    with quiet():
        for n in range(TIMES):
            for i in range(len(sides)) if n % 2 == 0 else reversed(range(len(sides))):
                took[i].append(clock.time(sides[i]))
    return [statistics.median(times) for times in took]


# Batching -------------------------------------------------------------------------------------------------------------


def batch_curve(
    engine_for: Callable[[int], Engine[Any] | str],
    device: Device,
    clock: Clock,
    tokens: Ids,
    limits: Limits,
    now: Callable[[], float] = time.perf_counter,
) -> Curve:
    """Decode's tokens per second by batch size, and what each user added since the size before brings of them.

    `engine_for` gives the engine of a batch size, or the reason why there is none. Prompts are BATCH_PROMPT_LEN tokens.
    """
    rates: dict[int, float] = {}

    def measure(batch_size: int) -> dict[str, float] | str:
        engine = engine_for(batch_size)
        if isinstance(engine, str):
            return engine
        rows = [exactly(tokens[row % len(tokens) :] + tokens, BATCH_PROMPT_LEN) for row in range(batch_size)]
        tpot_s = _tpot_s(engine, Workload("decode", tuple(rows), STEPS + 1), clock)
        rates[batch_size] = batch_size / tpot_s
        figures = {"tpot_s": tpot_s, "output_tokens_per_s": rates[batch_size]}
        sizes = list(rates)
        if len(sizes) > 1:
            added = (rates[sizes[-1]] - rates[sizes[-2]]) / (sizes[-1] - sizes[-2])
            figures["added_tokens_per_s"] = added
            figures["added_share"] = added / rates[sizes[0]] * sizes[0]
        return figures

    def turned(point: Point) -> bool:
        return point.figures.get("added_share", 1.0) < CHEAP_SHARE

    with set_aside():
        return search(measure, turned, limits, device, now)


def _tpot_s(engine: Engine[Any], workload: Workload, clock: Clock) -> float:
    """Median seconds of a decode step, of requests served as those of every table are."""
    serve(Request(engine, workload), clock)
    return statistics.median(serve(Request(engine, workload), clock).run.tpot_s for _ in range(TIMES))


def recorded(eager: EagerEngine) -> Callable[[int], Engine[Any] | str]:
    """Graph engines of a model, each captured when its point is measured and given up after it: together they would fill
    the card with caches that nothing else needs."""
    needed_len = BATCH_PROMPT_LEN + STEPS + 1
    from benchmarks.graphs import CannotCapture, capture

    def engine_for(batch_size: int) -> Engine[Any] | str:
        made = capture(eager.model, batch_size, max(LEAST_CACHE_LEN, needed_len))
        return str(made) if isinstance(made, CannotCapture) else made

    return engine_for


# Cells ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """How a curve stands in run.json: its station, the workload's field that grows, and the name of its answer."""

    station: str
    grows: str
    answer: str
    fixed: dict[str, object]


PREFIX = Shape(
    "prefix", "prompt_len", "caching_wins_2x_from_tokens", {"name": "prefix", "batch_size": 1, "output_len": 1}
)
BATCHING = Shape(
    "batching",
    "batch_size",
    "no_longer_cheap_at_users",
    {"name": "decode", "prompt_len": BATCH_PROMPT_LEN, "output_len": STEPS + 1},
)


def curve_cells(shape: Shape, curve: Curve, engine: str, precision: str) -> list[Cell]:
    """A cell a point, and one with the answer, or with the reason why there is none."""
    untold = dict.fromkeys(("wall_s", "device_s", "host_bound"), "a point keeps medians, by the caller's clock")
    made = [
        Cell(
            f"{shape.station}.curve.{point.size}",
            shape.station,
            "curve",
            shape.fixed | {shape.grows: point.size},
            engine,
            precision,
            figures=point.figures,
            unavailable=untold,
        )
        for point in curve.points
    ]
    found = {} if curve.turned is None else {shape.answer: float(curve.turned)}
    answer = Cell(
        f"{shape.station}.curve",
        shape.station,
        "turning_point",
        shape.fixed,
        engine,
        precision,
        figures=found,
        unavailable=untold | ({} if found else {shape.answer: curve.ended}),
    )
    return [*made, answer]
