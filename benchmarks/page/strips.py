"""A claim's samples as a strip: a dot a round, the interval around their middle, and the limit that they had to meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from benchmarks.page.drawing import (
    CHARACTER_IN,
    FAINT,
    INK,
    Look,
    Plot,
    drawn,
    house_style,
    log_axis,
    looks_of,
    plain_number,
)
from benchmarks.series import Series, Strip, strips
from benchmarks.verdicts import format_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_IN = 6.4
MOST_SAMPLES = 200
"""Dots of a strip; more of them are a smear."""
MOST_ROWS = 40


def strips_of(station: str, series: Sequence[Series], names: Mapping[str, str]) -> Plot | None:
    """Every claim of a station that rests on rounds, one strip for each judged figure; `names` are the claims' by id.
    None where no claim does."""
    rows: list[tuple[str, list[tuple[Series, Look, Strip]]]] = []
    for id, name in names.items():
        by_part: dict[str, list[tuple[Series, Look, Strip]]] = {}
        for one, look in zip(series, looks_of(series), strict=True):
            for strip in strips(one.claims[id]) if id in one.claims else ():
                by_part.setdefault(strip.what, []).append((one, look, strip))
        rows += [(f"{name}: {what}" if len(by_part) > 1 else name, of) for what, of in by_part.items()]
    rows = rows[:MOST_ROWS]
    if not rows:
        return None
    told = [
        f"{name}, {one.label}: {format_figure(strip.middle, strip.unit)} over {len(strip.samples)} rounds, "
        f"required {strip.required}"
        for name, of in rows
        for one, _, strip in of
    ]
    caption = (
        "The rounds behind the timed verdicts: a dot each, and a bar for the interval around their middle. The claim holds "
        "where the whole bar lies in the shaded range."
    )
    with house_style(f"{station}-samples"):
        return drawn(f"{station}-samples", _figure(rows, len(series) > 1), f"{caption} {'. '.join(told)}.", caption)


def _figure(rows: Sequence[tuple[str, Sequence[tuple[Series, Look, Strip]]]], named: bool) -> Figure:
    """One axis below the other, each in its claim's own unit; placed by hand, which is many times faster than a layout."""
    heights_in = [0.56 + 0.2 * len(of) for _, of in rows]
    left_in = 0.15 + CHARACTER_IN * max((len(one.label) for _, of in rows for one, *_ in of if named), default=0)
    figure = Figure(figsize=(_WIDTH_IN, sum(heights_in)))
    for n, (name, of) in enumerate(rows):
        bottom = (sum(heights_in[n + 1 :]) + 0.26) / sum(heights_in)
        box = (left_in / _WIDTH_IN, bottom, 1 - (left_in + 0.15) / _WIDTH_IN, (heights_in[n] - 0.52) / sum(heights_in))
        axes = figure.add_axes(box)
        _axis(axes, [strip for *_, strip in of])
        for place, (_, look, strip) in enumerate(of):
            _strip(axes, place, look, strip)
        axes.set_ylim(len(of) - 0.5, -0.5)
        axes.set_yticks(range(len(of)) if named else (), [one.label for one, *_ in of] if named else (), fontsize=8)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        required = dict.fromkeys(strip.required for *_, strip in of)
        condition = " or ".join(required).replace(">=", "\u2265").replace("<=", "\u2264")
        axes.set_title(f"{name}, required {condition}", loc="left", fontsize=9)
    return figure


def _scale(strip: Strip) -> float:
    return 100.0 if strip.unit == "%" else 1.0


def _axis(axes: Axes, of: Sequence[Strip]) -> None:
    """Room for all samples, intervals and limits; logarithmic where they lie far apart."""
    ends = [_scale(s) * end for s in of for end in (*s.samples, *(s.interval or ()), *s.limits) if end is not None]
    left, right = min(ends), max(ends)
    if left > 0 and right / left > 3:
        axes.set_xscale("log")
        axes.set_xlim(left / 1.15, right * 1.15)
        log_axis(axes.xaxis, 10)
    else:
        room = 0.08 * (right - left) or 0.05 * abs(right) or 1.0
        axes.set_xlim(left - room, right + room)
        axes.xaxis.set_major_locator(MaxNLocator(6))
    unit = of[0].unit if of[0].unit in ("x", "%") else ""
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value) + unit))


def _strip(axes: Axes, place: int, look: Look, strip: Strip) -> None:
    scale = _scale(strip)
    (low, high), shown = strip.limits, axes.get_xlim()
    if low is not None or high is not None:
        ends = (shown[0] if low is None else low * scale, shown[1] if high is None else high * scale)
        axes.fill_betweenx((place - 0.5, place + 0.5), *ends, color=FAINT, alpha=0.45, linewidth=0)
    for limit in dict.fromkeys(strip.limits):
        if limit is not None:
            axes.plot([limit * scale] * 2, [place - 0.5, place + 0.5], color=INK, linestyle=(0, (4, 2)), linewidth=1.2)
    if strip.interval:
        interval = [end * scale for end in strip.interval]
        axes.plot(interval, [place, place], color=look.colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
    dots = strip.samples[:: -(-len(strip.samples) // MOST_SAMPLES)]
    spread = [place + 0.14 * ((n % 3) - 1) for n in range(len(dots))]
    axes.plot([dot * scale for dot in dots], spread, look.marker, color=look.colour, markersize=3.2, alpha=0.8)
    axes.plot([strip.middle * scale], [place], "|", color=INK, markersize=13, markeredgewidth=2)
