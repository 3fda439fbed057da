"""run.json: every cell and every verdict, written as it comes, so that a killed run keeps what it measured."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from benchmarks import SUITE_VERSION
from benchmarks.verdicts import Verdict, Word

SCHEMA_VERSION = 1

HOST_BOUND = 0.5
"""Whatever takes more than half of a wait names what holds it back: no change elsewhere can halve the wait then, and a change
there might."""


@dataclass(frozen=True)
class Cell:
    """One measured place of a table: a phase of a station under a workload.

    Samples are seconds, one a round. `device_s` is the time that the card was busy, None with the reason in
    `unavailable`. `bytes` and `figures` are named numbers; `kernels` what attention ran, from a trace of the very
    call. A None anywhere has its reason in `unavailable`, under the field's name; one without raises ValueError.
    """

    id: str
    station: str
    phase: str
    workload: Mapping[str, object]
    engine: str
    precision: str
    wall_s: tuple[float, ...] | None = None
    device_s: tuple[float, ...] | None = None
    bytes: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    kernels: Mapping[str, object] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("wall_s", "device_s"):
            if getattr(self, name) is None and not self.unavailable.get(name):
                raise ValueError(f"cell {self.id} has no {name} and `unavailable` no reason for it")

    @property
    def host_bound(self) -> float | None:
        """Share of the wait during which the card was idle: 1 - device_s / wall_s, over the medians."""
        if not self.wall_s or not self.device_s or median(self.wall_s) <= 0:
            return None
        return max(0.0, 1 - median(self.device_s) / median(self.wall_s))

    @property
    def _reasons(self) -> dict[str, str]:
        """Why each null of the record is one: `unavailable`, and what follows from it and from the samples."""
        odd = {n: v for n, v in {**self.bytes, **self.figures}.items() if not math.isfinite(v)}
        reasons = dict(self.unavailable) | {name: f"the figure was {value}" for name, value in odd.items()}
        if self.host_bound is None:
            why = self.unavailable.get("device_s") or self.unavailable.get("wall_s") or "the clock stood still"
            reasons.setdefault("host_bound", why)
        return reasons

    @property
    def record(self) -> dict[str, object]:
        return {
            "id": self.id,
            "station": self.station,
            "phase": self.phase,
            "workload": dict(self.workload),
            "engine": self.engine,
            "precision": self.precision,
            "wall_s": list(self.wall_s) if self.wall_s is not None else None,
            "device_s": list(self.device_s) if self.device_s is not None else None,
            "host_bound": self.host_bound,
            "bytes": dict(self.bytes),
            "figures": dict(self.figures),
            "kernels": dict(self.kernels),
            "unavailable": self._reasons,
            "note": self.note,
        }


def verdict_record(verdict: Verdict, engine: str) -> dict[str, object]:
    """A claim as run.json keeps it; the deciding part's figures stand at the top, all parts below them."""
    deciding = verdict.deciding
    observed = deciding.observed if deciding else None
    return {
        "id": verdict.claim.id,
        "station": verdict.claim.station,
        "statement": verdict.claim.statement,
        "engine": engine,
        "verdict": str(verdict.word),
        "required": verdict.claim.required,
        "observed": observed.value if observed else None,
        "interval": [observed.low, observed.high] if observed else None,
        "unit": deciding.unit if deciding else None,
        "n": observed.n if observed else 0,
        "reason": verdict.reason,
        "t4": verdict.claim.t4,
        "parts": [
            {
                "what": part.what,
                "required": part.required,
                "verdict": str(part.verdict),
                "observed": part.observed.value,
                "interval": [part.observed.low, part.observed.high],
                "unit": part.unit,
                "n": part.observed.n,
                "raw": {name: list(values) for name, values in part.observed.raw.items()},
                "problem": part.observed.problem,
            }
            for part in verdict.parts
        ],
    }


class NotWritten(OSError):
    """The report folder doesn't take the run; the message is one line. What was measured is still in `Ledger.run`."""


class Ledger:
    """The run so far. Nothing is written before the first cell or verdict, and the run before is kept beside it.

    Writes are whole or not at all: a new file is moved over the old one. Every method that records raises NotWritten.
    """

    def __init__(self, folder: Path, machine: Mapping[str, object], rig: Mapping[str, object], engine: str) -> None:
        self.folder = folder
        self.run: dict[str, object] = {
            "schema_version": SCHEMA_VERSION,
            "suite_version": SUITE_VERSION,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": dict(machine),
            "rig": dict(rig),
            "engine": engine,
            "noise_floor": {},
            "calibration": None,
            "unavailable": {"calibration": "no claim that rests on this suite's own clock was judged"},
            "cells": [],
            "claims": [],
        }
        self.begun = False

    @property
    def path(self) -> Path:
        return self.folder / "run.json"

    @property
    def previous_path(self) -> Path:
        """Where the run that stood in `path` is kept once this one has begun."""
        return self.folder / "run.previous.json"

    def cell(self, cell: Cell) -> None:
        self._replace("cells", cell.record)

    def verdict(self, verdict: Verdict, engine: str) -> None:
        record = verdict_record(verdict, engine)
        self._replace("claims", record | {"disagreement": self._disagreement(record)})

    def _disagreement(self, record: Mapping[str, object]) -> str | None:
        """Why this verdict is another than the eager engine's, from how long the card was idle in eager decode; None
        where the two agree, or one of them decides nothing."""
        claims, cells = self.run["claims"], self.run["cells"]
        assert isinstance(claims, list)
        assert isinstance(cells, list)
        words = {record["verdict"]} | {
            c["verdict"] for c in claims if c["id"] == record["id"] and c["engine"] == "eager"
        }
        if record["engine"] == "eager" or words != {str(Word.HOLDS), str(Word.REFUTED)}:
            return None
        steps = [c for c in cells if c["engine"] == "eager" and c["phase"] == "decode" and c["host_bound"] is not None]
        own = [c for c in steps if c["station"] == record["station"]] or steps
        if not own:
            return "the engines disagree, and no trace says how long the card was idle"
        idle = median(tuple(c["host_bound"] for c in own))
        if idle < HOST_BOUND:
            return f"in an eager step the card is idle {idle:.0%} of the time: what differs is the kernels"
        return f"in an eager step the card waits for the host {idle:.0%} of the time, which hides what a replay shows"

    def note(self, key: str, value: object) -> None:
        """A top-level entry of the run, such as the machine's state afterwards."""
        self.run[key] = value
        self._write()

    def _replace(self, key: str, record: dict[str, object]) -> None:
        """A cell or claim measured twice in a session (a rerun) stands once an engine, as measured last."""
        entries = self.run[key]
        assert isinstance(entries, list)
        same = (record["id"], record["engine"])
        entries[:] = [e for e in entries if (e["id"], e["engine"]) != same] + [record]
        self._write()

    def _write(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self.begun and self.path.exists():
                os.replace(self.path, self.previous_path)
            self.begun = True
            write_json(self.path, self.run)
        except OSError as error:
            raise NotWritten(f"the report can't be written: {error}; make room or name another --report") from error


def write_json(path: Path, value: object) -> None:
    """Strict JSON, whole or not at all; a number that JSON has no word for becomes null."""
    text = json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """A text file, whole or not at all: a new one is moved over the old. What fails leaves nothing behind, and half a
    character (a lone surrogate, such as a file's name may hold) becomes "?"."""
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_text(text, encoding="utf-8", errors="replace")
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
