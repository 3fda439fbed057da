"""What a server was asked and what came back: one request as a value, and the frames of a streamed answer.

A request that failed is an answer too, with how it failed; nothing of it is ever read as a fast one. What a server does
not say, such as token counts, stays None. No network and no torch in here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

LONGEST_FRAME_BYTES = 1 << 20
"""A frame of a streamed answer is some hundred bytes; one that reaches a mebibyte is an attack or no stream at all."""

NO_JSON = "a frame that is no JSON"
FAILED = ("abort", "error")
"""Reasons to finish that name a failure of the server's (vLLM, SGLang), not the end of an answer."""

MOST_TOKENS = 10**7
"""No answer of a request that we make has more tokens: a larger count in a usage report is not believed."""


class Outcome(StrEnum):
    """How a request ended; all but OK are failures, counted apart."""

    OK = "ok"
    REFUSED = "refused"  # 429 or 503: the server is busy and says so
    ERROR = "error"  # another status, an error within the stream, a redirect, no connection
    TIMEOUT = "timeout"
    TRUNCATED = "truncated"  # the stream ended before the answer did
    TOO_LARGE = "too large"


@dataclass(frozen=True)
class Ask:
    """One request: a prompt, and how many tokens are wanted. `logprobs` asks for that many alternatives a token."""

    prompt: str
    output_len: int
    logprobs: int = 0


@dataclass(frozen=True)
class Answer:
    """What became of one request. Instants are seconds of one clock.

    `due_s` is when the load wanted it sent, `submit_s` when it was, `text_s` when each piece of content came. `tokens` and
    `top_logprobs` (one mapping a token, from candidate to logprob) are there only when they were asked for and given.
    """

    ask: Ask
    outcome: Outcome
    due_s: float
    submit_s: float
    end_s: float
    text_s: tuple[float, ...] = ()
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    tokens: tuple[str, ...] = ()
    top_logprobs: tuple[Mapping[str, float], ...] = ()
    retry_after_s: float | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def lag_s(self) -> float:
        """How much later than wanted the client sent it."""
        return max(0.0, self.submit_s - self.due_s)

    @property
    def ttft_s(self) -> float:
        """Submit to the first content. Raises ValueError when there was none."""
        if not self.text_s:
            raise ValueError("an answer without content has no ttft")
        return self.text_s[0] - self.submit_s

    @property
    def e2e_s(self) -> float:
        """Submit to the last content."""
        return (self.text_s[-1] if self.text_s else self.end_s) - self.submit_s

    @property
    def waited_s(self) -> float:
        """From when it was wanted to its last content: what a user waits who also queues on our side."""
        return (self.text_s[-1] if self.text_s else self.end_s) - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """(last content - first content) / (output tokens - 1); None where the server tells no count, gave one token, or
        gave all at once, as a store does, and a server that was held up."""
        if self.output_tokens is None or self.output_tokens < 2 or not self.text_s or self.text_s[-1] <= self.text_s[0]:
            return None
        return (self.text_s[-1] - self.text_s[0]) / (self.output_tokens - 1)

    @property
    def shortfall(self) -> str | None:
        """Why this answer can't stand for one of the length that was asked for; None when it can."""
        if not self.ok:
            return f"{self.outcome}{': ' + self.detail if self.detail else ''}"
        if self.output_tokens is None:
            return "the server tells no token counts"
        if self.output_tokens != self.ask.output_len:
            return f"{self.output_tokens} tokens instead of {self.ask.output_len}"
        return None


# Frames ---------------------------------------------------------------------------------------------------------------


class FrameTooLarge(ValueError):
    """A frame grew beyond LONGEST_FRAME_BYTES."""


class Frames:
    """Server-sent events out of bytes that may be split or merged anywhere, within a character too."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of every event that this chunk completes. Raises FrameTooLarge."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events: list[str] = []
        for line in lines:
            text = line.rstrip(b"\r").decode("utf-8", "replace").removeprefix("\ufeff")  # a byte order mark
            if not text:
                if self._data:
                    events.append("\n".join(self._data))
                    self._data = []
            elif text.startswith("data:"):
                self._data.append(text[5:].removeprefix(" "))
        if len(self._rest) + sum(map(len, self._data)) > LONGEST_FRAME_BYTES:
            raise FrameTooLarge(f"a frame beyond {LONGEST_FRAME_BYTES:,} bytes")
        return events

    def rest(self) -> list[str]:
        """The event that the end of the stream completes, where the server left out the last blank line."""
        return self.feed(b"\n\n")


@dataclass(frozen=True)
class Piece:
    """One frame's share of an answer. `finish` is the reason for which the answer ended, None while it goes on."""

    text: str = ""
    finish: str | None = None
    error: str | None = None
    usage: Mapping[str, int] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    top_logprobs: tuple[Mapping[str, float], ...] = ()


def read_piece(data: str) -> Piece:
    """One frame of a completions or chat stream. What isn't of that form is an error, never content."""
    try:
        frame = json.loads(data)
    except (ValueError, RecursionError):
        return Piece(error=NO_JSON)
    if not isinstance(frame, dict):
        return Piece(error="a frame that is no object")
    if frame.get("error"):
        said = frame["error"]
        return Piece(error=str(said.get("message", said) if isinstance(said, dict) else said))
    usage = _usage(frame.get("usage"))
    choices = frame.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return Piece(usage=usage)
    finish = choice.get("finish_reason")
    if finish in FAILED:
        return Piece(error=f"finish_reason {finish}")
    tokens, top = _logprobs(choice.get("logprobs"))
    return Piece(_content(choice), str(finish) if finish else None, None, usage, tokens, top)


def _content(choice: Mapping[str, Any]) -> str:
    """Content, reasoning or a tool call, whichever this frame carries; a role alone is none."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        text = choice.get("text")
        return text if isinstance(text, str) else ""
    said = [delta.get(name) for name in ("reasoning_content", "reasoning", "content")]
    text = "".join(part for part in said if isinstance(part, str))
    return text or (json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else "")


def _usage(usage: object) -> dict[str, int]:
    """The counts of a usage report that can be counts, by our names."""
    if not isinstance(usage, dict):
        return {}
    told = {"prompt_tokens": usage.get("prompt_tokens"), "output_tokens": usage.get("completion_tokens")}
    return {name: n for name, n in told.items() if type(n) is int and 0 <= n <= MOST_TOKENS}


def _listed(told: object) -> list[Any]:
    """A list, and nothing for whatever else a server sends in its place."""
    return told if isinstance(told, list) else []


def _logprobs(told: object) -> tuple[tuple[str, ...], tuple[dict[str, float], ...]]:
    """Tokens and their candidates, of either form: completions' parallel lists or chat's list of objects."""
    if not isinstance(told, dict):
        return (), ()
    if isinstance(content := told.get("content"), list):
        entries = [e for e in content if isinstance(e, dict)]
        tokens = [str(e.get("token")) for e in entries]
        tops = [
            {str(c.get("token")): c.get("logprob") for c in _listed(e.get("top_logprobs")) if isinstance(c, dict)}
            for e in entries
        ]
    else:
        tokens = [str(t) for t in _listed(told.get("tokens"))]
        tops = [dict(t) if isinstance(t, dict) else {} for t in _listed(told.get("top_logprobs"))]
    if len(tops) != len(tokens):
        return (), ()
    return tuple(tokens), tuple(map(_numbers, tops))


def _numbers(top: Mapping[Any, object]) -> dict[str, float]:
    return {str(token): float(v) for token, v in top.items() if isinstance(v, int | float) and abs(v) < 1e6}


# Many answers ---------------------------------------------------------------------------------------------------------


def failures(answers: Sequence[Answer]) -> str | None:
    """What went wrong among these answers, by kind, in one line; None when nothing did."""
    failed = [a for a in answers if not a.ok]
    if not failed:
        return None
    kinds = {kind: [a for a in failed if a.outcome is kind] for kind in Outcome}
    said = [
        f"{len(of)} {kind} ({of[0].detail})" if of[0].detail else f"{len(of)} {kind}"
        for kind, of in kinds.items()
        if of
    ]
    return f"{len(failed)} of {len(answers)} requests failed: {', '.join(said)}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values reach no further than. Raises ValueError for none."""
    if not values:
        raise ValueError("no values have no percentile")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def most_at_once(answers: Sequence[Answer]) -> int:
    """How many answers were being written at the same time at most: each from its first content to its last.

    This is how many sequences a server really runs at once, seen from outside.
    """
    edges = [(a.text_s[0], 1) for a in answers if len(a.text_s) > 1] + [
        (a.text_s[-1], -1) for a in answers if len(a.text_s) > 1
    ]
    running = most = 0
    for _, step in sorted(edges):
        running += step
        most = max(most, running)
    return most
