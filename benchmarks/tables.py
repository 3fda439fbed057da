"""Cells of run.json as tables for a person: a row a cell, units out of the names, what is missing with its reason.

A station's article table has its own order and headings below; every other station and figure gets a table by itself.
Nothing in a cell is trusted: all text passes through `plain`. No torch.
"""

from __future__ import annotations

import math
import statistics
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.verdicts import format_figure

MISSING = "-"
ODD = "?"
"""Stands for every character that could move a cursor, reorder a line or hide."""

LONGEST_TEXT = 200
LONGEST_LABEL = 60


def plain(text: object, longest: int = LONGEST_TEXT) -> str:
    """One line of harmless text: safe to write to a terminal, never longer than `longest` characters.

    Runs of blanks and line breaks become one space. Control characters (ESC and C1 too), format characters (bidi
    overrides, zero widths, tags), lone surrogates and unassigned or private characters become "?", and so does every
    combining mark after the second in a row. What is cut off shows as "...".
    """
    kept: list[str] = []
    marks = 0
    for character in str(text)[: 8 * longest]:
        kind = unicodedata.category(character)
        marks = marks + 1 if kind[0] == "M" else 0
        if kind[0] == "Z" or character in "\t\n\r\v\f\x1c\x1d\x1e\x1f\x85":
            kept.append(" ")
        elif kind[0] == "C" or marks > 2:
            kept.append(ODD)
        else:
            kept.append(character)
    line = " ".join("".join(kept).split())
    return line if len(line) <= longest else line[: longest - 3].rstrip() + "..."


@dataclass(frozen=True)
class Table:
    """Rows for a person. The first `labels` columns say which row it is, the others are figures in `units`."""

    title: str
    columns: tuple[str, ...]
    units: tuple[str, ...]
    labels: int
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Layout:
    """How a station's table looks: the fields that label its rows, the headings of its figures in their order, and the
    figures that it leaves to run.json. Figures that it doesn't know follow the ones it does."""

    labels: Mapping[str, str]
    headings: Mapping[str, str]
    left_out: frozenset[str] = frozenset()


_LAYOUTS = {
    "batching": _Layout(
        {"batch_size": "batch"},
        {
            "ttft_s": "TTFT",
            "tpot_s": "TPOT",
            "first_tpot_s": "TPOT of the first request",
            "built_s": "recorded and proven in",
            "e2e_s": "per-request latency",
            "wall_per_request_s": "wall / batch (no latency)",
            "output_tokens_per_s": "tok/s",
            "peak_bytes": "peak memory",
            "prefill_device_s": "prefill card busy",
            "prefill_host_bound": "prefill host-bound",
            "decode_device_s": "decode step card busy",
            "decode_host_bound": "decode host-bound",
        },
    ),
    "prefix": _Layout(
        {"name": "suffix"},
        {
            "full_prefill_s": "full prefill",
            "cached_prefill_s": "cached prefill",
            "prefill_speedup": "prefill speed-up",
            "full_decode_s": "decode after full",
            "cached_decode_s": "decode after cached",
            "full_e2e_s": "e2e full",
            "cached_e2e_s": "e2e cached",
            "full_prefill_device_s": "full prefill card busy",
            "full_prefill_host_bound": "full prefill host-bound",
            "cached_prefill_device_s": "cached prefill card busy",
            "cached_prefill_host_bound": "cached prefill host-bound",
            "cached_decode_device_s": "decode step card busy",
            "cached_decode_host_bound": "decode host-bound",
        },
        frozenset(
            {"full_decode_device_s", "full_decode_host_bound", "full_decode_floor_s", "full_decode_share_of_floor"}
        ),
    ),
    "quant": _Layout(
        {"precision": "precision"},
        {
            "loaded_bytes": "memory after load",
            "storages_bytes": "weights' memory",
            "ratio": "over reference",
            "ttft_s": "TTFT",
            "tpot_s": "TPOT",
            "e2e_s": "per-request latency",
            "output_tokens_per_s": "tok/s",
            "prefill_device_s": "prefill card busy",
            "prefill_host_bound": "prefill host-bound",
            "decode_device_s": "decode step card busy",
            "decode_host_bound": "decode host-bound",
        },
        frozenset({"wall_per_request_s"}),
    ),
    "attention": _Layout(
        {"prompt_len": "length"},
        {
            "naive_bytes": "naive extra memory",
            "sdpa_bytes": "SDPA extra memory",
            "naive_flops": "naive FLOPs",
            "sdpa_flops": "SDPA FLOPs",
            "naive_s": "naive time",
            "sdpa_s": "SDPA time",
            "naive_device_s": "naive card busy",
            "sdpa_device_s": "SDPA card busy",
        },
    ),
    "speculation": _Layout(
        {"id": "mode"},
        {
            "e2e_s": "time",
            "output_tokens_per_s": "tok/s",
            "acceptance_rate": "acceptance",
            "mean_acceptance_length": "tokens per check",
            "target_forwards": "target forwards",
            "speed_over_alone": "speed over alone",
            "predicted_speed": "predicted speed",
            "c": "draft step cost (target's = 1)",
        },
    ),
}

LABELS = {
    "name": "workload",
    "precision": "precision",
    "engine": "engine",
    "batch_size": "batch",
    "prompt_len": "prompt",
    "output_len": "new tokens",
    "id": "cell",
}
"""What can tell two rows apart, in the order in which a table tries them."""

_WORDS = {
    "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "kv": "KV", "sdpa": "SDPA", "flops": "FLOPs", "nll": "NLL",
    "kl": "KL", "device": "card busy", "speedup": "speed-up", "gpu": "GPU", "bytes": "memory",
}  # fmt: skip


@dataclass(frozen=True)
class _Row:
    """A cell on its way into a table; every text in it is plain."""

    station: str
    phase: str
    id: str
    labels: Mapping[str, str]
    values: Mapping[str, float | None]
    kernels: Mapping[str, str]
    missing: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    digits: int | None = None
    """Significant digits that the row's rounds carry; None where no rounds are known."""


_DRAWN = frozenset({"modules"})
"""Phases that the page draws: a table of bytes by the kind of a module has as many units as columns."""


def tables_of(cells: Sequence[Mapping[str, Any]]) -> dict[str, list[Table]]:
    """The tables of each station, in the order of the cells. `cells` are as run.json keeps them."""
    told = {(cell["engine"], str(cell["id"])) for cell in cells if cell["phase"] == "row"}
    by_table: dict[tuple[str, str], list[_Row]] = {}
    for cell in cells:
        whole = str(cell["id"]).removesuffix(f".{cell['phase']}")
        if cell["phase"] != "row" and (cell["engine"], whole) in told:
            continue  # the row of its request carries this phase's figures
        if cell["phase"] in _DRAWN:
            continue
        row = _row(cell)
        by_table.setdefault((row.station, row.phase), []).append(row)
    tables: dict[str, list[Table]] = {}
    for (station, phase), mixed in by_table.items():
        engines = list(dict.fromkeys(row.labels["engine"] for row in mixed))
        rows = sorted(mixed, key=lambda row: engines.index(row.labels["engine"]))
        shaped = _SHAPES.get(station, list)(rows) if phase == "row" else rows
        table, before = _table(station, phase, shaped), tables.setdefault(station, [])
        if before and phase != "row" and len(table.columns) == table.labels:  # no figure, but reasons why there is none
            notes = dict.fromkeys((*before[-1].notes, *table.notes))
            before[-1] = replace(before[-1], notes=tuple(notes))
        else:
            before.append(table)
    return tables


def _row(cell: Mapping[str, Any]) -> _Row:
    workload = cell["workload"]
    labels = {name: plain(workload[name], LONGEST_LABEL) for name in LABELS if workload.get(name) is not None}
    labels |= {"precision": plain(cell["precision"], LONGEST_LABEL), "engine": plain(cell["engine"])}
    labels["id"] = plain(str(cell["id"]).removeprefix(f"{cell['station']}.").replace("_", " "), LONGEST_LABEL)
    values: dict[str, float | None] = {}
    for name, value in cell["figures"].items():
        if not (cell["phase"] == "row" and name.endswith("_floor_s")):  # its share says it in one column less
            values[plain(name, 40)] = finite(value)
    for name, value in cell["bytes"].items():
        shown = plain(name, 40)
        values[shown if shown.endswith("bytes") else f"{shown}_bytes"] = finite(value)
    if not any(_kind(name) == "s" for name in values):
        values |= {name: _median(cell[name]) for name in ("wall_s",) if cell[name]}
    values |= {name: _median(cell[name]) for name in ("device_s",) if cell[name]}
    if cell["host_bound"] is not None:
        values["host_bound"] = finite(cell["host_bound"])
    traced = {phase: ran for phase, ran in cell["kernels"].items() if phase not in _TRACE_DETAILS}
    kernels = {plain(phase, 40): text for phase, ran in traced.items() if (text := _names(ran))}
    if cell["kernels"].get("math_fallback") is True:
        kernels["attention"] = kernels.get("attention", "") + " (math fallback: SDPA built the whole score matrix)"
    missing = {plain(name, 40): plain(reason) for name, reason in cell["unavailable"].items() if reason}
    station, phase = plain(cell["station"], 40), plain(cell["phase"], 40)
    digits = _carried(cell["wall_s"] or ())
    return _Row(station, phase, labels["id"], labels, values, kernels, missing, plain(cell["note"]), digits)


def _carried(samples: Iterable[object]) -> int | None:
    """Digits that the median of a row's rounds can bear, two or three: their range over their number is about how far
    it may be off. None without samples."""
    known = [number for value in samples if (number := finite(value)) is not None and number > 0]
    if not known:
        return None
    off = (max(known) - min(known)) / statistics.median(known) / len(known)
    return 3 if len(known) > 1 and off <= 0.01 else 2


_TRACE_DETAILS = frozenset({"gqa", "proof", "longest", "n_kernels", "math_fallback"})
"""What a traced phase records beside the attention that ran: for run.json, too long for a card."""


def math_fallbacks(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where SDPA ran its math kernel, as a cell's id and phase, with the engine where several have such a cell."""
    engines = Counter(cell["id"] for cell in cells)
    found = []
    for cell in cells:
        by = f" by {cell['engine']}" if engines[cell["id"]] > 1 else ""
        for phase, ran in cell["kernels"].items():
            if phase not in _TRACE_DETAILS and phase != "allowed" and "math" in _names(ran).split(", "):
                found.append(plain(f"{cell['id']}.{phase}".removesuffix(".attention") + by, 60))
    return list(dict.fromkeys(found))


def finite(value: object) -> float | None:
    """A number that can be shown, None for everything else."""
    if not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return float(value) if abs(value) < 1e300 else None


def _median(values: Iterable[object]) -> float | None:
    known = [number for value in values if (number := finite(value)) is not None]
    return statistics.median(known) if known else None


def _names(ran: object) -> str:
    """Names of what ran, out of a name, a list of names or a mapping of flags; "" where there are none."""
    if isinstance(ran, str):
        return plain(ran, 40)
    if isinstance(ran, Mapping):
        ran = [name for name, allowed in ran.items() if allowed is True]
    if isinstance(ran, list | tuple):
        return plain(", ".join(plain(name, 40) for name in ran[:8] if isinstance(name, str)), 80)
    return ""


def _paired(rows: Sequence[_Row]) -> list[_Row]:
    """The requests with a full and with a cached prefill of one suffix as one row, side by side as in the article."""
    merged: dict[tuple[str, str, str], _Row] = {}
    notes: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        side, colon, suffix = row.labels.get("name", "").partition(": ")
        if not colon or side not in ("full", "cached"):
            merged[row.id, row.labels["engine"], ""] = row
            continue
        renamed = {_of_side(side, name): value for name, value in row.values.items()}
        values = {name: value for name, value in renamed.items() if name is not None}
        kernels = {f"{side} {phase}" if phase == "prefill" else phase: ran for phase, ran in row.kernels.items()}
        key = (suffix, row.labels["engine"], row.labels["precision"])
        other = merged.get(key)
        if row.note:
            notes.setdefault(key, {})[side] = row.note
        labels = {k: v for k, v in row.labels.items() if k not in ("prompt_len", "id")} | {"name": suffix, "id": suffix}
        merged[key] = replace(
            row,
            labels=labels,
            values={**(other.values if other else {}), **values},
            kernels={**(other.kernels if other else {}), **kernels},
            missing={**(other.missing if other else {}), **row.missing},
            note=_of_sides(notes.setdefault(key, {})),
            digits=min((d for d in (row.digits, other.digits if other else None) if d), default=None),
        )
    return list(merged.values())


def _of_sides(notes: Mapping[str, str]) -> str:
    """Both sides' notes; each with its side's name where they differ."""
    if len(set(notes.values())) < 2:
        return "".join(list(notes.values())[:1])
    return "; ".join(f"{side}: {note}" for side, note in notes.items())


def _of_side(side: str, name: str) -> str | None:
    """A request's figure under its side's name; None for those that the prefix table leaves to run.json."""
    if name == "ttft_s":
        return f"{side}_prefill_s"
    if name in ("decode_s", "e2e_s") or name.endswith(("_device_s", "_host_bound", "_floor_s", "_share_of_floor")):
        return f"{side}_{name}"
    return None if name in ("tpot_s", "wall_per_request_s", "output_tokens_per_s", "prefix_len") else name


def _over_reference(rows: Sequence[_Row]) -> list[_Row]:
    """The precisions of one model, each with its bytes over those of the precision that isn't quantized."""
    whole = {row.labels["engine"]: row for row in rows if row.labels["precision"] not in ("int8", "nf4")}

    def with_ratio(row: _Row) -> _Row:
        full = whole.get(row.labels["engine"])
        for name in ("loaded_bytes", "storages_bytes"):
            held, all_of_it = row.values.get(name), full.values.get(name) if full else None
            if held and all_of_it:
                return replace(row, values={"ratio": held / all_of_it, **row.values})
        return row

    return [with_ratio(row) for row in rows]


_SHAPES: Mapping[str, Callable[[Sequence[_Row]], list[_Row]]] = {"prefix": _paired, "quant": _over_reference}
"""What a station's rows become before they are a table."""


# One table ------------------------------------------------------------------------------------------------------------


def _table(station: str, phase: str, rows: Sequence[_Row]) -> Table:
    layout = _LAYOUTS.get(station) if phase == "row" else None
    layout = layout or _Layout({}, {})
    labels = _telling(rows, layout.labels)
    known = [name for name in layout.headings if any(row.values.get(name) is not None for row in rows)]
    others = [
        name
        for name in dict.fromkeys(name for row in rows for name in row.values)
        if name not in layout.headings and name not in layout.left_out
    ]
    columns: list[tuple[str, str, list[str]]] = [
        (heading, "", [row.labels.get(name, MISSING) for row in rows]) for name, heading in labels.items()
    ]
    figures = known + others
    for name in figures:
        beside = [row.values.get(other) for other in figures if _bare(other) == _bare(name) for row in rows]
        scale, unit = _scale(_kind(name), beside)
        digits = [row.digits if _timed(name) else None for row in rows]
        shown = _figures(_kind(name), [row.values.get(name) for row in rows], scale, digits)
        columns.append((layout.headings.get(name) or _heading(name), unit, shown))
    seen = {name: {row.labels.get(name, "") for row in rows} for name in LABELS}
    shared = {name: next(iter(texts)) for name, texts in seen.items() if len(texts) == 1}
    told = [
        f"{LABELS[name]} {shared[name]}" if name.endswith(("_size", "_len")) else shared[name]
        for name in ("name", "batch_size", "prompt_len", "output_len", "precision", "engine")
        if shared.get(name) and name not in labels
    ]
    title = ", ".join([*([] if phase == "row" else [phase.replace("_", " ")]), *told])
    first = next((name for name in labels if name != "engine"), "id")
    return Table(
        title,
        tuple(heading for heading, _, _ in columns),
        tuple(unit for _, unit, _ in columns),
        len(labels),
        tuple(zip(*(shown for _, _, shown in columns), strict=True)),
        tuple(_notes(rows, first, labels.get(first, LABELS[first]), layout)),
    )


def _bare(name: str) -> str:
    """A figure's name without its side: figures that are read against each other share their unit."""
    return name.removeprefix("full_").removeprefix("cached_").removeprefix("naive_").removeprefix("sdpa_")


def _telling(rows: Sequence[_Row], wanted: Mapping[str, str]) -> dict[str, str]:
    """Label columns (field to heading) that tell the rows apart: the layout's, then as few others as are needed.

    Where that would take more than three, the cell's own id does it. Rows of several engines always say which.
    """

    def told_apart(names: Iterable[str]) -> int:
        return len({tuple(row.labels.get(name, MISSING) for name in names) for row in rows})

    labels = dict(wanted)
    for name, heading in LABELS.items():
        if labels and told_apart(labels) == len(rows):
            break
        if not labels or told_apart([*labels, name]) > told_apart(labels):
            labels[name] = heading
    if len(labels) > 3:
        labels = {"id": LABELS["id"]}
    if told_apart(["engine"]) > 1:
        labels["engine"] = LABELS["engine"]
    return labels


def _notes(rows: Sequence[_Row], label: str, heading: str, layout: _Layout) -> list[str]:
    """Lines under a table: which attention ran, what is missing and why, and the rows' own notes; equal ones once."""
    said: dict[str, list[_Row]] = {}
    for row in rows:
        traced = {phase: ran for phase, ran in row.kernels.items() if phase != "allowed"}
        phases = [ran if phase == "attention" else f"{phase} {ran}" for phase, ran in traced.items()]
        if phases:
            allowed = row.kernels.get("allowed")
            flags = f"; the flags allow {allowed}" if allowed else ""
            said.setdefault(f"attention that ran: {', '.join(phases)}{flags}", []).append(row)
    for row in rows:
        reasons: dict[str, list[str]] = {}
        for name, reason in row.missing.items():
            # A phase's device time is missing from a row by design; a figure of a column is not.
            by_design = row.phase == "row" and name in ("device_s", "wall_s")
            by_design |= name == "host_bound" and not {"device_s", "wall_s"}.isdisjoint(row.missing)
            column = name if name in layout.headings or name.endswith("_bytes") else f"{name}_bytes"
            if not by_design and name not in row.values and column not in row.values:
                reasons.setdefault(reason, []).append(layout.headings.get(column) or _heading(name))
        for reason, names in reasons.items():
            # A row that lacks everything, such as a batch that didn't fit, has its dashes to say so.
            which = "" if "figures" in names else f"{', '.join(names)}: "
            said.setdefault(f"not measured: {which}{reason}", []).append(row)
        if row.note and row.note not in reasons:
            said.setdefault(f"note: {row.note}", []).append(row)
    return [f"{text}{_of_which(of, rows, label, heading)}" for text, of in said.items()]


def _of_which(told: Sequence[_Row], rows: Sequence[_Row], label: str, heading: str) -> str:
    """The rows that a note is about, in brackets: nothing for all, whole engines by name, else each by its label."""
    if len(told) == len(rows):
        return ""
    by_engine = Counter(row.labels["engine"] for row in rows)
    of_engine = Counter(row.labels["engine"] for row in told)
    if len(by_engine) > 1 and all(by_engine[name] == count for name, count in of_engine.items()):
        return f" ({', '.join(of_engine)} engine{'s' * (len(of_engine) > 1)})"
    parts = []
    for name in of_engine:
        which = ", ".join(row.labels.get(label, MISSING) for row in told if row.labels["engine"] == name)
        parts.append(f"{heading} {which}" + (f" by {name}" if len(by_engine) > 1 else ""))
    return f" ({'; '.join(parts)})"


# Names and figures ----------------------------------------------------------------------------------------------------


def _kind(name: str) -> str:
    """What a figure measures, by the end of its name."""
    if name.endswith("bytes_per_s"):
        return "bytes/s"
    if name.endswith("_per_s"):
        return "rate"
    if name.endswith("bytes"):
        return "bytes"
    if name.endswith("_s"):
        return "s"
    if name.endswith("flops"):
        return "flops"
    if name.endswith(("share", "share_of_floor", "_rate", "host_bound", "agreement")):
        return "share"
    if name.endswith(("ratio", "speedup", "_speed", "_x")) or "over_" in name:
        return "x"
    return "number"


def _timed(name: str) -> bool:
    """Whether a figure is made of a row's rounds. `ratio` is one of bytes; device times come from a trace."""
    return (_kind(name) in ("s", "rate", "x") and name != "ratio" and not name.endswith("device_s")) or name == "c"


def _heading(name: str) -> str:
    """A figure's name as words: 'prefill_device_s' is 'prefill card busy', 'output_tokens_per_s' 'output tok/s'."""
    bare = name
    if name.endswith("_bytes_per_s"):
        bare = name.removesuffix("_bytes_per_s")
    elif name.endswith("_per_s"):
        bare = name.removesuffix("_per_s") + "/s"
    elif _kind(name) == "s":
        bare = name.removesuffix("_s")
    bare = bare.replace("tokens/s", "tok/s").replace("host_bound", "host-bound")
    return " ".join(_WORDS.get(word, word) for word in bare.split("_") if word) or name


_SCALES: Mapping[str, Sequence[tuple[float, str]]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
    "bytes/s": ((2**30, "GiB/s"), (2**20, "MiB/s"), (1, "B/s")),
    "flops": ((1e9, "G"), (1.0, "")),
}


def _scale(kind: str, values: Iterable[float | None]) -> tuple[float, str]:
    """The unit that suits the largest of the values: how many of ours it holds, and its name.

    Bytes take the unit of the middle value: they range over factors of thousands, and 0.75 MiB is no reading in GiB.
    """
    if kind not in _SCALES:
        return 1.0, ""
    sizes = sorted(abs(value) for value in values if value is not None) or [0.0]
    largest = sizes[len(sizes) // 2] if kind == "bytes" else sizes[-1]
    return next((scale for scale in _SCALES[kind] if largest >= scale[0]), _SCALES[kind][-1 if largest else 0])


def _figures(kind: str, values: Sequence[float | None], scale: float, carried: Sequence[int | None] = ()) -> list[str]:
    """A column's values in its unit, all with as many decimals: three digits of the smallest, four of the largest, and of
    each no more than are `carried`."""
    carried = carried or [None] * len(values)
    if kind == "share":
        return [MISSING if value is None else format_figure(value, "%") for value in values]
    known = [abs(value) / scale for value in values if value]
    whole = kind == "number" and all(value == int(value) for value in known)
    smallest, largest = (_magnitude(end(known, default=1.0)) for end in (min, max))
    decimals = 0 if whole else max(0, min(2 if kind == "x" else 3, 2 - smallest, 3 - largest))
    sign = "x" if kind == "x" else ""
    shown = []
    for value, digits in zip(values, carried, strict=True):
        if value is None:
            shown.append(MISSING)
        elif digits is None or not value:
            shown.append(_digits(value / scale, decimals) + sign)
        else:
            rounded = float(f"{value / scale:.{digits}g}")
            shown.append(_digits(rounded, min(decimals, max(0, digits - 1 - _magnitude(rounded)))) + sign)
    return shown


def _magnitude(value: float) -> int:
    """The power of ten of a figure's first digit."""
    return math.floor(math.log10(max(abs(value), 1e-300)))


def _digits(value: float, decimals: int) -> str:
    """A number in a column's decimals; those that would vanish or fill the line with digits as powers of ten."""
    if value and not 10.0**-decimals / 2 <= abs(value) < 1e12:
        return f"{value:.2e}"
    return f"{value:,.{decimals}f}"
