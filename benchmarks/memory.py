"""Bytes: what a call needs beside what is resident, what a model and its KV cache take, and running out as a value.

The counter is the caching allocator's "allocated" (bytes that tensors hold), not "reserved" and not the driver's: it is
the one that a claim about an algorithm can be made of. Where nothing counts, the answer is None and never 0.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar

import torch

T = TypeVar("T")
Device = Literal["cpu", "cuda"]


class Allocator(Protocol):
    """What a memory measurement asks of an allocator; faked in the tests."""

    def settle(self) -> None:
        """Finish the work under way and give back what nothing holds any more."""

    def reset_peak(self) -> None:
        """Start a new peak at what is resident now."""

    def resident_bytes(self) -> int: ...

    def peak_bytes(self) -> int: ...


class CudaAllocator:
    """PyTorch's caching allocator on the current CUDA device."""

    def settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def resident_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


CUDA_ALLOCATOR: Final = CudaAllocator()


def resident_bytes(device: Device, allocator: Allocator = CUDA_ALLOCATOR) -> int | None:
    """Bytes that tensors hold on the card after a clean-up; None on the CPU, which has no such counter."""
    if device == "cpu":
        return None
    allocator.settle()
    return allocator.resident_bytes() or None


def peak_extra_bytes(call: Callable[[], object], device: Device, allocator: Allocator = CUDA_ALLOCATOR) -> int | None:
    """Peak bytes of one call over what was resident before it, its result included.

    The call runs twice: the first run pays for what stays (cuBLAS workspaces are 8 to 32 MiB, kept by the library) and
    is not measured. None on the CPU, and where the counter saw nothing (caching switched off): 0 is not a measurement.
    """
    if device == "cpu":
        return None
    call()
    return watch_peak(call, device, allocator)[1]


def watch_peak(call: Callable[[], T], device: Device, allocator: Allocator = CUDA_ALLOCATOR) -> tuple[T, int | None]:
    """A call's result, and the peak bytes over what was resident before it; the bytes are None as in peak_extra_bytes.

    For calls too long to be made once more: whoever calls has warmed up.
    """
    if device == "cpu":
        return call(), None
    allocator.settle()
    allocator.reset_peak()
    resident = allocator.resident_bytes()
    result = call()
    extra = allocator.peak_bytes() - resident
    return result, extra if extra > 0 else None


def tensor_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters and buffers, each storage once: tied weights don't count twice.

    Raises ValueError for a module on the meta device, whose tensors have no bytes.
    """
    storages: dict[tuple[torch.device, int], int] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_meta:
            raise ValueError("a module on the meta device has no bytes: load its weights first")
        storage = tensor.untyped_storage()
        storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def kv_cache_bytes(config: Any, tokens: int, dtype_bytes: int) -> int:
    """Bytes of a KV cache of `tokens` positions in all rows together.

    2 (keys, values) * layers * KV heads * head size * tokens * `dtype_bytes`. `config` is a transformers config. It is
    the KV heads that are cached (grouped-query attention), not the attention heads.

    Raises ValueError for a cache that isn't keys and values of every position and KV head.
    """
    layer_types = getattr(config, "layer_types", None)
    other = {kind for kind in layer_types or () if kind != "full_attention"}
    if layer_types is None:  # all layers then are of one kind, which these fields tell (transformers' DynamicCache)
        other |= {name for name in ("sliding_window", "attention_chunk_size") if getattr(config, name, None)}
    kv_heads = getattr(config, "num_key_value_heads", None)
    if getattr(config, "kv_lora_rank", None):  # DeepSeek's latent attention
        other.add("kv_lora_rank")
    if kv_heads is None and getattr(config, "multi_query", None):  # Falcon's single KV head
        other.add("multi_query")
    if other:
        named = ", ".join(sorted(other))
        raise ValueError(f"its KV cache isn't keys and values of every position ({named}): its size is not computed")
    kv_heads = kv_heads or getattr(config, "num_attention_heads", None)
    if not kv_heads:
        raise ValueError("its config names no attention heads: the size of its cache is not computed")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * kv_heads * head_dim * tokens * dtype_bytes)


def free_bytes(device: Device) -> int | None:
    """Bytes that a cell may still allocate; None where the system doesn't say.

    On CUDA what the driver has free plus what the allocator keeps unused; on the CPU the smaller of what the kernel
    calls available and what the control group leaves.
    """
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    bounds = [_available_bytes(Path("/proc/meminfo")), _group_left_bytes(Path("/sys/fs/cgroup"))]
    return min((bound for bound in bounds if bound is not None), default=None)


def _available_bytes(meminfo: Path) -> int | None:
    """MemAvailable of a Linux kernel's meminfo, which counts in KiB."""
    if not meminfo.is_file():
        return None
    line = next((line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")), None)
    return int(line.split()[1]) * 1024 if line else None


def _group_left_bytes(group: Path) -> int | None:
    """What a version 2 control group still allows; None without one or without a limit."""
    limit, current = group / "memory.max", group / "memory.current"
    if not (limit.is_file() and current.is_file()) or (most := limit.read_text().strip()) == "max":
        return None
    return max(0, int(most) - int(current.read_text()))


def fits(bytes_needed: int, device: Device) -> bool:
    """Whether so many bytes can be had now. True where the system doesn't say: the allocator then will.

    Ask before a big cell on the CPU: Linux promises memory that it doesn't have, and then kills the process.
    """
    free = free_bytes(device)
    return free is None or bytes_needed <= free


@dataclass(frozen=True)
class OutOfMemory:
    """A cell that didn't fit: a value beside the others, so that the run goes on."""

    reason: str = "out of memory"


def attempt(call: Callable[[], T], device: Device) -> T | OutOfMemory:
    """The call's result, or OutOfMemory; everything else that it raises goes through.

    The one place where running out is caught. The cache is emptied after the handler, when the traceback no longer
    holds the tensors of the frames that failed.
    """
    try:
        return call()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return OutOfMemory()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a lack of memory, which the CPU's allocator and the CUDA libraries report in plain RuntimeErrors."""
    said = str(error)
    plain = "can't allocate memory" in said or "ALLOC_FAILED" in said or "CUDA error: out of memory" in said
    return plain or isinstance(error, (torch.OutOfMemoryError, MemoryError))
