"""Pipeline parallel: each GPU holds a run of consecutive layers and hands its output on.

One request passes through the stages one after the other, as transformers places them; several prefills in flight keep
all stages at work, by the GPipe schedule of torch.distributed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.phases import EagerEngine, State


def refusal(config: Any, world_size: int) -> str | None:
    """Why a model of this config can't be laid out over so many GPUs, with the remedy; None when it can."""
    if not getattr(config, "base_model_pp_plan", None):
        return f"{config.model_type} has no pipeline plan in transformers: choose another --target"
    if config.num_hidden_layers < world_size:
        n_layers = config.num_hidden_layers
        return f"{n_layers} layers are too few for {world_size} stages: pass --world-size {n_layers} or less"
    return None


class StageEngine(EagerEngine):
    """One stage; the stages of all processes make the same steps, and each ends with the logits that the last one sends.

    Positions are given with every forward. Left to itself transformers 5.24 reads them off the cache of layer 0, which
    only the first stage has: every later stage would take each new token for the first one, and say something else.
    """

    name = "pipeline"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        layers = enumerate(model.base_model.layers)
        self._first_layer = next(i for i, layer in layers if not isinstance(layer, nn.Identity))

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None) -> State:
        if mask is not None:
            raise ValueError("rows of unequal length are not split into stages here")
        past_len = cache.get_seq_length(self._first_layer)
        positions = torch.arange(past_len, past_len + ids.shape[1], device=ids.device)[None]
        output = self.model(ids, cache=cache, use_cache=True, position_ids=positions, **self._last_only)
        return State(output.cache, None, output.logits[:, -1])


@dataclass(frozen=True)
class Flight:
    """A stage's share of some prefills in flight: how long it was at work, of how long all took."""

    busy_s: float
    wall_s: float

    @property
    def idle_share(self) -> float:
        return 1 - self.busy_s / self.wall_s


def idle_share(n_stages: int, in_flight: int) -> float:
    """The share of time for which a stage must idle, (p - 1) / (m + p - 1) of p stages and m micro-batches: filling and
    draining the pipe (GPipe, arXiv:1811.06965, section 2.3)."""
    return (n_stages - 1) / (in_flight + n_stages - 1)


class _Stage(nn.Module):
    """A stage as torch.distributed's schedules want it, token ids or hidden states in, hidden states or the last
    position's logits out; it notes how long it works."""

    def __init__(self, model: Any, first: bool, last: bool) -> None:
        super().__init__()
        self.model, self.first, self.last = model, first, last
        self.spans: list[tuple[Any, Any]] = []

    def forward(self, handed: torch.Tensor) -> torch.Tensor:
        start = self._instant()
        given = {"input_ids": handed} if self.first else {"inputs_embeds": handed}
        hidden: torch.Tensor = self.model.base_model(**given, use_cache=False).last_hidden_state
        if self.last:
            hidden = self.model.lm_head(hidden[:, -1:])
        self.spans.append((start, self._instant()))
        return hidden

    def _instant(self) -> Any:
        """On the stream, so that the clock starts when the input has arrived and nobody has to wait for the device."""
        if self.model.device.type == "cpu":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @property
    def busy_s(self) -> float:
        if self.model.device.type == "cpu":
            return float(sum(end - start for start, end in self.spans))
        return float(sum(start.elapsed_time(end) for start, end in self.spans)) / 1e3


class Pipe:
    """Prefills of `in_flight` prompts of equal length, one a micro-batch."""

    def __init__(self, model: Any, rank: int, world_size: int, in_flight: int) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        self._stage = _Stage(model, rank == 0, rank == world_size - 1)
        placed = PipelineStage(self._stage, rank, world_size, model.device)
        self._schedule = ScheduleGPipe(placed, in_flight)

    @torch.no_grad()
    def fly(self, ids: torch.Tensor) -> Flight:
        """All of `ids`, (in_flight, prompt_len), to their last logits. Every process calls it at the same time."""
        cuda = self._stage.model.device.type == "cuda"
        self._stage.spans.clear()
        start = time.perf_counter()
        self._schedule.step(ids) if self._stage.first else self._schedule.step()
        if cuda:
            torch.cuda.synchronize()
        torch.distributed.barrier()
        if cuda:
            torch.cuda.synchronize()
        return Flight(self._stage.busy_s, time.perf_counter() - start)
