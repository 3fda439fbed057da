"""Tensor parallel: each GPU holds a slice of the matrices, as the model's own plan in transformers says.

What can be refused before anything loads, how a model is split, what each GPU should then hold, and what the all-reduces
of a step cost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.traces import Event, busy_s

_SPLIT_DIM = {
    "colwise": 0,
    "colwise_rep": 0,
    "colwise_gather_output": 0,
    "rowwise": 1,
    "rowwise_rep": 1,
    "rowwise_split_input": 1,
    "embedding_rowwise": 0,
    "embedding_colwise": 1,
}
"""The dimension of a weight that each style of a plan splits. A bias is split with the rows of its weight (dimension 0);
after a split of the columns every GPU adds the whole one."""


def refusal(config: Any, world_size: int) -> str | None:
    """Why a model of this config can't be split over so many GPUs, with the remedy; None when it can.

    transformers itself checks less: without KV heads for every GPU it fails in the middle of a forward.
    """
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        return f"{config.model_type} has no tensor-parallel plan in transformers: choose another --target"
    if unknown := sorted(set(plan.values()) - set(_SPLIT_DIM)):
        return (
            f"the tensor-parallel plan of {config.model_type} splits by {unknown[0]}, whose bytes aren't predicted here"
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    for count, what in ((heads, "attention heads"), (kv_heads, "KV heads")):
        if count % world_size:
            able = [n for n in range(2, world_size) if heads % n == 0 and kv_heads % n == 0]
            remedy = f"pass --world-size {able[-1]}" if able else "choose another --target"
            return f"{count} {what} can't be split over {world_size} GPUs: {remedy}"
    return None


def split(model: Any, world_size: int) -> Any:
    """The same of a model in memory, for timing: slices are views, so its bytes stay those of the whole model.

    Not for tied weights, which transformers splits only as it loads them.
    """
    from transformers.distributed import DistributedConfig

    over, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=world_size))
    return type(model).maybe_distribute_model(model, over, mesh).eval()


# Bytes ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """Bytes of weights on the fullest GPU: slices, and what every GPU holds whole, by kind of parameter."""

    split_bytes: int
    replicated_bytes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return self.split_bytes + sum(self.replicated_bytes.values())


def expected_shares(model: Any, world_size: int) -> Shares:
    """What a GPU should hold of a whole model: from its shapes and its plan, each tied weight once.

    A dimension that doesn't divide gives the first GPUs ceil(size / world_size) of it.
    """
    split_bytes, replicated = 0, dict[str, int]()
    for name, weight in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        kind = re.sub(r"\.\d+(?=\.)", ".*", module)
        dim = _SPLIT_DIM.get(model.tp_plan.get(kind, ""))
        if dim is None or (leaf == "bias" and dim == 1):
            replicated[f"{kind}.{leaf}"] = replicated.get(f"{kind}.{leaf}", 0) + weight.nbytes
        else:
            size = weight.shape[dim]
            split_bytes += weight.nbytes // size * -(-size // world_size)
    return Shares(split_bytes, replicated)


def held_bytes(model: Any) -> int:
    """Bytes that this process holds for a model's weights and buffers, tied ones once, split or not.

    A slice counts by itself: loaded on a CPU without another dtype it is a view of the whole matrix in the mapped file.
    """
    from torch.distributed.tensor import DTensor

    held: dict[tuple[int, int], int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        held[local.untyped_storage().data_ptr(), int(local.storage_offset())] = local.nbytes
    return sum(held.values())


# A traced step --------------------------------------------------------------------------------------------------------

_ALL_REDUCE = "c10d::allreduce_"
"""The op behind every all-reduce, whether asked for by name, through a DTensor or by an autograd function."""


@dataclass(frozen=True)
class StepTrace:
    """What one process's GPU did in a decode step.

    `compute_s` is the time in which it ran anything but NCCL's kernels, `collectives_s` how long each of those ran, in
    order; None with the `reason`. `all_reduces` were counted on the host. Plain data: it goes through a pipe.
    """

    compute_s: float | None
    collectives_s: tuple[float, ...]
    all_reduces: int
    reason: str | None = None

    @staticmethod
    def of(events: Sequence[Event] | str) -> StepTrace:
        if isinstance(events, str):
            return StepTrace(None, (), 0, events)
        all_reduces = sum(e.name == _ALL_REDUCE for e in events)
        on_device = sorted((e for e in events if e.on_device), key=lambda e: e.start_ns)
        if not on_device:
            return StepTrace(None, (), all_reduces, "the trace has no device time")
        collectives = [(e.end_ns - e.start_ns) / 1e9 for e in on_device if _is_collective(e.name)]
        zero = on_device[0].start_ns
        work = [((e.start_ns - zero) / 1e9, (e.end_ns - zero) / 1e9) for e in on_device if not _is_collective(e.name)]
        return StepTrace(busy_s(work), tuple(collectives), all_reduces)


def _is_collective(kernel: str) -> bool:
    return "nccl" in kernel.lower()


@dataclass(frozen=True)
class StepCost:
    """A step over several GPUs without the waiting for each other: the slowest's own work, and the collectives' own cost.

    A collective's kernel spins until the last GPU arrives, so its time on the others is mostly waiting for a host that
    launches late. On the GPU that came last it is the exchange alone: the least of all.
    """

    compute_s: float
    sync_s: float

    @property
    def device_s(self) -> float:
        return self.compute_s + self.sync_s

    @staticmethod
    def of(traces: Sequence[StepTrace]) -> StepCost | str:
        """From one step's trace on every GPU; the reason where there is none."""
        if reason := next((t.reason for t in traces if t.compute_s is None), None):
            return reason
        if len({len(t.collectives_s) for t in traces}) > 1:
            counts = ", ".join(str(len(t.collectives_s)) for t in traces)
            return f"the GPUs' traces show different numbers of collectives ({counts})"
        sync_s = sum(map(min, zip(*(t.collectives_s for t in traces), strict=True)))
        return StepCost(max(t.compute_s or 0.0 for t in traces), sync_s)
