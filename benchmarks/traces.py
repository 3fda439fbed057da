"""What ran, and how long the card was busy: one profiler trace of the very call.

Flags say which attention kernels are allowed, a trace says which one ran. A trace costs time (its first in a process a
second or more), so it is a call of its own, never inside a wall sample, and of a few steps: a decode step of an eager
1.5B model is some 1,200 kernels.
"""

from __future__ import annotations

import os
import re
import warnings
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

Device = Literal["cpu", "cuda"]
Shape = tuple[int, ...]

_BACKEND_OF_OP = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "aten::_scaled_dot_product_attention_math": "math",
}
_SDPA = "aten::scaled_dot_product_attention"
_RANGE = "traced call"
"""What the profiler calls the span of one of several calls."""
_PRODUCTS = {"aten::matmul": 0, "aten::bmm": 0, "aten::baddbmm": 1}  # and where the first factor stands

# In this order: cuDNN's kernels have "flash" in their names too.
_KERNEL_WORDS = (
    ("cudnn", re.compile(r"cudnn\w*sdpa|sdpa_sm\d+\w*_flash_[fb]prop|cudnn\w*flash_[fb]prop")),
    ("efficient", re.compile(r"fmha_cutlass|mem_?eff|efficient_attention", re.IGNORECASE)),
    ("flash", re.compile(r"flash_fwd|flash_attn|FlashAttn|FlashAttention", re.IGNORECASE)),
    ("flex", re.compile(r"flex_(attention|decoding)")),
)
_SOFTMAX_KERNEL = re.compile(r"softmax", re.IGNORECASE)

NEEDS_CAPABILITY = {"flash": (8, 0), "efficient": (5, 0), "cudnn": (8, 0)}
"""The least compute capability of CUDA's backends' kernels, from PyTorch's own checks (sdp_utils.cpp): a T4 (7.5) has
neither flash nor cudnn, whatever the flags allow."""


@dataclass(frozen=True)
class Event:
    """One line of a trace, in nanoseconds: a host op, or what the card did (`on_device`).

    `id` numbers the host ops from 1; `launched_by` is the id of the op that launched a device event, 0 when unknown (a
    graph replay).
    """

    name: str
    start_ns: int
    end_ns: int
    on_device: bool = False
    id: int = 0
    launched_by: int = 0
    thread: int = 0
    shapes: tuple[Shape, ...] = ()

    def inside(self, other: Event) -> bool:
        return self.thread == other.thread and other.start_ns <= self.start_ns and self.end_ns <= other.end_ns


@dataclass(frozen=True)
class KernelTime:
    """All runs of one kernel; the name without its template arguments."""

    name: str
    count: int
    total_s: float


@dataclass(frozen=True)
class AttentionRun:
    """Attention as it ran.

    `backend` is "flash", "efficient", "cudnn", "flash_cpu", "overrideable" or "flex"; "math" is SDPA's fallback that
    builds the full score matrix, "naive" a model's own softmax between two products, "unknown" an SDPA call whose op
    this module doesn't know. `op` is the op that showed it, None when only kernels were seen (a graph replay). `gqa`
    says how query heads met fewer KV heads: "enable_gqa" (the op was given fewer), "repeat_kv" (copied before), "none"
    (as many of both), None when no shape was seen. `kernels` prove the backend; the CPU has none.
    """

    backend: str
    op: str | None
    count: int
    gqa: str | None = None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """What one call did.

    `device_s` is the time in which the card did anything at all, `span_s` the time from its first start to its last
    end; both, and `n_kernels`, are None with the `reason` where they can't be had. `kernels` are the longest.
    """

    device_s: float | None
    span_s: float | None
    n_kernels: int | None
    kernels: tuple[KernelTime, ...]
    attention: tuple[AttentionRun, ...]
    reason: str | None = None

    @property
    def math_fallback(self) -> bool:
        """SDPA was asked for and built the full score matrix: a finding."""
        return any(run.backend == "math" for run in self.attention)

    @property
    def attention_named(self) -> bool:
        """Attention was seen, and each run has a known backend."""
        return bool(self.attention) and all(run.backend != "unknown" for run in self.attention)


def trace(call: Callable[[], object], device: Device) -> Trace:
    """Runs `call` once under the profiler, as `record` does. A profiler that doesn't start is a reason in the trace."""
    events = record(call, device)
    if isinstance(events, str):
        return Trace(None, None, None, (), (), events)
    return from_events(events, device)


def trace_each(calls: Sequence[Callable[[], object]], device: Device) -> list[Trace]:
    """A trace of each of several calls, run one after the other under one profiler: starting and stopping it costs more
    than a phase of a model does. Each call's work is waited for before the next begins."""
    sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def all_of_them() -> None:
        for number, call in enumerate(calls):
            with record_function(f"{_RANGE} {number}"):
                call()
                sync()

    events = record(all_of_them, device)
    if isinstance(events, str):
        return [Trace(None, None, None, (), (), events)] * len(calls)
    ranges = {e.name: e for e in events if e.name.startswith(_RANGE)}
    return [
        from_events(
            [e for e in events if one.start_ns <= e.start_ns and e.end_ns <= one.end_ns and e is not one], device
        )
        for one in (ranges[f"{_RANGE} {number}"] for number in range(len(calls)))
    ]


def record(call: Callable[[], object], device: Device) -> list[Event] | str:
    """Runs `call` once under the profiler and gives what the host and the card did. `device` is where its work happens.

    Earlier work is waited for before, the call's own work inside the profile. The call's exceptions go through. Where
    the profiler doesn't start, the reason is given and the call didn't run.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"traces are of cpu or cuda, not {device}")
    wanted = {ProfilerActivity.CPU} | ({ProfilerActivity.CUDA} if device == "cuda" else set())
    sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    supported = supported_activities()  # type: ignore[no-untyped-call]
    _leave_nothing_behind(os.environ, torch.version.cuda)
    profiler = profile(activities=wanted & supported, record_shapes=True)
    sync()
    try:
        with warnings.catch_warnings():
            # Some versions of torch say so at every start; there is one cycle here. To accumulate events instead would
            # make torch build its own event tree, which takes five times as long as everything else.
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            profiler.start()
    except RuntimeError as error:
        return f"the profiler did not start: {str(error).splitlines()[0]}"
    try:
        call()
        sync()
    finally:
        profiler.stop()
    return _events(profiler)


def _leave_nothing_behind(environ: MutableMapping[str, str], cuda: str | None) -> None:
    """Have the profiler detach from the card when it stops: else every launch that comes after it costs more.

    Seen on an H200 (torch 2.11, CUDA 13.0): an eager decode step of Qwen2.5-1.5B took 24 to 33 ms before the first trace
    of a process and 38 to 43 ms after it; with this, 27 ms before and 22 to 28 ms after. Detaching breaks recorded graphs
    before CUDA 12.6 (pytorch/pytorch#146604), so there wall times after a trace stay too long. What the user has set stays.
    """
    if cuda is not None and tuple(map(int, cuda.split(".")[:2])) >= (12, 6):
        environ.setdefault("TEARDOWN_CUPTI", "1")


def _events(profiler: profile) -> list[Event]:
    """The profiler's raw events; its own event tree would cost seconds for a few steps of a model."""
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None, "stop() fills both"
    kineto = profiler.profiler.kineto_results.events()
    host: list[tuple[str, Any]] = []
    device: list[tuple[str, Any]] = []
    for e in kineto:
        (host if e.device_type() == DeviceType.CPU else device).append((e.name(), e))
    host_names = {name for name, _ in host}
    events = [
        Event(
            name,
            e.start_ns(),
            e.end_ns(),
            # The runtime's launches are numbered on their own, so only what is an op ("aten::mm") keeps its number.
            id=e.correlation_id() if "::" in name else 0,
            thread=e.start_thread_id(),
            shapes=tuple(map(tuple, e.shapes())),
        )
        for name, e in host
    ]
    # A record_function range is mirrored onto the card under its host name; it spans idle time, so it isn't work.
    events += [
        Event(name, e.start_ns(), e.end_ns(), on_device=True, launched_by=e.linked_correlation_id())
        for name, e in device
        if not e.is_user_annotation() and name not in host_names
    ]
    return events


def from_events(events: Iterable[Event], device: Device, longest: int = 12) -> Trace:
    """The trace that these events make; `kernels` keeps the `longest` in total time."""
    events = sorted(events, key=lambda e: (e.start_ns, -e.end_ns))
    on_device = [e for e in events if e.on_device and not _is_wait(e.name)]
    attention = _attention([e for e in events if not e.on_device], on_device)
    if device == "cpu":
        return Trace(None, None, None, (), attention, "the CPU is the device")
    kernels = [e for e in on_device if not e.name.startswith(("Memcpy", "Memset"))]
    if not kernels:
        why = "the profiler recorded no GPU kernel: CUPTI is missing or not permitted, or the call launched nothing"
        return Trace(None, None, None, (), attention, why)
    totals: dict[str, list[int]] = defaultdict(list)
    for kernel in kernels:
        totals[short_name(kernel.name)].append(kernel.end_ns - kernel.start_ns)
    times = [KernelTime(name, len(spans), sum(spans) / 1e9) for name, spans in totals.items()]
    times.sort(key=lambda k: (-k.total_s, k.name))
    zero = on_device[0].start_ns  # seconds since 1970 as a float would round to a fraction of a microsecond
    intervals = [((e.start_ns - zero) / 1e9, (e.end_ns - zero) / 1e9) for e in on_device]
    return Trace(busy_s(intervals), max(end for _, end in intervals), len(kernels), tuple(times[:longest]), attention)


def _is_wait(name: str) -> bool:
    """Synchronisation shows as a device event in some traces; the card is not busy in it."""
    return name.endswith(("Sync", "Synchronize", "Wait Event"))


def busy_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals: streams that overlap count once, gaps don't count."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


@cache
def classify(kernel_name: str) -> str | None:
    """The attention backend that a GPU kernel belongs to: "cudnn", "efficient", "flash", "flex", or None."""
    return next((word for word, pattern in _KERNEL_WORDS if pattern.search(kernel_name)), None)


@cache
def short_name(kernel_name: str) -> str:
    """A kernel's name without return type, template arguments and parameters; classified names keep what classifies."""
    bare = kernel_name.removeprefix("void ").replace("(anonymous namespace)::", "")
    short = re.split(r"[<(]", bare, maxsplit=1)[0].strip()
    return short if short and classify(short) == classify(kernel_name) else bare[:160]


class _Kind(NamedTuple):
    """What makes two attention runs the same."""

    backend: str
    op: str | None
    gqa: str | None


def _attention(host: Sequence[Event], on_device: Sequence[Event]) -> tuple[AttentionRun, ...]:
    """Attention runs, from SDPA's ops and what they launched, then from softmaxes and kernels outside of any op.

    Both sequences are in order of start.
    """
    known = [e for e in host if e.name in _BACKEND_OF_OP]
    asked = _Enclosing([e for e in host if e.name == _SDPA])
    answered = {asked.find(op) for op in known}
    ops = sorted([*known, *(e for e in asked.ops if e not in answered)], key=lambda e: e.start_ns)
    softmaxes = _naive_softmaxes(host, _Enclosing(ops))
    subjects = sorted([*ops, *softmaxes], key=lambda e: e.start_ns)
    launched, strays = _launched(host, on_device, _Enclosing(subjects))
    expanded = _expanded_heads(host)

    counts: Counter[_Kind] = Counter()
    proofs: dict[_Kind, set[str]] = defaultdict(set)
    for op in ops:
        backend, proof = _proven(_BACKEND_OF_OP.get(op.name, "unknown"), launched[op])
        kind = _Kind(backend, op.name, _gqa(op.shapes, expanded))
        counts[kind] += 1
        proofs[kind] |= proof
    for softmax in softmaxes:
        batch, heads, _, kv_len = (1, *softmax.shapes[0])[-4:]
        repeated = any(shape[:3] == (batch, heads, kv_len) for shape in expanded)
        kind = _Kind("naive", softmax.name, "repeat_kv" if repeated else "none")
        counts[kind] += 1
        proofs[kind] |= _proven("naive", launched[softmax])[1]
    for op_name, kernel in strays:
        if word := classify(kernel):
            kind = _Kind(word, op_name, None)
            counts[kind] += "combine" not in kernel  # the second kernel of a split call
            proofs[kind].add(short_name(kernel))
    if not counts:  # a graph replay of unfused attention shows nothing but its softmax kernels
        for op_name, kernel in strays:
            if op_name is None and _SOFTMAX_KERNEL.search(kernel):
                counts[_Kind("math", None, None)] += 1
                proofs[_Kind("math", None, None)].add(short_name(kernel))
    return tuple(
        AttentionRun(kind.backend, kind.op, count, kind.gqa, tuple(sorted(proofs[kind])))
        for kind, count in counts.most_common()
    )


class _Enclosing:
    """Finds the op that an event ran inside, among ops (in order of start) that don't contain each other."""

    def __init__(self, ops: Sequence[Event]) -> None:
        self.ops = ops
        self._by_thread: dict[int, list[Event]] = defaultdict(list)
        for op in ops:
            self._by_thread[op.thread].append(op)

    def find(self, event: Event) -> Event | None:
        ops = self._by_thread.get(event.thread, [])
        at = bisect_right(ops, event.start_ns, key=lambda op: op.start_ns) - 1
        return ops[at] if at >= 0 and event.inside(ops[at]) else None


def _launched(
    host: Sequence[Event], on_device: Sequence[Event], finder: _Enclosing
) -> tuple[dict[Event, list[str]], list[tuple[str | None, str]]]:
    """Kernel names by the attention op that launched them, and the others with the op that did (None: unseen)."""
    by_id = {e.id: e for e in host if e.id}
    launched: dict[Event, list[str]] = defaultdict(list)
    strays: list[tuple[str | None, str]] = []
    for kernel in on_device:
        launcher = by_id.get(kernel.launched_by)
        op = finder.find(launcher) if launcher else None
        if op:
            launched[op].append(kernel.name)
        else:
            strays.append((launcher.name if launcher else None, kernel.name))
    return launched, strays


def _proven(backend: str, kernels: Sequence[str]) -> tuple[str, set[str]]:
    """The backend and the kernels that prove it; where op and kernel differ, the kernel is what ran."""
    words = [word for kernel in kernels if (word := classify(kernel))]
    if words:
        backend = words[0]
        return backend, {short_name(kernel) for kernel in kernels if classify(kernel) == backend}
    if backend in ("math", "naive"):
        return backend, {short_name(kernel) for kernel in kernels if _SOFTMAX_KERNEL.search(kernel)}
    return backend, set()


def _expanded_heads(host: Sequence[Event]) -> set[Shape]:
    """Shapes (batch, heads, tokens, head size) that came from copying KV heads.

    They are reshaped from (batch, KV heads, n, tokens, head size), which is how repeat_kv and repeat_interleave do it.
    """
    shapes = [e.shapes[0] for e in host if e.name in ("aten::reshape", "aten::clone", "aten::flatten") and e.shapes]
    return {(s[0], s[1] * s[2], s[3], s[4]) for s in shapes if len(s) == 5 and s[2] > 1}


def _gqa(shapes: Sequence[Shape], expanded: set[Shape]) -> str | None:
    if len(shapes) < 2 or len(shapes[0]) != 4 or len(shapes[1]) != 4:
        return None
    query, key = shapes[0], shapes[1]
    if query[1] != key[1]:
        return "enable_gqa"
    return "repeat_kv" if key in expanded else "none"


def _naive_softmaxes(host: Sequence[Event], finder: _Enclosing) -> list[Event]:
    """Softmaxes between the product that made their (queries, keys) scores and the one that uses them."""
    products: dict[int, list[Event]] = defaultdict(list)
    for e in host:
        if e.name in _PRODUCTS and len(e.shapes) > _PRODUCTS[e.name] + 1:
            products[e.thread].append(e)
    found = []
    for softmax in host:
        if softmax.name != "aten::_softmax" or finder.find(softmax) or not softmax.shapes:
            continue
        scores, nearby = softmax.shapes[0], products[softmax.thread]
        at = bisect_right(nearby, softmax.start_ns, key=lambda e: e.start_ns)
        if len(scores) < 3 or not 0 < at < len(nearby):
            continue
        (before_left, before_right), (after_left, _) = _factors(nearby[at - 1]), _factors(nearby[at])
        if before_left[-2:-1] + before_right[-1:] == scores[-2:] == after_left[-2:]:
            found.append(softmax)
    return found


def _factors(product: Event) -> tuple[Shape, Shape]:
    first = _PRODUCTS[product.name]
    return product.shapes[first], product.shapes[first + 1]


def allowed_backends() -> dict[str, bool]:
    """Which SDPA backends the flags allow here: to stand beside what ran, never instead of it."""
    flags: Any = torch.backends.cuda  # torch leaves these functions untyped
    return {
        "flash": flags.flash_sdp_enabled(),
        "efficient": flags.mem_efficient_sdp_enabled(),
        "cudnn": flags.cudnn_sdp_enabled(),
        "math": flags.math_sdp_enabled(),
    }


def impossible(runs: Iterable[AttentionRun], capability: tuple[int, int] | None) -> tuple[AttentionRun, ...]:
    """The runs that a card of this compute capability cannot have made, without one (None) none of CUDA's: a trace that names
    them is wrong."""
    return tuple(run for run in runs if (capability or (0, 0)) < NEEDS_CAPABILITY.get(run.backend, (0, 0)))
