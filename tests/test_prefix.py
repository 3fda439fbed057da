"""The prefix station: what holds on an honest cache is refuted on every liar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks import nimbusdb, prefix
from benchmarks.claims import CLAIMS
from benchmarks.phases import EagerEngine, Prompt, StoredPrefix, in_turn
from benchmarks.prefix import Hit, Told
from benchmarks.rigs import Loader, choose
from benchmarks.runs import Run
from benchmarks.session import Compared, Session
from benchmarks.timing import interleave, quiet
from benchmarks.verdicts import Word
from benchmarks.workloads import Ids
from tests.pretend import Pretend, PretendCache, Time, verdict

PREFIX: Ids = tuple(i % 50 for i in range(1484))
SUFFIX: Ids = tuple(range(12))
REQUEST = Hit.of(PREFIX, SUFFIX, 48, "a question")
ROUNDS = 10

Cost = Callable[[int, int, int], float]


def full_and_cached(pretend: Pretend) -> dict[str, Any]:
    sides = runs(pretend)
    return prefix.ratios(**sides)


def runs(pretend: Pretend) -> dict[str, list[Run]]:
    asked = prefix.both_ways((pretend.engine, pretend.engine), StoredPrefix(pretend.engine, PREFIX), REQUEST)
    with quiet():
        one_round = in_turn(asked, pretend.time.clock)
        rounds = [one_round() for _ in range(ROUNDS)]
    return {side: [round[side] for round in rounds] for side in asked}


def test_an_honest_cache_saves_prefill_and_no_decode() -> None:
    for id, estimate in full_and_cached(Pretend()).items():
        assert verdict(id, estimate).word is Word.HOLDS, verdict(id, estimate).line


def reads_all_again(rows: int, new: int, cached: int) -> float:
    """A cached prefill that computes the prefix once more."""
    return 0.010 + 0.0001 * rows * (new + cached)


def test_a_hit_that_computes_the_prefix_again_is_refuted() -> None:
    observed = full_and_cached(Pretend(prefill_s=reads_all_again))["prefix.prefill_1484"]
    assert verdict("prefix.prefill_1484", observed).word is Word.REFUTED


def test_copying_the_prefix_is_part_of_what_a_hit_costs() -> None:
    class SlowCopy(Pretend):
        def prefill(self, prompt: Prompt, cache: PretendCache | None = None) -> Any:
            return super().prefill(prompt, cache or PretendCache(self.time, copy_s=0.2))

    observed = full_and_cached(SlowCopy())["prefix.prefill_1484"]
    assert verdict("prefix.prefill_1484", observed).word is Word.REFUTED


def test_a_cache_that_answers_instead_of_the_model_is_refuted() -> None:
    answered = Pretend(step_s=lambda rows, cache: 0.0001 if cache.copied else 0.020)
    assert verdict("prefix.not_free", full_and_cached(answered)["prefix.not_free"]).word is Word.REFUTED


@pytest.mark.parametrize(
    ("factor", "word"), [(1.0, Word.HOLDS), (1.02, Word.HOLDS), (1.10, Word.REFUTED), (0.90, Word.REFUTED)]
)
def test_decode_that_changes_after_a_cached_prefill_is_refuted(factor: float, word: Word) -> None:
    pretend = Pretend(step_s=lambda rows, cache: 0.020 * (factor if cache.copied else 1))
    observed = prefix.ratios(**runs(pretend))["prefix.decode_unchanged"]
    assert verdict("prefix.decode_unchanged", observed).word is word


class TokenByToken(StoredPrefix):
    """Builds the prefix as if it were written, not read."""

    def __init__(self, engine: Any, ids: Ids) -> None:
        cache = None
        for id in ids[:200]:
            cache = engine.prefill(Prompt.of([(id,)], "cpu"), cache).cache


class HalfBuilt(StoredPrefix):
    """Leaves the second half for the first request to compute."""

    def __init__(self, engine: Any, ids: Ids) -> None:
        super().__init__(engine, ids[: len(ids) // 2])


class NeverBuilt(StoredPrefix):
    def __init__(self, engine: Any, ids: Ids) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (StoredPrefix, Word.HOLDS),
        (TokenByToken, Word.REFUTED),
        (HalfBuilt, Word.REFUTED),
        (NeverBuilt, Word.INCONCLUSIVE),
    ],
)
def test_a_prefix_not_built_by_one_prefill_is_refuted(kind: type[StoredPrefix], word: Word) -> None:
    pretend = Pretend()
    clock, engine = pretend.time.clock, pretend.engine
    build = [clock.time(lambda: kind(engine, PREFIX)) for _ in range(ROUNDS)]
    whole = Prompt.of(REQUEST.full.prompts, "cpu")
    full = [clock.time(lambda: engine.prefill(whole)) for _ in range(ROUNDS)]
    assert verdict("prefix.built_once", prefix.build_ratio(build, full)).word is word


class PretendSession(Session):
    """A Session that loads nothing and compares on a clock that pretends."""

    def __init__(self, time: Time) -> None:
        self.clock, self.time = time.clock, time

    def compare(self, sides: Any, observe: Any, engine: str = "eager") -> Compared[Any]:
        with quiet():
            rounds = interleave(sides, lambda rounds: len(rounds) >= ROUNDS, 1e9, now=lambda: self.time.s)
        return Compared(rounds, observe(rounds))


@pytest.mark.parametrize(
    ("prefill_s", "length", "word"),
    [
        (Pretend().prefill_s, 4096, Word.HOLDS),
        (reads_all_again, 4096, Word.REFUTED),
        (Pretend().prefill_s, None, Word.INCONCLUSIVE),
    ],
    ids=["honest", "reads all again", "no such length"],
)
def test_a_long_prefix_is_judged_where_it_keeps_the_card_busy(
    prefill_s: Cost, length: int | None, word: Word, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "device_bound_len", lambda *_: length)
    pretend = Pretend(prefill_s=prefill_s)
    observed = prefix.when_device_bound(PretendSession(pretend.time), pretend.engine, PREFIX, REQUEST)
    assert verdict("prefix.prefill_device_bound", observed).word is word


# Matching, on tokenizers that are honest and not -------------------------------------------------------------------


class Words:
    """One id a word, in the order of their first appearance."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def word(self, text: str) -> str:
        return text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.ids.setdefault(self.word(word), len(self.ids)) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        words = list(self.ids)
        return " ".join(words[i] for i in token_ids)


class Endings(Words):
    """Can't tell words with the same start from each other."""

    def word(self, text: str) -> str:
        return text[:1]


class NoDigits(Words):
    """Can't tell two times of a day from each other."""

    def word(self, text: str) -> str:
        return "".join("0" if letter.isdigit() else letter for letter in text)


@pytest.mark.parametrize("prefix_len", [64, 170, 1484, 4000])
@pytest.mark.parametrize(("kind", "word"), [(Words, Word.HOLDS), (Endings, Word.REFUTED)])
def test_a_tokenizer_that_does_not_see_the_changed_word_is_refuted(
    kind: type[Words], word: Word, prefix_len: int
) -> None:
    assert verdict("prefix.one_word", prefix.one_word(kind(), prefix_len)).word is word


def test_a_prompt_builder_that_puts_the_changed_sentence_last_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    build = prefix.prefix_ids

    def last(tokenizer: Any, prefix_len: int, text: str = nimbusdb.SYSTEM_TEXT) -> Ids:
        first, _, rest = text.partition(".")
        return build(tokenizer, prefix_len, f"{rest} {first}.")

    monkeypatch.setattr(prefix, "prefix_ids", last)
    tokenizer = Words()
    length = len(tokenizer.encode(nimbusdb.SYSTEM_TEXT))
    assert verdict("prefix.one_word", prefix.one_word(tokenizer, length)).word is Word.REFUTED


class Backwards(Words):
    """Reads a text from its end, so that what stands last comes first."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text, add_special_tokens=add_special_tokens)[::-1]


@pytest.mark.parametrize(("kind", "word"), [(Words, Word.HOLDS), (NoDigits, Word.REFUTED), (Backwards, Word.REFUTED)])
def test_a_timestamp_that_changes_no_token_is_refuted(kind: type[Words], word: Word) -> None:
    assert verdict("prefix.timestamp_first", prefix.timestamp(kind())).word is word


# The same answer, by the embedded target, whose choices are so clear that no leak changes a token --------------------


@pytest.fixture(scope="module")
def nimbus() -> EagerEngine:
    rig = choose(rig="nimbus", target=None, draft=None, weights="trained", dtype="float32", device="cpu")
    return EagerEngine(Loader(rig).model(rig.target))


TEXT: Ids = tuple(range(300, 364))
QUESTIONS = [Hit.of(TEXT, tuple(range(first, first + 6)), 6, "a question") for first in (500, 700)]


class Uncopied(StoredPrefix):
    """Hands out what is stored itself: the second question is answered after the first."""

    def take(self) -> Any:
        return self._cache


class CopiedOnce(StoredPrefix):
    """The copy is handed out again and again, cut back to its length, but to the wrong end of it."""

    def take(self) -> Any:
        kept = self.__dict__.setdefault("kept", super().take())
        if extra := kept.get_seq_length() - len(self.ids):
            for layer in kept.layers:
                layer.keys, layer.values = layer.keys[:, :, extra:], layer.values[:, :, extra:]
        return kept


class OnePositionOff(StoredPrefix):
    """One position of the cache is another's."""

    def take(self) -> Any:
        cache = super().take()
        with torch.inference_mode():
            for layer in cache.layers:
                layer.keys[:, :, 20], layer.values[:, :, 20] = layer.keys[:, :, 40], layer.values[:, :, 40]
        return cache


@pytest.mark.parametrize("kind", [StoredPrefix, Uncopied, CopiedOnce, OnePositionOff])
def test_a_stored_prefix_that_is_not_the_prefix_is_refuted(kind: type[StoredPrefix], nimbus: EagerEngine) -> None:
    told = verdict(
        "prefix.same_answer", prefix.same_answer(nimbus, kind(nimbus, TEXT), [Told.of(nimbus, q) for q in QUESTIONS])
    )
    assert told.word is (Word.HOLDS if kind is StoredPrefix else Word.REFUTED), told.line
    assert ("was handed out for a prefix of 64" in told.line) == (kind is Uncopied)


def test_a_use_that_changes_what_is_stored_shows_when_the_first_question_is_asked_again(nimbus: EagerEngine) -> None:
    """One question only, and the change keeps the length: nothing but asking it again can tell."""
    told = verdict(
        "prefix.same_answer", prefix.same_answer(nimbus, CopiedOnce(nimbus, TEXT), [Told.of(nimbus, QUESTIONS[0])])
    )
    assert told.word is Word.REFUTED and "logits" in told.line


HERE = {
    "prefix.prefill_1484",
    "prefix.not_free",
    "prefix.decode_unchanged",
    "prefix.built_once",
    "prefix.prefill_device_bound",
    "prefix.one_word",
    "prefix.timestamp_first",
}


def test_every_claim_of_the_station_has_met_its_liar() -> None:
    assert HERE | {"prefix.same_answer"} == {id for id, claim in CLAIMS.items() if claim.station == "prefix"}
