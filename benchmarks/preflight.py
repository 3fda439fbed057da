"""What a reader of the figures must know about the machine, in words: from its records before and after a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.machine import POWER_CAPS, SETTINGS, SLOWDOWNS

BUSY_LOAD = 0.5
"""Load over cores from which a machine counts as busy at the start. Eager decode is host-bound: its one thread shares a
core as soon as half of the cores are taken by others, hyperthreads counted."""

CLOCK_SHARE = 0.9
"""Share of the highest SM clock under which a working card's clock is a remark; boost steps of a healthy card are
smaller than the ten per cent left."""

HEAT_MARGIN_C = 5
"""Degrees below the card's own slowdown temperature from which a reader is told: the next runs may be slowed down."""


def warnings(before: Mapping[str, Any], after: Mapping[str, Any] | None = None) -> list[str]:
    """One line for each thing about this machine that a reader of its figures must know; `after` is None while it runs.

    Both are records as `record` makes them, or as read back from run.json.
    """
    records = {"before": before} if after is None else {"before": before, "after": after}
    if before["device"] == "cpu":
        return _busy(before)
    return [
        *_blind(before),
        *_shared(list(records.values())),
        *_sliced(before),
        *_throttled(records),
        *_capped(records),
        *_limited(before),
        *_slow_clock(records),
        *_hot(records),
        *_busy(before),
    ]


def _blind(before: Mapping[str, Any]) -> Iterator[str]:
    if before["driver"] is None:
        yield f"throttling and neighbours can't be seen ({before['unavailable']['driver']})"
    elif before["throttle_reasons"] is None:
        yield f"throttling can't be seen ({before['unavailable']['throttle_reasons']})"


def _shared(records: list[Mapping[str, Any]]) -> Iterator[str]:
    held_bytes: dict[int, int | None] = {}
    for one in records:
        for neighbour in one["neighbours"] or ():
            held_bytes[neighbour["pid"]] = neighbour["memory_bytes"]
    if held_bytes:
        n = len(held_bytes)
        known = [held for held in held_bytes.values() if held is not None]
        size = f" holding {sum(known) / 2**30:.1f} GiB" if len(known) == n else ""
        pids = ", ".join(map(str, sorted(held_bytes)))
        yield f"the card is shared: {n} other process{'es' * (n > 1)}{size} (pid {pids})"
    unknown = [one for one in records if one["neighbours"] is None and one["driver"] is not None]
    if unknown and not held_bytes:
        yield f"whether others use the card is unknown ({unknown[0]['unavailable']['neighbours']})"


def _sliced(before: Mapping[str, Any]) -> Iterator[str]:
    if before["mig"]:
        profile = f" ({before['mig_profile']})" if before["mig_profile"] else ""
        yield f"the card is a MIG slice{profile}: its figures are not the whole card's"


def _when(records: Mapping[str, Mapping[str, Any]], words: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """(a reason out of `words`, when it was seen) of the records."""
    for reason in words.values():
        seen = [when for when, one in records.items() if reason in (one["throttle_reasons"] or ())]
        if seen:
            yield reason, " and ".join(seen) + " the run"


def _throttled(records: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for reason, when in _when(records, SLOWDOWNS):
        yield f"the card was throttled {when}: {reason}"


def _capped(records: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for reason, when in _when(records, POWER_CAPS):
        yield f"the card ran at its power limit {when} ({reason}): its clocks follow the load"


def _limited(before: Mapping[str, Any]) -> Iterator[str]:
    limit, default = before["power_limit_w"], before["power_limit_default_w"]
    if limit is not None and default is not None and limit < default:
        yield f"the power limit is {limit:.0f} W, the card's own is {default:.0f} W"


def _slow_clock(records: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Low clocks of a card at work; an idle card's are low by design."""
    for when, one in records.items():
        clock, highest, reasons = one["clocks_mhz"]["sm"], one["clocks_mhz"]["max_sm"], one["throttle_reasons"]
        if None in (clock, highest, reasons) or SETTINGS[0x01] in reasons:
            continue
        if clock < CLOCK_SHARE * highest:
            said = f" ({', '.join(reasons)})" if reasons else ""
            yield f"the SM clock was {clock} of {highest} MHz {when} the run{said}"


def _hot(records: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for when, one in records.items():
        heat, slowdown = one["temperature_c"], one["temperature_slowdown_c"]
        if heat is not None and slowdown is not None and heat >= slowdown - HEAT_MARGIN_C:
            yield f"the card was at {heat} C {when} the run, and slows down at {slowdown} C"


def _busy(before: Mapping[str, Any]) -> list[str]:
    load, cores = before["cpu"]["load_1m"], before["cpu"]["cores_total"]
    if load is None or cores is None or load < BUSY_LOAD * cores:
        return []
    return [f"the machine was busy when the run began: load {load:.1f} on {cores} cores"]
