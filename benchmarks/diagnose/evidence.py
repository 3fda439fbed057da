"""What a run says, as numbers that can be reckoned with: requests, their phases, ratios, bytes. No torch.

A run may come from anybody. What is missing, of the wrong type, not finite or not positive is None here, never 0, and all
text has passed through `tables.plain`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from benchmarks.estimates import median_interval
from benchmarks.series import not_comparable
from benchmarks.tables import finite, plain
from benchmarks.verdicts import format_figure

QUANTIZED = ("int8", "nf4")


class Kind(StrEnum):
    """Where a gain comes from, which is how far it can be trusted."""

    MEASURED = "measured"
    COMPUTED = "computed"
    AT_MOST = "at most"
    UNPAIRED = "from unpaired rows"


@dataclass(frozen=True)
class Gain:
    """How many times better: `value`, with the interval or the range of its samples where the run has one."""

    value: float
    low: float | None = None
    high: float | None = None
    kind: Kind = Kind.MEASURED

    def capped(self, cap: float | None) -> Gain:
        """The same gain, no end of it above `cap`."""
        if cap is None:
            return self
        ends = [None if end is None else min(end, cap) for end in (self.low, self.high)]
        return replace(self, value=min(self.value, cap), low=ends[0], high=ends[1])

    @property
    def text(self) -> str:
        """'15.9x [15.7, 16]', 'at most 9.4x', '1.14x, computed'."""
        shown = times(self.value)
        if self.kind is Kind.AT_MOST:
            return f"at most {shown}"
        if self.low is not None and self.high is not None and (self.low, self.high) != (self.value, self.value):
            shown += f" [{times(self.low)[:-1]}, {times(self.high)[:-1]}]"
        return shown if self.kind is Kind.MEASURED else f"{shown}, {self.kind}"


def times(value: float) -> str:
    return format_figure(value, "x") if value < 1e6 else f"{value:.3g}x"


@dataclass(frozen=True)
class Timed:
    """A time in seconds, its samples, how long of it the device worked, and what nothing on this machine gets below."""

    wall_s: float
    samples_s: tuple[float, ...] = ()
    device_s: float | None = None
    floor_s: float | None = None

    @property
    def device_share(self) -> float | None:
        """Share of the wait in which the device worked."""
        return None if self.device_s is None else min(1.0, self.device_s / self.wall_s)

    @property
    def least_s(self) -> float | None:
        """What no software gets below on this machine: the floor of the roofline where the run has one, else the time that
        the device worked, which a faster host leaves as it is."""
        return self.floor_s or self.device_s

    @property
    def least_without_host_s(self) -> float | None:
        """What is left once the host costs nothing: a faster host leaves the device's own time as it is."""
        return max((known for known in (self.device_s, self.floor_s) if known), default=None)

    def over(self, other: Timed, scale: float = 1.0) -> Gain:
        """How many times `other` fits into this time, times `scale`; with the range that the samples of both span."""
        low = high = None
        if len(self.samples_s) > 1 and len(other.samples_s) > 1:
            low = scale * min(self.samples_s) / max(other.samples_s)
            high = scale * max(self.samples_s) / min(other.samples_s)
        return Gain(scale * self.wall_s / other.wall_s, low, high)


@dataclass(frozen=True)
class Request:
    """A row of a served workload. Lengths in tokens; `bytes` by name, as the cell has them."""

    id: str
    engine: str
    precision: str
    batch_size: int
    prompt_len: float | None
    output_len: float | None
    prefix_len: float | None
    tokens_per_s: float | None
    e2e: Timed | None
    prefill: Timed | None
    decode: Timed | None
    bytes: Mapping[str, float]
    figures: Mapping[str, float]


def positive(value: object) -> float | None:
    """A positive finite number, None for everything else."""
    number = None if isinstance(value, bool) else finite(value)
    return number if number is not None and number > 0 else None


def _positives(values: object) -> tuple[float, ...]:
    """All samples, or none: a clock that gave one bad time is not to be trusted with the others."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return ()
    known = [positive(value) for value in values]
    return tuple(v for v in known if v is not None) if None not in known else ()


class Evidence:
    """One run, as `run_file.read_run` gives it or as a Ledger holds it."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        cells = [cell for cell in run["cells"] if isinstance(cell, Mapping)]
        self._cells = {(str(cell["id"]), str(cell["engine"])): cell for cell in cells}
        claims = [claim for claim in run["claims"] if isinstance(claim, Mapping)]
        self._claims = {(str(claim["id"]), str(claim["engine"])): claim for claim in claims}
        machine, rig, roofline = run["machine"], run["rig"], run.get("roofline")
        self._device = machine["device"]
        self.memory_bytes = positive(machine["memory_bytes"])
        self._run = run
        self.trained = rig["weights"] != "random"
        roofs = roofline if isinstance(roofline, Mapping) else {}
        self.bandwidth_bytes_per_s = positive(roofs.get("bandwidth_bytes_per_s"))

    @cached_property
    def at_server(self) -> bool:
        """Whether the requests are a server's: then nothing is known of the machine that answers."""
        return bool(self._served) and not any(row.id.startswith("batching.") for row in self._requests)

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU is the device."""
        return bool(self._device == "cpu") and not self.at_server

    # Requests ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _requests(self) -> list[Request]:
        rows = [cell for cell in self._cells.values() if cell["phase"] == "row"]
        return [self._request(cell) for cell in rows if cell["station"] in ("batching", "prefix", "quant")]

    @cached_property
    def _served(self) -> list[Request]:
        """Users at once of a server, as batches."""
        found = []
        for cell in self._cells.values():
            users = str(cell["id"]).removeprefix("serving.users_")
            if cell["phase"] == "users" and users.isascii() and users.isdigit() and 0 < len(users) < 7 and int(users):
                row = self._request({**cell, "wall_s": None})  # a stretch's wall time is nobody's wait
                found.append(replace(row, batch_size=int(users)))
        return found

    def _request(self, cell: Mapping[str, Any]) -> Request:
        workload = cell["workload"]
        figures = {str(name): known for name, value in cell["figures"].items() if (known := positive(value))}
        batch_size = positive(workload.get("batch_size")) or 1.0
        e2e_s = figures.get("e2e_s")
        if e2e_s is None and {"ttft_s", "decode_s"} <= set(figures):
            e2e_s = figures["ttft_s"] + figures["decode_s"]
        return Request(
            str(cell["id"]),
            str(cell["engine"]),
            str(cell["precision"]),
            max(1, round(min(batch_size, 1e9))),
            positive(workload.get("prompt_len")),
            positive(workload.get("output_len")),
            figures.get("prefix_len"),
            figures.get("output_tokens_per_s"),
            Timed(e2e_s, _positives(cell["wall_s"])) if e2e_s else None,
            self._phase(cell, figures, "prefill", "ttft_s"),
            self._phase(cell, figures, "decode", "tpot_s"),
            {str(name): known for name, value in cell["bytes"].items() if (known := positive(value))},
            figures,
        )

    def _phase(self, cell: Mapping[str, Any], figures: Mapping[str, float], phase: str, name: str) -> Timed | None:
        if name not in figures:
            return None
        own = self._cells.get((f"{cell['id']}.{phase}", str(cell["engine"])), {})
        device = _positives(own.get("device_s"))
        floor_s = figures.get(f"{phase}_floor_s") or positive(_mapping(own.get("figures")).get("floor_s"))
        if floor_s is None and phase == "decode":
            floor_s = self.weights_s(str(cell["precision"]))
        return Timed(
            figures[name],
            _positives(own.get("wall_s")),
            figures.get(f"{phase}_device_s") or (statistics.median(device) if device else None),
            floor_s,
        )

    @cached_property
    def engine(self) -> str:
        """The engine that everything else is compared with: the stock one where the run has it."""
        engines = dict.fromkeys(request.engine for request in (self._served if self.at_server else self._requests))
        return next((name for name in engines if name == "eager"), next(iter(engines), "eager"))

    @cached_property
    def other_engines(self) -> list[str]:
        names = (request.engine for request in self._requests if request.id.startswith("batching."))
        return [name for name in dict.fromkeys(names) if name != self.engine]

    def batches(self, engine: str) -> list[Request]:
        """The batching table of an engine, smallest batch first; rows without a rate (out of memory) are left out."""
        table = self._served if self.at_server else [r for r in self._requests if r.id.startswith("batching.")]
        rows = [row for row in table if row.engine == engine and row.tokens_per_s]
        return sorted(rows, key=lambda row: row.batch_size)

    def not_comparable(self, rows: Sequence[Request]) -> str:
        """Why rows of a batching table say nothing about each other; "" where they do."""
        return not_comparable(self._run, rows[0].engine, [row.decode.wall_s for row in rows if row.decode])

    def batch_curve(self, engine: str) -> list[Request]:
        """Decode alone by batch size, as the search for the end of cheap users measured it, smallest first."""
        points = [self._request(cell) for cell in self._cells.values() if str(cell["id"]).startswith("batching.curve.")]
        known = [point for point in points if point.engine == engine and point.tokens_per_s]
        return sorted(known, key=lambda point: point.batch_size)

    @cached_property
    def prefix_curve(self) -> list[tuple[float, float]]:
        """(tokens of the prefix, full prefill over cached), shortest first."""
        found = []
        for cell in self._cells.values():
            length = positive(cell["workload"].get("prompt_len"))
            gain = positive(cell["figures"].get("prefill_speedup"))
            if str(cell["id"]).startswith("prefix.curve.") and length and gain:
                found.append((length, gain))
        return sorted(found)

    @cached_property
    def prefix_pairs(self) -> list[tuple[Request, Request]]:
        """(full prefill, cached prefill) of each suffix, by the engine that everything is compared with."""
        rows = {row.id: row for row in self._requests if row.id.startswith("prefix.") and row.engine == self.engine}
        found = [(row, rows.get(f"{id.removesuffix('.full')}.cached")) for id, row in rows.items()]
        return [
            (full, cached)
            for full, cached in found
            if full.id.endswith(".full") and cached and full.prefill and cached.prefill
        ]

    def precision(self, name: str | None) -> Request | None:
        """The quantization station's row of a precision; None stands for the one that isn't quantized."""
        rows = [r for r in self._requests if r.id.startswith("quant.") and r.engine == self.engine]
        wanted = [r for r in rows if (r.precision == name if name else r.precision not in QUANTIZED)]
        return wanted[0] if wanted else None

    def math_fallback(self) -> bool:
        """Whether a served phase's attention built the whole score matrix."""
        return any(_mapping(cell["kernels"]).get("math_fallback") is True for cell in self._cells.values())

    # Ratios -----------------------------------------------------------------------------------------------------------

    def ratio(self, id: str, engine: str | None = None, part: str | None = None) -> Gain | None:
        """What a claim observed, with its interval, whatever its verdict; a compound claim's `part` by name.

        Of the engine that everything is compared with, or of the only one that has it, where none is named.
        """
        own = self._claims.get((id, engine or self.engine))
        others = (claim for (found, _), claim in self._claims.items() if found == id)
        claim = own if own or engine else next(others, None)
        if claim is None:
            return None
        seen = claim if part is None else next((p for p in claim["parts"] if p["what"] == part), {})
        value = positive(seen.get("observed"))
        if value is None:
            return None
        ends = seen.get("interval")
        low, high = map(positive, ends) if isinstance(ends, Sequence) and len(ends) == 2 else (None, None)
        if low is None or high is None or not low <= value <= high:
            return Gain(value)
        return Gain(value, low, high)

    def samples(self, id: str, name: str) -> Gain | None:
        """The median of a claim's raw samples called `name`, whichever engine judged it, with its interval."""
        for (found, _), claim in self._claims.items():
            for part in claim["parts"] if found == id else ():
                seen = median_interval(_positives(_mapping(part.get("raw")).get(name)))
                if seen.value is not None and seen.problem is None:
                    return Gain(seen.value, seen.low, seen.high)
        return None

    def request(self, id: str, engines: Sequence[str] = ()) -> tuple[Request, float] | None:
        """A row of any station by its id, with the number of GPUs that served it; of one of `engines` where any are named."""
        named = {engine: cell for (found, engine), cell in self._cells.items() if found == id}
        cell = next((cell for engine, cell in named.items() if engine in engines or not engines), None)
        return (self._request(cell), positive(cell["workload"].get("gpus")) or 1.0) if cell else None

    @cached_property
    def several_gpus(self) -> bool:
        """Whether the run measured what more GPUs do."""
        return any(id.startswith("parallel.") for id, _ in self._cells)

    @cached_property
    def idle_shares(self) -> list[tuple[int, float]]:
        """(prefills in flight through a pipeline, share of the time for which its GPUs idled), fewest in flight first."""
        found = []
        for (id, _), cell in self._cells.items():
            in_flight, share = positive(cell["workload"].get("batch_size")), positive(cell["figures"].get("idle_share"))
            if id.startswith("parallel.in_flight_") and in_flight and share:
                found.append((round(min(in_flight, 1e9)), share))
        return sorted(found)

    def reason(self, id: str, engine: str | None = None) -> str:
        """What a claim's record says beside its figures; "" where it says nothing."""
        return plain(self._claims.get((id, engine or self.engine), {}).get("reason") or "", 120)

    def cell_figures(self, id: str, engines: Iterable[str]) -> dict[str, float]:
        """The positive figures of the first of the engines' cells, {} where there is none."""
        for engine in engines:
            if cell := self._cells.get((id, engine)):
                return {str(name): known for name, value in cell["figures"].items() if (known := positive(value))}
        return {}

    # Bytes ------------------------------------------------------------------------------------------------------------

    @cached_property
    def weight_bytes(self) -> dict[str, float]:
        """Bytes of the weights by precision: as loaded where that was counted, else their storages'; {} without those of
        the precision that isn't quantized."""
        rows = [cell for cell in self._cells.values() if cell["station"] == "quant" and cell["phase"] == "row"]
        for name in ("loaded", "storages"):
            held = {str(row["precision"]): count for row in rows if (count := positive(row["bytes"].get(name)))}
            if set(held) - set(QUANTIZED):
                return held
        return {}

    def weights_s(self, precision: str) -> float | None:
        """Seconds that reading the weights once takes at this machine's bandwidth; a decode step does nothing less."""
        weights = self.weight_bytes.get(precision)
        return weights / self.bandwidth_bytes_per_s if weights and self.bandwidth_bytes_per_s else None

    @property
    def full_precision(self) -> str | None:
        """The precision that isn't quantized."""
        return next((name for name in self.weight_bytes if name not in QUANTIZED), None)

    @cached_property
    def kv_bytes_per_token(self) -> float | None:
        """Bytes that a token takes in the KV cache, as the quantization station computed them."""
        for id in ("quant.chats.nf4", "quant.chats.int8"):
            for (found, _), cell in self._cells.items():
                chat, length = positive(cell["bytes"].get("chat")), positive(cell["workload"].get("prompt_len"))
                if found == id and chat and length:
                    return chat / length
        return None

    @cached_property
    def most_bytes_per_token(self) -> float | None:
        """An upper bound of the same from the peaks of the batching table: KV cache and activations of a row's tokens."""
        rows = [row for row in self.batches(self.engine) if "peak" in row.bytes and row.prompt_len and row.output_len]
        if len(rows) < 2 or rows[-1].bytes["peak"] <= rows[0].bytes["peak"]:
            return None
        first, last = rows[0], rows[-1]
        held = (last.prompt_len or 0) + (last.output_len or 0) - 1
        tokens = (last.batch_size - first.batch_size) * held
        return (last.bytes["peak"] - first.bytes["peak"]) / tokens if tokens > 0 else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
