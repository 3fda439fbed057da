"""The cells of a run as CSV, one value a line: for those who plot their own."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.tables import finite, plain

COLUMNS = (
    "machine", "started_at", "station", "cell", "phase", "engine", "precision", "workload", "batch_size", "prompt_len",
    "output_len", "quantity", "round", "value",
)  # fmt: skip
"""`quantity` carries its unit in its name (wall_s, peak_bytes, output_tokens_per_s); `round` counts samples from 1 and is
empty for a figure that a cell has once."""


def cells_csv(runs: Sequence[Mapping[str, Any]]) -> str:
    """All samples, bytes and figures of the runs' cells. What was not measured has no line."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in runs:
        for cell in run["cells"]:
            workload = cell["workload"]
            texts = [
                run["machine"]["name"], run["started_at"], cell["station"], cell["id"], cell["phase"], cell["engine"],
                cell["precision"], workload.get("name"),
            ]  # fmt: skip
            sizes = [finite(workload.get(name)) for name in ("batch_size", "prompt_len", "output_len")]
            where = [*map(_harmless, texts), *("" if size is None else f"{size:.0f}" for size in sizes)]
            writer.writerows([*where, _harmless(name), number, value] for name, number, value in _values(cell))
    return file.getvalue()


def _values(cell: Mapping[str, Any]) -> Iterable[tuple[str, int | str, float]]:
    """(quantity, round, value)"""
    for name in ("wall_s", "device_s"):
        for number, sample in enumerate(cell[name] or (), 1):
            if (value := finite(sample)) is not None:
                yield name, number, value
    if (share := finite(cell["host_bound"])) is not None:
        yield "host_bound", "", share
    for name, held in cell["bytes"].items():
        if (value := finite(held)) is not None:
            yield name if name.endswith("bytes") else f"{name}_bytes", "", value
    for name, figure in cell["figures"].items():
        if (value := finite(figure)) is not None:
            yield name, "", value


def _harmless(text: object) -> str:
    """Text that no spreadsheet takes for a formula: an apostrophe stands before what would begin one."""
    shown = plain("" if text is None else text)
    return f"'{shown}" if shown[:1] in ("=", "+", "-", "@", "'") else shown
