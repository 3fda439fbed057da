"""The one sentence that a run comes down to, computed from its figures and verdicts; and the line for a pull request.

Every clause says only what this run measured. A clause whose figures are missing is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.diagnose.evidence import Evidence
from benchmarks.series import Series, not_comparable, over_batch, series_of
from benchmarks.tables import finite, plain
from benchmarks.verdicts import Word, format_figure

BUSY_ENOUGH = 0.1
"""Idle shares below this bound nothing: a card that is hardly ever idle may be worth replacing."""


def counts(claims: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many claims came to each verdict, all four named."""
    seen = Counter(claim["verdict"] for claim in claims)
    return {str(word): seen[word] for word in Word}


def finding(series: Sequence[Series]) -> str:
    """One sentence on the engines of one run, the first of them first; `series` has at least one entry."""
    first, *others = series
    clauses = [*_idle(first), *_engines(first, others), *_batching(first), *_prefix(first), *_bigger(first)]
    if not clauses:
        reasons = Counter(plain(c["reason"]) for c in first.claims.values() if c["verdict"] == Word.NOT_JUDGED)
        judged = len(first.claims) - reasons.total()
        told = f"{judged} of {len(first.claims)} claims could be judged here" if first.claims else "Nothing was judged"
        why = f": {reasons.most_common(1)[0][0]}" if reasons else ""
        return _sentence([told + why])
    return _sentence(clauses)


def _sentence(clauses: Sequence[str]) -> str:
    text = "; ".join(clauses)
    return text[:1].upper() + text[1:] + "."


def idle_share(series: Series) -> float | None:
    """Share of a lone chat's decode during which the card was idle; None for what is no share."""
    cell = series.cell("batching.1.decode")
    idle = finite(cell["host_bound"]) if cell else None
    idle = idle if idle is not None else series.figure("batching.1", "decode_host_bound")
    return idle if idle is not None and 0 <= idle <= 1 else None


def _idle(series: Series) -> Iterable[str]:
    idle = idle_share(series)
    if idle is not None:
        yield f"the card was idle for {100 * idle:.0f} % of the time that one chat's tokens took"
    elif series.run["machine"]["device"] == "cpu" and series.cells:
        yield "no card here, the CPU did all the work"


def _engines(first: Series, others: Sequence[Series]) -> Iterable[str]:
    mine = first.figure("batching.1", "tpot_s")
    for other in others:
        theirs = other.figure("batching.1", "tpot_s")
        # Rounds of both in turn where there are any: rows are minutes apart, and a host has other minutes.
        rounds = Evidence(first.run).samples("bigger_gpu.software_first", "graph speed-up")
        if other.engine == "graph" and rounds:
            gain: float | None = rounds.value
        else:
            gain = mine / theirs if mine and theirs else None
        if gain is not None:
            idle = idle_share(other)
            left = f", idle {100 * idle:.0f} %" if idle is not None else ""
            yield f"the {plain(other.engine, 40)} engine wrote them {format_figure(gain, 'x')} as fast{left}"


def _batching(series: Series) -> Iterable[str]:
    """Sixteen chats over one as the claim's rounds have it; where it wasn't judged, the largest batch of the table."""
    claim = series.claims.get("batching.throughput")
    value = finite(claim["observed"]) if claim else None
    if value is not None:
        yield f"16 chats at once gave {format_figure(value, 'x')} the tokens per second of one"
        return
    table = over_batch(series)
    points = table["output_tokens_per_s"]
    if len(points) < 2 or points[0].x != 1:
        return
    last = points[-1]
    if why := not_comparable(series.run, series.engine, [point.y for point in table["tpot_s"]]):
        yield f"what {last.x:.0f} chats at once gain can't be told: {why}"
        return
    gain = format_figure(last.y / points[0].y, "x")
    yield f"{last.x:.0f} chats at once gave about {gain} the tokens per second of one, from unpaired rows"


def _prefix(series: Series) -> Iterable[str]:
    claim = series.claims.get("prefix.prefill_1484")
    value = finite(claim["observed"]) if claim else None
    if claim is None or value is None or claim["verdict"] not in (Word.HOLDS, Word.REFUTED):
        return
    length = series.figure("prefix.0.full", "prefix_len")
    prefix = f"a cached prefix of {length:,.0f} tokens" if length else "a cached prefix"
    only = "" if claim["verdict"] == Word.HOLDS else "only "
    yield f"{prefix} made prefill {only}{format_figure(value, 'x')} as fast"


def _bigger(series: Series) -> Iterable[str]:
    """A card that takes no time at all leaves the time in which this one was idle: wall / (wall - busy) at most."""
    idle = idle_share(series)
    if idle is not None and idle >= BUSY_ENOUGH:
        yield f"with the same software, a bigger card would write one chat's tokens at most {1 / idle:.3g}x as fast"
    elif idle is not None:
        yield "the card itself is what one chat waits for"


def badge(run: Mapping[str, Any]) -> str:
    """One line of plain text on a run: 'NVIDIA H200: 27 hold, 1 refuted. The card was idle ...'. Its first engine counts."""
    series = series_of([run])
    seen = counts(series[0].claims.values())
    words = {
        Word.HOLDS: "hold",
        Word.REFUTED: "refuted",
        Word.INCONCLUSIVE: "inconclusive",
        Word.NOT_JUDGED: "not judged",
    }
    told = ", ".join(f"{seen[word]} {text}" for word, text in words.items() if seen[word]) or "nothing was judged"
    return f"{series[0].label}: {told}. {finding(series)}"
