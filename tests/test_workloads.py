"""Prompts of an exact length on any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import workloads
from benchmarks.nimbusdb import QUESTIONS, SYSTEM_TEXT
from benchmarks.workloads import PREFIX_LEN, PROMPT_LEN, Workload, exactly, matching_prefix

quickly = settings(deadline=None, max_examples=40)
ids = st.lists(st.integers(0, 999), max_size=30)


class Words:
    """A tokenizer with one id a word, the coarsest there is."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [self.known.setdefault(word, len(self.known) + 1) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        names = {number: word for word, number in self.known.items()}
        return " ".join(names[i] for i in token_ids)


class Letters:
    """A tokenizer with one id a letter, about the finest."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


class Silent(Letters):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return []


TOKENIZERS = (Words(), Letters())
any_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=("words", "letters"))


@any_tokenizer
def test_the_articles_lengths_are_exact_on_any_tokenizer(tokenizer: workloads.Tokenizer) -> None:
    assert len(workloads.prefix_ids(tokenizer, PREFIX_LEN)) == 1484
    assert {len(row) for row in workloads.short_prompts(tokenizer, [37] * 40)} == {37}
    assert len(workloads.prefix_ids(tokenizer, 16384)) == 16384


@any_tokenizer
def test_a_batch_has_different_rows_of_one_length(tokenizer: workloads.Tokenizer) -> None:
    batch = workloads.equal_rows(tokenizer, 16, 48)
    assert (batch.batch_size, batch.prompt_len, batch.output_len) == (16, PROMPT_LEN, 48)
    assert len(set(batch.prompts)) == 16
    assert batch.record["batch_size"] == 16


@any_tokenizer
def test_an_unequal_batch_has_rows_that_need_padding(tokenizer: workloads.Tokenizer) -> None:
    lengths = [len(row) for row in workloads.unequal_rows(tokenizer, 16, 48).prompts]
    assert len(set(lengths)) > 8
    assert min(lengths) >= 9
    assert max(lengths) <= PROMPT_LEN


@any_tokenizer
def test_no_token_is_added_that_the_text_does_not_have(tokenizer: workloads.Tokenizer) -> None:
    assert 0 not in workloads.encode(tokenizer, SYSTEM_TEXT)


def test_a_short_prompt_ends_in_its_own_question_whole() -> None:
    tokenizer = Words()
    prompts = workloads.short_prompts(tokenizer, [37] * (len(QUESTIONS) + 2))
    for row in (0, 3, len(QUESTIONS) + 1):
        question = QUESTIONS[row % len(QUESTIONS)][0]
        assert question in tokenizer.decode(prompts[row])


def test_texts_to_continue_are_whole() -> None:
    tokenizer = Letters()
    assert workloads.counting(tokenizer, 8).prompts != workloads.open_text(tokenizer, 8).prompts


def test_a_tokenizer_that_returns_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens to make a prompt of"):
        workloads.prefix_ids(Silent(), 64)


@pytest.mark.parametrize(
    ("prompts", "output_len", "reason"),
    [((), 4, "every row"), (((1,), ()), 4, "every row"), (((1,),), 0, "at least one token")],
)
def test_a_batch_that_asks_for_nothing_is_refused(
    prompts: tuple[tuple[int, ...], ...], output_len: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Workload("broken", prompts, output_len)


@quickly
@given(ids.filter(bool), st.integers(0, 100))
def test_exactly_repeats_and_cuts(some: list[int], length: int) -> None:
    made = exactly(some, length)
    assert len(made) == length
    assert all(made[i] == some[i % len(some)] for i in range(length))


@quickly
@given(ids, ids, ids)
def test_the_matching_prefix_is_the_longest_common_start(common: list[int], a: list[int], b: list[int]) -> None:
    left, right = common + a, common + b
    n = matching_prefix(left, right)
    assert n >= len(common)
    assert left[:n] == right[:n]
    assert n in (len(left), len(right)) or left[n] != right[n]
    assert matching_prefix(right, left) == n
    assert matching_prefix(left, left) == len(left)
