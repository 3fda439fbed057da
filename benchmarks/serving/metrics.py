"""A server's own counters, in Prometheus' text form, before and after a load. No torch, no network."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_SERIES = 20_000
"""More series than any inference server has: what follows is not read."""

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*\Z")
_LABEL = re.compile(r'(?:^|,)\s*([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_COUNT = re.compile("[0-9]{1,9}")

NAMES: Mapping[str, tuple[str, ...]] = {
    "queue_s": ("vllm:request_queue_time_seconds_sum", "sglang:queue_time_seconds_sum"),
    "queued": ("vllm:request_queue_time_seconds_count", "sglang:queue_time_seconds_count"),
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "prefix_queries": (
        "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries_total",
        "sglang:prompt_tokens_total",
    ),
    "preemptions": ("vllm:num_preemptions_total",),
}
"""What each server calls a figure. Hits and queries are in tokens."""

_CONFIG = ("vllm:cache_config_info",)
_KNOWN = frozenset(itertools.chain(*NAMES.values(), _CONFIG))


@dataclass(frozen=True)
class Snapshot:
    """The series of known names at one moment: name, then labels and value of each."""

    series: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]] = field(default_factory=dict)

    @staticmethod
    def of(text: str) -> Snapshot:
        """What is well-formed in a text; the rest is left out."""
        found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for line in text.splitlines()[:MOST_SERIES]:
            if line.startswith("#") or len(line) > 4096:
                continue
            if not (match := _LINE.match(line)):
                continue
            name, labels, value = match.groups()
            if name not in _KNOWN:
                continue
            try:
                number = float(value)
            except ValueError:
                continue
            found.setdefault(name, []).append((dict(_LABEL.findall(labels or "")), number))
        return Snapshot({name: tuple(entries) for name, entries in found.items()})

    def figure(self, meaning: str) -> float | None:
        """A figure of NAMES, summed over its series (engines, ranks); None where the server has none or it is no number."""
        for name in NAMES[meaning]:
            if name in self.series:
                # not fsum, which raises where the sum is beyond all numbers
                total = sum(value for _, value in self.series[name])
                return total if math.isfinite(total) else None
        return None

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the server's KV cache holds: blocks times block size; None where it doesn't say."""
        for name in _CONFIG:
            for labels, _ in self.series.get(name, ()):
                blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
                if _COUNT.fullmatch(blocks) and _COUNT.fullmatch(size):
                    return int(blocks) * int(size)
        return None

    @property
    def record(self) -> dict[str, float]:
        """The known figures, for run.json."""
        known = {meaning: self.figure(meaning) for meaning in NAMES}
        return {meaning: value for meaning, value in known.items() if value is not None}


@dataclass(frozen=True)
class Change:
    """Two snapshots around a load."""

    before: Snapshot
    after: Snapshot

    def grown(self, meaning: str) -> float | None:
        """By how much a counter grew; None where it is unknown, or ran backwards, as after a restart, or beyond all numbers."""
        first, last = self.before.figure(meaning), self.after.figure(meaning)
        if first is None or last is None:
            return None
        grown = last - first
        return grown if 0 <= grown < math.inf else None

    @property
    def mean_queue_s(self) -> float | None:
        """Mean seconds in the server's queue of the requests in between."""
        return _over(self.grown("queue_s"), self.grown("queued"))

    @property
    def hit_share(self) -> float | None:
        """Share of the prompt tokens in between that the prefix cache had; None where it had more than there were."""
        share = _over(self.grown("prefix_hits"), self.grown("prefix_queries"))
        return share if share is not None and share <= 1 else None


def _over(part: float | None, whole: float | None) -> float | None:
    """part / whole; None where either is unknown, whole is 0, or it is no number."""
    if part is None or not whole:
        return None
    quotient = part / whole
    return quotient if math.isfinite(quotient) else None
