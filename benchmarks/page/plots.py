"""The plots of each station: what a run measured, beside other runs and the article's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from benchmarks import series as read
from benchmarks.page.drawing import (
    COLOURS,
    HATCHES,
    INK,
    PAPER,
    Look,
    Plot,
    blank,
    draw_legend,
    draw_line,
    drawn,
    house_style,
    log_axis,
    looks_of,
    told_points,
)
from benchmarks.series import Point, Series
from benchmarks.verdicts import format_figure

Found = TypeVar("Found")
Drawing = Callable[[Sequence[Series]], Iterable[Plot]]

MOST_BARS = 24
"""Rows of a bar chart that a reader can follow; all of them are in the table."""


def _measured(series: Sequence[Series], found: Sequence[Found]) -> list[Found]:
    """What was found in runs, and not only in the article's figures, which alone would be taken for a run's."""
    return [of for one, of in zip(series, found, strict=True) if not one.is_article] or list(found)


def _side(look: Look, second: bool) -> Look:
    """One of the two sides that a series has in a plot: the second is dotted and hollow."""
    return replace(look, line=(0, (1, 1.5)), hollow=True) if second else look


# Batching -------------------------------------------------------------------------------------------------------------


def batching(series: Sequence[Series]) -> Iterable[Plot]:
    found = [read.over_batch(one) for one in series]
    for quantity, title, unit, scale, caption in (
        ("output_tokens_per_s", "tokens per second", "", 1.0, "Tokens per second of the whole batch."),
        ("ttft_s", "time to first token (ms)", "ms", 1e3, "Time to first token over the batch size."),
        ("tpot_s", "time per output token (ms)", "ms", 1e3, "Time per output token over the batch size."),
    ):
        if not any(len(of[quantity]) > 1 for of in _measured(series, found)):
            continue
        shown = [one.label for one, of in zip(series, found, strict=True) if of[quantity]]
        figure, axes, columns = blank(shown)
        told = []
        for one, of, look in zip(series, found, looks_of(series), strict=True):
            if of[quantity]:
                draw_line(axes, of[quantity], look, one.label, scale)
                told.append(f"{one.label}: {told_points(of[quantity], unit, scale)}")
        axes.set_xscale("log", base=2)
        values = [point.y for of in found for point in of[quantity]]
        if max(values) < 8 * min(values):
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
            log_axis(axes.yaxis, 10)
        log_axis(axes.xaxis, 2)
        axes.set_xlabel("chats in the batch")
        axes.set_ylabel(title)
        draw_legend(figure, axes, columns)
        bars = " Bars: the range of the samples."
        yield drawn(f"batching-{quantity}", figure, f"{caption} {'. '.join(told)}.", caption + bars)


def many_chats(series: Sequence[Series]) -> Iterable[Plot]:
    """Decode's tokens per second up to the batch size at which a further chat stops being cheap."""
    found = {one.label: read.decode_curve(one) for one in series}
    if not any(len(points) > 1 for points in found.values()):
        return
    figure, axes, columns = blank([label for label, points in found.items() if points])
    told: list[str] = []
    notes: list[str] = []
    for one, look in zip(series, looks_of(series), strict=True):
        if points := found[one.label]:
            draw_line(axes, points, look, one.label)
            told.append(f"{one.label}: {told_points(points, '')}")
        if (turned := one.figure("batching.curve", "no_longer_cheap_at_users")) is not None:
            axes.axvline(turned, color=look.colour, linewidth=1, linestyle=(0, (2, 2)))
            notes.append(
                f"{one.label}: from {turned:,.0f} chats on, one more brings less than half of what the first had."
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    log_axis(axes.xaxis, 2)
    log_axis(axes.yaxis, 10)
    axes.set_xlabel("chats in the batch")
    axes.set_ylabel("tokens per second, decode")
    draw_legend(figure, axes, columns)
    caption = "Tokens per second of decode alone, as far as the search for the end of cheap chats went."
    words = f"{caption} {'. '.join(told)}. {' '.join(notes)}"
    yield drawn("batching-curve", figure, words, " ".join([caption, *notes]))


def floors(series: Sequence[Series]) -> Iterable[Plot]:
    """Share of floor by phase and engine; nothing where no run has a floor."""
    found = {one.label: read.shares_of_floor(one) for one in series}
    known = {label: shares for label, shares in found.items() if shares}
    if not known:
        return
    phases = list(dict.fromkeys(phase for shares in known.values() for phase in shares))
    figure, axes, columns = blank(list(known), phases, 0.7 + 0.3 * len(phases) * len(known))
    tall = 0.8 / len(known)
    looks = dict(zip(found, looks_of(series), strict=True))
    for n, (label, shares) in enumerate(known.items()):
        there = [place for place, phase in enumerate(phases) if phase in shares]
        widths = [100 * shares[phases[place]] for place in there]
        at = [place + (n - (len(known) - 1) / 2) * tall for place in there]
        colour = looks[label].colour
        axes.barh(at, widths, tall * 0.9, facecolor=colour, edgecolor=PAPER, hatch=HATCHES[n % 6], label=label)
        for y, width in zip(at, widths, strict=True):
            axes.text(width, y, f" {width:.3g} %", va="center", fontsize=8.5)
    axes.set_yticks(range(len(phases)), phases)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, max(100.0, *(112 * share for shares in known.values() for share in shares.values())))
    axes.set_xlabel("share of the wait (%)")
    draw_legend(figure, axes, columns)
    caption = (
        "What this machine's own bandwidth and matmul rate make unavoidable, as a share of the wait. "
        "100 % is a machine that does nothing but the work."
    )
    told = [
        f"{label}, {phase}: {format_figure(share, '%')}"
        for label, shares in known.items()
        for phase, share in shares.items()
    ]
    yield drawn("floors", figure, f"{caption} {'. '.join(told)}.", caption)


# Prefix ---------------------------------------------------------------------------------------------------------------


def prefix(series: Sequence[Series]) -> Iterable[Plot]:
    yield from _prefill_curve(series)
    yield from _requests(series)


def _prefill_curve(series: Sequence[Series]) -> Iterable[Plot]:
    found = [read.over_prefix(one) for one in series]
    if not any(len(of["full"]) > 1 for of in _measured(series, found)):
        return
    shown = [f"{one.label}, {side}" for one, of in zip(series, found, strict=True) for side in of if of[side]]
    figure, axes, columns = blank(shown)
    told: list[str] = []
    notes: list[str] = []
    for one, of, look in zip(series, found, looks_of(series), strict=True):
        for side in of:
            if of[side]:
                draw_line(axes, of[side], _side(look, side == "cached"), f"{one.label}, {side}", 1e3)
                told.append(f"{one.label}, {side}: {told_points(of[side], 'ms', 1e3)}")
        at = read.crossing(of["full"], of["cached"])
        if at is not None:
            axes.axvline(at, color=look.colour, linewidth=1, linestyle=(0, (2, 2)))
            axes.annotate(
                f"pays from {at:,.0f}", (at, 1), xycoords=("data", "axes fraction"), xytext=(3, -9),
                textcoords="offset points", fontsize=8.5,
            )  # fmt: skip
            told.append(f"{one.label}: a cached prefix is the faster one from {at:,.0f} tokens on")
        if (halved := one.figure("prefix.curve", "caching_wins_2x_from_tokens")) is not None:
            told.append(f"{one.label}: half the wait is gone from {halved:,.0f} tokens on")
            notes.append(f"{one.label}: half the wait is gone from {halved:,.0f} tokens on.")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    log_axis(axes.xaxis, 2)
    log_axis(axes.yaxis, 10)
    axes.set_xlabel("tokens of the shared prefix")
    axes.set_ylabel("prefill (ms)")
    draw_legend(figure, axes, columns)
    caption = "Prefill over the length of the prefix, computed anew and taken from the cache."
    yield drawn("prefix-curve", figure, f"{caption} {'. '.join(told)}.", " ".join([caption, *notes]))


def _requests(series: Sequence[Series]) -> Iterable[Plot]:
    found = [(one, *of) for one in series for of in read.requests(one)]
    if not found:
        return
    first = found[0][1]
    found = [row for row in found if row[1] == first][:MOST_BARS]  # one question tells it: the others are in the table
    rows = [f"{one.label}, {side}" for one, _, side, *_ in found]
    figure, axes, columns = blank(("prefill", "decode"), rows, 0.6 + 0.34 * len(found))
    places = range(len(found))
    for n, (phase, left, widths) in enumerate(
        (
            ("prefill", [0.0] * len(found), [row[3] for row in found]),
            ("decode", [row[3] for row in found], [row[4] for row in found]),
        )
    ):
        hatch = ("////", "")[n]
        axes.barh(places, widths, 0.7, left, facecolor=COLOURS[1 - n], edgecolor=PAPER, hatch=hatch, label=phase)
    longest = max(row[3] + row[4] for row in found)
    for place, row in zip(places, found, strict=True):
        axes.text(row[3] + row[4], place, f" {row[3] + row[4]:.3g} s", va="center", fontsize=8.5)
    axes.set_yticks(places, rows)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, longest * 1.25)
    axes.set_xlabel("time of the request (s)")
    draw_legend(figure, axes, columns)
    caption = f"One request, \u201c{first}\u201d, with a full and with a cached prefill."
    told = [f"{one.label}, {side}: prefill {p:.3g} s, decode {d:.3g} s" for one, _, side, p, d in found]
    yield drawn("prefix-requests", figure, f"{caption} {'. '.join(told)}.", caption)


# Quantization ---------------------------------------------------------------------------------------------------------


def quantization(series: Sequence[Series]) -> Iterable[Plot]:
    found = [(one, precision, kinds) for one in series for precision, kinds in read.by_module(one).items()][:MOST_BARS]
    if not found:
        return
    totals = [sum(kinds.values()) for _, _, kinds in found]
    unit, size = ("GiB", 2**30) if max(totals) >= 2**30 else ("MiB", 2**20)
    names = sorted({kind for _, _, kinds in found for kind in kinds}, key=lambda kind: kind != "all")
    rows = [f"{one.label}, {precision}" for one, precision, _ in found]
    legend = ["kinds not recorded" if kind == "all" else kind for kind in names]
    figure, axes, columns = blank(legend, rows, 0.6 + 0.3 * len(found))
    lefts = [0.0] * len(found)
    for n, kind in enumerate(names):
        widths = [kinds.get(kind, 0.0) / size for _, _, kinds in found]
        colour = COLOURS[n % 6]
        hatch = HATCHES[n % 6]
        axes.barh(
            range(len(found)), widths, 0.7, lefts, facecolor=colour, edgecolor=PAPER, hatch=hatch, label=legend[n]
        )
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, total in enumerate(lefts):
        axes.text(total, place, f" {total:.3g}", va="center", fontsize=8.5)
    axes.set_yticks(range(len(found)), rows)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, max(lefts) * 1.15)
    axes.set_xlabel(f"memory ({unit})")
    draw_legend(figure, axes, columns)
    caption = "Memory of the weights by precision" + (", and which modules hold it." if len(names) > 1 else ".")
    told = [
        f"{one.label}, {precision}: {', '.join(f'{kind} {held / size:.3g} {unit}' for kind, held in kinds.items())}"
        for one, precision, kinds in found
    ]
    yield drawn("quant-memory", figure, f"{caption} {'. '.join(told)}.", caption)


# Attention ------------------------------------------------------------------------------------------------------------


def attention(series: Sequence[Series]) -> Iterable[Plot]:
    found = [read.over_length(one) for one in series]
    for quantity, title, unit, scale, caption in (
        ("bytes", "extra memory (MiB)", "MiB", 2**-20, "Extra memory of attention over the length."),
        ("flops", "arithmetic (GFLOP)", "GFLOP", 1e-9, "Arithmetic of attention over the length."),
        ("s", "time (ms)", "ms", 1e3, "Time of attention over the length."),
    ):
        if not any(len(of[f"{way}_{quantity}"]) > 1 for of in _measured(series, found) for way in ("naive", "sdpa")):
            continue
        ways = {"naive": "naive", "sdpa": "SDPA"}
        shown = [
            f"{one.label}, {ways[w]}"
            for one, of in zip(series, found, strict=True)
            for w in ways
            if of[f"{w}_{quantity}"]
        ]
        figure, axes, columns = blank(shown)
        told = []
        noted = set()
        for one, of, look in zip(series, found, looks_of(series), strict=True):
            for way in ways:
                points = of[f"{way}_{quantity}"]
                if not points:
                    continue
                draw_line(axes, points, _side(look, way == "sdpa"), f"{one.label}, {ways[way]}", scale)
                grows = read.slope(points)
                told.append(f"{one.label}, {ways[way]}: {told_points(points, unit, scale)}")
                if grows is not None:
                    told[-1] += f", growing with the length to the power of {grows:.2f}"
                    last = (points[-1].x, points[-1].y * scale)
                    if not one.is_article and last not in noted:
                        noted.add(last)
                        axes.annotate(
                            f"slope {grows:.2f}", last, (-8, 2), textcoords="offset points", fontsize=8, ha="right"
                        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        log_axis(axes.xaxis, 2)
        log_axis(axes.yaxis, 10)
        axes.set_xlabel("sequence length (tokens)")
        axes.set_ylabel(title)
        draw_legend(figure, axes, columns)
        slopes = " Slope 2 is fourfold per doubling, slope 1 twofold."
        yield drawn(f"attention-{quantity}", figure, f"{caption} {'. '.join(told)}.", caption + slopes)


# Speculation ----------------------------------------------------------------------------------------------------------


def speculation(series: Sequence[Series]) -> Iterable[Plot]:
    found = [
        (one, look, of) for one, look in zip(series, looks_of(series), strict=True) if (of := read.speculated(one))
    ]
    if not found:
        return
    lines = [
        f"formula, c = {of.c:.2g}, {of.gamma:.2g} drafted"
        for *_, of in found
        if of.c is not None and of.gamma is not None
    ]
    lines += [_mark(one, of) for one, _, of in found]
    figure, axes, columns = blank(lines)
    told = []
    axes.axhline(1, color=INK, linewidth=1)
    for one, look, of in found:
        curve = [(share / 20, of.predicted(share / 20)) for share in range(21)]
        if of.c is not None and of.gamma is not None:
            xs, ys = [100 * x for x, y in curve if y is not None], [y for _, y in curve if y is not None]
            label = f"formula, c = {of.c:.2g}, {of.gamma:.2g} drafted"
            axes.plot(xs, ys, color=look.colour, linestyle=look.line, linewidth=1.4, label=label)
            told.append(f"{one.label}: the formula gives {ys[0]:.2f}x at 0 % and {ys[-1]:.2f}x at 100 % acceptance")
        told.append(f"{one.label}: {of.speed:.2f}x")
        if of.acceptance is None:
            axes.axhline(of.speed, color=look.colour, linestyle=":", linewidth=1.4, label=_mark(one, of))
        else:
            told[-1] += f" at {100 * of.acceptance:.0f} % acceptance"
            point = Point(100 * of.acceptance, of.speed, of.low, of.high)
            draw_line(axes, [point], Look(look.colour, look.marker, "none"), _mark(one, of))
    axes.set_xlim(-2, 102)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("drafted tokens accepted (%)")
    axes.set_ylabel("speed over the target alone (x)")
    draw_legend(figure, axes, columns)
    caption = (
        "Speed-up over acceptance: measured, and as the formula of arXiv:2211.17192 has it for the measured cost of a draft "
        "step beside a target step (c)."
    )
    yield drawn("speculation-speed", figure, f"{caption} {'. '.join(told)}.", caption)


def _mark(one: Series, of: read.Speculated) -> str:
    return one.label if of.acceptance is not None else f"{one.label}, acceptance unknown"


DRAWINGS: Mapping[str, Sequence[Drawing]] = {
    "batching": (batching, many_chats, floors),
    "prefix": (prefix,),
    "quant": (quantization,),
    "attention": (attention,),
    "speculation": (speculation,),
}
"""What is drawn for a station."""


def plots_of(station: str, series: Sequence[Series]) -> list[Plot]:
    """All plots of a station for these series, the article's among them. Empty where nothing was measured to draw."""
    with house_style(station):
        return [plot for draw in DRAWINGS.get(station, ()) for plot in draw(series)]
