"""The graph engine: one whole decode step recorded as a CUDA graph over a static KV cache, replayed for every token.

The eager engine's step costs what the host needs to launch a thousand kernels; a replay costs what the card needs to
run them. Prefill stays eager, with the library's own growing cache, and is copied into the static one.

`capture` gives an engine, or says as a value why there is none. An engine has proven itself: its logits were compared
with the model's own forward on prompts of unequal length, for every number of tokens a step that it was built for.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.decoder import Decoder, KeyValues, Ops, TorchOps, Unsupported, read, step
from benchmarks.phases import EagerEngine, Prompt, logit_distance
from benchmarks.tokens import NEAR_TIE_FACTOR

Tensor = torch.Tensor

_STEPS = 2
"""Steps that a recording runs to warm up, and that a proof compares."""
_LEAST_ERROR = 1e-3
_LEAST_ROUNDINGS = 32
"""What two right programs may differ by although the model's own two ways happen to agree, in standard deviations of
the logits: the first in any precision, the second in units of the precision's rounding."""


@dataclass(frozen=True)
class CannotCapture:
    """Why there is no graph engine: one line, for the cell that would have used it."""

    reason: str

    def __str__(self) -> str:
        return f"cannot be captured: {self.reason}"


@dataclass(frozen=True)
class Recorded:
    """A step of fixed shape: fill `tokens`, call `replay`, read `logits` and `choices`; all stay where they are.

    `tokens` and `choices` are (batch, step_len), `logits` (batch, step_len, vocab_size). With one token a step
    `choices` is `tokens`.
    """

    tokens: Tensor
    choices: Tensor
    logits: Tensor
    replay: Callable[[], None]


class GraphState:
    """A batch between two steps. The engine holds its cache and its logits, and has room for one batch: a state that
    was stepped on, or whose engine has prefilled another batch, raises RuntimeError when it is used again.

    `cache` is the eager prefill's cache, complete until the first step (so that a prefix can be stored), None after.
    """

    def __init__(self, engine: GraphEngine, logits: Tensor, choices: Tensor, held_len: int, cache: Any) -> None:
        self._engine, self._turn = engine, engine.turn
        self._logits, self._choices = logits, choices
        self.held_len = held_len
        self.cache = cache

    def check(self, engine: GraphEngine) -> None:
        if engine is not self._engine or self._turn != engine.turn:
            raise RuntimeError("this state is of the past: its engine has stepped on, and its logits are overwritten")

    def _check_known(self) -> None:
        self.check(self._engine)
        if not self._choices.shape[1]:
            raise RuntimeError(
                "this state was rewound beyond its last step, so it has no logits: tell its step the tokens"
            )

    @property
    def all_logits(self) -> Tensor:
        """After every token of the step, (batch, step_len, vocab_size); a buffer that the next step overwrites."""
        self.check(self._engine)
        return self._logits

    @property
    def logits(self) -> Tensor:
        """After the last token, (batch, vocab_size); a buffer that the next step overwrites."""
        self._check_known()
        return self.all_logits[:, -1]

    @property
    def choices(self) -> Tensor:
        """The greedy choice after every token of the step, (batch, step_len); the caller's own copy."""
        self.check(self._engine)
        return self._choices.clone()

    @property
    def next_tokens(self) -> Tensor:
        """The greedy choice after the last token, (batch,); the caller's own copy."""
        self._check_known()
        return self._choices[:, -1].clone()


class GraphEngine:
    """The eager engine's verbs over recorded steps.

    `steps` maps a number of tokens a row to its recorded step; `built_s` is what reading, compiling, capturing and
    proving took; `note` says why the steps are not made of fused kernels (empty when they are).
    """

    name = "graph"

    def __init__(
        self, eager: EagerEngine, decoder: Decoder, ops: Ops, held: KeyValues, steps: dict[int, Recorded], note: str
    ) -> None:
        self.eager = eager
        self.model = eager.model
        self.device = eager.device
        self.held = held
        self.steps = steps
        self.note = note
        self._in_use = decoder, ops  # a recorded step knows addresses: what lies there must live as long as it
        self.built_s = 0.0
        self.turn = 0
        self._kept_len = 0  # what no rewind may touch, since rows have less of it than others
        self._loaded = 0  # the step_len whose recorded tokens are the last choices, 0 when none is

    @property
    def kernels(self) -> str:
        """What the steps are made of: "fused" kernels, or "torch", PyTorch's own."""
        return "torch" if isinstance(self._in_use[1], TorchOps) else "fused"

    @property
    def batch_size(self) -> int:
        return self.held.lengths.shape[0]

    @property
    def cache_len(self) -> int:
        return self.held.cache_len

    @torch.inference_mode()
    def prefill(self, prompt: Prompt, cache: Any | None = None) -> GraphState:
        """Read a prompt eagerly, after `cache` (changed in place) when one is given, and copy what it holds.

        Raises ValueError when the batch has another size than the engine, or doesn't fit into its cache.
        """
        if prompt.ids.shape[0] != self.batch_size:
            raise ValueError(f"{prompt.ids.shape[0]} rows for an engine that was captured for {self.batch_size}")
        state = self.eager.prefill(prompt, cache)
        held_len = state.cache.get_seq_length()
        self._check_room(held_len)
        self._copy(state.cache, state.mask)
        self._kept_len = 0 if state.mask is None else held_len
        self.turn += 1
        self._loaded = 0
        logits = state.logits[:, None]
        return GraphState(self, logits, logits.argmax(-1), held_len, state.cache)

    @torch.inference_mode()
    def step(self, state: GraphState, tokens: Tensor | None = None) -> GraphState:
        """Read more tokens for every row: one, the greedy one or `tokens`, (batch,); or several, (batch, step_len).

        Raises ValueError for a step_len that wasn't captured, or past the end of the cache.
        """
        state.check(self)
        step_len = 1 if tokens is None or tokens.dim() == 1 else tokens.shape[1]
        recorded = self.steps.get(step_len)
        if recorded is None:
            raise ValueError(f"steps of {step_len} tokens were not captured, only of {sorted(self.steps)}")
        self._check_room(state.held_len + step_len)
        if tokens is not None:
            recorded.tokens.copy_(tokens.view_as(recorded.tokens))
        elif self._loaded != 1:
            recorded.tokens.copy_(state.next_tokens[:, None])
        recorded.replay()
        self.turn += 1
        self._loaded = step_len
        return GraphState(self, recorded.logits, recorded.choices, state.held_len + step_len, None)

    @torch.inference_mode()
    def rewind(self, state: GraphState, count: int) -> GraphState:
        """The state `count` tokens ago: rejected drafts are forgotten.

        Beyond the last step there are no logits any more: such a state has none, and its next step must be told its
        tokens. Raises ValueError when fewer tokens than that were read, since the prefill where rows are padded: what
        each of them has of it only the device knows.
        """
        read_len = state.held_len - self._kept_len
        if not 0 <= count <= read_len:
            since = " since the prefill of rows of unequal length" if self._kept_len else ""
            raise ValueError(f"{read_len} tokens were read{since} and can't be rewound by {count}")
        end = max(0, state.all_logits.shape[1] - count)
        logits, choices = state.all_logits[:, :end], state.choices[:, :end]
        self.held.lengths.sub_(count)
        self.turn += 1
        self._loaded = 0
        return GraphState(self, logits, choices, state.held_len - count, None)

    def _check_room(self, needed_len: int) -> None:
        if needed_len > self.cache_len:
            raise ValueError(
                f"{needed_len} positions in a static cache of {self.cache_len}: capture with a longer cache_len"
            )

    def _copy(self, cache: Any, mask: Tensor | None) -> None:
        """Copy a prefilled cache, dropping padding wherever it lies: a token's slot is its position."""
        held_len = cache.get_seq_length()
        if mask is None:
            self.held.lengths.fill_(held_len)
        else:
            self.held.lengths.copy_(mask.sum(-1))
            order = mask.argsort(dim=-1, descending=True, stable=True)[:, None, :, None]
        for layer, keys, values in zip(cache.layers, self.held.keys, self.held.values, strict=True):
            for source, target in ((layer.keys, keys), (layer.values, values)):
                kept = source if mask is None else source.gather(2, order.expand_as(source))
                target[:, :, :held_len].copy_(kept)


def lacking(device: str) -> str | None:
    """Why a device has no graphs, None when it has."""
    return None if device == "cuda" else "no CUDA on this machine, and graphs are CUDA's"


def capture(
    model: Any, batch_size: int, cache_len: int, step_lens: Sequence[int] = (1,)
) -> GraphEngine | CannotCapture:
    """A graph engine for batches of `batch_size`, up to `cache_len` positions, and steps of `step_lens` tokens a row.

    The steps are made of Triton kernels where they can be had, and otherwise of PyTorch's (the engine's `note` then says
    why).
    """
    if reason := lacking(model.device.type):
        return CannotCapture(reason)
    start = time.perf_counter()
    note = ""
    makers: tuple[Callable[[Decoder, int], Ops], ...] = (_fused_ops, lambda _decoder, _batch_size: TorchOps())
    for make in makers:
        try:
            engine = _captured(model, batch_size, cache_len, step_lens, make, note)
        except torch.OutOfMemoryError:
            reason = f"out of memory at batch {batch_size} with a cache of {cache_len}"
        except Unsupported as error:
            reason = str(error)
        except Exception as error:  # whatever a compiler or a library raises is a reason, and eager goes on
            reason = f"{type(error).__name__}: {_first_line(error)}"
        else:
            engine.built_s = time.perf_counter() - start
            return engine
        note = reason
        gc.collect()
        torch.cuda.empty_cache()
    return CannotCapture(note)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]


def _fused_ops(decoder: Decoder, batch_size: int) -> Ops:
    try:
        from benchmarks.kernels import FusedOps
    except ImportError as error:
        raise Unsupported(f"no Triton here ({error})") from error
    return FusedOps(decoder, batch_size)


def _captured(
    model: Any,
    batch_size: int,
    cache_len: int,
    step_lens: Sequence[int],
    make_ops: Callable[[Decoder, int], Ops],
    note: str,
) -> GraphEngine:
    decoder = read(model, cache_len)
    ops = make_ops(decoder, batch_size)
    engine = static_engine(model, decoder, ops, batch_size, cache_len, step_lens, _record, note)
    prove(engine)
    return engine


@torch.inference_mode()
def static_engine(
    model: Any,
    decoder: Decoder,
    ops: Ops,
    batch_size: int,
    cache_len: int,
    step_lens: Sequence[int],
    record: Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]],
    note: str = "",
) -> GraphEngine:
    """An unproven engine; `record` turns a step into its logits buffer and a call that repeats it."""
    longest = _STEPS * max(step_lens)
    if longest >= cache_len:
        raise Unsupported(f"a cache of {cache_len} has no room for a prompt and {_STEPS} steps of {max(step_lens)}")
    held = KeyValues.empty(decoder, batch_size, cache_len)
    steps = {}
    for step_len in step_lens:
        held.lengths.zero_()  # nothing checks a slot on the device: recording must not run past the end
        tokens = torch.zeros(batch_size, step_len, dtype=torch.long, device=held.lengths.device)
        choices = tokens if step_len == 1 else torch.zeros_like(tokens)

        def one_step(tokens: Tensor = tokens, choices: Tensor = choices) -> Tensor:
            return step(decoder, held, tokens, choices, ops)

        logits, replay = record(one_step)
        steps[step_len] = Recorded(tokens, choices, logits, replay)
    held.lengths.zero_()
    return GraphEngine(EagerEngine(model), decoder, ops, held, steps, note)


def _record(one_step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Capture a step as a CUDA graph. Raises Unsupported when it waits for the device, which a graph can't."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    mode = torch.cuda.get_sync_debug_mode()
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode warns that it is a prototype
        one_step()  # compiles kernels and makes handles, which may well wait
        # A wait inside a capture would break it, and sometimes the process with it: found out before.
        torch.cuda.set_sync_debug_mode("error")
        try:
            one_step()
        except RuntimeError as error:
            if "synchroniz" in str(error):
                raise Unsupported("a module of it waits for the device in every step") from error
            raise
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = one_step()
    return logits, graph.replay


# Proof ---------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def prove(engine: GraphEngine) -> None:
    """Compare the engine's logits with the model's own forward, token by token. Raises Unsupported where they differ.

    The bound comes from the model: how far its logits differ between reading all tokens at once and one by one, times
    what a near tie may be. Rows have unequal lengths, so that positions and padding are part of the proof.
    """
    for step_len in engine.steps:
        error, bound = step_error(engine, step_len)
        if not error <= bound:  # NaN is no proof
            raise Unsupported(
                f"its logits differ from the model's own by {error:.3g} (at most {bound:.3g} would be rounding) "
                f"with steps of {step_len}"
            )


@torch.inference_mode()
def step_error(engine: GraphEngine, step_len: int) -> tuple[float, float]:
    """The largest difference of the engine's logits from the model's own, and the bound on it from the model alone."""
    longest = min(9, engine.cache_len - _STEPS * step_len)
    generator = torch.Generator().manual_seed(step_len)
    rows = [
        tuple(torch.randint(engine.model.config.vocab_size, (max(1, longest - row % 4),), generator=generator).tolist())
        for row in range(engine.batch_size)
    ]
    forced_shape = (engine.batch_size, _STEPS * step_len)
    forced = torch.randint(engine.model.config.vocab_size, forced_shape, generator=generator).to(engine.device)
    prompt = Prompt.of(rows, engine.device)

    whole = _whole(engine.eager, prompt, forced)
    eager = engine.eager.prefill(prompt)
    stepped = []
    for position in range(forced.shape[1]):
        eager = engine.eager.step(eager, forced[:, position])
        stepped.append(eager.logits)
    state = engine.prefill(prompt)
    ours = []
    for start in range(0, forced.shape[1], step_len):
        tokens = forced[:, start : start + step_len]
        state = engine.step(state, tokens[:, 0] if step_len == 1 else tokens)
        ours.append(state.all_logits.clone())
        if not torch.equal(state.choices, state.all_logits.argmax(-1)):
            raise Unsupported("its greedy choices are not the argmax of its own logits")
    noise = float(logit_distance(torch.stack(stepped, dim=1), whole).max())
    least = max(_LEAST_ERROR, _LEAST_ROUNDINGS * torch.finfo(whole.dtype).eps) * float(whole.float().std())
    bound = NEAR_TIE_FACTOR * noise + least
    return float(logit_distance(torch.cat(ours, dim=1), whole).max()), bound


def _whole(eager: EagerEngine, prompt: Prompt, forced: Tensor) -> Tensor:
    """The model's own logits after each forced token, from one forward over everything."""
    ids = torch.cat([prompt.ids, forced], dim=1)
    if prompt.mask is None:
        logits = eager.model(ids, use_cache=False).logits
    else:
        mask = torch.cat([prompt.mask, torch.ones_like(forced)], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = eager.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    kept: Tensor = logits[:, -forced.shape[1] :]
    return kept
