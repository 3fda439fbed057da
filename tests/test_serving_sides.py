"""The loads that the claims about serving send, against servers that pretend: each claim holds for one that has the effect,
and is refuted for a liar without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import benchmarks.serving
import benchmarks.serving.loads
from benchmarks import serving
from benchmarks.calibration import Floor
from benchmarks.claims import CLAIMS
from benchmarks.estimates import counted
from benchmarks.report import head
from benchmarks.serving import Broken, NotServed, Server, measures
from benchmarks.serving.client import Client, Endpoint
from benchmarks.session import Options, Session
from benchmarks.timing import Rounds
from benchmarks.verdicts import Word, judge
from tests.fakeserver import Fake, Habits
from tests.pretend import verdict


@pytest.fixture(autouse=True)
def client_and_server_share_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.serving.loads, "CLIENT_BUSY", 9.0)


@contextmanager
def opened(fake_server: Fake, **known: Any) -> Iterator[Server]:
    with fake_server as running:
        one = Server("pretend", Client(Endpoint.of(running.url), answer_s=20.0), **known)
        try:
            yield one.open()
        finally:
            one.close()


def shows(claim_id: str, observe: Callable[[], Mapping[str, Any]], wanted: Word) -> bool:
    """Whether one of three tries ends in that verdict: a single stretch may meet a hiccup of a busy machine."""
    return any(verdict(claim_id, observe()[claim_id]).word is wanted for _ in range(3))


def once(sides: Mapping[str, Callable[[], Any]]) -> Rounds[Any]:
    """Each side served once, as twenty equal rounds."""
    return Rounds({name: [side()] * 20 for name, side in sides.items()}, "settled")


# Freezes --------------------------------------------------------------------------------------------------------------


class Reader(Fake):
    """While it reads a long prompt it writes nothing."""

    def __init__(self, reading_s: float) -> None:
        super().__init__(Habits(step_s=0.008))
        self.reading_s = reading_s
        self.computing = asyncio.Lock()

    async def _frames(self, prompt: str, n: int, chat: bool) -> AsyncIterator[bytes]:
        if len(prompt) > 8000:
            async with self.computing:
                await asyncio.sleep(self.reading_s)
        async for frame in super()._frames(prompt, n, chat):
            async with self.computing:
                pass
            yield frame


@pytest.mark.parametrize(("reading_s", "wanted"), [(0.12, Word.HOLDS), (0.0, Word.REFUTED)])
def test_a_server_that_stops_to_read_is_told_from_one_that_does_not(
    reading_s: float, wanted: Word, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "STREAM_LEN", 6)
    with opened(Reader(reading_s)) as one:
        sides = measures.freeze_sides(one)
        assert shows("serving.long_prompt_freezes", lambda: measures.freezes(once(sides)), wanted)


def test_a_long_prompt_that_finds_no_stream_running_or_gets_no_answer_shows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measures, "STREAM_LEN", 4)
    with opened(Fake(Habits(step_s=0.001, longest=1000))) as one:
        with pytest.raises(Broken, match="no stream was running when the long prompt arrived, 3 times"):
            measures.freeze_s(one, 0.05, long=False)
        with pytest.raises(Broken, match="the long prompt got no answer: error"):
            measures.freeze_s(one, 0.0, long=True)


# Groups ---------------------------------------------------------------------------------------------------------------


class Grouped(Fake):
    """It says that an answer is over when all that it began with are."""

    def __init__(self) -> None:
        super().__init__(Habits(step_s=0.001))
        self.together = asyncio.Barrier(measures.BATCH)

    async def _frames(self, prompt: str, n: int, chat: bool) -> AsyncIterator[bytes]:
        async for frame in super()._frames(prompt, n, chat):
            if b"[DONE]" in frame and n >= measures.SHORTEST:
                await self.together.wait()
            yield frame


@pytest.mark.parametrize(
    ("server", "wanted"), [(lambda: Fake(Habits(step_s=0.002)), Word.HOLDS), (Grouped, Word.REFUTED)]
)
def test_a_server_that_fills_its_seats_is_told_from_one_that_only_ends_in_groups(server: Any, wanted: Word) -> None:
    lens = (*[measures.SHORTEST] * 7, 40) * 3
    with opened(server()) as one:
        one.closed(one.prompts.many(measures.BATCH, 2), measures.BATCH)  # connections are made
        sides = measures.static_sides(one, lens)
        assert shows("serving.continuous_beats_static", lambda: measures.continuous(once(sides)), wanted)


def test_a_server_with_one_seat_is_not_asked_what_batching_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "USERS", 4)
    with opened(Fake(Habits(seats=1, step_s=0.0005))) as one, pytest.raises(NotServed, match="one answer at a time"):
        one.must_batch()
    with opened(Fake(Habits(seats=2, step_s=0.0005))) as one:
        one.must_batch()


# Queues ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seats", "wanted"), [(4, Word.HOLDS), (64, Word.REFUTED)])
def test_a_crowd_that_waits_for_seats_is_told_from_one_that_is_let_in(seats: int, wanted: Word) -> None:
    with opened(Fake(Habits(seats=seats, prefill_s=0.02, step_s=0.008)), seats=4) as one:
        one.closed(one.prompts.many(8, 2), 8)  # connections are made
        sides = measures.queue_sides(one)
        assert shows("serving.queue_is_in_ttft", lambda: measures.queue(once(sides)), wanted)


# Pages ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seats", "known", "at_once", "said"),
    [
        (20, {"kv_tokens": 16384}, 20, "its pages were the limit"),
        (16, {"kv_tokens": 16384, "seats": 16}, 16, "its 16 seats were the limit, not its pages"),
        (16, {"seats": 30}, 16, "its pages were the limit"),
        (20, {}, 20, "its pages or its seats were the limit"),
        (99, {"kv_tokens": 16384}, 32, "at least: none of them had to wait"),
    ],
)
def test_as_many_chats_are_sent_as_it_takes_until_some_must_wait(
    seats: int, known: dict[str, int], at_once: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MOST_SEATS", 32)
    told = 'vllm:num_requests_running 0\nvllm:cache_config_info{block_size="32",num_gpu_blocks="512"} 1.0\n'
    with opened(Fake(Habits(seats=seats, step_s=0.002, metrics=lambda _: told)), max_len=4096, **known) as one:
        seen = measures.pages(one)
    assert seen.value == pytest.approx(at_once / 4, rel=0.1)
    assert seen.note.split("; ")[-1] == said


def test_a_server_whose_answers_come_in_one_piece_shows_neither_seats_nor_pages() -> None:
    with opened(Fake(Habits(hoards=True, step_s=0.0005)), kv_tokens=1024) as one:
        for asked in (one.must_batch, lambda: measures.pages(one)):
            with pytest.raises(Broken, match="held its tokens back"):
                asked()


class Clearing(Fake):
    """It holds its first `held` answers back and no others."""

    held = 0

    async def _serve(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.habits.hoards = len(self.asked) < self.held
        await super()._serve(path, body, writer)


def test_a_crowd_whose_answers_were_held_back_once_asks_again() -> None:
    server = Clearing(Habits(seats=4, step_s=0.001))
    with opened(server) as one:
        server.held = len(server.asked) + serving.USERS
        assert one.seats == 4
        assert len(server.asked) >= server.held + serving.USERS


# Noise ----------------------------------------------------------------------------------------------------------------


FLOORS = {f"serving_{m}": Floor(f"serving_{m}", 0.02, 10, 1.0, 0.99, 1.01, 0.1) for m in ("ttft", "e2e")}


@pytest.mark.parametrize("failures", [1, 3])
def test_noise_that_could_not_be_measured_is_measured_again_and_else_says_why(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = iter([Broken("1 of 1 requests failed: 1 refused (503: busy)")] * failures)

    def a_a(*_: object, **__: object) -> dict[str, Floor | str]:
        for error in busy:
            raise error
        return {**FLOORS, "serving_tpot": "2 rounds within the budget, a floor needs 10"}

    monkeypatch.setattr(serving, "a_a", a_a)
    session = Session(Options(rig="nimbus", report=tmp_path), "cpu")
    with opened(Fake(Habits())) as one:
        session.add_floors("endpoint h.org:80", serving.noise(one))
    setting = replace(session.setting("endpoint h.org:80"), lacks={})
    latency, tpot = CLAIMS["serving.batching_latency"], CLAIMS["serving.prefix_decode_unchanged"]
    assert judge(latency, counted(1.0), setting).word is (Word.HOLDS if failures == 1 else Word.INCONCLUSIVE)
    said = judge(tpot, counted(1.0), setting).reason
    why = "2 rounds within the budget, a floor needs 10" if failures == 1 else "1 of 1 requests failed: 1 refused (503"
    assert f"the noise floor of serving_tpot is not known here: {why}" in said
    assert "calibrate" not in said


def test_a_card_shows_the_address_of_a_server_as_it_is_and_claims_nothing_of_its_own_clock(tmp_path: Path) -> None:
    session = Session(Options(rig="nimbus", report=tmp_path), "cpu")
    session.add_floors("endpoint my_host.example.org:8000", FLOORS)
    session.add_floors("graph", {"decode_wall": FLOORS["serving_e2e"]})
    said = dict(head(session.ledger.run))["noise floor"]  # type: ignore[arg-type]
    assert said.startswith(
        "endpoint my_host.example.org:8000 serving ttft 2%, endpoint my_host.example.org:8000 serving e2e"
    )
    assert said.endswith(", graph decode wall 2%")
    assert session.ledger.run["unavailable"] == {
        "calibration": "no claim that rests on this suite's own clock was judged"
    }


# The sweep ------------------------------------------------------------------------------------------------------------


def test_a_sweep_of_a_slow_server_begins_with_a_rate_whose_arrivals_are_all_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measures, "capacity_per_s", lambda server: 0.005)
    asked: list[float] = []

    def load(server: Server, rate_per_s: float, seed: int) -> Any:
        asked.append(rate_per_s)
        return lambda: benchmarks.serving.loads.closed(server.client.send, server.prompts.many(2, 2), 2)

    monkeypatch.setattr(measures, "poisson_load", load)
    with opened(Fake(Habits(step_s=0.0))) as one:
        assert measures.rate_cells(one, 0.0)[0].id == "serving.rate_0"
    arrivals_s = benchmarks.serving.loads.poisson(asked[0], measures.FEWEST_ARRIVALS, measures.SEED)
    assert arrivals_s[-1] <= benchmarks.serving.loads.LOAD_S
