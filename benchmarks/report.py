"""The card: what a run found, for a terminal and as Markdown. Reads the run as run.json keeps it; no torch.

A run may come from anybody: all text in it is untrusted. `run_file` refuses what is not a run, the card holds nothing but
plain text (see tables.plain), and each renderer escapes what its medium would take for markup.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import preflight
from benchmarks.claims import CLAIMS
from benchmarks.finding import badge
from benchmarks.ledger import write_text
from benchmarks.tables import MISSING, Table, finite, math_fallbacks, plain, tables_of
from benchmarks.verdicts import Word, format_figure

STATIONS = {
    "batching": "Batching",
    "prefix": "Prefix reuse",
    "quant": "Quantization",
    "attention": "Attention memory",
    "speculation": "Speculative decoding",
    "bigger_gpu": "A bigger GPU",
    "parallel": "More GPUs",
    "serving": "Serving",
}
"""Titles of the stations; one that isn't listed goes by its id."""

# The card, before it is drawn -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """One row of a station's verdicts.

    A part of a compound claim has its verdict in small letters and no T4 figure. Where several engines judged a claim, its
    first row has no verdict and each engine a row below.
    """

    verdict: str
    name: str
    observed: str
    required: str
    t4: str
    statement: str = ""
    reason: str = ""


@dataclass(frozen=True)
class _Station:
    title: str
    lines: tuple[_Line, ...]
    unjudged: tuple[tuple[str, tuple[str, ...]], ...]
    """(why, the claims that share the reason)."""
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class _Card:
    title: str
    head: tuple[tuple[str, str], ...]
    stations: tuple[_Station, ...]
    unjudged: tuple[str, ...]
    """One line for each reason of an engine that judged nothing while another one did."""
    counts: tuple[str, ...]


def _card(run: Mapping[str, Any]) -> _Card:
    order = {name: place for place, name in enumerate(CLAIMS)}
    claims = sorted(run["claims"], key=lambda claim: order.get(claim["id"], len(order)))
    engines = {name: [c for c in claims if c["engine"] == name] for name in dict.fromkeys(c["engine"] for c in claims)}
    idle = [name for name, judged in engines.items() if all(map(_unjudged, judged))]
    idle = idle if len(idle) < len(engines) else []
    told = [claim for claim in claims if claim["engine"] not in idle]
    tables = tables_of(run["cells"])
    names = dict.fromkeys([*(plain(claim["station"], 40) for claim in told), *tables])
    ranked = sorted(names, key=lambda name: list(STATIONS).index(name) if name in STATIONS else len(STATIONS))
    by_station = {name: [claim for claim in told if plain(claim["station"], 40) == name] for name in ranked}
    return _Card(
        f"inference-myths {plain(run['suite_version'], 20)}, {_date(run['started_at'])}",
        tuple(head(run)),
        tuple(_station(name, judged, tables.get(name, [])) for name, judged in by_station.items()),
        tuple(line for name in idle for line in _idle(name, engines[name])),
        tuple(_counts(name if len(engines) > 1 else "", judged) for name, judged in engines.items())
        or ("nothing was judged",),
    )


def _unjudged(claim: Mapping[str, Any]) -> bool:
    return bool(claim["verdict"] == Word.NOT_JUDGED and claim["observed"] is None)


def _why_unjudged(claim: Mapping[str, Any]) -> str:
    return plain(claim["reason"]) or "no reason was given"


def _idle(engine: str, claims: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for why, count in Counter(map(_why_unjudged, claims)).items():
        yield f"{_engine_words(engine)}, {count} claim{'s' * (count > 1)}: {why}"


def _engine_words(engine: str) -> str:
    """'eager engine', and 'eager and graph engines' where a run had both."""
    shown = plain(engine, 40)
    return f"{shown} engine{'s' * (' and ' in shown)}"


def _engines_used(run: Mapping[str, Any]) -> str:
    """The run's engines; on a CPU without the graph engine, where that judged nothing."""
    names = run["engine"].split(" and ")
    idle = all(claim["verdict"] == Word.NOT_JUDGED for claim in run["claims"] if claim["engine"] == "graph")
    if run["machine"]["device"] != "cpu" or "graph" not in names or len(names) == 1 or not idle:
        return _engine_words(run["engine"])
    return f"{_engine_words(' and '.join(name for name in names if name != 'graph'))} (graphs need CUDA)"


def _counts(engine: str, claims: Sequence[Mapping[str, Any]]) -> str:
    seen = Counter(claim["verdict"] for claim in claims)
    counts = ", ".join(f"{seen[word]} {word}" for word in Word)
    return f"{_engine_words(engine)}: {counts}" if engine else counts


def _date(text: str) -> str:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return plain(text, 40)
    return f"{when:%Y-%m-%d}" if len(text) == len("2026-11-09") else f"{when:%Y-%m-%d %H:%M %Z}".strip()


def head(run: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """(label, text): which machine, rig and software, and what their reader must know."""
    about, rig = run["machine"], run["rig"]
    yield "machine", ", ".join(_machine_words(about))
    random = rig["weights"] == "random"
    weights = "RANDOM WEIGHTS (time, memory and equality only)" if random else f"{plain(rig['weights'], 40)} weights"
    yield "rig", f"{plain(rig['name'], 80)}, {weights}, {plain(rig['dtype'], 40)}, {_engines_used(run)}"
    yield "target", plain(rig["target"], 120)
    yield "draft", plain(rig["draft"], 120) if rig["draft"] else "none"
    versions = {plain(name, 40): plain(version, 40) for name, version in about["versions"].items() if version}
    yield "versions", ", ".join(f"{name} {version}" for name, version in list(versions.items())[:12]) or "unknown"
    floors = {name: known for name, floor in run.get("noise_floor", {}).items() if (known := finite(floor)) is not None}
    if floors:
        yield "noise floor", ", ".join(f"{_metric_words(n)} {_percent(f)}" for n, f in floors.items())
    if isinstance(run.get("source"), str):
        yield "source", plain(run["source"], 300)
    if any(claim["t4"] for claim in run["claims"]):
        yield "column T4", "the article's figures, measured once on one Tesla T4; a dash where it gives none"
    for remark in _remarks(run):
        yield "remark", remark
    if fallen := math_fallbacks(run["cells"]):
        more = f" and {len(fallen) - 6} more" if len(fallen) > 6 else ""
        where = ", ".join(fallen[:6]) + more
        yield "finding", f"SDPA fell back to its math kernel, which builds the whole score matrix, in {where}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if abs(share) < 0.995 else f"{100 * share:,.0f}%"


def _metric_words(name: str) -> str:
    """'graph.decode_wall' is 'graph decode wall'. The engine of a metric may be an address, which stays one."""
    engine, _, metric = plain(name, 100).rpartition(".")
    return f"{engine} {metric.replace('_', ' ')}".strip()


def _machine_words(about: Mapping[str, Any]) -> Iterable[str]:
    yield plain(about["name"] or "a machine without a name", 80)
    cpu = about.get("cpu")
    capability = about.get("capability")
    if about["device"] == "cpu" and isinstance(cpu, Mapping) and (cores := finite(cpu.get("cores"))):
        yield f"{cores:.0f} cores"
    if isinstance(capability, list | tuple) and len(capability) == 2:
        yield f"compute capability {'.'.join(plain(part, 4) for part in capability)}"
    if memory_bytes := finite(about["memory_bytes"]):
        yield f"{memory_bytes / 2**30:.1f} GiB" if memory_bytes < 2**60 else "an impossible amount of memory"
    for name, words in (("driver", "driver"), ("cuda", "CUDA")):
        if isinstance(about.get(name), str):
            yield f"{words} {plain(about[name], 40)}"
    if about["device"] == "cpu":
        yield "no CUDA"


def _remarks(run: Mapping[str, Any]) -> list[str]:
    try:
        said = preflight.warnings(run["machine"], run.get("machine_after"))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # Another program's record may lack what the remarks are drawn from; its figures can be read all the same.
        lacking = f"{type(error).__name__} {plain(error, 60)}"
        return [f"nothing is known about throttling and neighbours: the machine's record is not whole ({lacking})"]
    return [plain(remark) for remark in said[:10]]


def _station(name: str, claims: Sequence[Mapping[str, Any]], tables: Sequence[Table]) -> _Station:
    lines: list[_Line] = []
    unjudged: dict[tuple[str, str], list[str]] = {}
    for same in _by_id(claims):
        judged = [claim for claim in same if not _unjudged(claim)]
        reasons = {claim["engine"]: _why_unjudged(claim) for claim in same if _unjudged(claim)}
        if len(set(reasons.values())) == 1 and not judged:  # of whatever engine: said once
            reasons = {"": next(iter(reasons.values()))}
        for engine, why in reasons.items():
            unjudged.setdefault((why, engine), []).append(_short_id(same[0]))
        if len(judged) == 1:
            lines += _claim_lines(judged[0])
        elif judged:
            lines += _engines_lines(judged)
    return _Station(
        STATIONS.get(name, name),
        tuple(lines),
        tuple(
            (f"{_engine_words(engine)}, {why}" if engine else why, tuple(ids))
            for (why, engine), ids in unjudged.items()
        ),
        tuple(tables),
    )


def _by_id(claims: Iterable[Mapping[str, Any]]) -> Iterable[list[Mapping[str, Any]]]:
    by_id: dict[str, list[Mapping[str, Any]]] = {}
    for claim in claims:
        by_id.setdefault(claim["id"], []).append(claim)
    return by_id.values()


def _short_id(claim: Mapping[str, Any]) -> str:
    return plain(str(claim["id"]).removeprefix(f"{claim['station']}."), 40)


def _claim_lines(claim: Mapping[str, Any]) -> Iterable[_Line]:
    required = _held(plain(_required(claim), 60))
    t4 = plain(claim["t4"], 60) if claim["t4"] else MISSING
    statement, reason = plain(claim["statement"]), plain(claim["reason"], 300)
    yield _Line(claim["verdict"], _short_id(claim), _seen(claim), required, t4, statement, reason)
    yield from _part_lines(claim)


def _engines_lines(claims: Sequence[Mapping[str, Any]]) -> Iterable[_Line]:
    """One claim, by several engines: its name and limits once, then what each engine showed."""
    first = claims[0]
    required = {_required(claim) for claim in claims}
    differ = len({claim["verdict"] for claim in claims}) > 1
    why = next((claim["disagreement"] for claim in claims if claim.get("disagreement")), None) if differ else None
    yield _Line(
        "",
        _short_id(first),
        "",
        _held(plain(_required(first), 60)) if len(required) == 1 else "by engine:",
        plain(first["t4"], 60) if first["t4"] else MISSING,
        plain(first["statement"]),
        f"the engines differ: {plain(why, 300)}" if why else "",
    )
    for claim in claims:
        own = _held(plain(_required(claim), 60)) if len(required) > 1 else ""
        name = _engine_words(claim["engine"])
        yield _Line(claim["verdict"], name, _seen(claim), own, "", reason=plain(claim["reason"], 300))
        yield from _part_lines(claim)


def _required(claim: Mapping[str, Any]) -> str:
    return "all of:" if len(claim["parts"]) > 1 else str(claim["required"])


def _seen(claim: Mapping[str, Any]) -> str:
    return "" if len(claim["parts"]) > 1 else _observed(claim)


def _part_lines(claim: Mapping[str, Any]) -> Iterable[_Line]:
    for part in claim["parts"] if len(claim["parts"]) > 1 else ():
        said = _held(plain(part["required"], 60))
        yield _Line(part["verdict"].lower(), f"- {plain(part['what'], 60)}", _observed(part), said, "")


_HELD = "\u00a0"
"""A blank where no line may break. No plain text has one."""


def _held(text: str) -> str:
    return text.replace(" ", _HELD)


def _observed(judged: Mapping[str, Any]) -> str:
    """'0.93x [0.91, 0.95]': the figure and its interval, neither of which a line break may cut."""
    value, unit = finite(judged["observed"]), plain(judged["unit"] or "", 12)
    if value is None:
        return MISSING
    low, high = (finite(end) for end in judged["interval"] or (None, None))
    shown = format_figure(value, unit) if abs(value) < 1e9 else f"{value:.3g} {unit}"
    if low is None or high is None or low == value == high:
        return _held(shown)
    scale, sign = (100, "%") if unit == "%" else (1, "")
    return f"{_held(shown)} {_held(f'[{scale * low:.3g}{sign}, {scale * high:.3g}{sign}]')}"


# For a terminal -------------------------------------------------------------------------------------------------------


def card_lines(run: Mapping[str, Any], width: int = 100) -> list[str]:
    """The card as lines of at most `width` columns (40 or more), readable without colour.

    `run` is a run as read_run gives it or as a Ledger holds it; no line has a control character, whatever the run has.
    """
    width = max(40, width)
    card = _card(run)
    lines = [*wrapped(card.title, width)]
    for label, text in card.head:
        lines += _labelled(label, text, width)
    widths = _verdict_widths(card, width)
    for station in card.stations:
        lines += ["", f"== {station.title} ".ljust(width, "=")]
        lines += _verdict_lines(station, widths, width)
        for why, ids in station.unjudged:
            indent = max(len(Word.NOT_JUDGED), widths[0] if widths else 0) + _GAP
            lines += _labelled(Word.NOT_JUDGED, f"{why}: {', '.join(ids)}", width, indent)
        for table in station.tables:
            lines += ["", *table_lines(table, width)]
    lines += ["", "=" * width]
    for said in card.unjudged:
        lines += _labelled(Word.NOT_JUDGED, said, width, len(Word.NOT_JUDGED) + _GAP)
    lines += [part for said in card.counts for part in wrapped(said, width)]
    return [line.replace(_HELD, " ").rstrip() for line in lines]


_GAP = 2
"""Blanks between two columns."""


def _labelled(label: str, text: str, width: int, indent: int = 13) -> list[str]:
    rows = wrapped(text, width - indent)
    return [_padded(label if n == 0 else "", indent) + row for n, row in enumerate(rows)]


_VERDICT_HEADS = ("verdict", "claim", "observed", "required", "T4")


def _cells(line: _Line) -> tuple[str, ...]:
    return line.verdict, line.name, line.observed, line.required, line.t4


def _verdict_widths(card: _Card, width: int) -> list[int] | None:
    """Widths of the verdicts' columns, the same in all stations; None where the page is too narrow for columns."""
    columns = list(zip(_VERDICT_HEADS, *(_cells(line) for s in card.stations for line in s.lines), strict=True))
    natural = [max(map(_columns, column)) for column in columns]
    return _fit(natural, [_longest_word(column) for column in columns], width)


def _verdict_lines(station: _Station, widths: Sequence[int] | None, width: int) -> list[str]:
    """The verdicts as a table, each claim in words and what is to say about it below; as a list without `widths`."""
    if not station.lines:
        return []
    lines = [*_in_columns(_VERDICT_HEADS, widths), _rule(widths)] if widths else []
    for line in station.lines:
        if widths:
            lines += _in_columns(_cells(line), widths)
            indent = widths[0] + _GAP
        else:
            lines += wrapped(f"{line.verdict} {line.name}", width)
            figures = zip(_VERDICT_HEADS[2:], _cells(line)[2:], strict=True)
            told = [f"{head} {text}" for head, text in figures if text not in ("", MISSING)]
            lines += [f"    {part}" for text in told for part in wrapped(text, width - 4)]
            indent = 4
        below = [line.statement, f"({line.reason})" if line.reason else ""]
        lines += [" " * indent + part for text in below if text for part in wrapped(text, width - indent)]
    return lines


def _rule(widths: Sequence[int]) -> str:
    return (" " * _GAP).join("-" * width for width in widths)


_WIDEST = 20
"""Columns that a figure's column takes at most; no figure is wider."""


def table_lines(table: Table, width: int) -> list[str]:
    """A table in columns; where it is wider than the page, its figures go on in another block with the same labels."""
    lines = [f"[{part}]" for part in wrapped(table.title, width - 2)] if table.title else []
    columns = list(zip(table.columns, table.units, *table.rows, strict=True))
    widest = max(4, width // 2 // table.labels - _GAP)
    widths = [min(max(map(_columns, column)), widest) for column in columns[: table.labels]]
    for heading, *below in columns[table.labels :]:
        least = max(_longest_word([heading]), *map(_columns, below))
        widths.append(next((w for w in range(least, _WIDEST) if len(wrapped(heading, w)) <= 3), _WIDEST))
    taken = sum(w + _GAP for w in widths[: table.labels])
    blocks: list[list[int]] = [[]]
    used = taken
    for n in range(table.labels, len(columns)):
        if blocks[-1] and used + widths[n] > width:
            blocks.append([])
            used = taken
        blocks[-1].append(n)
        used += widths[n] + _GAP
    for number, block in enumerate(blocks):
        shown = [*range(table.labels), *block]
        across = [widths[n] for n in shown]
        lines += [""] if number else []
        lines += _in_columns([table.columns[n] for n in shown], across, table.labels, at_bottom=True)
        if any(table.units[n] for n in shown):
            lines += _in_columns([table.units[n] for n in shown], across, table.labels)
        lines.append(_rule(across))
        for row in table.rows:
            lines += _in_columns([row[n] for n in shown], across, table.labels)
    for note in table.notes:
        lines += [("  " if n else "") + part for n, part in enumerate(wrapped(note, width - 2))]
    return lines


def _fit(natural: Sequence[int], least: Sequence[int], width: int) -> list[int] | None:
    """Column widths that fit, made by narrowing the widest that may be; None when all are as narrow as they go."""
    widths = list(natural)
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        spare = [n for n, (now, limit) in enumerate(zip(widths, least, strict=True)) if now > limit]
        if not spare:
            return None
        widths[max(spare, key=lambda n: widths[n])] -= 1
    return widths


def _in_columns(row: Sequence[str], widths: Sequence[int], left: int = 99, *, at_bottom: bool = False) -> list[str]:
    """One row, over as many lines as its longest field needs; the first `left` columns are set to the left."""
    fields = [wrapped(text, width) for text, width in zip(row, widths, strict=True)]
    height = max(map(len, fields))
    if at_bottom:
        fields = [[""] * (height - len(field)) + field for field in fields]
    lines = []
    for n in range(height):
        parts = [field[n] if n < len(field) else "" for field in fields]
        padded = [_padded(part, w, right=i >= left) for i, (part, w) in enumerate(zip(parts, widths, strict=True))]
        lines.append((" " * _GAP).join(padded).rstrip(" "))
    return lines


def _columns(text: str) -> int:
    """How many columns of a terminal a plain text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me") for c in text)


def _longest_word(texts: Iterable[str]) -> int:
    return min(32, max((_columns(word) for text in texts for word in text.split(" ")), default=1))


def _padded(text: str, width: int, right: bool = False) -> str:
    blanks = " " * max(0, width - _columns(text))
    return blanks + text if right else text + blanks


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns, broken at blanks; a word that is wider than a line is broken anywhere."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if _columns(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        for character in word:
            if lines[-1] and _columns(lines[-1] + character) > width:
                lines.append("")
            lines[-1] += character
    return lines


# As Markdown ----------------------------------------------------------------------------------------------------------

_MARKUP = re.compile(r"[\\`*_{}\[\]<|~$&^]|(?<!\d):(?=\S)|:(?=[^\s\d])|(?<=www)\.", re.IGNORECASE)


def escaped(text: str) -> str:
    """Plain text so that GitHub's Markdown shows it as it is, in a table too: no markup, HTML, link, mention or math.

    An "@" is written as its full-width form: mail addresses and mentions are found after escapes are gone. Marks that
    count only where a line begins are left alone, since no line begins with such a text.
    """
    return _MARKUP.sub(lambda m: "\\" + m.group(), text.replace("@", "\uff20")).replace(_HELD, " ")


def card_markdown(run: Mapping[str, Any]) -> str:
    """The card as GitHub-flavoured Markdown, same content as card_lines."""
    card = _card(run)
    lines = [f"# {escaped(card.title)}", "", f"**In one line:** {escaped(badge(run))}", ""]
    lines += [f"- **{label}:** {escaped(text)}" for label, text in card.head]
    for said in card.counts:
        lines += ["", f"**{escaped(said)}**"]
    lines += [part for said in card.unjudged for part in ("", f"NOT JUDGED, {escaped(said)}")]
    for station in card.stations:
        lines += ["", f"## {escaped(station.title)}", ""]
        if station.lines:
            lines += markdown_table(
                ("verdict", "claim", "observed", "required", "T4"),
                [
                    (line.verdict, _claim_words(line), *map(escaped, (line.observed, line.required, line.t4)))
                    for line in station.lines
                ],
                labels=5,
            )
        for why, ids in station.unjudged:
            lines += ["", f"NOT JUDGED, {escaped(why)}: {escaped(', '.join(ids))}"]
        for table in station.tables:
            lines += ["", f"Each row: {escaped(table.title)}", ""] if table.title else [""]
            heads = [f"{head} {unit}".strip() for head, unit in zip(table.columns, table.units, strict=True)]
            rows = [tuple(map(escaped, row)) for row in table.rows]
            lines += markdown_table(tuple(map(escaped, heads)), rows, table.labels)
            for note in table.notes:
                lines += ["", escaped(note)]
    return "\n".join(lines) + "\n"


def _claim_words(line: _Line) -> str:
    if not line.statement:
        return escaped(line.name)
    reason = f" ({escaped(line.reason)})" if line.reason else ""
    return f"**{escaped(line.name)}**: {escaped(line.statement)}{reason}"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], labels: int) -> list[str]:
    rule = ["---" if n < labels else "---:" for n in range(len(heads))]
    return [f"| {' | '.join(row)} |" for row in (heads, rule, *rows)]


def write_card(run: Mapping[str, Any], folder: Path) -> Path:
    """Writes card.md beside run.json, whole or not at all."""
    path = folder / "card.md"
    write_text(path, card_markdown(run))
    return path
