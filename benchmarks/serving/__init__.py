"""Serving: what only a server shows, measured over HTTP. Batching, prefixes, queues, pages, chunks, and what an average hides.

A claim rests on stretches of load (`loads`) that are served in turn. A stretch with a failed request, an answer of
another length, or a client that couldn't keep up gives no figure: `Broken`, and the claim is INCONCLUSIVE with that reason.
What a server has no means to show raises `NotServed`, and the claim is NOT JUDGED.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.calibration import Floor, a_a
from benchmarks.claims import CLAIMS
from benchmarks.estimates import unusable
from benchmarks.ledger import Cell
from benchmarks.nimbusdb import PROMPT, QUESTIONS, SYSTEM_TEXT
from benchmarks.rigs import SHORT_DTYPES
from benchmarks.serving.answers import Ask, most_at_once
from benchmarks.serving.loads import Stretch, closed, held_up
from benchmarks.serving.metrics import Snapshot
from benchmarks.serving.servers import MAX_LEN, Fleet, Plan, ServerError
from benchmarks.workloads import PREFIX_LEN

if TYPE_CHECKING:
    from benchmarks.serving.client import Client
    from benchmarks.session import Observed

USERS = 16
"""The article's batch, as users who ask at once."""

OUTPUT_LEN = 16
MOST_SEATS = 256
TRIES = 3
"""Loads that are tried before what a server does to them is called its answer."""

ALL_SERVED = 0.9
"""Share of a crowd's answers written at once that counts as all: the first may be done when the last begins."""

METRICS = ("serving_ttft", "serving_tpot", "serving_e2e")
"""What has a noise floor of each server's own."""

FLOOR_S = 8.0
"""Seconds of A/A rounds for a server's noise floors."""


class NotServed(Exception):
    """This server can't answer the question; the message is one line that says why."""


class Broken(Exception):
    """A load gave no figure; the message is one line that says why."""


class ClientBusy(Broken):
    """A load shows the client and not the server."""


# The server under test ------------------------------------------------------------------------------------------------


@dataclass
class Prompts:
    """Prompts that no cache has seen: each begins with a mark of its own, unless a shared prefix is the subject.

    `chars_per_token` is what this server's own counts gave for this kind of text.
    """

    chars_per_token: float
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    asked: int = 0

    def mark(self) -> str:
        self.asked += 1
        return f"{self.asked:04d}{self.tag}"

    def text(self, tokens: int, first: str) -> str:
        """About `tokens` tokens of the policies that begin with `first`."""
        length = round(tokens * self.chars_per_token)
        body = f"{first} {SYSTEM_TEXT} " * (1 + length // len(SYSTEM_TEXT))
        return body[:length].rsplit(" ", 1)[0]

    def question(self) -> str:
        """The next question, in the form that the embedded models answer."""
        return PROMPT.format(question=QUESTIONS[self.asked % len(QUESTIONS)][0])

    def short(self, output_len: int = OUTPUT_LEN) -> Ask:
        return Ask(f"[{self.mark()}]\n\n{self.question()}", output_len)

    def long(self, tokens: int, output_len: int) -> Ask:
        return Ask(f"{self.text(tokens, self.mark())}\n\n{self.question()}", output_len)

    def after_shared(self, output_len: int, changed: str | None = None) -> Ask:
        """The shared prefix and a question of its own; `changed` takes the place of one word in its first sentence."""
        prefix = self.text(PREFIX_LEN, f"shared {self.tag} {changed or 'words'}")
        return Ask(f"{prefix}\n\n[{self.mark()}]\n\n{self.question()}", output_len)

    def many(self, n: int, output_len: int = OUTPUT_LEN) -> list[Ask]:
        return [self.short(output_len) for _ in range(n)]


@dataclass(frozen=True)
class Crowd:
    """Users who asked at once, and how many of their answers were being written at once."""

    users: int
    at_once: int

    @property
    def all_served(self) -> bool:
        return self.at_once >= ALL_SERVED * self.users


class Server:
    """One server that is asked, by name: `open` it first, `close` it in any case.

    `told_seats`, `kv_tokens` and `dtype` are what the suite told a server of its own, None where nobody did.
    """

    def __init__(
        self,
        name: str,
        client: Client,
        seats: int | None = None,
        kv_tokens: int | None = None,
        max_len: int | None = None,
        dtype: str | None = None,
    ) -> None:
        self.name, self.client = name, client
        self.kv_tokens, self.max_len, self.dtype = kv_tokens, max_len, dtype
        self.told_seats = self._seats = seats
        self._broken: str | None = None
        self._disturbed: str | None = None
        self._runner = asyncio.Runner()
        self.prompts = Prompts(4.0)
        self.before: Snapshot | None = None

    def open(self) -> Server:
        """Agree with the server on how to ask. Raises ServerError."""
        self._runner.run(self._open())
        return self

    async def _open(self) -> None:
        await self.client.__aenter__()
        await self.client.agree()
        self.max_len = self.max_len or self.client.max_len
        answer = await self.client.send(Ask(SYSTEM_TEXT, 2), time.perf_counter())
        if answer.prompt_tokens:
            chars_per_token = len(SYSTEM_TEXT) / answer.prompt_tokens
            if not 0.8 <= chars_per_token <= 12:  # of English, tokenizers give 3 to 5, and by bytes a little under 1
                counted = f"{answer.prompt_tokens:,} tokens in {len(SYSTEM_TEXT):,} characters"
                raise ServerError(f"{self.client.shown} counts {counted}: its counts can't be used, ask another server")
            self.prompts = Prompts(chars_per_token)
        self.before = await self._snapshot()

    def close(self) -> None:
        self._runner.run(self.client.__aexit__(None, None, None))
        self._runner.close()

    def snapshot(self) -> Snapshot | None:
        """The server's counters now, None where it shows none."""
        return self._runner.run(self._snapshot())

    async def _snapshot(self) -> Snapshot | None:
        status, text = await self.client.get(f"{self.client.endpoint.root}/metrics")
        shot = Snapshot.of(text) if status == 200 else Snapshot()
        return shot if shot.record else None

    def load(self, make: Callable[[], Awaitable[Stretch]]) -> Stretch:
        """Serves one stretch. Raises Broken when it gives no figure, at once when the server is known to be dead: when nothing of
        a stretch was answered, nor a short question after it."""
        if self._broken:
            raise Broken(self._broken)
        stretch = self.any_load(make)
        self._disturbed = self._disturbed or held_up(stretch.answers)
        if stretch.problem is None:
            return stretch
        if stretch.problem == stretch.client_problem:
            raise ClientBusy(stretch.problem)
        if not any(a.ok for a in (*stretch.answers, *self._asked_briefly().answers)):
            self._broken = stretch.problem
        raise Broken(stretch.problem)

    def disturbance(self) -> str | None:
        """Why the loads since this was asked last are worth serving again, None where they are not."""
        reason, self._disturbed = self._disturbed, None
        return reason

    def _asked_briefly(self) -> Stretch:
        return self.any_load(lambda: closed(self.client.send, self.prompts.many(1), 1))

    def any_load(self, make: Callable[[], Awaitable[Stretch]]) -> Stretch:
        """Serves one stretch, whatever becomes of it: where failures are the figure."""
        return self._runner.run(_awaited(make))

    def closed(self, asks: Sequence[Ask], users: int) -> Stretch:
        return self.load(lambda: closed(self.client.send, asks, users))

    @property
    def seats(self) -> int | None:
        """How many answers this server writes at once: told, or found by a crowd; None when more than MOST_SEATS. Raises Broken
        as `crowd` does."""
        if self._seats is None:
            seen = self.crowd(USERS)
            self._seats = MOST_SEATS + 1 if seen.all_served else max(1, seen.at_once)
        return self._seats if self._seats <= MOST_SEATS else None

    def crowd(self, users: int, output_len: int = OUTPUT_LEN) -> Crowd:
        """A crowd in which some must wait: twice as many users each time, up to MOST_SEATS. Raises Broken where a load does, and
        where the server holds its tokens back every time, since nobody can tell then."""
        while (seen := self._crowd_of(users, output_len)).all_served and users < MOST_SEATS:
            users = min(MOST_SEATS, 2 * users)
        return seen

    def _crowd_of(self, users: int, output_len: int) -> Crowd:
        for _ in range(TRIES):
            answers = self.closed(self.prompts.many(users, output_len), users).answers
            if not (problem := held_up(answers)):
                return Crowd(users, most_at_once(answers))
        raise Broken(problem)

    def must_batch(self) -> None:
        """Raises NotServed for a server with one seat."""
        if self.seats == 1:
            raise NotServed("this server writes one answer at a time")

    @property
    def record(self) -> dict[str, object]:
        """For run.json: what was asked how, and the server's counters before and after."""
        after = self.snapshot()
        return {
            "model": self.client.endpoint.hide(self.client.model, 120),
            "address": self.client.shown,
            "api": "chat" if self.client.dialect.chat else "completions",
            "fields": sorted(self.client.dialect.fields),
            "metrics_before": self.before.record if self.before else None,
            "metrics_after": after.record if after else None,
        }


def connect(plan: Plan, fleet: Fleet, name: str, dtype: str) -> Server:
    """The server of that name: the plan's endpoint, or one of the fleet, which was started with that dtype."""
    from benchmarks.serving.client import Client, Endpoint

    if plan.endpoint is not None:
        return Server(name, Client(plan.endpoint, plan.model))
    process = fleet.processes[name]
    client = Client(Endpoint.of(process.url), process.model)
    return Server(name, client, process.launch.seats, process.launch.kv_tokens, MAX_LEN, dtype)


async def _awaited(make: Callable[[], Awaitable[Stretch]]) -> Stretch:
    await asyncio.sleep(0.001)  # between loads no loop runs: here it learns which connections the server has closed
    return await make()


# Rounds ---------------------------------------------------------------------------------------------------------------


def noise(server: Server) -> dict[str, Floor | str]:
    """The noise floors of this server: one user who asks the same kind of question, as both sides of a comparison. Tried again
    where a load breaks; where all do, every metric has the last one's reason."""

    def alone() -> dict[str, float]:
        (answer,) = server.closed([server.prompts.long(128, 17)], 1).answers
        tpot_s = math.nan if answer.tpot_s is None else answer.tpot_s
        return dict(zip(METRICS, (answer.ttft_s, tpot_s, answer.e2e_s), strict=True))

    for _ in range(TRIES):
        try:
            return a_a(alone, FLOOR_S, disturbance=server.disturbance)
        except Broken as error:
            problem = str(error)
    return dict.fromkeys(METRICS, problem)


def observed(claim_ids: Sequence[str], measure: Callable[[], Mapping[str, Observed]]) -> Mapping[str, Observed]:
    """What a measurement shows for each claim; where a load breaks, each of them has that for a reason."""
    try:
        return measure()
    except Broken as error:
        return {claim_id: broken(claim_id, str(error)) for claim_id in claim_ids}


def broken(claim_id: str, problem: str) -> Observed:
    """No figure for any bound of a claim, with the reason."""
    return {bound.what: unusable(problem) for bound in CLAIMS[claim_id].bounds}


# Cells ----------------------------------------------------------------------------------------------------------------


def cell_of(
    server: Server,
    id: str,
    name: str,
    stretch: Stretch,
    figures: Mapping[str, float],
    missing: Mapping[str, str] | None = None,
    *,
    note: str = "",
    phase: str = "queue",
) -> Cell:
    first = stretch.answers[0]
    return Cell(
        id=f"serving.{id}",
        station="serving",
        phase=phase,
        workload={"name": name, "prompt_len": first.prompt_tokens, "output_len": first.ask.output_len},
        engine=server.name,
        precision=SHORT_DTYPES.get(server.dtype or "", "unknown"),
        wall_s=(stretch.wall_s,),
        figures=figures,
        unavailable={"device_s": "a server doesn't tell how long its card was busy", **(missing or {})},
        note=note,
    )
