"""Load shapes: who asks when. Closed loops, groups that wait for their longest member, Poisson arrivals and bursts.

Every load is bounded in requests and in seconds, seeded where it is random, and measures itself: an arrival that was sent
late, or a client that was busy all the time, would be the client's figure and not the server's.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.serving.answers import Answer, Ask, failures, percentile

Send = Callable[[Ask, float], Awaitable[Answer]]
"""Sends one request that was wanted at an instant (of time.perf_counter) and gives back what became of it; never raises."""

CLIENT_BUSY = 0.85
"""Share of the time at which one client process counts as the bottleneck: from there on its answers queue in itself."""

LATE_SHARE = 0.5
"""Of the mean gap between arrivals, or of one answer's time where all arrive at once: sent later than that, they are no longer
the load that was asked for."""

MANY_PROMPTS = 8
"""Prompts of which not all get one answer from a model: a small one said the same to four."""

LATE_S = 0.02
"""Later than any event loop that keeps up."""

LOAD_S = 60.0
"""Within this time a load sends what it sends."""


@dataclass(frozen=True)
class Stretch:
    """One load, served: its answers in the order of the asks, from when to when, and how busy the client was. `gap_s` is the
    mean gap between arrivals, 0 where all come at once, None where the users of a closed loop say when they ask."""

    answers: tuple[Answer, ...]
    start_s: float
    end_s: float
    client_cpu_s: float
    unsent: int = 0
    gap_s: float | None = None

    @property
    def wall_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def output_tokens(self) -> int | None:
        """Of all answers; None when the server doesn't tell."""
        told = [a.output_tokens for a in self.answers]
        return None if any(n is None for n in told) else sum(n for n in told if n is not None)

    @property
    def output_tokens_per_s(self) -> float | None:
        return None if self.output_tokens is None else self.output_tokens / self.wall_s

    @property
    def client_busy(self) -> float:
        """Share of the time for which this process computed."""
        return self.client_cpu_s / self.wall_s if self.wall_s > 0 else 1.0

    @property
    def mean_wait_s(self) -> float:
        return statistics.fmean(a.waited_s for a in self.answers)

    def empty_seats(self, seats: int) -> float:
        """Share of the seats' time for which no answer was being fetched in them."""
        busy_s = math.fsum(a.end_s - a.submit_s for a in self.answers)
        return max(0.0, 1 - busy_s / (seats * self.wall_s))

    @property
    def client_problem(self) -> str | None:
        """Why this stretch shows the client and not the server; None when it doesn't."""
        if self.client_busy >= CLIENT_BUSY:
            return f"the client, not the server, is the bottleneck: it was busy {self.client_busy:.0%} of the time"
        if self.gap_s is not None and self.answers:
            late_s = percentile([a.lag_s for a in self.answers], 0.9)
            gap_s = self.gap_s or statistics.median(a.e2e_s for a in self.answers)
            if late_s > max(LATE_SHARE * gap_s, LATE_S):
                return f"the client, not the server, is the bottleneck: it sent requests {1e3 * late_s:.0f} ms late"
        return None

    @property
    def problem(self) -> str | None:
        """Why no figure of this stretch may be used: failures, wrong lengths, a client that couldn't keep up."""
        if self.unsent:
            return f"{self.unsent} requests were never sent: the load's time was over"
        if said := failures(self.answers):
            return said
        short = [why for a in self.answers if (why := a.shortfall)]
        if short:
            return f"{len(short)} of {len(self.answers)} answers: {short[0]}"
        return repeated(self.answers) or self.client_problem


def held_up(answers: Sequence[Answer]) -> str | None:
    """Most answers of several tokens came all at once: when their tokens were there, nobody can tell. Seen now and then of a
    vLLM on two CPU cores, where whole answers of 16 tokens came after 160 to 1,100 ms."""
    long = [a for a in answers if a.ok and (a.output_tokens or 0) > 1]
    return "the server held its tokens back" if 2 * sum(a.tpot_s is None for a in long) > len(long) else None


def repeated(answers: Sequence[Answer]) -> str | None:
    """Different prompts with one and the same long answer, cached or made up: nothing about a model follows."""
    told = {a.ask.prompt: a.text for a in answers}
    texts = set(told.values())
    if len(told) >= MANY_PROMPTS and len(texts) == 1 and len(next(iter(texts))) > 8:
        return f"{len(told)} different prompts got the same answer: cached or made up, not generated"
    return None


async def _measured(
    load: Callable[[], Awaitable[tuple[list[Answer], int]]], arrivals_s: Sequence[float] | None = None
) -> Stretch:
    gap_s = (max(arrivals_s) - min(arrivals_s)) / max(1, len(arrivals_s) - 1) if arrivals_s else None
    cpu_s, start_s = time.process_time(), time.perf_counter()
    answers, unsent = await load()
    return Stretch(tuple(answers), start_s, time.perf_counter(), time.process_time() - cpu_s, unsent, gap_s)


async def closed(send: Send, asks: Sequence[Ask], concurrency: int, limit_s: float = LOAD_S) -> Stretch:
    """`concurrency` users who each ask again as soon as they have their answer, until all asks are answered.

    All asks are wanted from the start, so `waited_s` of an answer counts its turn too. Raises ValueError for no users.
    """
    if concurrency < 1:
        raise ValueError("a closed loop has at least one user")

    async def load() -> tuple[list[Answer], int]:
        start_s = time.perf_counter()
        answers: dict[int, Answer] = {}
        left = iter(enumerate(asks))

        async def user() -> None:
            for number, ask in left:
                if time.perf_counter() - start_s > limit_s:
                    return
                answers[number] = await send(ask, start_s)

        await asyncio.gather(*(user() for _ in range(concurrency)))
        return [answers[n] for n in sorted(answers)], len(asks) - len(answers)

    return await _measured(load)


async def groups(send: Send, asks: Sequence[Ask], size: int, limit_s: float = LOAD_S) -> Stretch:
    """Static batches: `size` asks at once, and the next ones only when the longest of them is done."""

    async def load() -> tuple[list[Answer], int]:
        start_s = time.perf_counter()
        answers: list[Answer] = []
        while len(answers) < len(asks) and time.perf_counter() - start_s <= limit_s:
            group = asks[len(answers) : len(answers) + size]
            answers += await asyncio.gather(*(send(ask, start_s) for ask in group))
        return answers, len(asks) - len(answers)

    return await _measured(load)


async def arriving(send: Send, asks: Sequence[Ask], arrivals_s: Sequence[float], limit_s: float = LOAD_S) -> Stretch:
    """An open load: ask i is sent at arrivals_s[i] after the start, whatever became of those before it.

    Arrivals after `limit_s` are never sent. Raises ValueError when asks and arrivals differ in number.
    """
    if len(asks) != len(arrivals_s):
        raise ValueError(f"{len(asks)} asks and {len(arrivals_s)} arrivals")

    async def load() -> tuple[list[Answer], int]:
        start_s = time.perf_counter()

        async def one(ask: Ask, after_s: float) -> Answer:
            due_s = start_s + after_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            return await send(ask, due_s)

        pairs = [(ask, t) for ask, t in zip(asks, arrivals_s, strict=True) if t <= limit_s]
        return list(await asyncio.gather(*(one(*pair) for pair in pairs))), len(asks) - len(pairs)

    return await _measured(load, arrivals_s)


def poisson(rate_per_s: float, n: int, seed: int) -> tuple[float, ...]:
    """`n` arrivals of a Poisson process, in seconds from the start, the last one at n / rate.

    Stretched to that: the sum of so few gaps as a load has is off by a fifth and more, and the load would have another
    rate than it says. Raises ValueError for a rate that is none.
    """
    if not 0 < rate_per_s < math.inf:
        raise ValueError(f"a rate is a positive number of requests a second, not {rate_per_s}")
    dice = random.Random(seed)
    arrivals = list(itertools.accumulate(dice.expovariate(1.0) for _ in range(n)))
    return tuple(at * n / rate_per_s / arrivals[-1] for at in arrivals)


def bursts(size: int, gap_s: float, n: int, seed: int) -> tuple[float, ...]:
    """`n` arrivals in bursts of `size` at once; the gaps between bursts vary by half around `gap_s`."""
    if size < 1 or not 0 <= gap_s < math.inf:
        raise ValueError(f"bursts have at least one request and a gap in seconds, not {size} and {gap_s}")
    dice = random.Random(seed)
    arrivals: list[float] = []
    now = 0.0
    while len(arrivals) < n:
        arrivals += [now] * min(size, n - len(arrivals))
        now += gap_s * dice.uniform(0.5, 1.5)
    return tuple(arrivals)


def mixed_lens(n: int, seed: int, shortest: int = 8, longest: int = 256) -> tuple[int, ...]:
    """`n` output lengths, log-uniform: many short answers and a few long ones, as chats have."""
    dice = random.Random(seed)
    return tuple(round(math.exp(dice.uniform(math.log(shortest), math.log(longest)))) for _ in range(n))


# The rate sweep -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Targets:
    """What a user would call good: at most this long to the first token, and for each token after it."""

    ttft_s: float
    tpot_s: float

    def met(self, answer: Answer) -> bool:
        tpot_s = answer.tpot_s
        return answer.ok and answer.ttft_s <= self.ttft_s and (tpot_s is None or tpot_s <= self.tpot_s)


@dataclass(frozen=True)
class Rate:
    """One rate of a sweep: what was offered, what was answered, and how much of it was good."""

    offered_per_s: float
    stretch: Stretch
    targets: Targets

    @property
    def answered_per_s(self) -> float:
        return sum(a.ok for a in self.stretch.answers) / self.stretch.wall_s

    @property
    def sent_per_s(self) -> float:
        """The rate at which the drawn arrivals were really sent."""
        submits = sorted(a.submit_s for a in self.stretch.answers)
        return len(submits) / max(1e-9, submits[-1] - self.stretch.start_s)

    @property
    def goodput_per_s(self) -> float:
        """Answers a second that met both targets."""
        return sum(map(self.targets.met, self.stretch.answers)) / self.stretch.wall_s

    @property
    def good_share(self) -> float:
        return sum(map(self.targets.met, self.stretch.answers)) / len(self.stretch.answers)

    @property
    def saturated(self) -> bool:
        """Whether fewer than half were good, or any request failed: a higher rate can only be worse."""
        return self.good_share < 0.5 or any(not a.ok for a in self.stretch.answers)


SWEEP_STEP = 2.0
MOST_RATES = 8


def sweep(at: Callable[[float], Rate], first_per_s: float, budget_s: float, now: Callable[[], float]) -> list[Rate]:
    """Rates that double from `first_per_s` until the server is saturated, the client can't keep up, or time is over."""
    found: list[Rate] = []
    start_s, rate = now(), first_per_s
    while len(found) < MOST_RATES:
        found.append(at(rate))
        if found[-1].saturated or found[-1].stretch.client_problem or now() - start_s > budget_s:
            break
        rate *= SWEEP_STEP
    return found
