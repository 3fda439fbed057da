"""What is asked of the models: prompts of an exact length, made of NimbusDB's support texts.

Every prompt is a tuple of token ids, so that lengths are what the claims say on any tokenizer. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.nimbusdb import COUNTING_PROMPT, OPEN_PROMPT, PROMPT, QUESTIONS, SYSTEM_TEXT

PROMPT_LEN = 37
"""The article's short prompt, in tokens."""

LONG_PROMPT_LEN = {"cuda": 512, "cpu": 128}
"""A prompt long enough for its prefill to show. The CPU has no launches to hide behind and shows it with fewer."""

COMPARED_SHARE = {"eager": 1 / 3, "graph": 1.0}
"""Share of the new tokens that rounds of whole requests generate. Eager rounds take as long as their steps, and a third
of them show the same; replays take so little beside the prefill that half of them would judge the prefill."""

PREFIX_LEN = 1484
"""The article's system prompt of 40 policies, in tokens."""

NEW_TOKENS = 48
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
LARGEST_BATCH = 65_536
"""Rows that a batch may have: more take minutes to write down, and no card holds their KV cache."""

ANSWER_LEN = 40
"""Tokens of the answer to the user's own question."""

SUFFIXES = ("How do I reset my password?", "Why was I charged twice this month?")
QUANT_PROMPT = "what is a KV cache?"

Ids = tuple[int, ...]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Workload:
    """A static batch: one prompt a row, `output_len` tokens each. Rows of unequal length are padded on the left.

    Raises ValueError for no rows, an empty row or fewer than one new token.
    """

    name: str
    prompts: tuple[Ids, ...]
    output_len: int

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ValueError(f"{self.name}: every row needs at least one prompt token")
        if self.output_len < 1:
            raise ValueError(f"{self.name}: at least one token must be generated")

    @property
    def batch_size(self) -> int:
        return len(self.prompts)

    @property
    def prompt_len(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.prompts))

    @property
    def total_len(self) -> int:
        """Positions that the longest row takes, its new tokens included."""
        return self.prompt_len + self.output_len

    @property
    def record(self) -> dict[str, object]:
        """For run.json."""
        return {
            "name": self.name,
            "batch_size": self.batch_size,
            "prompt_len": self.prompt_len,
            "output_len": self.output_len,
        }


def encode(tokenizer: Tokenizer, text: str) -> Ids:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def question_ids(tokenizer: Tokenizer, question: str) -> Ids:
    """A user's question in the form that the support bot answers."""
    return encode(tokenizer, "\n\n" + PROMPT.format(question=question))


def exactly(ids: Sequence[int], length: int) -> Ids:
    """`ids` repeated and cut to `length` tokens. Raises ValueError when there is nothing to repeat."""
    if not ids:
        raise ValueError("no tokens to make a prompt of: the tokenizer returned none")
    return tuple(ids[i % len(ids)] for i in range(length))


def prefix_ids(tokenizer: Tokenizer, prefix_len: int, text: str = SYSTEM_TEXT) -> Ids:
    """The system prompt in exactly `prefix_len` tokens; a longer one than the 40 policies repeats them."""
    return exactly(encode(tokenizer, text), prefix_len)


def short_prompts(tokenizer: Tokenizer, lengths: Sequence[int]) -> tuple[Ids, ...]:
    """Prompts of these lengths in tokens, each ending in its row's own question; rows differ, as users do.

    The front is filled from the policies, so that the question stays whole and the answer is the question's.
    """
    lead = encode(tokenizer, SYSTEM_TEXT)
    asked = [question_ids(tokenizer, question) for question, *_ in QUESTIONS[: len(lengths)]]
    prompts = []
    for row, length in enumerate(lengths):
        question = asked[row % len(asked)][-length:]
        start = row % max(1, len(lead))
        prompts.append(exactly(lead[start : start + length], length - len(question)) + question)
    return tuple(prompts)


def equal_rows(tokenizer: Tokenizer, batch_size: int, output_len: int, prompt_len: int = PROMPT_LEN) -> Workload:
    """A batch of different prompts of equal length: the article's batching table."""
    prompts = short_prompts(tokenizer, [prompt_len] * batch_size)
    return Workload(f"{batch_size} x {prompt_len} tokens", prompts, output_len)


def unequal_rows(tokenizer: Tokenizer, batch_size: int, output_len: int) -> Workload:
    """A batch of prompts of 9 to 37 tokens and more, so that rows are padded on the left."""
    lengths = [9 + (7 * row) % (PROMPT_LEN - 8) for row in range(batch_size)]
    prompts = short_prompts(tokenizer, lengths)
    return Workload(f"{batch_size} rows of {min(lengths)} to {max(lengths)} tokens", prompts, output_len)


def counting(tokenizer: Tokenizer, output_len: int) -> Workload:
    """Predictable text."""
    return Workload("count from 1 to 50", (encode(tokenizer, COUNTING_PROMPT),), output_len)


def open_text(tokenizer: Tokenizer, output_len: int) -> Workload:
    """Open text: many fair continuations."""
    return Workload("open text", (encode(tokenizer, OPEN_PROMPT),), output_len)


def matching_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that a prefix cache could reuse: the length of the common start."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
