"""prefill() and decode(), the two verbs of inference, and serve(), which times both.

The eager engine runs the model as transformers ships it; graphs.py has another. Whatever engine runs them, the verbs
keep the same meaning: prefill reads prompt tokens into a KV cache and names the next token; decode names one token more
per step.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.memory import Device
from benchmarks.runs import Run
from benchmarks.timing import Clock, quiet
from benchmarks.tokens import Ids, Tolerance
from benchmarks.workloads import Workload


def clock_for(device: str) -> Clock:
    """The wall clock that waits for this device."""
    return Clock(sync=torch.cuda.synchronize) if device == "cuda" else Clock()


@dataclass(frozen=True)
class Prompt:
    """Token ids, (batch, length), padded on the left; `mask` is 1 where a token is real, None without padding."""

    ids: torch.Tensor
    mask: torch.Tensor | None

    @staticmethod
    def of(rows: Sequence[Ids], device: str) -> Prompt:
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
        if all(len(row) == longest for row in rows):
            return Prompt(ids, None)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        return Prompt(ids, (torch.arange(longest, device=device) >= longest - lengths[:, None]).long())


@dataclass
class State:
    """A batch between two steps: its KV cache (changed in place), the mask so far, and the logits of the last position,
    (batch, vocab_size)."""

    cache: Any
    mask: torch.Tensor | None
    logits: torch.Tensor

    @property
    def next_tokens(self) -> torch.Tensor:
        """The greedy choice, (batch,): argmax and nothing else, whatever generation defaults a checkpoint brings."""
        return self.logits.argmax(-1)


class Stepped(Protocol):
    """What every engine's states have: the greedy choice after the last token, (batch,), the caller's to keep; the
    logits behind it, (batch, vocab_size), which the engine's next step may overwrite; and after a prefill its cache."""

    @property
    def next_tokens(self) -> torch.Tensor: ...
    @property
    def logits(self) -> torch.Tensor: ...
    @property
    def cache(self) -> Any: ...


S = TypeVar("S", bound=Stepped)


class Engine(Protocol[S]):
    """What runs the verbs. A state goes in and comes out, and no engine accepts another's."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> Any: ...
    @property
    def device(self) -> Device: ...

    def prefill(self, prompt: Prompt, cache: Any | None = None) -> S:
        """Read a prompt, appending to `cache` (an eager one, changed in place) when one is given."""

    def step(self, state: S, tokens: torch.Tensor | None = None) -> S:
        """One more token for every row: the greedy one, or `tokens`, (batch,), forced by the caller."""


class EagerEngine:
    """The model as transformers runs it, one forward a step, with the library's own growing KV cache."""

    name = "eager"

    def __init__(self, model: Any) -> None:
        if model.training:
            raise ValueError("the model is in training mode; call eval() first")
        self.model = model
        self.device: Device = model.device.type
        # Without this a prefill would materialise logits for every prompt position: (batch, length, vocab_size).
        self._last_only = (
            {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        )

    @torch.inference_mode()
    def prefill(self, prompt: Prompt, cache: Any | None = None) -> State:
        """Read a prompt, appending to `cache` (changed in place) when one is given."""
        from transformers import DynamicCache

        if cache is None:
            cache = DynamicCache(config=self.model.config)
        mask = prompt.mask
        past_len = cache.get_seq_length()
        if mask is not None and past_len:
            mask = torch.cat([mask.new_ones(mask.shape[0], past_len), mask], dim=1)
        return self._forward(prompt.ids, cache, mask)

    @torch.inference_mode()
    def step(self, state: State, tokens: torch.Tensor | None = None) -> State:
        """One more token for every row: the greedy one, or `tokens`, (batch,), forced by the caller."""
        tokens = state.next_tokens if tokens is None else tokens
        mask = state.mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        return self._forward(tokens[:, None], state.cache, mask)

    def _forward(self, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None) -> State:
        positions = {}
        if mask is not None:
            positions["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.model(ids, attention_mask=mask, cache=cache, use_cache=True, **positions, **self._last_only)
        return State(output.cache, mask, output.logits[:, -1])


@dataclass(frozen=True)
class Served:
    """A run and the tokens it gave, one tuple a row."""

    run: Run
    tokens: tuple[Ids, ...]


def decode(engine: Engine[S], state: S, output_len: int) -> tuple[Ids, ...]:
    """All `output_len` greedy tokens of a prefilled batch, the first of which the prefill has named already."""
    steps = [state.next_tokens]
    for _ in range(output_len - 1):
        state = engine.step(state)
        steps.append(state.next_tokens)
    return tuple(tuple(row) for row in torch.stack(steps, dim=1).tolist())


@dataclass(frozen=True)
class Request:
    """A workload to be served by an engine. `take_cache` gives a cache that holds a prefix already prefilled
    (StoredPrefix.take); it is called after submit, since fetching the prefix is part of what a hit costs."""

    engine: Engine[Any]
    workload: Workload
    take_cache: Callable[[], Any] = lambda: None


def serve(request: Request, clock: Clock) -> Served:
    """Serve one static batch from submit to its last token."""
    return serve_in_turn([request], clock)[0]


def serve_in_turn(requests: Sequence[Request], clock: Clock) -> list[Served]:
    """Serve requests side by side: all are prefilled, then each decodes one step in turn, the order swapping every step.

    Each request is billed its own prefill and its own steps, as if it were alone. Served one after the other, two
    requests would each meet other neighbours, and on a host whose speed wanders that difference is all one would see.
    The clock is read after every token, as a user who watches the stream would: a step's time includes the wait for it.
    """
    prompts = [Prompt.of(r.workload.prompts, r.engine.device) for r in requests]
    states: list[Any] = []
    steps: list[list[torch.Tensor]] = []
    token_s: list[list[float]] = []
    with quiet():
        for request, prompt in zip(requests, prompts, strict=True):
            start = clock.read()
            state = request.engine.prefill(prompt, request.take_cache())
            steps.append([state.next_tokens])
            token_s.append([clock.read() - start])
            states.append(state)
        for position in range(1, max(r.workload.output_len for r in requests)):
            turns = [i for i, r in enumerate(requests) if position < r.workload.output_len]
            for i in turns if position % 2 else reversed(turns):
                start = clock.read()
                states[i] = requests[i].engine.step(states[i])
                steps[i].append(states[i].next_tokens)
                token_s[i].append(token_s[i][-1] + clock.read() - start)
    return [
        Served(
            Run(request.workload.batch_size, request.workload.prompt_len, tuple(times)),
            tuple(tuple(row) for row in torch.stack(tokens, dim=1).tolist()),
        )
        for request, times, tokens in zip(requests, token_s, steps, strict=True)
    ]


def in_turn(requests: Mapping[str, Request], clock: Clock) -> Callable[[], dict[str, Run]]:
    """A call that serves the requests in turn and gives their runs by name: one round of a comparison.

    Which request is prefilled first swaps from call to call.
    """
    orders = itertools.cycle((list(requests), list(requests)[::-1]))

    def one_round() -> dict[str, Run]:
        order = next(orders)
        served = serve_in_turn([requests[name] for name in order], clock)
        return {name: one.run for name, one in zip(order, served, strict=True)}

    return one_round


class StoredPrefix:
    """A prefilled prefix that is never handed out itself: who uses a cache changes it, so each use gets a copy.

    Copying is part of what a hit costs; time it with the prefill.
    """

    def __init__(self, engine: EagerEngine, prefix: Ids) -> None:
        self.ids = prefix
        self._cache = engine.prefill(Prompt.of([prefix], engine.device)).cache

    def take(self) -> Any:
        """A fresh copy of the cache, holding exactly the prefix."""
        cache = copy.deepcopy(self._cache)
        held = cache.get_seq_length()
        if held != len(self.ids):
            raise AssertionError(f"the stored prefix has {len(self.ids)} tokens and its cache {held}: it was changed")
        return cache


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of one row, decoded alone, with the logits behind each, (output_len, vocab_size), on the CPU."""

    tokens: Ids
    logits: torch.Tensor

    def gap(self, position: int, token: int) -> float:
        """How far the logit of `token` lies under the top logit at `position`."""
        row = self.logits[position]
        return float(row.max() - row[token])


@torch.inference_mode()
def reference(engine: EagerEngine, prompt: Ids, output_len: int) -> Reference:
    """What a row says when it is alone: no padding, no batch mates, no cache from elsewhere."""
    state = engine.prefill(Prompt.of([prompt], engine.device))
    logits = [state.logits[0].float().cpu()]
    tokens = [int(state.next_tokens)]
    for _ in range(output_len - 1):
        state = engine.step(state)
        logits.append(state.logits[0].float().cpu())
        tokens.append(int(state.next_tokens))
    return Reference(tuple(tokens), torch.stack(logits))


def logit_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The largest difference of any logit, one figure for each position: (..., vocab_size) to (...).

    Centred, since a shift of all logits changes no choice.
    """
    difference = a.float() - b.float()
    return (difference - difference.mean(-1, keepdim=True)).abs().amax(-1)


LEAST_ROUNDINGS = {torch.float32: 16}
"""The least that the logit error can be, in units in the last place of the largest logit; 1 where nothing else is said.
In half precision rounding a logit to the format is most of its error. In float32 it is one rounding of thousands, and two
ways that happen to agree to the last bit say nothing of a third."""


@torch.inference_mode()
def logit_error(engine: EagerEngine, prompt: Ids, told: Reference) -> float:
    """How far two right computations of the same logits differ on this machine.

    The reference's tokens are read once more in a single forward instead of one by one, alone and unpadded: the same
    mathematics in other matrix shapes. The largest `logit_distance` over all positions is the error, and no less than
    LEAST_ROUNDINGS. The subject under test has no part in it. NaN where the logits are no numbers.
    """
    ids = torch.tensor([[*prompt, *told.tokens[:-1]]], device=engine.device)
    again = engine.model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    measured = float(logit_distance(again.cpu(), told.logits).max())
    dtype = engine.model.dtype
    least = LEAST_ROUNDINGS.get(dtype, 1) * torch.finfo(dtype).eps * float(told.logits.abs().max())
    return max(measured, least)


def tolerance(engine: EagerEngine, prompts: Sequence[Ids], told: Sequence[Reference]) -> Tolerance:
    """What rounding explains in any of these rows: from the largest of their errors, with exact tokens in float32."""
    errors = [logit_error(engine, prompt, row) for prompt, row in zip(prompts, told, strict=True)]
    largest = float(torch.tensor(errors).max())  # NaN if any is, which max() would lose
    return Tolerance.of(largest, exact=engine.model.dtype == torch.float32)


@dataclass(frozen=True)
class Choices:
    """What one row would choose at every position, and how far its logits lie from the reference's there."""

    tokens: Ids
    distances: tuple[float, ...]


@torch.inference_mode()
def forced_choices(engine: Engine[S], state: S, references: Sequence[Reference]) -> list[Choices]:
    """What each row of a prefilled batch would choose at every position when fed its reference's tokens.

    Logits are compared as they come, position by position: kept, those of 16 rows would fill a gigabyte.
    """
    told = torch.tensor([r.tokens for r in references], device=engine.device)
    chosen, distances = [], []
    for position in range(told.shape[1]):
        if position:
            state = engine.step(state, told[:, position - 1])
        wanted = torch.stack([r.logits[position] for r in references]).to(engine.device)
        chosen.append(state.next_tokens)
        distances.append(logit_distance(state.logits, wanted))
    tokens, apart = torch.stack(chosen, dim=1).tolist(), torch.stack(distances, dim=1).tolist()
    return [Choices(tuple(t), tuple(d)) for t, d in zip(tokens, apart, strict=True)]
