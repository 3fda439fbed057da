"""How often the verdict engine is wrong, and how many rounds it needs, on a thousand synthetic series of each kind.

The engine is the suite's own: looks, paired_ratio's interval, a bound's verdict. Only the sides are made up: each sample
is a time from a seeded generator. That interleave's rounds and judge decide alike is tested on some of the series. The
figures are the table of docs/verdict-quality.md, word for word; after a change of the engine,
`python -m tests.test_verdict_quality` in the project's folder writes it anew.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy
import pytest

from benchmarks import timing
from benchmarks.estimates import LAST_LOOK, Estimate, looks, paired_ratio
from benchmarks.timing import Rounds, interleave
from benchmarks.verdicts import Bound, Claim, Word, judge

SERIES = 1000
NOISE = 0.01
"""Standard deviation of the logarithm of one time."""

SHIFT = 1.05
DOC = Path(__file__).parent.parent / "docs" / "verdict-quality.md"
START, END = "<!-- table -->\n", "<!-- end of table -->\n"

ONE_SIDED = Claim("synthetic.not_faster", "b is not faster than a", (Bound("b over a", "a limit", at_least=1.0),))
BAND = Bound("b over a", "a band of 5 %", at_least=0.95, at_most=1.05)
UNCHANGED = Claim("synthetic.unchanged", "b takes as long as a", (BAND,))

Noise = Callable[[Random, int], float]
"""The logarithm of one time, from a generator and the number of times measured before."""


def gaussian(random: Random, _: int) -> float:
    return random.gauss(0, NOISE)


def heavy_tails(random: Random, _: int) -> float:
    """Student's t with 3 degrees of freedom, which has no finite kurtosis."""
    chi_square = random.gauss(0, 1) ** 2 + 2 * random.expovariate(1)
    return random.gauss(0, NOISE) / math.sqrt(chi_square / 3)


def drift(random: Random, position: int) -> float:
    """A card that heats up: every time is 0.3 % longer than the one before it, beside the noise."""
    return random.gauss(0, NOISE) + 0.003 * position


def bursts(random: Random, _: int) -> float:
    """A neighbour: one time in ten takes four times as long."""
    return random.gauss(0, NOISE) + (math.log(4) if random.random() < 0.1 else 0.0)


KINDS: dict[str, Noise] = {"Gaussian": gaussian, "heavy tails": heavy_tails, "drift": drift, "bursts of 4x": bursts}


def times(kind: str, seed: int) -> tuple[float, ...]:
    """Times of a series in the order they are measured in, two a round; every scenario sees the same ones."""
    random, noise = Random(f"{kind} {seed}"), KINDS[kind]
    return tuple(math.exp(noise(random, position)) for position in range(2 * LAST_LOOK))


def sides(series: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The same times by side, index by index of one round: A B, B A, ..."""
    pairs = list(zip(series[::2], series[1::2], strict=True))
    return tuple(pair[n % 2] for n, pair in enumerate(pairs)), tuple(pair[1 - n % 2] for n, pair in enumerate(pairs))


@dataclass(frozen=True)
class Scenario:
    """A true ratio under a claim. `right` is the verdict to be found, None where either end would be false."""

    name: str
    claim: Claim
    ratio: float
    right: Word | None


SCENARIOS = (
    Scenario("A/A, on the limit", ONE_SIDED, 1.0, None),
    Scenario("5 % over the limit", ONE_SIDED, SHIFT, Word.HOLDS),
    Scenario("5 % under the limit", ONE_SIDED, 1 / SHIFT, Word.REFUTED),
    Scenario("unchanged within 5 %, A/A", UNCHANGED, 1.0, Word.HOLDS),
    Scenario("unchanged within 5 %, on the limit", UNCHANGED, 1.05, None),
    Scenario("unchanged within 5 %, shifted by 10 %", UNCHANGED, 1.05 * SHIFT, Word.REFUTED),
)


See = Callable[[float, int], Estimate]
"""What is observed of a series where b takes so many times as long, after so many rounds."""


def seen(series: tuple[float, ...]) -> See:
    """Each estimate is made once: scenarios with the same ratio under different claims see the same."""
    a, b = sides(series)
    return cache(lambda ratio, n: paired_ratio(tuple(map(ratio.__mul__, b[:n])), a[:n]))


def decide(claim: Claim, ratio: float, see: See) -> tuple[Word, int]:
    """The verdict on one series, and the rounds that it took. Where no floor is known judge() asks the bound, no more."""
    (bound,) = claim.bounds
    word, n = Word.INCONCLUSIVE, 0
    for n in looks():
        word = bound.verdict(see(ratio, n))
        if word is not Word.INCONCLUSIVE:
            break
    return word, n


def decide_in_rounds(claim: Claim, ratio: float, series: tuple[float, ...]) -> tuple[Word, int]:
    """The same through the suite's own rounds; the warm-ups take no time of the series."""
    waiting: Iterator[float] = iter((1.0, 1.0, *series))

    found: dict[int, Word] = {}

    def settled(rounds: Rounds[float]) -> bool:
        found[len(rounds)] = judge(claim, paired_ratio(rounds["b"], rounds["a"])).word
        return found[len(rounds)] is not Word.INCONCLUSIVE

    sides = {"a": lambda: next(waiting), "b": lambda: ratio * next(waiting)}
    rounds = interleave(sides, settled, math.inf, now=lambda: 0.0)
    return found[len(rounds)], len(rounds)


@dataclass(frozen=True)
class Row:
    kind: str
    scenario: Scenario
    words: Counter[Word]
    rounds: tuple[int, ...]

    @property
    def wrong(self) -> int:
        """False HOLDS and false REFUTED together."""
        ends = {Word.HOLDS, Word.REFUTED} - {self.scenario.right}
        return sum(self.words[word] for word in ends)

    @property
    def found(self) -> int | None:
        return self.words[self.scenario.right] if self.scenario.right else None

    @property
    def text(self) -> str:
        median, late = statistics.median_low(self.rounds), sorted(self.rounds)[math.ceil(0.99 * len(self.rounds)) - 1]
        share = "" if self.found is None else f"{self.found / len(self.rounds):.1%}"
        cells = (
            self.scenario.name,
            self.kind,
            *(str(self.words[w]) for w in (Word.HOLDS, Word.REFUTED, Word.INCONCLUSIVE)),
            f"{self.wrong / len(self.rounds):.1%}",
            share,
            str(median),
            str(late),
        )
        return "| " + " | ".join(cells) + " |"


def measure(kind: str) -> list[Row]:
    """One row a scenario."""
    found: list[list[tuple[Word, int]]] = [[] for _ in SCENARIOS]
    for seed in range(SERIES):
        see = seen(times(kind, seed))
        for scenario, ends in zip(SCENARIOS, found, strict=True):
            ends.append(decide(scenario.claim, scenario.ratio, see))
    return [
        Row(kind, scenario, Counter(word for word, _ in ends), tuple(n for _, n in ends))
        for scenario, ends in zip(SCENARIOS, found, strict=True)
    ]


def table(rows: list[Row]) -> str:
    words = (Word.HOLDS, Word.REFUTED, Word.INCONCLUSIVE)
    head = ("true ratio", "noise", *words, "wrong", "found", "rounds, median", "99th percentile")
    return "\n".join(["| " + " | ".join(head) + " |", "|---|---|" + "--:|" * 7, *(row.text for row in rows)]) + "\n"


def measure_all() -> list[Row]:
    return [row for of_scenario in zip(*map(measure, KINDS), strict=True) for row in of_scenario]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return measure_all()


def test_a_wrong_verdict_comes_at_most_once_in_a_hundred_series(rows: list[Row]) -> None:
    assert {(r.scenario.name, r.kind): r.wrong for r in rows if r.wrong > SERIES // 100} == {}


def test_a_shift_of_five_per_cent_is_found_in_99_of_a_hundred_series(rows: list[Row]) -> None:
    shifts = [r for r in rows if r.found is not None]
    assert len(shifts) == 16
    assert {(r.scenario.name, r.kind): r.found for r in shifts if r.found is not None and r.found < 0.99 * SERIES} == {}


def test_the_table_in_the_docs_is_what_is_measured(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    fresh = table(rows)
    with capsys.disabled():
        print(f"\n{fresh}")
    assert DOC.read_text(encoding="utf-8").split(START)[1].split(END)[0] == fresh


def test_the_suites_own_rounds_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the collector left alone: it would take most of the time, and there is nothing here for it to bill."""
    monkeypatch.setattr(timing, "quiet", nullcontext)
    monkeypatch.setattr(timing, "set_aside", nullcontext)
    for kind in KINDS:
        for series in (times(kind, seed) for seed in range(12)):
            see = seen(series)
            for scenario in SCENARIOS:
                found = decide(scenario.claim, scenario.ratio, see)
                assert decide_in_rounds(scenario.claim, scenario.ratio, series) == found


def test_these_limits_can_be_missed() -> None:
    """Liar: a verdict from the mean of the ratios is moved by bursts, and a look after every round finds accidents."""
    wrong = 0
    for seed in range(60):
        series = times("Gaussian", seed)
        ratios = [b / a for a, b in zip(series[::2], series[1::2], strict=True)]
        for n in range(5, 81):
            mean, error = statistics.fmean(ratios[:n]), float(numpy.std(ratios[:n], ddof=1)) / math.sqrt(n)
            if abs(mean - 1) > 1.96 * error:
                wrong += 1
                break
    assert wrong > 6
    assert list(looks()) == [5, 10, 20, 40, 80, 160]


if __name__ == "__main__":
    before, after = DOC.read_text(encoding="utf-8").split(START)[0], DOC.read_text(encoding="utf-8").split(END)[1]
    DOC.write_text(before + START + table(measure_all()) + END + after, encoding="utf-8")
