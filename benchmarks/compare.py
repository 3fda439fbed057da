"""python -m benchmarks compare: runs or cards side by side, whatever machines they are of.

Of every figure that two or more of them have it shows the values and the ratio to the first column that has it, and of
the claims those whose verdicts differ.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gate import Key
from benchmarks.gate.rules import figures
from benchmarks.report import STATIONS, escaped, markdown_table, table_lines, wrapped
from benchmarks.run_file import read_run
from benchmarks.tables import MISSING, Table, finite, plain
from benchmarks.verdicts import Word, format_figure

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Runs side by side: a line about each column, then tables; every text is plain."""

    columns: tuple[str, ...]
    tables: tuple[Table, ...]
    remarks: tuple[str, ...]


def compare(runs: Mapping[str, Run]) -> Comparison:
    """Two or more runs by file name, in the order of the columns."""
    names = [plain(run["machine"]["name"] or "no name", 40) for run in runs.values()]
    counts = Counter(names)
    heads = [
        name if counts[name] == 1 else f"{name} ({plain(Path(file).stem, 30)})"
        for name, file in zip(names, runs, strict=True)
    ]
    if len(set(heads)) < len(heads):
        heads = [f"{n}: {head}" for n, head in enumerate(heads, start=1)]
    about = tuple(_about(head, file, run) for head, (file, run) in zip(heads, runs.items(), strict=True))
    sides = list(runs.values())
    differing, remarks = _verdicts(sides, heads)
    stations, alone = _stations(sides, heads)
    remarks += [f"{n} figures only in {head}" for head, n in zip(heads, alone, strict=True) if n]
    return Comparison(about, (*differing, *stations), tuple(remarks))


def _about(head: str, file: str, run: Run) -> str:
    rig = run["rig"]
    words = [rig["name"], f"{rig['weights']} weights", rig["dtype"], f"{run['engine']} engine", f"torch {_torch(run)}"]
    return f"{head}: {plain(file, 120)}, {', '.join(plain(word, 40) for word in words)}"


def _torch(run: Run) -> str:
    return str(run["machine"]["versions"].get("torch") or "unknown")


def _by_key(entries: Iterable[Run]) -> dict[Key, Run]:
    return {(entry["id"], entry["engine"]): entry for entry in entries}


def _called(key: Key, keys: Iterable[Key]) -> str:
    """A claim's or cell's id, with its engine where the id alone doesn't tell it from another."""
    several = sum(id == key[0] for id, _ in keys) > 1
    return plain(f"{key[0]} ({key[1]})" if several else key[0], 60)


def _verdicts(runs: Sequence[Run], heads: Sequence[str]) -> tuple[list[Table], list[str]]:
    """A table of the claims that two runs judged differently, none where all agree, and a remark on the others."""
    sides = [_by_key(run["claims"]) for run in runs]
    keys = list(dict.fromkeys(key for side in sides for key in side))
    rows, same, partly = [], 0, []
    for key in keys:
        claims = [side.get(key) for side in sides]
        words = [claim["verdict"] for claim in claims if claim is not None and claim["verdict"] != Word.NOT_JUDGED]
        if len(set(words)) > 1:
            rows.append((_called(key, keys), *map(_verdict, claims)))
        elif len(words) == len(runs):
            same += 1
        elif words:
            partly.append(_called(key, keys))
    columns = ("claim", *heads)
    remarks = [f"{same} claims have the same verdict in all of them"] if same else []
    remarks += [f"judged by some of them only: {', '.join(partly)}"] if partly else []
    return ([Table("verdicts that differ", columns, ("",) * len(columns), 1, tuple(rows))] if rows else []), remarks


def _verdict(claim: Run | None) -> str:
    if claim is None:
        return MISSING
    value = finite(claim["observed"])
    seen = "" if value is None else f" {format_figure(value, plain(claim['unit'] or '', 12))}"
    return f"{claim['verdict']}{seen}"


def _stations(runs: Sequence[Run], heads: Sequence[str]) -> tuple[list[Table], list[int]]:
    """A table a station, and for each run the number of figures that it alone has."""
    sides = [_by_key(run["cells"]) for run in runs]
    keys = list(dict.fromkeys(key for side in sides for key in side))
    alone = [0] * len(runs)
    rows: dict[str, list[tuple[str, ...]]] = {}
    for key in keys:
        cells = [side.get(key) for side in sides]
        measured = [figures(cell) if cell is not None else {} for cell in cells]
        for name in dict.fromkeys(name for one in measured for name in one):
            values = [one.get(name) for one in measured]
            have = [n for n, value in enumerate(values) if value is not None]
            if len(have) == 1:
                alone[have[0]] += 1
            elif not name.startswith("kernels.") or len({str(values[n]) for n in have}) > 1:
                station = plain(next(cell["station"] for cell in cells if cell is not None), 40)
                row = (_called(key, keys), plain(name.split(".")[-1], 40), *_beside(name, values))
                rows.setdefault(station, []).append(row)
    order = [*STATIONS, *rows]
    columns = ("cell", "figure", *heads)
    return [
        Table(STATIONS.get(name, name), columns, ("",) * len(columns), 2, tuple(rows[name]))
        for name in sorted(rows, key=order.index)
    ], alone


def _beside(name: str, values: Sequence[float | str | None]) -> list[str]:
    """Values of one figure, each after the first with its ratio to that."""
    shown: list[str] = []
    first: float | None = None
    for value in values:
        if value is None or isinstance(value, str):
            shown.append(plain(value or MISSING, 40))
        elif first is None:
            first = value
            shown.append(_amount(name, value))
        else:
            ratio = f" ({format_figure(value / first, 'x')})" if first else ""
            shown.append(_amount(name, value) + ratio)
    return shown


_UNITS = (
    ("bytes_per_s", 2**30, "GiB/s"),
    ("_per_s", 1, "/s"),
    ("_s", 1e-3, "ms"),
    ("flops", 1e9, "GFLOP"),
)


def _amount(name: str, value: float) -> str:
    """A figure in the unit that its name ends in."""
    if name.startswith("bytes.") or name.endswith("_bytes"):
        return format_figure(value / 2**30, "GiB") if value >= 2**30 else format_figure(value / 2**20, "MiB")
    for ending, unit, word in _UNITS:
        if name.endswith(ending):
            return format_figure(value / unit, word)
    share = name.endswith(("_rate", "share", "host_bound", "agreement"))
    return format_figure(value, "%" if share else "")


def lines(comparison: Comparison, width: int) -> list[str]:
    """For a terminal of `width` columns."""
    out = list(_hanging(comparison.columns, width))
    for table in comparison.tables:
        out += ["", *table_lines(table, width)]
    return [*out, "", *_hanging(comparison.remarks, width)] if comparison.remarks else out


def _hanging(texts: Iterable[str], width: int) -> Iterable[str]:
    """Texts over as many lines as they need, each line of a text but its first moved in."""
    for text in texts:
        first, *more = wrapped(text, width - 2)
        yield from (first, *(f"  {part}" for part in more))


def markdown(comparison: Comparison) -> str:
    """The same as GitHub-flavoured Markdown."""
    out = [f"- {escaped(text)}" for text in comparison.columns]
    for table in comparison.tables:
        out += ["", f"## {escaped(table.title)}", ""]
        out += markdown_table(
            [escaped(c) for c in table.columns], [[*map(escaped, r)] for r in table.rows], table.labels
        )
    out += ["", *(f"- {escaped(remark)}" for remark in comparison.remarks)] if comparison.remarks else []
    return "\n".join(out) + "\n"


# The command ----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks compare`."""
    parser.add_argument("first", type=Path, metavar="A.JSON", help="the run or card that the others are compared with")
    parser.add_argument("others", type=Path, nargs="+", metavar="B.JSON", help="one or more others")
    parser.add_argument("--markdown", action="store_true", help="GitHub-flavoured Markdown instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison. Returns the exit code."""
    paths = [arguments.first, *arguments.others]
    names = [str(path) if paths.count(path) == 1 else f"{path} ({n})" for n, path in enumerate(paths, start=1)]
    comparison = compare({name: read_run(path) for name, path in zip(names, paths, strict=True)})
    if arguments.markdown:
        sys.stdout.write(markdown(comparison))
    else:
        width = min(120, shutil.get_terminal_size((120, 24)).columns)
        sys.stdout.write("\n".join(lines(comparison, width)) + "\n")
    return 0
