"""index.html: what one or several runs found, as a page that needs nothing but itself. No torch.

The template escapes all that it is given. What is marked as safe is made here: the plots, whose texts matplotlib has
escaped, and the style sheet. A content security policy in the page forbids scripts, whatever should slip through.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from benchmarks.cells_csv import cells_csv
from benchmarks.claims import CLAIMS
from benchmarks.diagnose import Diagnosis, diagnose
from benchmarks.finding import badge, counts, finding
from benchmarks.page.drawing import Plot
from benchmarks.page.plots import plots_of
from benchmarks.page.stations import STATIONS, Station, answer
from benchmarks.page.strips import strips_of
from benchmarks.report import head
from benchmarks.series import Series, article, series_of
from benchmarks.tables import LABELS, Table, finite, plain, tables_of
from benchmarks.verdicts import Word, format_figure

TEMPLATES = Path(__file__).parent / "templates"
MARKS = {Word.HOLDS: "\u2713", Word.REFUTED: "\u2717", Word.INCONCLUSIVE: "~", Word.NOT_JUDGED: "\u2013"}
"""A sign beside each verdict's word, for those to whom its colour says nothing."""

MOST_ROWS = 200
"""Rows of a table; a page is for reading."""
MOST_CSV_BYTES = 2**20
"""Longest CSV that the page brings along."""


@dataclass(frozen=True)
class Badge:
    """A verdict as it is shown: `kind` names its style."""

    word: str
    count: int | None = None

    @property
    def mark(self) -> str:
        return MARKS[Word(self.word)]

    @property
    def kind(self) -> str:
        return self.word.lower().replace(" ", "-")


@dataclass(frozen=True)
class Judged:
    """What one series showed of a claim; `parts` are (what, badge, seen, required), empty where there is only one."""

    label: str
    badge: Badge
    seen: str
    required: str
    n: int
    reason: str
    parts: tuple[tuple[str, Badge, str, str], ...]


@dataclass(frozen=True)
class ClaimView:
    """A claim by all series. `key` is its id as the run has it, `id` the same in plain text."""

    key: str
    id: str
    name: str
    statement: str
    t4: str
    judged: tuple[Judged, ...]
    by_label: Mapping[str, Judged]

    @property
    def differs(self) -> bool:
        """Whether two of those that could judge it came to different verdicts."""
        return len({j.badge.word for j in self.judged if j.badge.word != Word.NOT_JUDGED}) > 1


@dataclass(frozen=True)
class StationView:
    id: str
    words: Station
    answers: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    """(the article's figure, (series, sentence) of each series) of each claim that the question is about."""
    counts: tuple[tuple[str, tuple[Badge, ...]], ...]
    """(series, its verdicts); the series is unnamed where there is only one."""
    claims: tuple[ClaimView, ...]
    plots: tuple[Plot, ...]
    samples: Plot | None
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class RunView:
    label: str
    finding: str
    counts: tuple[tuple[str, tuple[Badge, ...]], ...]
    """(engine, its verdicts); the engine is unnamed where there is only one."""
    head: tuple[tuple[str, str], ...]
    badge: str
    diagnosis: Diagnosis


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The HTML of `runs`, of which there is at least one, as run_file.read_run gives them or a Ledger holds them."""
    own = series_of(runs)
    beside = [] if any(one.is_article for one in own) else series_of([article()])
    views = [_run(run, [one for one in own if one.place == place]) for place, run in enumerate(runs)]
    stations = [_station(name, own, beside) for name in _order(own)]
    csv = cells_csv(runs).encode("utf-8", "replace")
    return _template().render(
        runs=views,
        series=[one.label for one in own],
        stations=stations,
        other_model=_other_model(own),
        title=" and ".join(dict.fromkeys(view.label for view in views)),
        suite_version=plain(runs[0]["suite_version"], 20),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        csv=base64.b64encode(csv).decode() if len(csv) <= MOST_CSV_BYTES else "",
    )


def _other_model(own: Sequence[Series]) -> str:
    """The article's model, where a run served another one: then its figures are of another size. Else nothing."""
    target = str(article()["rig"]["target"])
    served = {str(one.run["rig"]["target"]).partition("@")[0] for one in own}
    return target if served != {target} else ""


def write_page(runs: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Writes the page to `path`, whole or not at all. Raises OSError."""
    text = page(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8", errors="replace")
    os.replace(fresh, path)
    return path


@cache
def _template() -> Template:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return made.get_template("page.html")


def _order(own: Sequence[Series]) -> list[str]:
    """Stations of the runs, the article's first and in its order."""
    there = dict.fromkeys(plain(record["station"], 40) for one in own for record in (*one.claims.values(), *one.cells))
    return [*(name for name in STATIONS if name in there), *(name for name in there if name not in STATIONS)]


def _run(run: Mapping[str, Any], own: Sequence[Series]) -> RunView:
    first = own[0]
    told = [(plain(one.engine, 40) if len(own) > 1 else "", _badges(one.claims.values())) for one in own]
    idle = [(f"engine {name}", why) for name, why in first.idle.items()]
    return RunView(
        first.run_label,
        finding(own),
        tuple(told),
        (*(line for line in head(run) if line[0] != "column T4"), *idle),
        badge(run),
        diagnose(run),
    )


def _badges(claims: Iterable[Mapping[str, Any]]) -> tuple[Badge, ...]:
    return tuple(Badge(word, count) for word, count in counts(claims).items())


def _station(name: str, own: Sequence[Series], beside: Sequence[Series]) -> StationView:
    words = STATIONS.get(name) or Station(name.replace("_", " ").capitalize())
    claims = _claims(name, own)
    names = {claim.key: claim.name for claim in claims}
    # The article's figures stand beside this run's: alone they would be taken for them.
    measured = any(plain(cell["station"], 40) == name for one in own for cell in one.cells)
    shown = [*own, *beside] if measured else []
    return StationView(
        name,
        words,
        tuple(_answers(words, own)),
        tuple(
            (
                one.label if len(own) > 1 else "",
                _badges(claim for claim in one.claims.values() if plain(claim["station"], 40) == name),
            )
            for one in own
        ),
        tuple(claims),
        tuple(plots_of(name, shown)),
        strips_of(name, own, names),
        tuple(_tables(name, shown)),
    )


def _answers(words: Station, own: Sequence[Series]) -> Iterable[tuple[str, tuple[tuple[str, str], ...]]]:
    for id, said in words.answers.items():
        told = [(one, one.claims[id]) for one in own if id in one.claims]
        # What no run could judge is told once, and only where it is all there is: the list of verdicts has every reason.
        if told and any(claim["verdict"] != Word.NOT_JUDGED for _, claim in told):
            t4 = _t4(told)
            yield t4, tuple((one.label if len(own) > 1 else "", answer(said, claim)) for one, claim in told)


def _t4(told: Sequence[tuple[Series, Mapping[str, Any]]]) -> str:
    """The article's figure of a claim, where the article isn't one of the runs and says it itself."""
    if any(one.is_article for one, _ in told):
        return ""
    return next((plain(claim["t4"], 60) for _, claim in told if claim["t4"]), "")


def _claims(station: str, own: Sequence[Series]) -> list[ClaimView]:
    ids = dict.fromkeys(id for one in own for id, c in one.claims.items() if plain(c["station"], 40) == station)
    order = {id: place for place, id in enumerate(CLAIMS)}
    views = []
    for id in sorted(ids, key=lambda id: order.get(id, len(order))):
        told = [(one, one.claims[id]) for one in own if id in one.claims]
        first = told[0][1]
        name = plain(str(id).removeprefix(f"{first['station']}."), 40).replace("_", " ")
        t4 = _t4(told)
        judged = {one.label: _judged(one.label, claim) for one, claim in told}
        views.append(ClaimView(id, plain(id, 80), name, plain(first["statement"]), t4, tuple(judged.values()), judged))
    return views


def _judged(label: str, claim: Mapping[str, Any]) -> Judged:
    several = len(claim["parts"]) > 1
    parts = tuple(
        (plain(p["what"], 60), Badge(p["verdict"]), _seen(p), _required(p)) for p in claim["parts"] if several
    )
    seen = "" if several else _seen(claim)
    n = max([int(finite(record.get("n")) or 0) for record in (claim, *claim["parts"])])
    required = "" if several else _required(claim)
    return Judged(label, Badge(claim["verdict"]), seen, required, n, plain(claim["reason"], 300), parts)


def _required(judged: Mapping[str, Any]) -> str:
    return plain(judged["required"], 120).replace(">=", "\u2265").replace("<=", "\u2264")


def _seen(judged: Mapping[str, Any]) -> str:
    """'15.9x [15.7, 16.2]'; the interval only where it has a width."""
    value, unit = finite(judged["observed"]), plain(judged["unit"] or "", 12)
    if value is None:
        return ""
    low, high = (finite(end) for end in judged["interval"] or (None, None))
    shown = format_figure(value, unit)
    if low is None or high is None or low == high:
        return shown
    bare = unit if unit == "%" else ""
    return f"{shown} [{format_figure(low, bare)}, {format_figure(high, bare)}]"


def _tables(station: str, series: Sequence[Series]) -> list[Table]:
    """The station's tables over all series: rows that measure the same stand together, whoever measured them."""
    labels = [one.label for one in series]
    cells = [_beside(cell, one) for one in series for cell in one.cells]
    return [_together(table, labels) for table in tables_of(cells).get(station, [])]


def _beside(cell: Mapping[str, Any], one: Series) -> Mapping[str, Any]:
    """A cell as a table over several series takes it: under its series' name, and in an article's station without the
    workload's own, which the article words in its way and which the row's label says already."""
    kept: dict[str, Any] = {**cell, "engine": one.label}
    if one.is_article:
        kept |= {"unavailable": {}, "note": ""}
    if cell["phase"] == "row" and cell["station"] in STATIONS and cell["station"] != "prefix":
        kept["workload"] = {name: value for name, value in cell["workload"].items() if name != "name"}
    return kept


def _together(table: Table, labels: Sequence[str]) -> Table:
    """A table whose rows are ordered by what they measure and whose engines are series."""
    notes = []
    for note in table.notes:
        for label in labels:
            note = note.replace(f"{label} engines)", f"{label})").replace(f"{label} engine)", f"{label})")
        notes.append(note)
    first = list(dict.fromkeys(row[0] for row in table.rows))
    rows = sorted(table.rows, key=lambda row: first.index(row[0]))
    heads = [
        "measured on" if n < table.labels and head == LABELS["engine"] else head for n, head in enumerate(table.columns)
    ]
    if len(rows) > MOST_ROWS:
        notes.append(f"{len(rows) - MOST_ROWS:,} more rows are in run.json")
    return replace(table, columns=tuple(heads), rows=tuple(rows[:MOST_ROWS]), notes=tuple(notes))
