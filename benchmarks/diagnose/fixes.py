"""What can be done before new hardware: each fix with its gain, computed from the figures of one run. No torch.

A gain is how many times better one metric gets, against what this run measured. Two rules hold for all of them: what was
measured is not extrapolated, and no gain is larger than its cap, the measured time over the least time that the work takes
on this machine (docs/diagnose.md has the arithmetic).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum

from benchmarks.diagnose.evidence import Evidence, Gain, Kind, Request, Timed, times
from benchmarks.ledger import HOST_BOUND
from benchmarks.tables import plain

SMALLEST = 1.05
"""A gain below this is no reason to change a service: it takes a release to roll out and a quiet machine to see."""


class Metric(StrEnum):
    """What a fix makes better."""

    TTFT = "TTFT"
    LONG_TTFT = "TTFT of longer prompts"
    PAUSE = "worst pause in an answer"
    TPOT = "TPOT"
    THROUGHPUT = "throughput"
    CHATS = "chats in memory"


ASIDE = (Metric.LONG_TTFT, Metric.PAUSE)
"""What gets better without any of the four figures that the map asks for."""


class Stage(IntEnum):
    """When a fix's turn comes. Within a stage the larger gain comes first.

    A device that waits for its host comes first, since every other figure of the run was measured while it waited, and
    changes once it doesn't. More devices come last: one replica is tuned before it is copied.
    """

    STOP_WAITING = 0
    TUNE = 1
    SCALE_OUT = 2


class Reach(StrEnum):
    """Whether a gain meets a target: its whole interval, its value or its bound only, or neither."""

    ENOUGH = "enough for the target"
    MAYBE = "may be enough"
    SHORT = "not enough alone"


@dataclass(frozen=True)
class Fix:
    """Something to try before new hardware.

    `gain` is in `metric`; `cap` is what it was held below, None where this run has nothing to cap it by; `basis` says where
    the figures come from and what the fix costs; `command` measures it. `reaches`: whether this alone meets the target,
    None without one.
    """

    name: str
    metric: Metric
    gain: Gain
    basis: str
    command: str
    cap: float | None = None
    stage: Stage = Stage.TUNE
    reaches: Reach | None = None
    either: str = ""
    """Fixes with the same word here exclude each other."""
    device_share: float | None = None
    """For a fix that takes the host out of a phase: the share of it that the device works from then on."""


@dataclass(frozen=True)
class Untold:
    """What this run can't tell, why, and the command that would."""

    what: str
    why: str
    command: str


def worth(gain: Gain | None) -> bool:
    """Whether a gain is one: at least SMALLEST, and no end of its interval below 1."""
    return gain is not None and gain.value >= SMALLEST and (gain.low is None or gain.low > 1)


def ranked(fixes: Iterable[Fix]) -> tuple[Fix, ...]:
    """By stage, then by gain."""
    return tuple(sorted(fixes, key=lambda fix: (fix.stage, -fix.gain.value)))


def suite(seen: Evidence, myth: str, *options: str, beside: Sequence[str] = ()) -> str:
    """The command that measures a station, and those `beside` it, on a machine like the run's."""
    stations = (f"myths/test_{name}.py" for name in (myth, *beside))
    words = ["pytest", *stations, *(() if seen.on_cpu else ("-m gpu",)), *options]
    return " ".join([*words, *(() if seen.trained else ("--weights random",))])


SERVER = "pytest myths/test_serving.py --endpoint URL"
"""Measures a serving engine, whose scheduler and cache the suite doesn't have itself."""


# Text -----------------------------------------------------------------------------------------------------------------


def ms(seconds: float) -> str:
    """Seconds for a reader: '37.8 ms', '1.82 s'."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1e6 else f"{seconds:.2e} s"
    return f"{1e3 * seconds:.3g} ms"


def gib(count: float) -> str:
    """Bytes for a reader."""
    unit, size = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20)) if count >= s), ("KiB", 2**10))
    return f"{count / size:.3g} {unit}" if count < 2**60 else f"{count:.2e} bytes"


def number(value: float) -> str:
    """A count or rate with three digits and all of the whole ones: '1,355', '26.4'."""
    if value >= 1e9:
        return f"{value:.2e}"
    return f"{value:,.0f}" if value >= 999.5 or value == int(value) else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if 0.0995 <= share <= 0.995 or share in (0, 1) else f"{100 * share:.2g}%"


# Waiting for the host -------------------------------------------------------------------------------------------------


def graph_engine(seen: Evidence) -> Fix | Untold | None:
    """Decode without a host in between: measured where another engine ran the same batch, else what the device's idle time
    allows. None where there is nothing to gain, or no device beside the host."""
    command = suite(seen, "batching", "--engine both")
    base = next((row for row in seen.batches(seen.engine) if row.decode), None)
    if base is None or base.decode is None or seen.at_server:
        return None
    if other := same_batch(seen, base):
        return _measured_graph(seen, base, other, command)
    if seen.on_cpu or seen.engine == "graph":
        return None
    least_s = base.decode.least_without_host_s
    if least_s is None:
        why = "the run has neither the device time of a step nor a roofline"
        return Untold("how much of a decode step is the host's", why, command)
    gain = Gain(base.decode.wall_s / least_s, kind=Kind.AT_MOST)
    if not worth(gain):
        return None
    whose = "the card works" if base.decode.device_s else "reading the weights takes"
    basis = f"{whose} {ms(least_s)} of a step's {ms(base.decode.wall_s)}; throughput gains no more"
    if failed := seen.reason("batching.tpot", "graph"):
        basis += f"; this run has no such engine: {failed}"
    name, stage = "decode by CUDA graphs (engine graph)", _host_stage(base.decode)
    return Fix(name, Metric.TPOT, gain, basis, command, gain.value, stage, device_share=1.0)


def same_batch(seen: Evidence, base: Request) -> Request | None:
    """`base`'s row on the first other engine that has one with a decode time."""
    rows = (row for engine in seen.other_engines for row in seen.batches(engine))
    return next(
        (r for r in rows if (r.batch_size, r.precision) == (base.batch_size, base.precision) and r.decode), None
    )


def _measured_graph(seen: Evidence, base: Request, other: Request, command: str) -> Fix | None:
    assert base.decode and other.decode
    devices = [device for device in (base.decode.device_s, other.decode.device_s) if device]
    least_s = other.decode.floor_s or base.decode.floor_s or min(devices, default=None)
    cap = base.decode.wall_s / least_s if least_s else None
    gain = base.decode.over(other.decode)
    # The claim's rounds are of one row and in turn. The rows are minutes apart, and a host has other minutes; but it is the
    # row's time that targets are held against, so its own ratio is the gain and the rounds are among its ends.
    rounds = seen.samples("bigger_gpu.software_first", "graph speed-up") if base.batch_size == 1 else None
    if rounds:
        ends = [x for x in (rounds.low, rounds.value, rounds.high, gain.value) if x is not None]
        gain = replace(gain, low=min(ends), high=max(ends))
    gain = gain.capped(cap)
    if not worth(gain):
        return None
    shown = "CUDA graphs (engine graph)" if other.engine == "graph" else f"engine {plain(other.engine, 40)}"
    basis = f"a step at batch {base.batch_size} took {ms(base.decode.wall_s)}, and {ms(other.decode.wall_s)} on it"
    if rounds:
        basis += f" ({times(rounds.value)} in rounds of both in turn)"
    if base.tokens_per_s and other.tokens_per_s:
        basis += f"; {number(base.tokens_per_s)} to {number(other.tokens_per_s)} tok/s, prefill included"
    share = other.decode.device_share or 1.0
    stage = _host_stage(base.decode)
    return Fix(f"decode by {shown}", Metric.TPOT, gain, basis, command, cap, stage, device_share=share)


def graph_throughput(seen: Evidence) -> Fix | None:
    """The same as tokens per second, in which prefill has a part that no graph speeds up."""
    fix = graph_engine(seen)
    if not isinstance(fix, Fix):
        return None
    base = next(row for row in seen.batches(seen.engine) if row.decode)
    other = same_batch(seen, base)
    gain = _rate_gain(base, other) if other else None
    if gain is None:
        return replace(fix, metric=Metric.THROUGHPUT)
    return replace(fix, metric=Metric.THROUGHPUT, gain=gain.capped(fix.cap)) if worth(gain.capped(fix.cap)) else None


def _host_stage(phase: Timed) -> Stage:
    share = phase.device_share
    return Stage.STOP_WAITING if share is not None and share < HOST_BOUND else Stage.TUNE


def prefill_off_host(seen: Evidence, row: Request) -> Fix | None:
    """A prefill in which the device waits: what is the most that a server which compiles or captures it can save."""
    prefill = row.prefill
    if prefill is None or prefill.device_s is None or prefill.least_without_host_s is None or seen.on_cpu:
        return None
    cap = prefill.wall_s / prefill.least_without_host_s
    gain = Gain(cap, kind=Kind.AT_MOST)
    if not worth(gain):
        return None
    return Fix(
        "a server that compiles or captures prefill",
        Metric.TTFT,
        gain,
        f"the card works {ms(prefill.device_s)} of a prefill's {ms(prefill.wall_s)}; the suite has no such prefill itself",
        SERVER,
        cap,
        _host_stage(prefill),
        device_share=1.0,
    )


# Prefix ---------------------------------------------------------------------------------------------------------------


def prefix_gain(seen: Evidence) -> tuple[Gain | None, float | None]:
    """(gain of a cached prefix at the station's length, its cap).

    The claim's paired rounds where they have an interval, else the smallest ratio that is named. The cap is the full
    prefill over the least time of the cached one, or where that is unknown the prompt over what is left of it to prefill.
    """
    caps: list[float] = []
    gains: list[Gain] = []
    for full, cached in seen.prefix_pairs:
        assert full.prefill and cached.prefill
        gains.append(full.prefill.over(cached.prefill))
        if cached.prefill.least_s:
            caps.append(full.prefill.wall_s / cached.prefill.least_s)
        elif full.prompt_len and cached.prompt_len:
            caps.append(full.prompt_len / cached.prompt_len)
    claimed = seen.ratio("prefix.prefill_1484")
    if claimed:
        gains = [claimed] if claimed.low is not None else [*gains, claimed]
    gain = min(gains, key=lambda gain: gain.value, default=None)
    cap = min(caps, default=None)
    return (gain.capped(cap) if gain else None), cap


def prefix_caching(seen: Evidence) -> Fix | Untold | None:
    command = suite(seen, "prefix_reuse", '--suffix "YOUR QUESTION"')
    gain, cap = prefix_gain(seen)
    if gain is None and seen.ratio("serving.prefix_ttft"):
        return None
    if gain is None:
        return Untold("what a cached prefix saves", "the run has no prefix station", command)
    pairs = seen.prefix_pairs
    length = next((full.prefix_len for full, _ in pairs if full.prefix_len), 1484.0)
    sides = [f"{ms(f.prefill.wall_s)} to {ms(c.prefill.wall_s)}" for f, c in pairs[:4] if f.prefill and c.prefill]
    exact = "it needs the same tokens from the first on, so what changes goes last"
    if worth(gain):
        # The least that the cached request still costs is its share of the whole: said, so that nobody expects it free.
        whole = [(f.e2e.wall_s, c.e2e.wall_s) for f, c in pairs if f.e2e and c.e2e]
        rest = f"; a whole request still takes {percent(min(1.0, whole[0][1] / whole[0][0]))}" if whole else ""
        basis = f"{number(length)} shared tokens took the first token from {', '.join(sides)}{rest}; {exact}"
        return Fix("prefix caching", Metric.TTFT, gain, basis, command, cap)
    return _longer_prefix(seen, f"at {number(length)} tokens it gains nothing ({gain.text}); {exact}")


def _longer_prefix(seen: Evidence, rest: str) -> Fix | None:
    """Where a prefix pays that the station's length doesn't show."""
    command = suite(seen, "prefix_reuse", "--prefix-len TOKENS")
    if wins := seen.cell_figures("prefix.curve", (seen.engine,)).get("caching_wins_2x_from_tokens"):
        rest = f"from {number(wins)} tokens on it gains 2x; {rest}"
    claimed = seen.ratio("prefix.prefill_device_bound")
    if claimed is not None and worth(claimed):
        gain, where = claimed, seen.reason("prefix.prefill_device_bound") or "at a length that isn't in the run"
    elif seen.prefix_curve and worth(Gain(seen.prefix_curve[-1][1])):
        gain, where = Gain(seen.prefix_curve[-1][1]), f"at {number(seen.prefix_curve[-1][0])} tokens"
    else:
        return None
    return Fix("prefix caching, of long prefixes only", Metric.LONG_TTFT, gain, f"{where}; {rest}", command)


# Batching -------------------------------------------------------------------------------------------------------------


def batching(seen: Evidence, tables: Sequence[Sequence[Request]]) -> Fix | Untold | None:
    """The largest measured throughput over the smallest batch's of the same engine, in whichever table shows more; why it
    can't be told where only rows that say nothing about each other would.

    `tables` are an engine's requests and its decode curve, smallest batch first.
    """
    found = [told for rows in tables if (told := _batching(seen, rows))]
    fixes = [fix for fix in found if isinstance(fix, Fix)]
    return max(fixes, key=lambda fix: fix.gain.value, default=next(iter(found), None))


def _batching(seen: Evidence, rows: Sequence[Request]) -> Fix | Untold | None:
    if len(rows) < 2:
        return None
    base, best = rows[0], max(rows, key=lambda row: row.tokens_per_s or 0.0)
    cap = rate_cap(base, best)
    gain = _rate_gain(base, best)
    claimed = seen.ratio("batching.throughput", base.engine)
    paired = base.e2e is not None and (base.batch_size, best.batch_size) == (1, 16)
    sizes = f"--batch-sizes {base.batch_size},{best.batch_size},{2 * best.batch_size}"
    command = SERVER if seen.at_server else suite(seen, "batching", sizes)
    if claimed and paired:
        gain = claimed
    elif why := seen.not_comparable(rows):
        return Untold(f"what {best.batch_size} chats in a batch gain", why, command)
    elif gain and base.e2e is None:
        gain = replace(gain, kind=Kind.COMPUTED)  # requests have a prefill too, which the curve leaves out
    elif gain:
        gain = Gain(gain.value, kind=Kind.UNPAIRED)
    gain = gain.capped(cap) if gain else None
    if gain is None or not worth(gain):
        return None
    assert base.tokens_per_s and best.tokens_per_s
    basis = f"{number(base.tokens_per_s)} tok/s at batch {base.batch_size}, {number(best.tokens_per_s)} at {best.batch_size}"
    if base.engine != seen.engine:
        basis += f", on engine {plain(base.engine, 40)}"
    basis += "" if base.e2e else " (decode alone, from the run's curve)"
    for what, before, after in (("", base.e2e, best.e2e), (" for a token", base.decode, best.decode)):
        if before and after:
            longer = after.wall_s / before.wall_s
            basis += (
                f"; each user waits {times(longer)} as long{what}" if longer >= SMALLEST else "; no user waits longer"
            )
            break
    if base.decode and _host_stage(base.decode) is Stage.STOP_WAITING and not seen.on_cpu:
        basis += "; measured while the card waits for its host, so less once it doesn't"
    if cheap := stops_being_cheap(rows):
        whose = "a further user's whole request" if base.e2e else "a further user"  # prefills and all
        basis += f"; from batch {cheap} on {whose} adds less than half of what the first one gets"
    return Fix(f"serve {best.batch_size} chats in a batch", Metric.THROUGHPUT, gain, basis, command, cap)


def rate_cap(base: Request, best: Request) -> float:
    """The most that `best` can give over `base` on the same engine: once for each row, and no more than `fastest_rate`."""
    cap = best.batch_size / base.batch_size
    rate = fastest_rate(best)
    return min(cap, rate / base.tokens_per_s) if rate and base.tokens_per_s else cap


def fastest_rate(row: Request) -> float | None:
    """Tokens per second if each decode step of a batch took its least time: output_len tokens in output_len - 1 steps."""
    if row.decode is None or row.decode.least_s is None or row.output_len is None or row.output_len <= 1:
        return None
    return row.batch_size * row.output_len / ((row.output_len - 1) * row.decode.least_s)


def _rate_gain(base: Request, best: Request) -> Gain | None:
    if not base.tokens_per_s or not best.tokens_per_s:
        return None
    value = best.tokens_per_s / base.tokens_per_s
    if base.e2e is None or best.e2e is None or not base.e2e.samples_s or not best.e2e.samples_s:
        return Gain(value)
    # tokens/s is a batch's tokens over its time, so its samples follow from those of the time.
    scale = value * best.e2e.wall_s / base.e2e.wall_s
    ends = base.e2e.over(best.e2e, scale)
    return Gain(value, ends.low, ends.high)


def stops_being_cheap(rows: Sequence[Request]) -> int | None:
    """The batch size from which on every further user adds less than half of what the smallest batch gives each; None where
    the last one still adds as much."""
    known = [(row.batch_size, row.tokens_per_s) for row in rows if row.tokens_per_s]
    turned = None
    for (size, rate), (larger, faster) in itertools.pairwise(known):
        cheap = larger > size and (faster - rate) / (larger - size) >= known[0][1] / known[0][0] / 2
        turned = None if cheap else turned or larger
    return turned
