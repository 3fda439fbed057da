"""What plots and sentences read of a run: one Series for each engine of each run, its figures as points with a spread.

Everything here is a value drawn from run.json; what a run lacks is an empty list, never a zero. No torch, no drawing.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.tables import finite, plain
from benchmarks.verdicts import Word, format_figure

ARTICLE = Path(__file__).parent / "cards" / "tesla-t4.json"
"""The figures that the article published: what every run is shown beside."""


@dataclass(frozen=True)
class Series:
    """One engine of one run, which is the `place`th of those given. No two series share a `label`, no two runs a `run_label`.

    `cells` and `claims` are records of run.json, claims by id; `idle` are engines of the same run that judged nothing,
    with the reason.
    """

    label: str
    run_label: str
    place: int
    run: Mapping[str, Any]
    engine: str
    cells: tuple[Mapping[str, Any], ...]
    claims: Mapping[str, Mapping[str, Any]]
    idle: Mapping[str, str]

    @property
    def is_article(self) -> bool:
        return self.run is article()

    def cell(self, id: str) -> Mapping[str, Any] | None:
        return next((cell for cell in self.cells if cell["id"] == id), None)

    def figure(self, id: str, name: str) -> float | None:
        cell = self.cell(id)
        return finite(cell["figures"].get(name)) if cell else None

    def of_station(self, station: str, phase: str = "row") -> list[Mapping[str, Any]]:
        return [cell for cell in self.cells if cell["station"] == station and cell["phase"] == phase]


@cache
def article() -> Mapping[str, Any]:
    """The article's published run."""
    run: Mapping[str, Any] = json.loads(ARTICLE.read_text(encoding="utf-8"))
    return run


def series_of(runs: Sequence[Mapping[str, Any]]) -> list[Series]:
    """A series for each engine of each run, in their order; the article's own run is known by its content."""
    known = [article() if run == article() else run for run in runs]
    labelled = zip(known, _labels(known), strict=True)
    found = [one for place, (run, label) in enumerate(labelled) for one in _engines(run, label, place)]
    # A machine may be called what another one's engine is, such as "A, eager".
    return [replace(one, label=label) for one, label in zip(found, _distinct([o.label for o in found]), strict=True)]


def _labels(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A short name for each run that no other has: the card's, then its day, its minute, its place."""
    names = [plain(run["machine"]["name"] or "unnamed machine", 40) for run in runs]
    names = [f"{n} (article)" if run is article() else n for n, run in zip(names, runs, strict=True)]
    rigs, days = [str(run["rig"]["name"]) for run in runs], [str(run["started_at"])[:10] for run in runs]
    for told in (rigs, days, [str(run["started_at"])[10:16] for run in runs]):
        counts = Counter(names)
        names = [
            f"{n}, {plain(t, 30)}" if counts[n] > 1 and len(set(told)) > 1 else n
            for n, t in zip(names, told, strict=True)
        ]
    return _distinct(names)


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, each that several have with a number that makes it nobody else's."""
    counts, taken, found = Counter(names), set(names), []
    for place, name in enumerate(names, 1):
        numbered = (f"{name} #{number}" for number in itertools.count(place))
        found.append(next(n for n in numbered if n not in taken) if counts[name] > 1 else name)
        taken.add(found[-1])
    return found


def _engines(run: Mapping[str, Any], label: str, place: int) -> list[Series]:
    """Cells of an engine that judged nothing (such as transformers' own generate) belong to the run's first."""
    claims: dict[str, dict[str, Mapping[str, Any]]] = {}
    for claim in run["claims"]:
        claims.setdefault(claim["engine"], {})[claim["id"]] = claim
    judged = {
        name: of for name, of in claims.items() if any(claim["verdict"] != Word.NOT_JUDGED for claim in of.values())
    } or dict(list(claims.items())[:1])
    judged = judged or {run["engine"]: {}}
    idle = {
        plain(name, 40): "; ".join(dict.fromkeys(plain(claim["reason"]) for claim in of.values()))
        for name, of in claims.items()
        if name not in judged
    }
    first = next(iter(judged))
    return [
        Series(
            f"{label}, {plain(name, 40)}" if len(judged) > 1 else label,
            label,
            place,
            run,
            name,
            tuple(c for c in run["cells"] if c["engine"] == name or (name == first and c["engine"] not in claims)),
            of,
            idle if name == first else {},
        )
        for name, of in judged.items()
    ]


# Figures over something -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A figure at `x` with the range of its samples, None where they weren't kept."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


def _spread(samples: Iterable[object]) -> tuple[float | None, float | None]:
    known = [value for sample in samples if (value := finite(sample)) is not None and value > 0]
    return (min(known), max(known)) if len(known) > 1 else (None, None)


def _points(found: Iterable[tuple[float | None, float | None, Iterable[object]]]) -> list[Point]:
    """Points of (x, y, samples), without those that have no place on a logarithmic axis."""
    return sorted(
        (Point(x, y, *_spread(samples)) for x, y, samples in found if x is not None and y is not None and x > 0 < y),
        key=lambda point: point.x,
    )


def over_batch(series: Series) -> dict[str, list[Point]]:
    """ttft_s, tpot_s and output_tokens_per_s over the batch size."""
    found: dict[str, list[tuple[float | None, float | None, list[object]]]] = {
        "ttft_s": [],
        "tpot_s": [],
        "output_tokens_per_s": [],
    }
    for cell in series.of_station("batching"):
        batch, tokens = (finite(cell["workload"].get(name)) for name in ("batch_size", "output_len"))
        walls = [wall for sample in cell["wall_s"] or () if (wall := finite(sample))]
        samples: dict[str, list[object]] = {"output_tokens_per_s": []}
        if batch and tokens:
            samples["output_tokens_per_s"] = [batch * tokens / wall for wall in walls]
        for name, phase in (("ttft_s", "prefill"), ("tpot_s", "decode")):
            of_phase = series.cell(f"{cell['id']}.{phase}")
            samples[name] = list(of_phase["wall_s"] or ()) if of_phase else []
        for name, into in found.items():
            into.append((batch, finite(cell["figures"].get(name)), samples[name]))
    return {name: _points(rows) for name, rows in found.items()}


def over_prefix(series: Series) -> dict[str, list[Point]]:
    """Prefill seconds, full and cached, over the length of the shared prefix: the points of the curve and the requests of
    the table."""
    found: dict[str, list[tuple[float | None, float | None, list[object]]]] = {"full": [], "cached": []}
    for cell in series.of_station("prefix", "curve"):
        length = finite(cell["workload"].get("prompt_len"))
        for side, into in found.items():
            into.append((length, finite(cell["figures"].get(f"{side}_s")), []))
    for cell in series.of_station("prefix"):
        length = finite(cell["figures"].get("prefix_len"))
        of_phase = series.cell(f"{cell['id']}.prefill")
        for side, into in found.items():
            if str(cell["id"]).endswith(f".{side}"):
                samples = list(of_phase["wall_s"] or ()) if of_phase else []
                into.append((length, finite(cell["figures"].get("ttft_s")), samples))
    return {side: _one_a_length(_points(rows)) for side, rows in found.items()}


def decode_curve(series: Series) -> list[Point]:
    """Tokens per second of decode by batch size, out of the search for the size at which a further chat stops being cheap."""
    return _points(
        (finite(cell["workload"].get("batch_size")), finite(cell["figures"].get("output_tokens_per_s")), ())
        for cell in series.of_station("batching", "curve")
    )


def _one_a_length(points: Sequence[Point]) -> list[Point]:
    """Several questions over one prefix are one point, the middle one, with the range of all of them."""
    by_x: dict[float, list[Point]] = {}
    for point in points:
        by_x.setdefault(point.x, []).append(point)
    merged = []
    for x, same in by_x.items():
        ends = [end for point in same for end in (point.low, point.high, point.y) if end is not None]
        merged.append(Point(x, statistics.median(p.y for p in same), *_spread(ends if len(ends) > 1 else ())))
    return merged


def crossing(full: Sequence[Point], cached: Sequence[Point]) -> float | None:
    """The prefix length from which a cached prefill stays the faster one, between measured lengths by a straight line of
    the ratio's logarithm over the length's. None where one side is faster at every length, or fewer than two are known."""
    there = {point.x: point.y for point in cached}
    ratios = [(point.x, math.log(point.y) - math.log(there[point.x])) for point in full if point.x in there]
    found = None
    for (x0, r0), (x1, r1) in itertools.pairwise(ratios):
        if r0 <= 0 < r1:
            found = math.exp(math.log(x0) + (math.log(x1) - math.log(x0)) * (-r0) / (r1 - r0))
    return found if ratios and ratios[-1][1] > 0 else None


def over_length(series: Series) -> dict[str, list[Point]]:
    """Attention's bytes, flops and seconds over the length, for naive and SDPA: 'naive_bytes', 'sdpa_s', ... Seconds are
    the card's where it has a clock of its own."""
    found: dict[str, list[Point]] = {}
    for way in ("naive", "sdpa"):
        for quantity in ("bytes", "flops", "s"):
            rows = []
            for cell in series.of_station("attention"):
                names = [f"{way}_device_s", f"{way}_s"] if quantity == "s" else [f"{way}_{quantity}"]
                known = [finite(cell[where].get(name)) for name in names for where in ("figures", "bytes")]
                value = next((number for number in known if number is not None), None)
                rows.append((finite(cell["workload"].get("prompt_len")), value, ()))
            found[f"{way}_{quantity}"] = _points(rows)
    return found


def slope(points: Sequence[Point]) -> float | None:
    """How a figure grows over the last doublings: the exponent of a power law through the two longest lengths."""
    if len(points) < 2 or points[-1].x <= points[-2].x:
        return None
    (a, b) = points[-2:]
    longer = math.log(b.x) - math.log(a.x) if a.x > 0 else 0.0
    # Differences of logarithms: a quotient of the figures may under- or overflow.
    return (math.log(b.y) - math.log(a.y)) / longer if longer and a.y > 0 < b.y else None


# Shares of something --------------------------------------------------------------------------------------------------


def requests(series: Series) -> list[tuple[str, str, float, float]]:
    """(question, "full" or "cached", prefill seconds, decode seconds) of each request over the shared prefix."""
    found = []
    for cell in series.of_station("prefix"):
        side, colon, question = plain(cell["workload"].get("name", ""), 60).partition(": ")
        prefill_s, decode_s = (finite(cell["figures"].get(name)) for name in ("ttft_s", "decode_s"))
        if colon and side in ("full", "cached") and prefill_s is not None and decode_s is not None:
            found.append((question, side, prefill_s, decode_s))
    return found


def by_module(series: Series) -> dict[str, dict[str, float]]:
    """Bytes of each precision by the kind of module that holds them; in one piece, "all", where kinds weren't kept."""
    found: dict[str, dict[str, float]] = {}
    for cell in series.of_station("quant", "modules"):
        kinds = {plain(kind, 30): held for kind, value in cell["bytes"].items() if (held := finite(value))}
        if kinds:
            found[plain(cell["precision"], 20)] = kinds
    for cell in series.of_station("quant"):
        held = finite(cell["bytes"].get("loaded")) or finite(cell["bytes"].get("storages"))
        if held:
            found.setdefault(plain(cell["precision"], 20), {"all": held})
    return found


@dataclass(frozen=True)
class Speculated:
    """One measured speed-up: `acceptance` is accepted over drafted, `gamma` the tokens drafted a check, `c` a draft step
    over a target step; None where they weren't kept."""

    speed: float
    low: float | None
    high: float | None
    acceptance: float | None
    gamma: float | None
    c: float | None

    def predicted(self, acceptance: float) -> float | None:
        """Theorem 3.8 of arXiv:2211.17192 in counted terms: tokens a check over its cost in target steps."""
        if self.gamma is None or self.c is None:
            return None
        return (1 + self.gamma * acceptance) / (1 + self.gamma * self.c)


def speculated(series: Series) -> Speculated | None:
    cell = series.cell("speculation.with_draft")
    if cell is None:
        return None
    figure = {name: finite(value) for name, value in cell["figures"].items()}
    speed = figure.get("speed_over_alone")
    if not speed:
        return None
    drafted, checks = figure.get("drafted"), figure.get("target_forwards")
    gamma = drafted / checks if drafted and checks else None
    alone, with_draft = (series.cell(f"speculation.{mode}") for mode in ("alone", "with_draft"))
    pairs = zip((alone or {}).get("wall_s") or (), (with_draft or {}).get("wall_s") or (), strict=False)
    low, high = _spread(float(a) / float(b) for a, b in pairs if a and b)
    return Speculated(speed, low, high, figure.get("acceptance_rate"), gamma, figure.get("c"))


def shares_of_floor(series: Series) -> dict[str, float]:
    """Of what the caller waited, the share that this machine's own bandwidth and matmul rate make unavoidable, by phase."""
    found = {}
    for id in ("batching.1.decode", "batching.16.decode", "prefix.0.full.prefill"):
        cell = series.cell(id)
        share = finite(cell["figures"].get("wall_share_of_floor")) if cell else None
        if cell and share is not None:
            workload = {name: finite(cell["workload"].get(name)) or 0 for name in ("batch_size", "prompt_len")}
            decode = f"decode, batch {workload['batch_size']:.0f}"
            prefill = f"prefill, {workload['prompt_len']:,.0f} tokens"
            found[decode if cell["phase"] == "decode" else prefill] = share
    return found


# Rows beside each other -----------------------------------------------------------------------------------------------

NOISY = 0.2
"""A noise floor of decode above which rows that were measured one after another say nothing about each other."""

FASTER_IN_A_BATCH = 2 / 3
"""No token of a larger batch takes less than this of a smaller one's: it has all of its work to do, and more."""


def not_comparable(run: Mapping[str, Any], engine: str, tpots_s: Sequence[float]) -> str:
    """Why rows of a batching table, measured one after another, can't be held against each other; "" where they can.

    `tpots_s` are the seconds per output token of growing batches.
    """
    floors = run.get("noise_floor") or {}
    floor = next((f for n in (f"{engine}.decode_wall", "decode_wall") if (f := finite(floors.get(n))) is not None), 0.0)
    if floor > NOISY:
        return f"the rows were measured one after another, and decode's noise floor is {format_figure(floor, '%')}"
    slowest_s = 0.0
    for tpot_s in tpots_s:
        if tpot_s < FASTER_IN_A_BATCH * slowest_s:
            return "the rows were measured one after another, and a token came faster in a larger batch than in a smaller one"
        slowest_s = max(slowest_s, tpot_s)
    return ""


# A claim's samples ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strip:
    """One judged figure: its samples, the interval around its middle, and the limits it had to meet (low, high)."""

    what: str
    required: str
    unit: str
    verdict: str
    middle: float
    interval: tuple[float, float] | None
    samples: tuple[float, ...]
    limits: tuple[float | None, float | None]


def strips(claim: Mapping[str, Any]) -> list[Strip]:
    """Those parts of a claim that rest on several rounds: what was counted once has no scatter to show."""
    found = []
    for part in claim["parts"]:
        middle, unit = finite(part["observed"]), part["unit"] or ""
        samples = _ratios(part.get("raw"), middle)
        if middle is None or middle <= 0 or len(samples) < 3:
            continue
        ends = [finite(end) for end in part["interval"] or ()]
        interval = (ends[0], ends[1]) if len(ends) == 2 and ends[0] is not None and ends[1] is not None else None
        required = plain(part["required"], 60)
        found.append(
            Strip(
                plain(part["what"], 60),
                required,
                plain(unit, 10),
                part["verdict"],
                middle,
                interval,
                samples,
                limits_of(required, unit),
            )
        )
    return found


def _ratios(raw: object, middle: float | None) -> tuple[float, ...]:
    """Round by round, the first side over the second; nothing where those aren't what the middle is the middle of."""
    sides = list(raw.values()) if isinstance(raw, Mapping) else []
    if len(sides) != 2 or middle is None or not all(isinstance(side, list) for side in sides):
        return ()
    over, under = ([finite(value) for value in side] for side in sides)
    if len(over) != len(under):
        return ()
    divided = [finite(a / b) for a, b in zip(over, under, strict=True) if a is not None and b]
    ratios = [ratio for ratio in divided if ratio is not None]
    if len(ratios) != len(over) or not ratios or not math.isclose(statistics.median(ratios), middle, rel_tol=1e-6):
        return ()
    return tuple(ratios)


_CONDITION = re.compile(r"(>=|<=|=|>|<|to)? ?(\d[\d.,]*)")


def limits_of(required: str, unit: str) -> tuple[float | None, float | None]:
    """(low, high) of a condition as run.json words it: '>= 3x', '<= 15%', '0.95x to 1.05x', '> 0% and < 100%'."""
    low: float | None = None
    high: float | None = None
    for sign, digits in _CONDITION.findall(required):
        try:
            limit = float(digits.replace(",", "")) / (100 if unit == "%" else 1)
        except ValueError:
            return (None, None)
        if sign in (">=", ">", "=", ""):
            low = limit
        if sign in ("<=", "<", "=", "to"):
            high = limit
    return (low, high)
