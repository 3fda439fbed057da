"""Reading a run.json that may come from anybody: refused is what is no run, what would not fit, and what no figure can be."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ledger import SCHEMA_VERSION
from benchmarks.tables import LABELS, plain
from benchmarks.verdicts import Word

LONGEST_BYTES = 64 * 2**20
LONGEST_LIST = 20_000
DEEPEST = 16
MOST_GPUS = 10_000
SMALLEST, LARGEST = 1e-100, 1e100
"""Sizes between which every figure other than 0 lies: products and quotients of a few of them stay finite."""


class RunFileError(Exception):
    """A file that is no run, in one line that says what is wrong with it."""


def read_run(path: Path) -> dict[str, Any]:
    """The run in a run.json, with every field that a card needs checked. Raises RunFileError."""
    name = plain(path, 120)
    try:
        if path.is_fifo() and not path.is_relative_to(
            "/dev"
        ):  # as a shell's <(...) is; others wait for whoever writes to them
            raise RunFileError(f"{name} is a pipe: save what comes from it to a file first")
        with path.open("rb") as file:
            content = file.read(LONGEST_BYTES + 1)
    except OSError as error:
        raise RunFileError(f"{name} can't be read: {error.strerror or error}") from None
    if len(content) > LONGEST_BYTES:
        raise RunFileError(f"{name} is larger than {LONGEST_BYTES // 2**20} MiB: no run.json of this suite is")
    try:
        run = json.loads(content.decode("utf-8-sig"), parse_constant=_no_number)
    except RecursionError:
        raise RunFileError(f"{name} is nested too deeply to be a run.json") from None
    except RunFileError as error:
        raise RunFileError(f"{name}: {error}") from None
    except ValueError as error:
        raise RunFileError(f"{name} is not whole JSON: {plain(error, 120)}") from None
    try:
        return _checked(run)
    except RunFileError as error:
        raise RunFileError(f"{name}: {error}") from None


def _no_number(word: str) -> float:
    raise RunFileError(f"{word} is no number; figures that are missing are null")


_TEXT = (str,)
_TEXT_OR_NONE = (str, type(None))
_NUMBER_OR_NONE = (int, float, type(None))

_RUN: Mapping[str, tuple[type, ...]] = {
    "suite_version": _TEXT,
    "started_at": _TEXT,
    "machine": (dict,),
    "rig": (dict,),
    "engine": _TEXT,
    "cells": (list,),
    "claims": (list,),
}
_RIG = {"name": _TEXT, "weights": _TEXT, "target": _TEXT, "draft": _TEXT_OR_NONE, "dtype": _TEXT}
_MACHINE = {"device": _TEXT, "name": _TEXT_OR_NONE, "memory_bytes": _NUMBER_OR_NONE, "versions": (dict,)}
_CLAIM = {
    "id": _TEXT,
    "station": _TEXT,
    "statement": _TEXT,
    "engine": _TEXT,
    "verdict": _TEXT,
    "required": _TEXT,
    "observed": _NUMBER_OR_NONE,
    "interval": (list, type(None)),
    "unit": _TEXT_OR_NONE,
    "reason": _TEXT,
    "t4": _TEXT_OR_NONE,
    "parts": (list,),
}
_PART = {name: _CLAIM[name] for name in ("verdict", "required", "observed", "interval", "unit")} | {
    "what": _TEXT,
    "problem": _TEXT_OR_NONE,
}
_CELL: Mapping[str, tuple[type, ...]] = {
    "id": _TEXT,
    "station": _TEXT,
    "phase": _TEXT,
    "workload": (dict,),
    "engine": _TEXT,
    "precision": _TEXT,
    "wall_s": (list, type(None)),
    "device_s": (list, type(None)),
    "host_bound": _NUMBER_OR_NONE,
    "bytes": (dict,),
    "figures": (dict,),
    "kernels": (dict,),
    "unavailable": (dict,),
    "note": _TEXT,
}


def _checked(run: Any) -> dict[str, Any]:
    """`run`, once all that a card reads of it has the right type and a sane size. Raises RunFileError."""
    if not isinstance(run, dict) or "schema_version" not in run:
        raise RunFileError("not a run.json: it has no schema_version")
    version = run["schema_version"]
    if isinstance(version, int) and not isinstance(version, bool) and version > SCHEMA_VERSION:
        made = f"schema_version {plain(version, 20)}, known is {SCHEMA_VERSION}"
        raise RunFileError(f"made by a newer suite ({made}): update this one")
    if version != SCHEMA_VERSION or isinstance(version, bool | float):
        raise RunFileError(f"schema_version is {plain(json.dumps(version), 40)}; this suite reads {SCHEMA_VERSION}")
    _sane(run)
    _fields(run, _RUN, "the run")
    _fields(run["rig"], _RIG, "rig")
    for when in ("machine", "machine_after"):
        if when == "machine" or run.get(when) is not None:
            _fields(_is(run[when], (dict,), when), _MACHINE, when)
            _all(run[when]["versions"].values(), _TEXT_OR_NONE, f"{when}.versions")
            gpus = _is(run[when].get("gpus"), (int, type(None)), f"{when}.gpus")
            if gpus is not None and not 0 <= gpus <= MOST_GPUS:
                raise RunFileError(f"{when}.gpus is {gpus}, no number of GPUs")
    _all(_is(run.get("noise_floor", {}), (dict,), "noise_floor").values(), _NUMBER_OR_NONE, "noise_floor")
    for n, claim in enumerate(run["claims"]):
        where = f"claims[{n}]"
        _judged(_is(claim, (dict,), where), _CLAIM, where)
        _is(claim.get("disagreement"), _TEXT_OR_NONE, f"{where}.disagreement")
        for m, part in enumerate(claim["parts"]):
            _judged(_is(part, (dict,), f"{where}.parts[{m}]"), _PART, f"{where}.parts[{m}]")
    for n, cell in enumerate(run["cells"]):
        where = f"cells[{n}]"
        _fields(_is(cell, (dict,), where), _CELL, where)
        for name in ("figures", "bytes"):
            _all(cell[name].values(), (*_NUMBER_OR_NONE, bool), f"{where}.{name}")
        for name in ("wall_s", "device_s"):
            _all(cell[name] or (), _NUMBER_OR_NONE, f"{where}.{name}")
        _all(cell["unavailable"].values(), _TEXT_OR_NONE, f"{where}.unavailable")
        _all(map(cell["workload"].get, LABELS), (*_NUMBER_OR_NONE, str), f"{where}.workload")
        if max(map(len, (cell["figures"], cell["bytes"], cell["unavailable"], cell["kernels"]))) > 200:
            raise RunFileError(f"{where} has more than 200 figures")
    for kind in ("claims", "cells"):
        _once(run[kind], kind)
    return run


def _once(records: Sequence[Mapping[str, Any]], where: str) -> None:
    """A claim or cell is known by its id and engine: of two such ones, nobody could say which counts."""
    seen: dict[tuple[str, str], int] = {}
    for n, record in enumerate(records):
        first = seen.setdefault((record["id"], record["engine"]), n)
        if first != n:
            which = f"{plain(record['id'], 60)} of engine {plain(record['engine'], 40)}"
            raise RunFileError(f"{where}[{first}] and {where}[{n}] are both {which}: each stands once")


def _sane(run: object) -> None:
    """Every number of a size that figures have, no list endless, nothing nested deeper than a run is."""
    level = [run]
    for _ in range(DEEPEST):
        below: list[object] = []
        for value in level:
            if isinstance(value, float) and value and not SMALLEST <= abs(value) <= LARGEST:
                raise RunFileError(f"a number in it is too large or too small to be a figure, {value:g}")
            if isinstance(value, int) and abs(value) > 2**63:
                raise RunFileError("a whole number in it has more than 64 bits")
            if isinstance(value, dict | list):
                if len(value) > LONGEST_LIST:
                    raise RunFileError(f"a list in it has more than {LONGEST_LIST:,} entries")
                below += value.values() if isinstance(value, dict) else value
        if not below:
            return
        level = below
    raise RunFileError("nested too deeply to be a run.json")


def _is(value: Any, kinds: tuple[type, ...], where: str) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        words = {"dict": "an object", "list": "a list", "str": "text", "NoneType": "null", "bool": "true or false"}
        wanted = " or ".join(dict.fromkeys(words.get(kind.__name__, "a number") for kind in kinds))
        raise RunFileError(f"{plain(where, 80)} must be {wanted}, not {plain(json.dumps(value), 40)}")
    return value


def _all(values: Iterable[Any], kinds: tuple[type, ...], where: str) -> None:
    for value in values:
        _is(value, kinds, f"each of {where}")


def _fields(record: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]], where: str) -> None:
    for name, kinds in fields.items():
        if name not in record:
            raise RunFileError(f"{where} has no {name}")
        _is(record[name], kinds, f"{where}.{name}" if where != "the run" else name)


def _judged(record: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]], where: str) -> None:
    _fields(record, fields, where)
    if record["verdict"] not in list(Word):
        raise RunFileError(f"{where}.verdict {plain(record['verdict'], 40)!r} is none of {', '.join(Word)}")
    if record["interval"] is not None:
        if len(record["interval"]) != 2:
            raise RunFileError(f"{where}.interval must be null or [low, high]")
        _all(record["interval"], _NUMBER_OR_NONE, f"{where}.interval")
