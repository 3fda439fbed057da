"""The clock and the rounds, on fakes: a device that works only when it is waited for, a clock that is told the time."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from benchmarks.estimates import paired_ratio
from benchmarks.timing import Clock, Rounds, interleave, quiet
from benchmarks.verdicts import Bound, Claim, Word, judge


@dataclass
class Device:
    """Work is only queued when it is launched; it takes its time in sync(), as on a GPU."""

    now_s: float = 0.0
    queue: list[float] = field(default_factory=list)

    def launch(self, seconds: float) -> None:
        self.now_s += 1e-6
        self.queue.append(seconds)

    def sync(self) -> None:
        self.now_s += sum(self.queue)
        self.queue.clear()

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now_s, self.sync)


def never(_: Rounds[float]) -> bool:
    return False


def test_a_time_includes_the_work_that_the_device_still_had_to_do() -> None:
    device = Device()
    assert device.clock.time(lambda: device.launch(0.05)) == pytest.approx(0.05, abs=1e-4)


def test_work_of_the_past_is_not_billed_to_the_next_call() -> None:
    device = Device()
    device.launch(3.0)
    assert device.clock.time(lambda: device.launch(0.05)) == pytest.approx(0.05, abs=1e-4)


def test_a_clock_without_sync_would_see_nothing_of_it() -> None:
    """Liar: this is what the fence is for."""
    device = Device()
    assert Clock(lambda: device.now_s).time(lambda: device.launch(0.05)) < 1e-4


def test_a_longer_call_takes_longer() -> None:
    device = Device()
    assert device.clock.time(lambda: device.launch(0.4)) > 3.9 * device.clock.time(lambda: device.launch(0.1))


def test_the_sides_swap_places_every_round() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or 1.0  # type: ignore[func-returns-value]

    interleave({"a": side("a"), "b": side("b")}, never, math.inf, max_rounds=4)
    assert "".join(order) == "ab" + "abbaabba"


def test_the_slow_first_call_of_a_shape_is_never_among_the_samples() -> None:
    seen: set[int] = set()
    device = Device()

    def backend(shape: int) -> float:
        compile_s = 0.0 if shape in seen else 30.0
        seen.add(shape)
        return device.clock.time(lambda: device.launch(0.01 * shape + compile_s))

    rounds = interleave({"short": lambda: backend(1), "long": lambda: backend(2)}, never, math.inf, max_rounds=6)
    assert max(rounds["short"] + rounds["long"]) < 0.03
    assert len(rounds) == 6


def test_it_is_asked_only_at_the_looks_and_stops_at_the_first_clear_one() -> None:
    asked: list[int] = []

    def settled(rounds: Rounds[float]) -> bool:
        asked.append(len(rounds))
        return len(rounds) >= 20

    rounds = interleave({"a": lambda: 1.0}, settled, math.inf)
    assert asked == [5, 10, 20]
    assert (len(rounds), rounds.stopped) == (20, "settled")


def test_a_question_that_never_settles_ends_at_the_last_look() -> None:
    rounds = interleave({"a": lambda: 1.0}, never, math.inf)
    assert (len(rounds), rounds.stopped) == (160, "rounds")


def timed(device: Device, seconds: float) -> Callable[[], float]:
    return lambda: device.clock.time(lambda: device.launch(seconds))


def test_the_budget_ends_the_rounds_and_says_so() -> None:
    device = Device()
    sides = {"a": timed(device, 1.0), "b": timed(device, 1.0)}
    rounds = interleave(sides, never, 5.0, now=lambda: device.now_s)
    assert (len(rounds), rounds.stopped) == (3, "budget")
    assert rounds.note == "the budget ended after 3 rounds"


def test_rounds_that_must_be_made_are_made_however_long_they_take() -> None:
    device = Device()
    rounds = interleave({"a": timed(device, 1.0)}, never, 2.0, now=lambda: device.now_s, min_rounds=7)
    assert (len(rounds), rounds.stopped) == (7, "budget")


LIMIT = Claim("synthetic.limit", "", (Bound("ratio", "a limit", at_least=1.0),))


def test_a_round_that_outlasts_the_budget_is_finished_and_decides_nothing() -> None:
    device = Device()
    sides = {"a": timed(device, 100.0), "b": timed(device, 300.0)}
    rounds = interleave(sides, never, 5.0, now=lambda: device.now_s)
    assert len(rounds) == 1
    verdict = judge(LIMIT, paired_ratio(rounds["b"], rounds["a"]))
    assert verdict.word is Word.INCONCLUSIVE
    assert "1 round" in verdict.reason


def test_a_clock_that_runs_backwards_is_inconclusive_and_the_rounds_still_end() -> None:
    hands: Iterator[int] = iter(range(10**6, 0, -1))
    clock = Clock(lambda: float(next(hands)))
    sides = {"a": lambda: clock.time(lambda: None), "b": lambda: clock.time(lambda: None)}
    rounds = interleave(sides, never, 1.0, now=clock.now)
    assert len(rounds) == 160
    verdict = judge(LIMIT, paired_ratio(rounds["b"], rounds["a"]))
    assert verdict.word is Word.INCONCLUSIVE
    assert "zero or negative" in verdict.reason


def test_a_throttled_round_is_measured_again() -> None:
    samples = iter([1.0, 1.0, 9.0, *[1.0] * 20])
    throttled = iter([None, "throttled", *[None] * 20])
    sides = {"a": lambda: next(samples)}
    rounds = interleave(sides, never, math.inf, disturbance=lambda: next(throttled), max_rounds=5)
    assert rounds["a"] == [1.0] * 5
    assert rounds.disturbed == {"throttled": 1}
    assert rounds.note == "1 rounds measured again (throttled)"


def test_a_card_that_always_throttles_is_measured_anyway_and_the_figure_says_so() -> None:
    calls = []
    sides = {"a": lambda: calls.append(1) or 1.0}  # type: ignore[func-returns-value]
    rounds = interleave(sides, never, math.inf, disturbance=lambda: "throttled", max_rounds=10)
    assert len(rounds) == 10
    assert len(calls) == 1 + 5 + 10
    assert rounds.kept_disturbed == 10
    assert rounds.note == "5 rounds measured again (throttled), 10 rounds kept although disturbed"


def test_one_round_is_kept_when_the_budget_ends_while_the_card_throttles() -> None:
    device = Device()
    sides = {"a": timed(device, 100.0)}
    rounds = interleave(sides, never, 5.0, now=lambda: device.now_s, disturbance=lambda: "hot")
    assert (len(rounds), rounds.kept_disturbed, rounds.stopped) == (1, 1, "budget")


def test_no_sides_are_refused() -> None:
    with pytest.raises(ValueError, match="no sides"):
        interleave({}, never, 1.0)


def test_nothing_is_collected_inside_a_measurement_and_the_collector_is_on_again_after() -> None:
    before = gc.get_freeze_count()
    inside: list[bool] = []
    rounds = interleave({"a": lambda: inside.append(gc.isenabled()) or 1.0}, never, 1.0, max_rounds=2)  # type: ignore[func-returns-value]
    assert len(rounds) == 2
    assert inside == [True, False, False]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before


def test_what_was_set_aside_comes_back_unless_it_was_so_before() -> None:
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    interleave({"a": lambda: 1.0}, never, 1.0, max_rounds=1)
    assert gc.get_freeze_count() == 0
    gc.freeze()
    interleave({"a": lambda: 1.0}, never, 1.0, max_rounds=1)
    assert gc.get_freeze_count() > 0
    if not frozen:
        gc.unfreeze()


def test_the_collector_is_on_again_when_a_side_raises() -> None:
    before = gc.get_freeze_count()

    def breaks() -> float:
        if not gc.isenabled():
            raise RuntimeError("out of memory")
        return 1.0

    with pytest.raises(RuntimeError):
        interleave({"a": breaks}, never, 1.0)
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before


def test_a_measurement_inside_a_round_does_not_collect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    collections: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(1))
    with quiet(), quiet():
        assert not gc.isenabled()
    assert len(collections) == 1
    assert gc.isenabled()
