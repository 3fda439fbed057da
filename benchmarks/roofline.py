"""The roofline of this machine: what a phase would take if nothing but memory or arithmetic cost time, and what holds it.

Two rates are measured, a copy's bandwidth and a matrix product's FLOPs a second. The bytes that a phase must read and the
arithmetic that it must do, over these rates, are its floor: no software on this machine gets below it, and how far a
measured time stands above it is what software may still gain. (Williams, Waterman and Patterson, "Roofline", 2009.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.ledger import HOST_BOUND
from benchmarks.memory import Device, free_bytes, kv_cache_bytes, tensor_bytes

COPY_BYTES = {"cuda": 2**30, "cpu": 2**25}
"""Bytes of the copied buffer: many times what a card's cache holds (an H200's is 50 MiB), few enough to be free beside a
model. A CPU's new pages take longer than their copy, so it gets fewer."""

BURST = {"cuda": 10, "cpu": 1}
"""Calls of a try. A card gets several, so that the host has launched the next before the last has ended."""

TRIES = {"cuda": 5, "cpu": 3}
"""The best try counts: a roof is what the machine can do, and a neighbour can only lower a try."""

PRODUCT_S = {"cuda": 1e-3, "cpu": 5e-3}
"""Matrices grow until one product takes so long: then the launch is no part of its time, and no dtype takes seconds."""

SIDES = (128, 8192)
"""Of the square matrices, from and to."""


@dataclass(frozen=True)
class Work:
    """What a phase can't do without: bytes read from memory, and floating point operations (a multiply-add is two)."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Roofline:
    """The two roofs of a machine. `bandwidth_bytes_per_s` counts bytes read and bytes written; `how` says how both rates
    were found."""

    bandwidth_bytes_per_s: float
    matmul_flops_per_s: float
    how: str

    @property
    def record(self) -> dict[str, object]:
        """For run.json."""
        return asdict(self)

    def bytes_s(self, work: Work) -> float:
        return work.bytes / self.bandwidth_bytes_per_s

    def flops_s(self, work: Work) -> float:
        return work.flops / self.matmul_flops_per_s

    def floor_s(self, work: Work) -> float:
        """The larger of both: reading and calculating can go on at the same time, and neither can be skipped."""
        return max(self.bytes_s(work), self.flops_s(work))

    def regime(self, work: Work, wall_s: float, device_s: float | None) -> str:
        """What holds a phase back, in a word.

        host-bound: the card waits for most of the wall time, so that a faster card would hardly show;
        memory-bound or compute-bound: the floor is most of the time that the device works, and this is the floor's side;
        overhead-bound: neither. The device is busy, but with starting and emptying small kernels (on a CPU also with the
        interpreter) for most of its time. `device_s` None means that the device is the CPU, which never waits for a host.
        """
        if device_s is not None and device_s < (1 - HOST_BOUND) * wall_s:
            return "host-bound"
        if self.floor_s(work) < HOST_BOUND * (wall_s if device_s is None else device_s):
            return "overhead-bound"
        return "memory-bound" if self.bytes_s(work) >= self.flops_s(work) else "compute-bound"


def measure(device: Device, dtype: torch.dtype) -> Roofline:
    """Measure both roofs in about half a second. Buffers are at most an eighth of the free memory each."""
    free = free_bytes(device)
    copied = min(COPY_BYTES[device], COPY_BYTES[device] if free is None else max(2**20, free // 8))
    bandwidth = _copy_bytes_per_s(device, copied)
    flops, side = _matmul_flops_per_s(device, dtype)
    name = str(dtype).removeprefix("torch.")
    how = (
        f"measured here, best of {TRIES[device]}: a copy of {copied / 2**20:,.0f} MiB, bytes read and written; "
        f"a product of two {side:,} x {side:,} matrices in {name}"
    )
    return Roofline(bandwidth, flops, how)


def _copy_bytes_per_s(device: Device, count: int) -> float:
    # A pattern, not zeros: some cards compress what is all the same.
    source = torch.arange(count // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_s(lambda: target.copy_(source), device)


def _matmul_flops_per_s(device: Device, dtype: torch.dtype) -> tuple[float, int]:
    side = SIDES[0]
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        took_s = _best_s(partial(torch.matmul, a, b), device)
        if took_s >= PRODUCT_S[device] or side >= SIDES[1]:
            return 2 * side**3 / took_s, side
        side *= 2


def _best_s(call: Callable[[], object], device: Device) -> float:
    call()  # the first call pays for pages, handles and kernels
    return min(burst_s(call, device, BURST[device]) for _ in range(TRIES[device]))


@torch.inference_mode()
def burst_s(call: Callable[[], object], device: Device, count: int) -> float:
    """Seconds of one of `count` calls in a row: the card's own, between two CUDA events, or by the clock on a CPU.

    Raises RuntimeError where the clock stood still: no rate follows from no time.
    """
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        took_s = float(start.elapsed_time(end)) / 1e3
    else:
        began = time.perf_counter()
        for _ in range(count):
            call()
        took_s = time.perf_counter() - began
    if took_s <= 0:
        raise RuntimeError("the clock stood still while bandwidth was measured: run it again on a quieter machine")
    return took_s / count


# What a phase can't do without ----------------------------------------------------------------------------------------


def forward_work(model: Any, rows: Sequence[tuple[int, int]]) -> Work:
    """What one forward needs that names one next token for each of `rows`: (cached tokens, new tokens) each.

    A prefill's rows bring their prompts, a decode step's one token each; padding is nobody's need. Bytes: every weight
    once (the embedding only where it is also the head, else the looked-up rows), and keys and values of all positions.
    FLOPs: 2 a weight and token in the layers, 2 a weight and row in the head, and 4 * heads * head size in each layer for
    every pair of a new token and one that it sees. Constants that a quantized weight keeps beside itself are left out, so
    its floor is a few per cent too low.

    Raises ValueError for a model whose work depends on what it reads (experts), whose cache isn't all positions, or whose
    head is no linear layer.
    """
    config = model.config
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError("how much of a mixture of experts a step reads depends on its tokens: not computed")
    if not isinstance(model.get_output_embeddings(), torch.nn.Linear):
        raise ValueError("its head is no linear layer: not computed")
    new_tokens = sum(new for _, new in rows)
    held_tokens = sum(past + new for past, new in rows)
    pairs = sum(new * past + new * (new + 1) // 2 for past, new in rows)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    looked_up = 0
    if embedding.data_ptr() != head.data_ptr():
        looked_up = new_tokens * embedding.shape[-1] * embedding.element_size() - embedding.nbytes
    read = tensor_bytes(model) + looked_up + kv_cache_bytes(config, held_tokens, model.dtype.itemsize)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim * pairs
    return Work(read, 2 * _layer_weights(model) * new_tokens + 2 * _head_weights(model) * len(rows) + attention)


def _layer_weights(model: Any) -> int:
    """Weights that each token is multiplied with: all matrices but the embedding and the head, by shape, since
    low-bit ones are stored packed."""
    head = model.get_output_embeddings()
    total = 0
    for module in model.modules():
        if module is head or isinstance(module, torch.nn.Embedding):
            continue
        if isinstance(module, torch.nn.Linear):
            total += module.in_features * module.out_features
        else:
            total += sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 2)
    return total


def _head_weights(model: Any) -> int:
    head = model.get_output_embeddings()
    return int(head.in_features * head.out_features)
