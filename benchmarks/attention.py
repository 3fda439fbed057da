"""One attention call, alone: what naive and fused attention cost in bytes, FLOPs and time, and whether they agree.

The tensors are synthetic, shaped like the article's: one row, 12 heads of size 64, no mask. Alone, because in a model
the full-vocabulary logits of a prefill hide the score matrix.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from benchmarks.estimates import Estimate, counted, paired_ratio, unusable
from benchmarks.ledger import Cell
from benchmarks.memory import Device, OutOfMemory, attempt, fits, peak_extra_bytes
from benchmarks.timing import Clock
from benchmarks.traces import Trace, allowed_backends, impossible, trace

HEADS = 12
HEAD_DIM = 64
LENGTHS = (512, 1024, 2048, 4096, 8192)

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Formula = Callable[..., int]


def qkv(
    length: int, dtype: torch.dtype, device: Device, seed: int = 0, kv_heads: int = HEADS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query (1, 12, length, 64), key and value (1, kv_heads, length, 64), standard normal.

    Equal numbers for a seed on any device. Raises ValueError for sizes that make no attention.
    """
    if length < 1 or HEADS % kv_heads:
        raise ValueError(f"a length of at least 1 and a divisor of {HEADS} heads, not {length} and {kv_heads}")
    source = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, heads, length, HEAD_DIM, generator=source).to(device=device, dtype=dtype)
        for heads in (HEADS, kv_heads, kv_heads)
    )
    return query, key, value


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention as written down: the full (length x length) score matrix, scaled, softmax, times the values.

    With fewer KV than query heads, each KV head serves neighbouring query heads (repeat_interleave, not repeat).
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5)
    return torch.softmax(scores, dim=-1) @ value


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """PyTorch's scaled_dot_product_attention, which picks the kernel; KV heads are shared through enable_gqa."""
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])


# --- is it the same result? -------------------------------------------------------------------------------------------


def error_ratio(
    length: int,
    dtype: torch.dtype,
    device: Device,
    attend: Attention = sdpa,
    kv_heads: int = HEADS,
    seed: int = 0,
) -> float:
    """How much further from the exact result `attend` is than naive attention in the same precision.

    Both errors are the largest of all outputs against float64. The divisor is at least half a unit in the last place of
    the largest exact output: nothing in this dtype is reliably closer, so a reference that happens to be exact makes
    neither a division by zero nor an accusation. 0 means that `attend` is exact, NaN that it gave one.

    Raises ValueError for float64, which has nothing wider to be judged by.
    """
    if dtype.itemsize >= torch.float64.itemsize:
        raise ValueError(f"{dtype} can't be judged by float64: take float32 or narrower")
    query, key, value = qkv(length, dtype, device, seed, kv_heads)
    exact = _exact(query, key, value)
    off = _largest(attend(query, key, value).double() - exact)
    reference_off = _largest(naive(query, key, value).double() - exact)
    half_unit = torch.finfo(dtype).eps / 2 * _largest(exact)
    return off / max(reference_off, half_unit)


def _exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Naive attention in float64, a head at a time: all heads at 8,192 would need 6 GiB a matrix."""
    groups = query.shape[1] // key.shape[1]
    heads = [
        naive(
            query[:, h : h + 1].double(),
            key[:, h // groups : h // groups + 1].double(),
            value[:, h // groups : h // groups + 1].double(),
        )
        for h in range(query.shape[1])
    ]
    return torch.cat(heads, dim=1)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


# --- how much math? ---------------------------------------------------------------------------------------------------


def expected_flops(batch: int, heads: int, length: int, head_dim: int) -> int:
    """4*B*H*L*L*D: two products of 2*L*L*D each. The convention of this module: a multiply-add is 2, the softmax is not
    counted, and nothing is halved for causal masks."""
    return 4 * batch * heads * length * length * head_dim


def _attention_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: Any, **__: Any) -> int:
    """The same for any SDPA op, from its input shapes (batch, heads, tokens, head size); KV heads may be fewer."""
    batch, heads, queries, head_dim = query
    return 2 * batch * heads * queries * key[-2] * (head_dim + value[-1])


FORMULAS: Mapping[Any, Formula] = {
    getattr(torch.ops.aten, name): _attention_flops
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",  # torch has no formula for the last two, and counts them as 0
        "_scaled_dot_product_fused_attention_overrideable",
    )
}
"""FLOP formulas of SDPA's fused ops. Its math fallback is counted through its products."""


def flops(call: Callable[[], object], formulas: Mapping[Any, Formula] = FORMULAS) -> int:
    """Counted FLOPs of one call, from the ops that it dispatches.

    Raises LookupError for an attention op without a formula: torch would count it as 0, and fused attention would look
    cheaper than it is.
    """
    with (
        _NoUncountedAttention(formulas),
        FlopCounterMode(display=False, custom_mapping=dict(formulas)) as counter,
    ):
        call()
    return int(counter.get_total_flops())


class _NoUncountedAttention(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops at an attention op that has no FLOP formula. Entered outside the counter, so it sees what the counter
    dispatches after taking composite ops apart."""

    def __init__(self, formulas: Mapping[Any, Formula]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {*flop_registry, *formulas}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if re.search("attention|attn|fmha", str(packet)) and packet not in self._known:
            raise LookupError(f"no FLOP formula for {packet}: add it to FORMULAS in benchmarks/attention.py")
        return func(*args, **(kwargs or {}))


def growth_per_doubling(value_by_length: Mapping[int, float]) -> float:
    """By how much a value grows each time the length doubles: the geometric mean from the shortest to the longest.

    Raises ValueError for fewer than two lengths and for values that are not positive and finite.
    """
    if len(value_by_length) < 2:
        raise ValueError(f"growth needs two lengths, not {len(value_by_length)}")
    if bad := [v for v in value_by_length.values() if not (math.isfinite(v) and v > 0)]:
        raise ValueError(f"growth needs positive values, not {bad[0]}")
    first, last = min(value_by_length), max(value_by_length)
    return float((value_by_length[last] / value_by_length[first]) ** (1 / math.log2(last / first)))


# --- how long on the card? --------------------------------------------------------------------------------------------

SHORTEST_BATCH_S = 2e-3
"""CUDA events resolve about half a microsecond, and a graph launch costs some ten: below 1 % of this."""

MOST_LAUNCHES = 1000


def device_timer(call: Callable[[], object]) -> Callable[[], float]:
    """A clock for one CUDA call: each reading is the device seconds of one call, from CUDA events around a batch.

    The batch is captured once as a CUDA graph and replayed for each reading, so that a slow host can't stretch it. All
    its calls read the same tensors: what fits the L2 cache stays there, which flatters short lengths.
    """
    launches, seconds = 1, 0.0
    while True:
        replay = _captured(call, launches)
        replay()  # the first replay uploads the graph
        seconds = _replay_s(replay)
        if seconds >= SHORTEST_BATCH_S or launches >= MOST_LAUNCHES:
            return lambda: _replay_s(replay) / launches
        launches = next_launches(launches, seconds)


def next_launches(launches: int, seconds: float) -> int:
    """How many launches to try next, when so many lasted so long: 20 % more than looks needed, at least double."""
    needed = 1.2 * launches * SHORTEST_BATCH_S / seconds if seconds > 0 else math.inf
    return min(MOST_LAUNCHES, max(2 * launches, math.ceil(min(needed, MOST_LAUNCHES))))


def _captured(call: Callable[[], object], launches: int) -> Callable[[], None]:
    """The replay of a graph of so many calls; the call runs once before, since a first call may not be captured."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    return graph.replay


def _replay_s(replay: Callable[[], None]) -> float:
    event: Any = torch.cuda.Event  # torch leaves it untyped
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def device_seconds(call: Callable[[], object], device: Device) -> float | None:
    """One reading of device_timer; None on the CPU, where the caller's clock is the device's."""
    return device_timer(call)() if device == "cuda" else None


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Naive and fused attention at one length.

    `_bytes` is the peak of a call over what was resident, output included; `_s` the median wall seconds of one fenced
    call, `_device_s` the card's own. None where it can't be had: bytes and device time on the CPU, everything of a side
    that ran out of memory, and `note` says which. `kernel` is the backend of SDPA from a trace of the very call.
    """

    length: int
    naive_bytes: int | None
    sdpa_bytes: int | None
    naive_flops: int | None
    sdpa_flops: int | None
    naive_s: float | None
    sdpa_s: float | None
    naive_device_s: float | None
    sdpa_device_s: float | None
    kernel: str | None
    note: str = ""


FIGURES = tuple(f.name for f in fields(Row) if f.name not in ("length", "kernel", "note"))
"""What a row measures."""


@dataclass(frozen=True)
class _Cost:
    peak_bytes: int | None = None
    flops: int | None = None
    wall_s: float | None = None
    device_s: float | None = None


def measure_row(
    length: int, dtype: torch.dtype, device: Device, clock: Clock, seed: int = 0, subject: Attention = sdpa
) -> Row:
    """One row of the table. A side that doesn't fit is out of memory in the note, and the other is still measured."""
    notes = ["bytes and device time need a GPU"] if device == "cpu" else []
    inputs = attempt(lambda: qkv(length, dtype, device, seed), device)
    costs, kernel = {"naive": _Cost(), "SDPA": _Cost()}, None
    if isinstance(inputs, OutOfMemory):
        notes.append(f"inputs: {inputs.reason}")
    else:
        tensors_bytes = dtype.itemsize * HEADS * length * HEAD_DIM
        scores_bytes = dtype.itemsize * HEADS * length**2
        # SDPA is given room for its own output and for one more tensor of its size, naive for scores and their softmax.
        for name, attend, needed in (("naive", naive, 2 * scores_bytes), ("SDPA", subject, 2 * tensors_bytes)):
            cost = _measure(partial(attend, *inputs), needed, device, clock)
            if isinstance(cost, OutOfMemory):
                notes.append(f"{name}: {cost.reason}")
            else:
                costs[name] = cost
        if costs["SDPA"].flops is not None:
            ran = trace(partial(subject, *inputs), device)
            kernel = ran.attention[0].backend if ran.attention else None
    slow, fused = costs["naive"], costs["SDPA"]
    return Row(
        length,
        slow.peak_bytes,
        fused.peak_bytes,
        slow.flops,
        fused.flops,
        slow.wall_s,
        fused.wall_s,
        slow.device_s,
        fused.device_s,
        kernel,
        "; ".join(notes),
    )


def _measure(call: Callable[[], object], needed_bytes: int, device: Device, clock: Clock) -> _Cost | OutOfMemory:
    """What one call costs. The bytes come first: they show what doesn't fit before a graph is captured."""
    if not fits(needed_bytes, device):
        return OutOfMemory()
    return attempt(
        lambda: _Cost(
            peak_extra_bytes(call, device),
            flops(call),  # on the CPU also the warm-up of the clock
            statistics.median(clock.time(call) for _ in range(3)),
            device_seconds(call, device),
        ),
        device,
    )


# What the rows show for the claims ------------------------------------------------------------------------------------


def lengths(device: Device) -> tuple[int, ...]:
    """The article's lengths and the 8,192 that it tells its readers to try; on the CPU those that take no seconds."""
    return LENGTHS if device == "cuda" else (256, 512, 1024)


def cell(row: Row, precision: str) -> Cell:
    """A row as run.json keeps it."""
    known = {name: value for name in FIGURES if (value := getattr(row, name)) is not None}
    return Cell(
        id=f"attention.{row.length}",
        station="attention",
        phase="row",
        workload={"name": f"1 x {HEADS} heads x {row.length} x {HEAD_DIM}", "batch_size": 1, "prompt_len": row.length},
        engine="eager",
        precision=precision,
        bytes={name: float(value) for name, value in known.items() if name.endswith("bytes")},
        figures={name: float(value) for name, value in known.items() if not name.endswith("bytes")},
        kernels={"attention": [row.kernel] if row.kernel else []},
        unavailable={name: row.note or "not measured" for name in FIGURES if name not in known}
        | dict.fromkeys(("wall_s", "device_s"), "a row is two calls, naive and SDPA: see its figures"),
        note=row.note,
    )


def exactness(dtype: torch.dtype, device: Device, attend: Attention = sdpa) -> Estimate:
    """The worst error ratio over two lengths, with and without grouped heads; unusable where one is no number."""
    seen = {
        f"{length}, {kv_heads} KV heads": error_ratio(length, dtype, device, attend, kv_heads)
        for length in (256, 1024)
        for kv_heads in (HEADS, 2)
    }
    worst = float(torch.tensor(list(seen.values())).max())  # NaN if any is, which max() would lose
    return counted(worst, {name: (value,) for name, value in seen.items()})


def _by_length(rows: Sequence[Row], name: str) -> dict[int, float]:
    return {row.length: float(value) for row in rows if (value := getattr(row, name)) is not None}


def _growth(rows: Sequence[Row], name: str) -> Estimate:
    values = _by_length(rows, name)
    if len(values) < 2:
        return unusable(f"{name} was had at {len(values)} lengths, growth needs two")
    raw = {f"{length}": (value,) for length, value in values.items()}
    return counted(growth_per_doubling(values), raw)


def flops_growth(rows: Sequence[Row]) -> dict[str, Estimate]:
    naive_flops, sdpa_flops = _by_length(rows, "naive_flops"), _by_length(rows, "sdpa_flops")
    ratios = [sdpa_flops[length] / naive_flops[length] for length in naive_flops if length in sdpa_flops]
    same = counted(max(ratios, key=lambda r: abs(r - 1))) if ratios else unusable("no length has both counts")
    return {"growth per doubling": _growth(rows, "sdpa_flops"), "SDPA over naive": same}


def naive_growth(rows: Sequence[Row]) -> Estimate:
    return _growth(rows, "naive_bytes")


def sdpa_growth(rows: Sequence[Row]) -> dict[str, Estimate]:
    at = next((row for row in rows if row.length == 4096 and row.naive_bytes and row.sdpa_bytes), None)
    less = unusable("4,096 was not measured on both sides")
    if at is not None:
        assert at.naive_bytes is not None
        assert at.sdpa_bytes is not None
        less = counted(at.naive_bytes / at.sdpa_bytes)
    return {"growth per doubling": _growth(rows, "sdpa_bytes"), "naive over SDPA at 4,096": less}


def time_growth(shorter_s: Sequence[float], longer_s: Sequence[float]) -> Estimate:
    """Device seconds of one call at twice the length over once."""
    return paired_ratio(longer_s, shorter_s, ("longer device_s", "shorter device_s"))


def kernels_named(traces: Mapping[str, Trace], capability: tuple[int, int] | None) -> dict[str, Estimate]:
    """Whether each traced call says which attention ran, and whether the device can have run it: without a card, and so
    without a `capability`, none of CUDA's."""
    named = sum(t.attention_named for t in traces.values()) / len(traces)
    ran = {where: sorted({run.backend for run in t.attention}) or ["nothing"] for where, t in traces.items()}
    wrong = [run for t in traces.values() for run in impossible(t.attention, capability)]
    note = "ran: " + ", ".join(f"{where} {'+'.join(what)}" for where, what in ran.items())
    if fallen := [where for where, t in traces.items() if t.math_fallback]:
        note += f"; SDPA fell back to math in {', '.join(fallen)}: the full score matrix is built there"
    allowed = [name for name, on in allowed_backends().items() if on]
    note += f"; allowed: {', '.join(allowed)}"
    return {
        "cells with a named kernel": counted(named, note=note),
        "kernels the card can't have": counted(float(len(wrong))),
    }
