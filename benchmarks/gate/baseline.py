"""Baselines: what was accepted for a machine, read from files that nobody vouches for.

A baseline is a run.json of which only the fields that the gate and a card need were kept. `accept` (accept.py) writes
them, the gate compares with them.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.run_file import RunFileError, read_run
from benchmarks.series import ARTICLE
from benchmarks.tables import finite, plain
from benchmarks.verdicts import Word

CARDS = Path(__file__).parents[1] / "cards"
"""The baselines that come with the suite, one a card."""

Run = Mapping[str, Any]
"""A run as run.json keeps it."""


# Reading --------------------------------------------------------------------------------------------------------------

NOISIEST = 0.5
"""A noise floor above this would let any loss pass for noise."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._,'+:/-]{0,99}")
"""Names of claims, cells, engines (an endpoint's is its address) and figures."""


def read_baseline(path: Path) -> dict[str, Any]:
    """The baseline in a file. Raises RunFileError, in one line, for whatever can't be gated against: what is no whole
    run.json, a figure below zero, a name with markup, a noise floor that would hide any loss, a verdict without its
    figure, and the article's published figures, which are no run."""
    refuse_article(path)
    run = read_run(path)
    try:
        gateable(run)
    except RunFileError as error:
        raise RunFileError(f"{plain(path, 120)} is no baseline: {error}") from None
    return run


def refuse_article(path: Path) -> None:
    """Raises RunFileError for the file of the article's figures."""
    if os.path.realpath(path) == os.path.realpath(ARTICLE):  # Path.resolve raises on links that run in a circle
        name = f"{ARTICLE.stem}-run.json"
        raise RunFileError(
            f"{plain(path, 120)} is no baseline but the article's figures; a run of that card goes to {name}"
        )


def known_at(path: Path) -> dict[str, Any] | None:
    """The baseline at a path, None where there is none yet. Raises RunFileError for one that can't be gated against, and for a
    path at which there never can be one: what is done for it would be for nothing."""
    try:
        nearest = next(parent for parent in path.absolute().parents if parent.exists())
        if path.is_symlink():
            path.stat()  # a link to nothing or in a circle raises: accept would put a file in its place
        there = path.exists()
    except OSError as error:
        raise RunFileError(f"{plain(path, 120)} can't be written: {error.strerror}; name another file") from None
    if not nearest.is_dir():
        raise RunFileError(f"{plain(path, 120)} can't be written: {nearest} is no folder; name another file")
    return read_baseline(path) if there else None


def gateable(run: Run) -> None:
    """Raises RunFileError, in one line, for the first thing in a run that the gate can't rest on."""
    for name, floor in run.get("noise_floor", {}).items():
        _named(name, "a noise floor's name")
        if floor is not None and not 0 <= floor <= NOISIEST:
            raise RunFileError(f"noise_floor.{plain(name, 40)} is {floor:g}; one is a share from 0 to {NOISIEST:g}")
    for kind in ("claims", "cells"):
        for n, entry in enumerate(run[kind]):
            for field in ("id", "engine", "station"):
                _named(entry[field], f"{kind}[{n}].{field}")
    for claim in run["claims"]:
        if len({part["what"] for part in claim["parts"]}) < len(claim["parts"]):
            raise RunFileError(f"claim {claim['id']} has two parts of one name")
        _claim(claim)
    for cell in run["cells"]:
        _cell(cell)


def _claim(claim: Run) -> None:
    decided = (Word.HOLDS, Word.REFUTED)
    if claim["verdict"] in decided and not claim["parts"]:
        raise RunFileError(f"claim {claim['id']} has a verdict and nothing that was judged")
    for part in claim["parts"]:
        where = f"{plain(part['what'], 60)!r} of claim {claim['id']}"
        known = [finite(value) for value in (part["observed"], *(part["interval"] or (None, None)))]
        observed, low, high = known
        if None in known and (claim["verdict"] == Word.HOLDS or part["verdict"] in decided):
            raise RunFileError(f"{where} is decided, yet it has no figure with an interval")
        if low is not None and high is not None and (observed is None or not low <= observed <= high):
            raise RunFileError(f"{where} has an interval that doesn't hold what was observed")


def _cell(cell: Run) -> None:
    for name in ("wall_s", "device_s"):
        if any(value is None or value < 0 for value in cell[name] or ()):
            raise RunFileError(f"cell {cell['id']} has a time in {name} that is none, or below zero")
    for group in ("bytes", "figures"):
        for name, value in cell[group].items():
            _named(name, f"a name in {group} of cell {cell['id']}")
            if isinstance(value, bool):
                raise RunFileError(f"cell {cell['id']} has true or false where {group}.{name} is a number")
            counted = group == "bytes" or name.endswith(("_s", "_noise", "_bytes"))
            if value is not None and value < 0 and counted and not name.startswith("added_"):  # a difference may be
                raise RunFileError(f"cell {cell['id']} has {group}.{name} below zero: {value:g}")
            if value is not None and name.endswith("_noise") and value > NOISIEST:
                raise RunFileError(f"cell {cell['id']} has {name} {value:g}, which would hide any loss")
    for name, ran in cell["kernels"].items():
        _named(name, f"a name in kernels of cell {cell['id']}")
        if not isinstance(ran, str | bool | int | list | dict | None):
            raise RunFileError(f"cell {cell['id']} has something in kernels.{name} that names no kernel")


def _named(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise RunFileError(f"{plain(where, 80)} is no name: {plain(name, 40)!r}")


# Like with like -------------------------------------------------------------------------------------------------------

MEMORY_SHARE = 0.05
"""How much the memory of equal cards may differ: drivers keep some of it, and a slice of a card has half or less."""


def unlike(run: Run, baseline: Run) -> list[str]:
    """Why the two must not be compared, one line each; empty for runs of one kind of machine, rig and engine."""
    pairs: list[tuple[str, object, object]] = [
        (name, run["machine"].get(name), baseline["machine"].get(name)) for name in ("device", "name", "capability")
    ]
    if run["machine"]["device"] == "cpu":
        pairs.append(("cores", _cores(run), _cores(baseline)))
    else:
        pairs.append(("number of GPUs", run["machine"].get("gpus") or 1, baseline["machine"].get("gpus") or 1))
    pairs += [
        ("rig" if name == "name" else f"the rig's {name}", run["rig"][name], baseline["rig"][name])
        for name in ("name", "weights", "dtype", "target", "draft")
    ]
    pairs.append(("engine", run["engine"], baseline["engine"]))
    said = [
        f"{what} is {shown(here)} here, {shown(there)} in the baseline"
        for what, here, there in pairs
        if _plain_value(here) != _plain_value(there)
    ]
    here, there = (finite(one["machine"]["memory_bytes"]) for one in (run, baseline))
    if here is None or there is None or abs(here - there) > MEMORY_SHARE * here:
        said.append(f"memory is {_gib(here)} here, {_gib(there)} in the baseline")
    return said


def _cores(run: Run) -> object:
    cpu = run["machine"].get("cpu")
    return cpu.get("cores") if isinstance(cpu, Mapping) else None


def _plain_value(value: object) -> object:
    """A tuple and the list that JSON makes of it are one."""
    return list(value) if isinstance(value, tuple) else value


def shown(value: object) -> str:
    """A value of a run for a reader: '9.0' for (9, 0), 'none' for None."""
    if isinstance(value, list | tuple):
        return plain(".".join(map(str, value)), 60)
    return "none" if value is None else plain(value, 60)


def _gib(value: float | None) -> str:
    return "unknown" if value is None else f"{value / 2**30:.1f} GiB"


def other_software(run: Run, baseline: Run) -> list[str]:
    """One line for each program that is not the baseline's: figures are compared all the same."""
    here, there = (
        {"driver": one["machine"].get("driver"), "CUDA": one["machine"].get("cuda"), **one["machine"]["versions"]}
        for one in (run, baseline)
    )
    return [
        f"{plain(name, 40)} is {shown(here.get(name))} here, {shown(there.get(name))} in the baseline"
        for name in dict.fromkeys([*there, *here])
        if here.get(name) != there.get(name)
    ]


def find(run: Run, folder: Path) -> Path | None:
    """The baseline of this machine, rig and engine in a folder, None where there is none; never the article's figures.
    Raises RunFileError for a file that can't be read or gated against, and where two would do."""
    files = [path for path in sorted(folder.glob("*.json")) if path.name != ARTICLE.name]
    found = [path for path in files if not unlike(run, read_baseline(path))]
    if len(found) > 1:
        raise RunFileError(f"{found[0].name} and {found[1].name} are both of this machine and rig: name one of them")
    return found[0] if found else None


def card_path(run: Run, folder: Path) -> Path:
    """Where the baseline of a run goes: the file that find() finds, else the first of its names that is free. Raises
    RunFileError as find() does."""
    free = (path for name in _names(run) if not os.path.lexists(path := folder / f"{name}.json"))
    return find(run, folder) or next(free)


def _names(run: Run) -> Iterator[str]:
    """'nvidia-h200', 'nvidia-h200-own-trained', 'nvidia-h200-own-trained-2' and so on; of two GPUs 'nvidia-h200-x2'.
    'tesla-t4' is the article's, so there it is 'tesla-t4-run'."""
    machine, rig = run["machine"], run["rig"]
    gpus = machine.get("gpus") or 1
    card = _stem(machine["name"] or machine["device"], f"x{gpus}" if gpus > 1 else "")
    yield f"{card}-run" if card == ARTICLE.stem else card
    longer = f"{card}-{_stem(rig['name'], rig['weights'])}"
    yield longer
    yield from (f"{longer}-{n}" for n in itertools.count(2))


def _stem(*texts: str) -> str:
    """Lower-case letters and digits of texts, joined by "-"; "machine" where there are none."""
    return "-".join(re.findall(r"[a-z0-9]+", " ".join(plain(text, 60) for text in texts).lower())) or "machine"


# What is kept ---------------------------------------------------------------------------------------------------------

_MACHINE = (
    "device", "name", "gpus", "capability", "memory_bytes", "driver", "cuda", "clocks_mhz", "throttle_reasons", "power_w",
    "power_limit_w", "power_limit_default_w", "temperature_c", "temperature_slowdown_c", "mig", "mig_profile", "versions",
    "architecture",
)  # fmt: skip
"""What of the machine is kept: no neighbours with their process ids, no kernel, no load."""

_CPU = ("model", "cores", "cores_total")
_RIG = ("name", "weights", "target", "draft", "dtype")
_CLAIM = (
    "id",
    "station",
    "statement",
    "engine",
    "verdict",
    "required",
    "observed",
    "interval",
    "unit",
    "n",
    "reason",
    "t4",
)
_PART = ("what", "required", "verdict", "observed", "interval", "unit", "n", "problem")
_CELL = (
    "id", "station", "phase", "engine", "precision", "wall_s", "device_s", "host_bound", "bytes", "figures", "unavailable",
)  # fmt: skip
_WORKLOAD = ("batch_size", "prompt_len", "output_len", "gpus")
_KERNELS = ("attention", "prefill", "decode", "verify", "draft prefill", "draft decode", "allowed", "math_fallback")


def kept(run: Run) -> dict[str, Any]:
    """A run with nothing in it but what the gate and a card need: no prompts, answers, samples of claims, process ids
    or anything that a field of another name holds, and no noise floor of a day on which nothing could be seen."""
    machine = {name: run["machine"].get(name) for name in _MACHINE}
    cpu = run["machine"].get("cpu")
    machine["cpu"] = {name: cpu.get(name) if isinstance(cpu, Mapping) else None for name in _CPU} | {"load_1m": None}
    machine |= {"neighbours": None, "os": None, "kernel": None}
    lacking = run["machine"].get("unavailable")
    machine["unavailable"] = {
        **{name: plain(why) for name, why in (lacking if isinstance(lacking, Mapping) else {}).items()},
        **dict.fromkeys(("neighbours", "os", "kernel", "cpu.load_1m"), "not kept in a baseline"),
    }
    return {
        "schema_version": run["schema_version"],
        "suite_version": run["suite_version"],
        "started_at": run["started_at"],
        "machine": machine,
        "rig": _only(run["rig"], _RIG),
        "engine": run["engine"],
        "noise_floor": {name: floor for name, floor in run.get("noise_floor", {}).items() if (floor or 0) <= NOISIEST},
        "cells": [_kept_cell(cell) for cell in run["cells"]],
        "claims": [
            _only(claim, _CLAIM) | {"parts": [_only(part, _PART) for part in claim["parts"]]} for claim in run["claims"]
        ],
    }


def _only(record: Run, names: Iterable[str]) -> dict[str, Any]:
    return {name: record.get(name) for name in names}


def _kept_cell(cell: Run) -> dict[str, Any]:
    kept_cell = _only(cell, _CELL) | {"note": ""}
    kept_cell["workload"] = _only(cell["workload"], _WORKLOAD)
    name = cell["workload"].get("name")
    if isinstance(name, str) and not _users_own(name):
        kept_cell["workload"]["name"] = plain(name, 60)
    kept_cell["kernels"] = {name: ran for name, ran in cell["kernels"].items() if name in _KERNELS}
    return kept_cell


def _users_own(name: str) -> bool:
    """Whether a workload is called by a question that isn't the suite's own."""
    side, colon, question = name.partition(": ")
    return bool(colon) and side in ("full", "cached") and question not in workloads.SUFFIXES
