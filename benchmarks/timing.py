"""The clock, and rounds: both sides of a comparison measured in turn, until the question is settled.

The clock and the device's sync are injected, so that everything here is tested without a GPU and without waiting.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from benchmarks.estimates import LAST_LOOK, looks

T = TypeVar("T")


def _nothing() -> None:
    """The CPU's sync: by the time a call returns, its work is done."""


@dataclass(frozen=True)
class Clock:
    """A wall clock that waits for the device first: a reading never leaves work of the past unpaid."""

    now: Callable[[], float] = time.perf_counter
    sync: Callable[[], None] = _nothing

    def read(self) -> float:
        """Seconds, after everything launched before has finished."""
        self.sync()
        return self.now()

    def time(self, call: Callable[[], object]) -> float:
        """Seconds that one call takes, fenced on both sides."""
        start = self.read()
        call()
        return self.read() - start


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside a measurement: a collection would bill one side for the other's garbage.

    Collects once before. Inside another quiet stretch it does nothing: the round is one stretch, whatever its sides do.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def set_aside() -> Iterator[None]:
    """What is there now is collected once and then left alone, so that the collection before each round is a short one:
    with a model loaded a whole one takes a tenth of a second. What a caller has set aside before stays so."""
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not before:
            gc.unfreeze()


@dataclass
class Rounds(Generic[T]):
    """Samples of every side, index by index measured in the same round.

    `stopped` says why no more rounds were added: "settled", "budget" or "rounds". `disturbed` counts the rounds that
    were thrown away and measured again, by reason (a throttled clock, say); `kept_disturbed` those kept because the
    bound on repeats was reached.
    """

    samples: dict[str, list[T]]
    stopped: str = "rounds"
    disturbed: dict[str, int] = field(default_factory=dict)
    kept_disturbed: int = 0

    def __getitem__(self, side: str) -> list[T]:
        return self.samples[side]

    def __len__(self) -> int:
        return len(next(iter(self.samples.values())))

    @property
    def note(self) -> str:
        """What a reader of the verdict must know about these rounds; empty when nothing."""
        said = [f"{n} rounds measured again ({why})" for why, n in self.disturbed.items()]
        if self.kept_disturbed:
            said.append(f"{self.kept_disturbed} rounds kept although disturbed")
        if self.stopped == "budget":
            said.append(f"the budget ended after {len(self)} round{'s' * (len(self) > 1)}")
        return ", ".join(said)


def interleave(
    sides: Mapping[str, Callable[[], T]],
    settled: Callable[[Rounds[T]], bool],
    budget_s: float,
    *,
    now: Callable[[], float] = time.perf_counter,
    disturbance: Callable[[], str | None] = lambda: None,
    min_rounds: int = 1,
    max_rounds: int = LAST_LOOK,
) -> Rounds[T]:
    """Measure all sides once a round, in alternating order (A B, B A, ...), until `settled` or the budget ends.

    Each side is a call that measures itself and returns its sample; one warm-up of each is dropped, since the first
    call of a shape pays for kernels, autotuning and caches. `settled` is asked only after 5, 10, 20, 40, ... rounds:
    asking after every round would find an accident sooner or later. `disturbance` is asked after every round; where it
    names a reason the round is measured again, as often as there are rounds wanted for the first look and no more.
    `budget_s` counts from the first measured round; the round under way is finished, and `min_rounds` are made however
    long they take.
    Raises ValueError when there are no sides.
    """
    if not sides:
        raise ValueError("nothing to measure: no sides")
    for warm_up in sides.values():
        warm_up()
    rounds: Rounds[T] = Rounds({name: [] for name in sides})
    look_at = set(looks(max_rounds))
    repeats_left = min(look_at, default=1)
    orders = (list(sides.items()), list(sides.items())[::-1])
    with set_aside():
        start = now()
        while (n := len(rounds)) < max_rounds:
            with quiet():
                sample = {name: side() for name, side in orders[n % 2]}
            reason = disturbance()
            if reason and repeats_left:
                repeats_left -= 1
                rounds.disturbed[reason] = rounds.disturbed.get(reason, 0) + 1
            else:
                rounds.kept_disturbed += bool(reason)
                for name, value in sample.items():
                    rounds.samples[name].append(value)
                if n + 1 in look_at and settled(rounds):
                    rounds.stopped = "settled"
                    return rounds
            if now() - start > budget_s:
                if len(rounds) >= min_rounds:
                    rounds.stopped = "budget"
                    return rounds
                repeats_left = 0  # out of time and too few kept: keep the next ones, marked
    return rounds
