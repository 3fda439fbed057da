"""What one worker of a group does: holds its part of a model on its own GPU, serves, traces and compares.

A worker knows nothing of claims. The parent calls the same method on all workers (workers.py), since a collective waits
for everybody, and gets plain data back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.graphs import CannotCapture, GraphEngine, capture
from benchmarks.memory import Device, resident_bytes
from benchmarks.parallel import tensor_parallel
from benchmarks.parallel.pipeline import Flight, Pipe, StageEngine
from benchmarks.parallel.tensor_parallel import Shares, StepTrace, expected_shares, held_bytes
from benchmarks.phases import (
    EagerEngine,
    Prompt,
    Reference,
    Request,
    State,
    clock_for,
    forced_choices,
    reference,
    serve,
    serve_in_turn,
    tolerance,
)
from benchmarks.rigs import Loader, Rig, random_model
from benchmarks.runs import Run
from benchmarks.timing import Clock, quiet
from benchmarks.tokens import Ids, Match, compare
from benchmarks.traces import record
from benchmarks.workloads import Workload

WHOLE, TENSOR_PARALLEL, PIPELINE = "whole", "tensor parallel", "pipeline"
WIDE, WIDE_TENSOR_PARALLEL = "wide", "wide tensor parallel"

COLLECTIVE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Group:
    """The workers of one rig: how many, and the port of the parent's store at which they meet."""

    rig: Rig
    world_size: int
    port: int


def join(group: Group, rank: int) -> Rank:
    """A worker's service (see Workers)."""
    return Rank(group, rank)


class TensorParallelEngine(EagerEngine):
    """The eager engine on this process's slices; all processes make the same steps.

    Not in inference mode, in which some operations of a DTensor fail (pytorch/pytorch#142190, open since 2024).
    """

    name = TENSOR_PARALLEL

    def _forward(self, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None) -> State:
        with torch.inference_mode(False), torch.no_grad():
            return super()._forward(ids, cache, mask)


class Bystander:
    """Takes its turn and does nothing, so that all processes pass the same fences while one of them serves alone."""

    name = "bystander"
    model = None
    cache = None

    def __init__(self, device: str) -> None:
        self.device: Any = device
        self.logits = torch.zeros(1, 1)
        self.next_tokens = torch.zeros(1, dtype=torch.long)

    def prefill(self, prompt: Prompt, cache: Any | None = None) -> Bystander:
        return self

    def step(self, state: Bystander, tokens: torch.Tensor | None = None) -> Bystander:
        return self


class Rank:
    """One worker. Methods are called by the parent, on all ranks unless they say otherwise."""

    def __init__(self, group: Group, rank: int) -> None:
        device = group.rig.device
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(group.world_size)}
        # NVLink multicast stays off unless the machine says otherwise: it is a resource that a host's guests share.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        if device == "cpu":
            os.environ |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(rank)
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore("127.0.0.1", group.port, is_master=False, wait_for_workers=False)
        torch.distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=group.world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=torch.device("cuda", rank) if device == "cuda" else None,
        )
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.rank, self.group = rank, group
        self.device: Device = "cuda" if device == "cuda" else "cpu"
        self.dtype: torch.dtype = getattr(torch, group.rig.dtype)
        self.clock = clock_for(device)
        self.engines: dict[str, EagerEngine] = {}
        self.recorded: dict[int, GraphEngine] = {}
        self._pipes: dict[int, Pipe] = {}
        self.fence()

    def fence(self) -> None:
        """All processes have come here, and their devices have done what they were given."""
        self.clock.sync()
        torch.distributed.barrier()
        self.clock.sync()

    # Models -----------------------------------------------------------------------------------------------------------

    def hold_whole(self) -> Shares:
        """Load the rig's target whole, as every replica does; what a GPU should hold of it once it is split."""
        model = Loader(self.group.rig).model(self.group.rig.target)
        self.engines[WHOLE] = EagerEngine(model)
        return expected_shares(model, self.group.world_size)

    def save(self, folder: Path) -> None:
        """Write the whole model where all can load their parts from. Called on rank 0."""
        self.engines[WHOLE].model.save_pretrained(folder)

    def hold_split(self, name: str, folder: Path) -> int:
        """Load this process's part of the model in `folder`, TENSOR_PARALLEL or PIPELINE; the bytes that it holds.

        On CUDA by the allocator's count, on the CPU by the tensors' own.
        """
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        before, n = resident_bytes(self.device), self.group.world_size
        over = DistributedConfig(tp_size=n) if name == TENSOR_PARALLEL else DistributedConfig(pp_size=n)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=self.dtype, local_files_only=True, distributed_config=over
        )
        self.engines[name] = (TensorParallelEngine if name == TENSOR_PARALLEL else StageEngine)(model.eval())
        after = resident_bytes(self.device)
        return held_bytes(self.engines[name].model) if after is None else after - (before or 0)

    def hold_wide(self, shape: dict[str, Any]) -> None:
        """Build a random model of a wide shape: whole on rank 0, and split over all."""
        from transformers import AutoConfig

        shape = dict(shape)
        config = AutoConfig.for_model(shape.pop("model_type"), **shape)
        if self.rank == 0:
            self.engines[WIDE] = EagerEngine(random_model(config, self.dtype, self.device))
        model = tensor_parallel.split(random_model(config, self.dtype, self.device), self.group.world_size)
        self.engines[WIDE_TENSOR_PARALLEL] = TensorParallelEngine(model)

    def record_step(self, batch_size: int, cache_len: int) -> str | None:
        """Record the whole model's decode step for batches of that size. Why it can't be done, None when it is."""
        made = capture(self.engines[WHOLE].model, batch_size, cache_len)
        if isinstance(made, CannotCapture):
            return str(made)
        self.recorded[batch_size] = made
        return None

    # Serving ----------------------------------------------------------------------------------------------------------

    def serve(self, workload: Workload, fenced: bool, recorded: bool = False) -> Run:
        """Serve the whole model here, as a replica does, by its recorded steps if asked. `fenced`: all start together."""
        engine: Any = self.recorded[workload.batch_size] if recorded else self.engines[WHOLE]
        with quiet():
            if fenced:
                self.fence()
            return serve(Request(engine, workload), self.clock).run

    def serve_beside(self, alone: str, split: str, workload: Workload, split_first: bool) -> dict[str, Run]:
        """Serve a workload by a whole model on rank 0 and by the split one on all, step by step in turn.

        Every reading of the clock is a fence, the same for both: each step starts on all GPUs at once, and the wait for
        the slowest is part of it. What rank 0 read is what counts.
        """
        one: Any = self.engines[alone] if self.rank == 0 else Bystander(self.device)
        sides = {alone: Request(one, workload), split: Request(self.engines[split], workload)}
        names = list(sides)[::-1] if split_first else list(sides)
        served = serve_in_turn([sides[name] for name in names], Clock(sync=self.fence))
        return {name: each.run for name, each in zip(names, served, strict=True)}

    def trace_step(self, name: str, workload: Workload) -> StepTrace:
        """What this GPU does in one decode step. A whole model's is called on rank 0 alone."""
        engine = self.engines[name]
        state = engine.prefill(Prompt.of(workload.prompts, self.device))
        state = engine.step(state)  # the first step after a prefill pays for shapes not seen before
        return StepTrace.of(record(lambda: engine.step(state), self.device))

    def fly(self, prompts: Sequence[Ids], in_flight: Sequence[int]) -> dict[int, Flight]:
        """Prefill so many prompts at a time through the stages, each number once."""
        flights = {}
        for n in in_flight:
            if n not in self._pipes:
                self._pipes[n] = Pipe(self.engines[PIPELINE].model, self.rank, self.group.world_size, n)
            with quiet():
                ids = torch.tensor(prompts[:n], device=self.device)
                self.fence()
                flights[n] = self._pipes[n].fly(ids)
        return flights

    # Equality ---------------------------------------------------------------------------------------------------------

    def same_tokens(self, name: str, prompts: Sequence[Ids], output_len: int) -> list[Match]:
        """The split model's choices against the whole model's, each prompt alone, at every position. Rank 0's count.

        In float32 no logit of a pipeline may differ at all: it adds the same numbers in the same order.
        """
        whole, split = self.engines[WHOLE], self.engines[name]
        told = [self._agreed(reference(whole, prompt, output_len)) for prompt in prompts]
        allowed = tolerance(whole, prompts, told)
        if name == PIPELINE and self.dtype == torch.float32:
            allowed = replace(allowed, distance=0.0 * allowed.distance)  # NaN stays NaN: what is no number isn't judged
        matches = []
        for prompt, row in zip(prompts, told, strict=True):
            state = split.prefill(Prompt.of([prompt], self.device))
            (chosen,) = forced_choices(split, state, [row])
            matches.append(compare(row.tokens, chosen.tokens, row.gap, chosen.distances, allowed, forced=True))
        return matches

    def _agreed(self, told: Reference) -> Reference:
        """Rank 0's tokens with this rank's logits: all must be fed the same text, or the split model answers nobody's."""
        tokens = torch.tensor(told.tokens, device=self.device)
        torch.distributed.broadcast(tokens, 0)
        return Reference(tuple(tokens.tolist()), told.logits)
