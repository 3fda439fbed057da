"""An engine and a clock that pretend: every step costs what its Costs say, and no real time passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from benchmarks.claims import CLAIMS
from benchmarks.estimates import Estimate
from benchmarks.phases import EagerEngine, Prompt, State
from benchmarks.timing import Clock
from benchmarks.verdicts import Setting, Verdict, judge

FLOORS = Setting(floors={claim.noise: 0.02 for claim in CLAIMS.values() if claim.noise})
"""A machine whose noise is known."""


@dataclass
class Time:
    """Seconds that pass when somebody says so."""

    s: float = 0.0

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.s)

    def passes(self, seconds: float) -> None:
        self.s += seconds


@dataclass
class PretendCache:
    """A KV cache that knows its length, and how long copying it takes."""

    time: Time
    length: int = 0
    copied: bool = False
    copy_s: float = 0.001

    def get_seq_length(self) -> int:
        return self.length

    def __deepcopy__(self, memo: dict[int, Any]) -> PretendCache:
        self.time.passes(self.copy_s)
        return PretendCache(self.time, self.length, True, self.copy_s)


@dataclass
class Pretend:
    """A card that waits for its weights: a step takes as long for 16 rows as for one, prefill grows with its tokens.

    The costs are seconds, of (batch size, new tokens, tokens in the cache) and of (batch size, cache).
    """

    time: Time = field(default_factory=Time)
    prefill_s: Callable[[int, int, int], float] = lambda rows, new, cached: 0.010 + 0.0001 * rows * new
    step_s: Callable[[int, PretendCache], float] = lambda rows, cache: 0.020 + 0.0001 * rows
    name: str = "pretend"
    device: str = "cpu"

    @property
    def engine(self) -> EagerEngine:
        return cast(EagerEngine, self)

    def prefill(self, prompt: Prompt, cache: PretendCache | None = None) -> State:
        rows, new = prompt.ids.shape
        cache = cache or PretendCache(self.time)
        self.time.passes(self.prefill_s(rows, new, cache.length))
        cache.length += new
        return self._state(rows, cache)

    def step(self, state: State, tokens: torch.Tensor | None = None) -> State:
        rows = state.logits.shape[0]
        self.time.passes(self.step_s(rows, state.cache))
        state.cache.length += 1
        return self._state(rows, state.cache)

    def _state(self, rows: int, cache: PretendCache) -> State:
        logits = torch.zeros(rows, 7)
        logits[:, cache.length % 7] = 1
        return State(cache, None, logits)


def verdict(claim_id: str, observed: Estimate | dict[str, Estimate]) -> Verdict:
    """Judged as on a machine that lacks nothing."""
    return judge(CLAIMS[claim_id], copy.deepcopy(observed), FLOORS)
