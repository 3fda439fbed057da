"""A run as run.json keeps it, small but with every kind of figure that the gate judges; to be changed and compared."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.claims import CLAIMS
from benchmarks.estimates import counted, paired_ratio
from benchmarks.ledger import SCHEMA_VERSION, Cell, verdict_record
from benchmarks.verdicts import Setting, judge, not_judged

Run = dict[str, Any]

MACHINE = {
    "device": "cuda",
    "name": "NVIDIA H200",
    "capability": [9, 0],
    "memory_bytes": 150_000_000_000,
    "driver": "570.1",
    "cuda": "13.0",
    "kernel": "6.18-secret",
    "neighbours": [{"pid": 77, "memory_bytes": 2**31}],
    "cpu": {"model": "Some CPU", "cores": 16, "cores_total": 16, "load_1m": 0.4},
    "versions": {"python": "3.11.7", "torch": "2.11.0+cu130", "transformers": "5.24.0"},
    "unavailable": {},
}
RIG = {"name": "qwen2.5", "weights": "trained", "target": "Qwen/Qwen2.5-1.5B", "draft": None, "dtype": "float16"}


def _cell(id: str, phase: str, engine: str = "eager", **known: Any) -> Cell:
    workload = {"name": "1 x 37 tokens", "batch_size": 1, "prompt_len": 37, "output_len": 48}
    lacking = {name: "pretended" for name in ("wall_s", "device_s") if known.get(name) is None}
    return Cell(id, id.split(".")[0], phase, workload, engine, "fp16", unavailable=lacking, **known)


def _cells() -> list[Cell]:
    attention = {"attention": ["flash"], "math_fallback": False}
    over = {"cpu_over_yardstick": 0.85, "cpu_over_yardstick_noise": 0.01, "wall_over_yardstick": 0.9}
    return [
        _cell("batching.1", "row", wall_s=(1.3, 1.4), bytes={"peak": 3e9, "freed": 2e9}, figures={"tpot_s": 0.028}),
        _cell("batching.1.prefill", "prefill", wall_s=(0.1, 0.1), device_s=(0.09,), kernels=attention),
        _cell("batching.1.decode", "decode", wall_s=(0.02, 0.02), device_s=(0.003,)),
        _cell("batching.1.decode", "decode", "graph", device_s=(0.002,)),
        _cell("batching.curve.64", "curve", figures={"tpot_s": 0.03}),
        _cell("quant.quality.nf4", "quality", figures={"kl": 4e-4, "top1_agreement": 0.97}),
        _cell("speculation.with_draft", "row", figures={"acceptance_rate": 0.8}),
        _cell("yardstick.prefill", "prefill", figures=over),
    ]


def some_run() -> Run:
    """A run that is sound in every way."""
    known = Setting(floors={c.noise: 0.02 for c in CLAIMS.values() if c.noise})
    slow, fast = (tuple(base * (1 + 0.001 * (n % 3)) for n in range(20)) for base in (1.0, 0.1))
    claims = [
        verdict_record(judge(CLAIMS["prefix.prefill_1484"], paired_ratio(slow, fast), known), "eager"),
        verdict_record(judge(CLAIMS["prefix.one_word"], counted(0.01), known), "eager"),
        verdict_record(judge(CLAIMS["quant.not_always_faster"], paired_ratio(fast, slow), known), "eager"),
        verdict_record(not_judged(CLAIMS["batching.memory"], "no counter"), "eager"),
    ]
    run = {
        "schema_version": SCHEMA_VERSION,
        "suite_version": "0.1.0",
        "started_at": "2026-11-30T11:35:01+00:00",
        "machine": MACHINE,
        "rig": RIG,
        "engine": "eager",
        "noise_floor": {"prefill_wall": 0.02, "prefill_device": 0.01},
        "calibration": None,
        "cells": [cell.record for cell in _cells()],
        "claims": claims,
    }
    return json.loads(json.dumps(run))  # as it is read back


def entry(run: Run, id: str, engine: str = "eager") -> dict[str, Any]:
    """A claim or cell of a run."""
    return next(e for e in run["claims"] + run["cells"] if (e["id"], e["engine"]) == (id, engine))


def changed(run: Run, change: Callable[[Run], object]) -> Run:
    """A copy of a run after a change."""
    other = copy.deepcopy(run)
    change(other)
    return other


def written(run: object, path: Path) -> Path:
    path.write_text(json.dumps(run), encoding="utf-8")
    return path
