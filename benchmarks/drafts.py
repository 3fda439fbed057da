"""Speculative decoding made of replays: the loop that the library runs on the eager engine, on two graph engines.

A cycle: the draft proposes DRAFT_LEN tokens one by one, the target reads them all in one step behind the token that is
certain, and what it would have chosen itself is kept. So the output is the target's own, and a cycle yields between one
token and DRAFT_LEN + 1.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.graphs import GraphEngine, GraphState
from benchmarks.phases import Engine, Prompt
from benchmarks.speculation import DRAFT_LEN, EagerVerifier, Generated, Verifier
from benchmarks.timing import Clock, quiet
from benchmarks.workloads import Ids, Workload

TARGET_STEPS = (1, DRAFT_LEN, DRAFT_LEN + 1)
"""Step lengths of a target's engine: decoding, what `verify_cheap` times, and checking a whole draft behind one token."""

DRAFT_STEPS = (1, 2)
"""Step lengths of a draft's engine: where all proposals were kept it has two tokens to catch up with."""


def generate(
    target: GraphEngine,
    prompt: Ids,
    output_len: int,
    clock: Clock,
    draft: GraphEngine | None = None,
    *,
    keep_logits: bool = False,
) -> Generated:
    """The target's greedy output of exactly `output_len` tokens, alone or with a draft; as `speculation.generate`."""
    with torch.inference_mode(), quiet():
        start = clock.read()
        said = _Output(target.prefill(Prompt.of([prompt], target.device)), keep_logits)
        if draft is None:
            _alone(target, said, output_len)
        else:
            _assisted(target, draft, prompt, said, output_len)
        wall_s = clock.read() - start
        logits = torch.cat(said.logits).float().cpu() if keep_logits else None
    return Generated(tuple(said.tokens), wall_s, said.target_forwards, said.drafted, logits)


class _Output:
    """An output as it grows, and the target's state behind it."""

    def __init__(self, state: GraphState, keep_logits: bool) -> None:
        self.state = state
        self.tokens: list[int] = state.next_tokens.tolist()
        self.keep_logits = keep_logits
        self.logits: list[torch.Tensor] = []
        self.keep(state.logits)
        self.target_forwards = 1
        self.drafted = 0

    def keep(self, logits: torch.Tensor) -> None:
        """Logits, (tokens, vocab_size), off the engine's buffer, if they were asked for."""
        if self.keep_logits:
            self.logits.append(logits.clone())


def _alone(target: GraphEngine, output: _Output, output_len: int) -> None:
    steps = []
    for _ in range(output_len - 1):
        output.state = target.step(output.state)
        steps.append(output.state.next_tokens)
        output.keep(output.state.logits)
    output.target_forwards += len(steps)
    output.tokens += torch.cat(steps).tolist() if steps else []


def _assisted(target: GraphEngine, draft: GraphEngine, prompt: Ids, output: _Output, output_len: int) -> None:
    state, draft_state = output.state, draft.prefill(Prompt.of([prompt], draft.device))
    certain = state.next_tokens  # what the target has said and the draft not read, (1,) or (2,)
    while (left := output_len - len(output.tokens)) > 0:
        proposed = min(DRAFT_LEN, left - 1)
        last = certain[-1:]
        proposals = []
        for turn in range(proposed):
            told = None if turn else certain if len(certain) == 1 else certain[None]
            draft_state = draft.step(draft_state, told)
            proposals.append(draft_state.next_tokens)
        # The check has one shape: what is missing at the end of the output is filled up and not looked at.
        filled = [last] * (DRAFT_LEN - proposed)
        state = target.step(state, torch.cat([last, *proposals, *filled])[None])
        choices = state.choices[0]
        said = torch.cat([choices, *proposals]).tolist()
        chosen, guessed = said[: DRAFT_LEN + 1], said[DRAFT_LEN + 1 :]
        accepted = next((i for i, guess in enumerate(guessed) if guess != chosen[i]), proposed)
        output.tokens += chosen[: accepted + 1]
        output.keep(state.all_logits[0, : accepted + 1])
        output.target_forwards += 1
        output.drafted += proposed
        state = target.rewind(state, DRAFT_LEN - accepted)
        # The draft has read what it proposed but the last: of that it keeps what was accepted.
        unread = accepted == proposed and proposed > 0
        draft_state = draft.rewind(draft_state, max(0, proposed - 1 - accepted))
        certain = choices[accepted - 1 : accepted + 1] if unread else choices[accepted : accepted + 1]


class ReplayVerifier(Verifier):
    """Replays over a static cache."""

    engine: GraphEngine
    _state: GraphState

    def forward(self, tokens: int) -> None:
        ids = self._ids[:, :tokens]
        self._state = self.engine.step(self._state, ids[:, 0] if tokens == 1 else ids)
        self._clock.sync()

    def restore(self, tokens: int) -> None:
        self._state = self.engine.rewind(self._state, tokens)
        if self._state.held_len != self.cache_len:
            raise RuntimeError(f"{self._state.held_len} positions are held instead of {self.cache_len}")


def verifier(engine: Engine[Any], workload: Workload, clock: Clock) -> Verifier:
    """What times checks on an engine of either kind."""
    return (ReplayVerifier if isinstance(engine, GraphEngine) else EagerVerifier)(engine, workload, clock)
