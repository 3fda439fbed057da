"""run.json: every cell and every verdict, written as it comes, so that a killed run keeps what it measured."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import SUITE_VERSION
from benchmarks.claims import Verdict

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Cell:
    """One measured place of a table: a phase of a station under a workload.

    Samples are seconds, one a round. `device_s` is the time that the card was busy, None with the reason in
    `unavailable`. `bytes` and `figures` are named numbers; `kernels` what attention ran, from a trace of the very
    call. A None anywhere has its reason in `unavailable`, under the field's name.
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

    @property
    def host_bound(self) -> float | None:
        """Share of the wait during which the card was idle: 1 - device_s / wall_s, over the medians."""
        if not self.wall_s or not self.device_s:
            return None
        return max(0.0, 1 - _median(self.device_s) / _median(self.wall_s))

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
            "unavailable": dict(self.unavailable),
            "note": self.note,
        }


def _median(values: tuple[float, ...]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


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


class Ledger:
    """The run so far. Nothing is written before the first cell or verdict, and the run before is kept beside it.

    Writes are whole or not at all: a new file is moved over the old one.
    """

    def __init__(self, folder: Path, machine: Mapping[str, object], rig: Mapping[str, object], engine: str) -> None:
        self.folder = folder
        self.engine = engine
        self.verdicts: list[Verdict] = []
        self.run: dict[str, object] = {
            "schema_version": SCHEMA_VERSION,
            "suite_version": SUITE_VERSION,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": dict(machine),
            "rig": dict(rig),
            "engine": engine,
            "noise_floor": {},
            "calibration": None,
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

    def verdict(self, verdict: Verdict) -> None:
        self.verdicts = [v for v in self.verdicts if v.claim.id != verdict.claim.id] + [verdict]
        self._replace("claims", verdict_record(verdict, self.engine))

    def note(self, key: str, value: object) -> None:
        """A top-level entry of the run, such as the machine's state afterwards."""
        self.run[key] = value
        self._write()

    def _replace(self, key: str, record: dict[str, object]) -> None:
        """A cell or claim measured twice in a session (a rerun) stands once, as measured last."""
        entries = self.run[key]
        assert isinstance(entries, list)
        entries[:] = [e for e in entries if e["id"] != record["id"]] + [record]
        self._write()

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.begun and self.path.exists():
            os.replace(self.path, self.previous_path)
        self.begun = True
        write_json(self.path, self.run)


def write_json(path: Path, value: object) -> None:
    """Strict JSON, whole or not at all; a number that JSON has no word for becomes null."""
    text = json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text + "\n", encoding="utf-8")
    os.replace(fresh, path)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
