"""How the page's plots are drawn: by matplotlib, as SVG whose colours are variables of the page's style sheet.

Every plot is told apart without colour too: by marker and line style, bars by hatching. Text stays text, so that it can
be read aloud, searched and cleaned; no text of a run is taken for markup or math. The same run gives the same bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.series import Point, Series
from benchmarks.verdicts import format_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, PAPER = "#010203", "#040506", "#070809"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which those who see few colours tell apart. The article's figures are drawn in the text's colour."""
_STYLE = {INK: "--ink", FAINT: "--faint", PAPER: "--paper"} | {c: f"--c{n}" for n, c in enumerate(COLOURS)}
"""Drawn colours and the variables of the style sheet that take their place: light, dark and print have their own."""
_MARKERS = ("o", "s", "^", "D", "v", "P")
_LINES = ("-", "--", "-.", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++")

_RC: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.transparent": True,
} | dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK)


@contextmanager
def house_style(salt: str) -> Iterator[None]:
    """The look of all plots; `salt` goes into generated ids, so that they are the same whenever the same is drawn."""
    with matplotlib.rc_context():
        matplotlib.rcParams.update(_RC)
        matplotlib.rcParams["svg.hashsalt"] = salt
        yield


_WIDTH_IN, _HEIGHT_IN = 4.6, 2.9
CHARACTER_IN = 0.066
"""What a character of a label takes, on average."""


@dataclass(frozen=True)
class Plot:
    """A drawing for the page: `svg` is safe markup, `words` tell the reader who can't see it, `caption` everybody."""

    name: str
    svg: Markup
    words: str
    caption: str


def drawn(name: str, figure: Figure, words: str, caption: str) -> Plot:
    """The figure as a piece of SVG whose ids no other plot has and whose colours are variables."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's own font has it, or shows a box
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = re.sub(r"<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]*>", lambda tag: _for_page(name, tag.group()), text)
    head = f'<svg role="img" aria-label="{escape(words)}"'
    return Plot(name, Markup(f"{head} {text.removeprefix('<svg').strip()}"), words, caption)


def _for_page(name: str, tag: str) -> str:
    """One tag of matplotlib's: named for its plot, coloured by variables, sized by the page. Its values are escaped."""
    if tag.startswith("<svg"):
        tag = re.sub(r' (?:width|height|xmlns(?::\w+)?|version)="[^"]*"', "", tag)
    tag = re.sub(r' id="(?:figure|patch|axes|matplotlib|xtick|ytick|line2d|text|legend|LineCol)[^"]*"', "", tag)
    tag = tag.replace(' id="', f' id="{name}-').replace("url(#", f"url(#{name}-")
    tag = tag.replace(' xlink:href="#', f' href="#{name}-')
    for colour, variable in _STYLE.items():
        tag = tag.replace(colour, f"var({variable})")
    return tag


def blank(legend: Sequence[str], rows: Sequence[str] = (), height_in: float = _HEIGHT_IN) -> tuple[Figure, Axes, int]:
    """A figure with room for its legend on top and the names of its rows at the left, and the legend's columns.

    The room is reckoned from the texts' lengths: matplotlib's own layout takes longer than all the drawing.
    """
    left_in = 0.78 if not rows else 0.2 + CHARACTER_IN * max(map(len, rows))
    longest_in = 0.65 + CHARACTER_IN * max(map(len, legend), default=0)
    columns = max(1, min(len(legend), int((_WIDTH_IN - 0.1) / longest_in)))
    top_in = 0.12 + 0.19 * -(-len(legend) // columns)
    height_in = height_in + top_in
    figure = Figure(figsize=(_WIDTH_IN, height_in))
    axes = figure.add_axes(
        (left_in / _WIDTH_IN, 0.5 / height_in, 1 - (left_in + 0.12) / _WIDTH_IN, 1 - (0.5 + top_in) / height_in)
    )
    return figure, axes, columns


@dataclass(frozen=True)
class Look:
    """How a series is told from others; `hollow` markers are for the second of two sides (cached, SDPA)."""

    colour: str
    marker: str
    line: Any
    hollow: bool = False


def looks_of(series: Sequence[Series]) -> list[Look]:
    """Runs in the colours in turn; the article's figures in ink, hollow and dotted, the same on every page."""
    own = iter(range(len(series)))
    return [
        Look(INK, "X", ":") if one.is_article else Look(COLOURS[(n := next(own)) % 6], _MARKERS[n % 6], _LINES[n % 6])
        for one in series
    ]


def plain_number(value: float, _: object = None) -> str:
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.0e}"
    return f"{value:,.10g}"


def log_axis(axis: Any, base: int) -> None:
    """A logarithmic axis with plain numbers at some of its ticks."""
    axis.set_major_formatter(FuncFormatter(plain_number))
    axis.set_minor_formatter(NullFormatter())
    if base == 10:
        low, high = axis.get_view_interval()
        subs = (1.0, 2.0, 5.0) if high / low < 60 else (1.0, 3.0) if high / low < 500 else (1.0,)
        axis.set_major_locator(LogLocator(10, subs=subs, numticks=12))
        axis.set_minor_locator(NullLocator())


def draw_line(axes: Axes, points: Sequence[Point], look: Look, label: str, scale: float = 1.0) -> None:
    xs, ys = [p.x for p in points], [p.y * scale for p in points]
    below = [max(0.0, p.y - p.low) * scale if p.low is not None else 0.0 for p in points]
    above = [max(0.0, p.high - p.y) * scale if p.high is not None else 0.0 for p in points]
    bars = [below, above] if any(below + above) else None
    axes.errorbar(
        xs,
        ys,
        yerr=bars,
        color=look.colour,
        marker=look.marker,
        markerfacecolor=PAPER if look.hollow else look.colour,
        linestyle=look.line,
        capsize=3,
        linewidth=1.6,
        elinewidth=1,
        label=label,
    )


def draw_legend(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper left", ncols=columns, handlelength=2.6, columnspacing=1.2, borderaxespad=0.2
    )


def told_points(points: Sequence[Point], unit: str, scale: float = 1.0) -> str:
    return ", ".join(f"{format_figure(p.y * scale, unit)} at {plain_number(p.x)}" for p in points)
