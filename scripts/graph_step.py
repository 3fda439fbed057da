"""One decode step of Qwen2.5-1.5B (random weights, fp16) on a CUDA card: how long it takes, where, and whether it is right.

    python scripts/graph_step.py [STAGE ...] [--json FILE] [--seconds S] [--limit S]

Without stages it runs `times`, `eager`, `plain`, `kernels`, `correct` and `compiled`. Every run ends with a table of the
ways to run the step that it timed, side by side, with their shares of the floor. The other stages tune the kernels (`tune`,
`tune16`), or look at their parts (`cublas`, `quantized`). A stage that fails or runs out of time takes no other's figures
along, and `compiled` comes last since nobody knows how long a compiler takes.
Times of recorded steps are the device's own, over hundreds of replays between two events. The floor is weights and a full
cache over the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a clone runs it without being installed

import torch

from benchmarks import graphs
from benchmarks.decoder import Decoder, Dense, Norm, TorchOps, gated, read
from benchmarks.graphs import CannotCapture, GraphEngine
from benchmarks.ledger import write_json
from benchmarks.phases import EagerEngine, Prompt, Reference, decode, forced_choices, reference, tolerance
from benchmarks.rigs import Loader, Rig, choose
from benchmarks.tokens import Ids, compare
from benchmarks.traces import trace

PROMPT_LEN = 37
OUTPUT_LEN = 32
DRAFT_STEP_LEN = 5
CACHE_LENS = (256, 2048)
MOST_REPLAYS = 200
BATCH_SIZES = (1, 4, 16)

WAYS = {
    "eager wall": "eager, wall",
    "eager device": "eager, card busy",
    "captured": "transformers captured",
    "compiled": "transformers compiled, captured",
    "torch": "ours of PyTorch's operations, captured",
    "fused": "ours of fused kernels, captured",
    "floor": "floor",
}
"""The ways to run the step, in the order of the table."""


class OutOfTime(BaseException):
    """A stage's time is over. No Exception: a compiler that falls back on any error must not fall back on this one."""


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raises OutOfTime within the block once `limit_s` seconds have passed. For the main thread."""

    def over(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTime(f"stopped after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Bench:
    """The model, taken apart, and the figures so far (written to `json_path` after each).

    `beside` holds us a step by batch size and way, all with a static cache of CACHE_LENS[0] where they have one.
    """

    model: Any
    decoder: Decoder
    copy_bytes_per_s: float
    json_path: Path | None = None
    budget_s: float = 60.0
    figures: dict[str, object] = field(default_factory=dict)
    beside: dict[int, dict[str, float]] = field(default_factory=dict)
    failed: int = 0

    @staticmethod
    def on_cuda(json_path: Path | None, budget_s: float) -> Bench:
        rig = the_rig()
        model = Loader(rig).model(rig.target)
        bench = Bench(model, read(model, max(CACHE_LENS)), copy_bandwidth(), json_path, budget_s)
        machine = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        bench.note("machine", machine | {"copy_TB_per_s": bench.copy_bytes_per_s / 1e12, "floor_us": bench.floor_us()})
        return bench

    def note(self, name: str, value: object) -> None:
        """A figure: printed, kept and saved."""
        print(f"{name}: {shown(value)}", flush=True)
        self.figures[name] = value
        if self.json_path is not None:
            write_json(self.json_path, self.figures)

    def tried(self, name: str, call: Callable[[], object]) -> None:
        """A call whose failure is a figure too, so that what stands beside it is still measured. OutOfTime goes through."""
        try:
            call()
        except Exception as error:
            self.fail(name, error)
            torch.cuda.empty_cache()

    def fail(self, name: str, error: BaseException) -> None:
        self.failed += 1
        traceback.print_exc(limit=-4)
        self.note(f"{name} failed", f"{type(error).__name__}: {str(error)[:300]}")

    def stand(self, batch_size: int, way: str, took_us: float) -> None:
        """A time for the table at the end."""
        assert way in WAYS
        self.beside.setdefault(batch_size, {"floor": self.floor_us(batch_size, CACHE_LENS[0])})[way] = took_us

    def floor_us(self, batch_size: int = 0, cache_len: int = 0) -> float:
        """What reading all weights, and a full cache, takes at the bandwidth of a copy."""
        weight_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        d = self.decoder
        slot_bytes = 2 * d.kv_heads * d.head_dim * d.embedding.element_size() * len(d.layers)
        return (weight_bytes + batch_size * cache_len * slot_bytes) / self.copy_bytes_per_s * 1e6

    def fused(self, batch_size: int, tuning: Any = None) -> Any:
        from benchmarks.kernels import FusedOps

        return FusedOps(self.decoder, batch_size, tuning)

    def engine(
        self, ops: Any, batch_size: int, cache_len: int = CACHE_LENS[0], step_lens: Sequence[int] = (1,)
    ) -> GraphEngine:
        """Recorded, not proven."""
        return graphs.static_engine(self.model, self.decoder, ops, batch_size, cache_len, step_lens, graphs._record)


def the_rig() -> Rig:
    return choose(rig="qwen2.5", target=None, draft=None, weights="random", dtype="auto", device="cuda")


def shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(v)}" for key, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def ids(count: int, seed: int) -> Ids:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, 150000, (count,), generator=generator).tolist())


def device_us(replay: Callable[[], object], reset: Callable[[], object] = lambda: None, count: int = 50) -> float:
    """Device time of one replay, the median of three bursts of `count` after a short one."""
    took = []
    for n in (min(20, count), count, count, count):
        reset()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(n):
            replay()
        end.record()
        torch.cuda.synchronize()
        took.append(start.elapsed_time(end) / n * 1e3)
    return statistics.median(took[1:])


def copy_bandwidth() -> float:
    """Bytes a second of a 2 GiB copy on the card, read and written."""
    source = torch.empty(2 << 30, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / device_us(lambda: target.copy_(source), count=10) * 1e6


def replay_span(cache_len: int, step_len: int) -> tuple[int, int]:
    """Where timed replays begin and how many there are: they end short of the cache's end, never past it."""
    room_len = cache_len - 20
    count = min(MOST_REPLAYS, room_len // step_len)
    return room_len - count * step_len, count


def step_us(engine: GraphEngine, step_len: int = 1) -> float:
    start_len, count = replay_span(engine.cache_len, step_len)

    def reset() -> None:
        with torch.inference_mode():
            engine.held.lengths.fill_(start_len)

    return device_us(engine.steps[step_len].replay, reset, count)


# Times ---------------------------------------------------------------------------------------------------------------


def times(bench: Bench) -> None:
    """The step at several batch sizes and cache lengths, of fused kernels and of PyTorch's own."""
    shapes = [(batch_size, cache_len) for batch_size in BATCH_SIZES for cache_len in CACHE_LENS]
    for batch_size, cache_len in shapes:
        step_lens = (1, DRAFT_STEP_LEN) if (batch_size, cache_len) == (1, CACHE_LENS[0]) else (1,)
        fused = partial(_time, bench, "fused", partial(bench.fused, batch_size), batch_size, cache_len, step_lens)
        bench.tried(f"fused batch {batch_size} cache {cache_len}", fused)
    for batch_size in BATCH_SIZES:
        plain_ops = partial(_time, bench, "torch", TorchOps, batch_size, CACHE_LENS[0], (1,))
        bench.tried(f"torch batch {batch_size}", plain_ops)


def _time(
    bench: Bench, name: str, make_ops: Callable[[], Any], batch_size: int, cache_len: int, step_lens: Sequence[int]
) -> None:
    start = time.perf_counter()
    engine = bench.engine(make_ops(), batch_size, cache_len, step_lens)
    built_s = time.perf_counter() - start
    floor_us = bench.floor_us(batch_size, cache_len)
    for step_len in step_lens:
        took_us = step_us(engine, step_len)
        figures = {"us": took_us, "floor_us": floor_us, "of_bandwidth": floor_us / took_us, "built_s": built_s}
        bench.note(f"{name} batch {batch_size} cache {cache_len} tokens {step_len}", figures)
        if (cache_len, step_len) == (CACHE_LENS[0], 1):
            bench.stand(batch_size, name, took_us)


# Whether it is right -------------------------------------------------------------------------------------------------


def correct(bench: Bench) -> None:
    """Each projection against float64; then proven engines against the eager engine, token by token."""
    for n_rows in (1, DRAFT_STEP_LEN, 16):
        bench.note(f"relative errors, rows {n_rows}", projection_errors(bench, n_rows))
    for batch_size in (1, 16):
        engine = graphs.capture(bench.model, batch_size, CACHE_LENS[0], (1, DRAFT_STEP_LEN))
        if isinstance(engine, CannotCapture):
            bench.note(f"greedy batch {batch_size}", str(engine))
            continue
        for step_len in engine.steps:
            error, bound = graphs.step_error(engine, step_len)
            bench.note(f"logits batch {batch_size} tokens {step_len}", {"error": error, "bound": bound})
        figures = {"kernels": engine.kernels, "note": engine.note, "built_s": engine.built_s}
        bench.note(f"greedy batch {batch_size}", figures | greedy(engine, bench.model))


@torch.inference_mode()
def projection_errors(bench: Bench, n_rows: int) -> dict[str, float]:
    layer, ops, device = bench.decoder.layers[0], bench.fused(n_rows), bench.decoder.embedding.device
    assert isinstance(layer.qkv, Dense)
    assert isinstance(layer.gate_up, Dense)
    assert isinstance(layer.down, Dense)
    generator = torch.Generator(device=device).manual_seed(1)

    def drawn(width: int) -> torch.Tensor:
        values = torch.randn(n_rows, width, device=device, generator=generator)
        return values.to(bench.decoder.embedding.dtype)

    x, residual, hidden = (drawn(p.weight.shape[1]) for p in (layer.qkv, layer.qkv, layer.down))
    pairs = {
        "qkv": (ops.norm_linear(x, layer.attention_norm, layer.qkv), wide(layer.qkv, x, layer.attention_norm)),
        "gate_up": (ops.norm_gated(x, layer.mlp_norm, layer.gate_up), gated(wide(layer.gate_up, x, layer.mlp_norm))),
        "down": (ops.linear_add(hidden, layer.down, residual), residual.double() + wide(layer.down, hidden)),
    }
    return {kind: float((ours - true).norm() / true.norm()) for kind, (ours, true) in pairs.items()}


def wide(projection: Dense, x: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
    """A projection in float64."""
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    bias = 0.0 if projection.bias is None else projection.bias.double()
    return x @ projection.weight.double().T + bias


def greedy(engine: GraphEngine, model: Any) -> dict[str, object]:
    """Rows of unequal length, decoded together by a graph, against each row alone by the eager engine."""
    eager = EagerEngine(model)
    rows = [ids(PROMPT_LEN - 2 * row % 30, row) for row in range(engine.batch_size)]
    alone = [reference(eager, row, OUTPUT_LEN) for row in rows]
    rounding = tolerance(eager, rows, alone)
    prompt = Prompt.of(rows, engine.device)
    said = decode(engine, engine.prefill(prompt), OUTPUT_LEN)
    again = decode(engine, engine.prefill(prompt), OUTPUT_LEN)
    matches = [
        compare(told.tokens, row.tokens, told.gap, row.distances, rounding, forced=True)
        for told, row in zip(alone, forced_choices(engine, engine.prefill(prompt), alone), strict=True)
    ]
    return {
        "rows": len(rows),
        "equal": sum(not m.differences for m in matches),
        "explained": sum(m.explained for m in matches),
        "vacuous": sum(m.vacuous is not None for m in matches),
        "repeats_itself": said == again,
        "several_at_once_as_one_by_one": several_at_once(engine, prompt, alone),
        "first_differences": [str(m.differences[0]) for m in matches if m.differences],
    }


def several_at_once(engine: GraphEngine, prompt: Prompt, alone: Sequence[Reference]) -> int:
    """In how many rows a step of several tokens chooses what the eager engine chose after each."""
    forced = torch.tensor([told.tokens[:DRAFT_STEP_LEN] for told in alone], device=engine.device)
    chosen = engine.step(engine.prefill(prompt), forced).choices.tolist()
    return sum(row == list(told.tokens[1 : DRAFT_STEP_LEN + 1]) for row, told in zip(chosen, alone, strict=True))


# Where the time goes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """All kernels of one kind in a replay. `gap_us` is from the end of the kernel before; negative when they overlap,
    and durations then include waiting."""

    kind: str
    count: int
    mean_us: float
    total_us: float
    gap_us: float
    bytes_per_s: float | None


def kernel_order(n_layers: int, batch_size: int) -> list[str]:
    """The kinds of a fused step's kernels, as launched. At one row the norms are inside the projections."""
    norm = [] if batch_size == 1 else ["norm"]
    layer = [*norm, "qkv", "attend", "out", *norm, "gate_up", "down"]
    return ["embed", *layer * n_layers, *norm, "head", "choose"]


def kernel_table(
    spans_ns: Sequence[tuple[int, int]], order: Sequence[str], weight_bytes: Mapping[str, int]
) -> list[Kernel]:
    """Begin and end of each kernel of one replay, summed up by kind. Raises ValueError when the counts differ."""
    if len(spans_ns) != len(order):
        raise ValueError(f"{len(spans_ns)} kernels ran in a replay, {len(order)} were expected")
    kinds: dict[str, list[tuple[float, float]]] = {}
    before_ns = spans_ns[0][0]
    for kind, (start_ns, end_ns) in zip(order, spans_ns, strict=True):
        kinds.setdefault(kind, []).append(((end_ns - start_ns) / 1e3, (start_ns - before_ns) / 1e3))
        before_ns = end_ns
    table = []
    for kind, seen in kinds.items():
        mean_us = statistics.mean(took for took, _ in seen)
        speed = weight_bytes[kind] / mean_us * 1e6 if kind in weight_bytes else None
        gap_us = statistics.mean(gap for _, gap in seen)
        table.append(Kernel(kind, len(seen), mean_us, mean_us * len(seen), gap_us, speed))
    return table


def kernels(bench: Bench) -> None:
    """The kernels of a replay at batch 1, without and with overlap, and at batch 16, which never overlaps."""
    from benchmarks.kernels import Tuning

    best = Tuning.of(bench.decoder.embedding.device)
    layer = bench.decoder.layers[0]
    parts = {
        "qkv": layer.qkv,
        "out": layer.out,
        "gate_up": layer.gate_up,
        "down": layer.down,
        "head": bench.decoder.head,
    }
    weight_bytes = {k: p.weight.numel() * p.weight.element_size() for k, p in parts.items() if isinstance(p, Dense)}
    for batch_size, overlap in dict.fromkeys(((1, False), (1, best.overlap), (16, False))):
        engine = bench.engine(bench.fused(batch_size, replace(best, overlap=overlap)), batch_size)
        order = kernel_order(len(bench.decoder.layers), batch_size)
        took_us = step_us(engine)
        table = kernel_table(_replayed(engine), order, weight_bytes)
        name = f"kernels batch {batch_size}{' overlapping' if overlap else ''}"
        bench.note(name, {"step_us": took_us, "sum_us": sum(k.total_us for k in table), "count": len(order)})
        for k in table:
            speed = {} if k.bytes_per_s is None else {"TB_per_s": k.bytes_per_s / 1e12}
            figures = {"count": k.count, "mean_us": k.mean_us, "total_us": k.total_us, "gap_us": k.gap_us}
            bench.note(f"{name}, {k.kind}", figures | speed)


def _replayed(engine: GraphEngine) -> list[tuple[int, int]]:
    """Begin and end, in ns, of each kernel of the last of three replays under the profiler."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode():
        engine.held.lengths.fill_(100)
    replay = engine.steps[1].replay
    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiled:
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
    events = profiled.profiler.kineto_results.events()
    on_card = [e for e in events if e.device_type() != DeviceType.CPU and "Sync" not in e.name()]
    spans = sorted((e.start_ns(), e.end_ns()) for e in on_card)
    return spans[len(spans) // 3 * 2 :]


# Tuning --------------------------------------------------------------------------------------------------------------

ONE_ROW_TILES = [(2, 512, 2), (8, 512, 2), (4, 512, 4), (4, 1024, 4), (2, 1024, 4), (4, 2048, 8), (2, 2048, 8),
                 (4, 256, 1)]  # fmt: skip
FEW_ROWS_TILES = [(16, 512, 4, 3), (16, 512, 4, 4), (16, 256, 8, 4), (16, 256, 8, 5), (16, 128, 4, 6), (16, 128, 4, 8),
                  (32, 256, 4, 3), (32, 128, 4, 5), (64, 64, 4, 6), (64, 128, 4, 4), (128, 64, 4, 4)]  # fmt: skip
"""Rows, columns, warps (and stages) to try for each projection."""


def tune(bench: Bench, batch_size: int = 1) -> None:
    """Coordinate descent on the time of the whole step, for `--seconds`."""
    from benchmarks.kernels import KINDS, Tile, Tuning

    best = Tuning.of(bench.decoder.embedding.device)
    tiles, name = (ONE_ROW_TILES, "one_row") if batch_size == 1 else (FEW_ROWS_TILES, "few_rows")
    trials: list[tuple[str, str, Any]] = [("splits", "", n) for n in (1, 2, 4)]
    trials += [("block", "", 32), ("block", "", 128), ("attention_warps", "", 2), ("attention_warps", "", 8)]
    trials += [("overlap", "", not best.overlap), ("evict", "", "")] if batch_size == 1 else []
    trials += [(name, kind, Tile(*sizes)) for kind in KINDS for sizes in tiles]
    started = time.perf_counter()
    best_us = step_us(bench.engine(bench.fused(batch_size, best), batch_size))
    bench.note(f"tune batch {batch_size}, start", best_us)
    for name, kind, value in trials:
        label = f"tune batch {batch_size}, {kind or name} {astuple(value) if kind else value!r}"
        if time.perf_counter() - started > bench.budget_s:
            bench.note(label, "not reached in time, nor what follows")
            break
        changed = replace(best, **{name: {**getattr(best, name), kind: value} if kind else value})
        try:
            took_us = step_us(bench.engine(bench.fused(batch_size, changed), batch_size))
        except Exception as error:  # a tile that the card has no room for is a finding, not an end
            bench.note(label, f"{type(error).__name__} {str(error)[:100]}")
            continue
        bench.note(label, took_us)
        if took_us < best_us - 1:
            best, best_us = changed, took_us
    bench.note(f"tune batch {batch_size}, best", {"us": best_us, "tuning": str(best)})


def tune16(bench: Bench) -> None:
    """As `tune`, at 16 rows."""
    tune(bench, 16)


# Other ways to run the same step -------------------------------------------------------------------------------------


def eager(bench: Bench) -> None:
    """What the eager engine's step makes a caller wait, in wall time, and how long the card works in it."""
    engine = EagerEngine(bench.model)
    for batch_size in BATCH_SIZES:
        prompt = Prompt.of([ids(PROMPT_LEN, row) for row in range(batch_size)], "cuda")
        # Twice, since attention may prepare something for every length that it sees for the first time.
        for which in ("first", "again"):
            state = engine.prefill(prompt)
            took_us = []
            for _ in range(40):
                torch.cuda.synchronize()
                start = time.perf_counter()
                state = engine.step(state)
                torch.cuda.synchronize()
                took_us.append((time.perf_counter() - start) * 1e6)
            wall_us = statistics.median(took_us[5:])
            bench.note(f"eager wall batch {batch_size} {which}", {"us": wall_us, "least_us": min(took_us)})
        bench.stand(batch_size, "eager wall", wall_us)
        traced = trace(partial(engine.step, state), "cuda")
        if traced.device_s is None:
            bench.note(f"eager device batch {batch_size}", traced.reason)
            continue
        bench.note(f"eager device batch {batch_size}", {"us": 1e6 * traced.device_s, "kernels": traced.n_kernels})
        bench.stand(batch_size, "eager device", 1e6 * traced.device_s)


def plain(bench: Bench) -> None:
    """transformers' own forward over its own static cache, captured."""
    for batch_size in BATCH_SIZES:
        bench.tried(f"transformers captured batch {batch_size}", partial(_plain, bench, batch_size))


def _plain(bench: Bench, batch_size: int) -> None:
    took_us = transformers_us(bench.model, bench.model, batch_size, CACHE_LENS[0])
    bench.note(f"transformers captured batch {batch_size} cache {CACHE_LENS[0]}", took_us)
    bench.stand(batch_size, "captured", took_us)


def compiled(bench: Bench) -> None:
    """The same, compiled by torch.compile first; at batch 1 also with transformers' own eager attention, which an H200 ran
    faster once compiled. The quicker of both stands in the table."""
    for batch_size, attention in ((1, "sdpa"), (1, "eager"), (16, "sdpa"), (4, "sdpa")):
        name = f"transformers compiled batch {batch_size} {attention}"
        bench.tried(name, partial(_compiled, bench, name, batch_size, attention))


def _compiled(bench: Bench, name: str, batch_size: int, attention: str) -> None:
    before = bench.model.config._attn_implementation
    torch._dynamo.reset()
    start = time.perf_counter()
    bench.model.set_attn_implementation(attention)
    try:
        forward = torch.compile(bench.model.forward, dynamic=False)
        took_us = transformers_us(bench.model, forward, batch_size, CACHE_LENS[0])
    finally:
        bench.model.set_attn_implementation(before)
    bench.note(name, {"us": took_us, "built_s": time.perf_counter() - start})
    known = bench.beside.get(batch_size, {}).get("compiled", took_us)
    bench.stand(batch_size, "compiled", min(known, took_us))


@torch.inference_mode()
def transformers_us(model: Any, forward: Callable[..., Any], batch_size: int, cache_len: int) -> float:
    from transformers import StaticCache

    start_len = 20
    cache = StaticCache(config=model.config, max_cache_len=cache_len)
    prompt = Prompt.of([ids(start_len, row) for row in range(batch_size)], "cuda")
    model(prompt.ids, cache=cache, use_cache=True, logits_to_keep=1)
    tokens = prompt.ids[:, -1:].clone()

    def one_step() -> None:
        logits = forward(tokens, cache=cache, use_cache=True).logits
        tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            one_step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step()

    def reset() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(start_len)

    return device_us(graph.replay, reset, MOST_REPLAYS)


@torch.inference_mode()
def cublas(bench: Bench) -> None:
    """Each projection as PyTorch calls it: a chain over all layers' weights, captured."""
    for n_rows in (1, 16):
        for kind in ("qkv", "out", "gate_up", "down"):
            weights = [getattr(layer, kind).weight for layer in bench.decoder.layers]
            x = torch.randn(n_rows, weights[0].shape[1], device="cuda").to(weights[0].dtype)
            torch.nn.functional.linear(x, weights[0])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for weight in weights:
                    torch.nn.functional.linear(x, weight)
            took_us = device_us(graph.replay) / len(weights)
            speed = weights[0].numel() * weights[0].element_size() / took_us / 1e6
            bench.note(f"cublas {kind} rows {n_rows}", {"us": took_us, "TB_per_s": speed})


def quantized(bench: Bench) -> None:
    """Whether bitsandbytes' modules can be captured, and what a step of them takes."""
    for precision in ("int8", "nf4"):
        rig = the_rig()
        engine = graphs.capture(Loader(rig).model(rig.target, precision), 1, CACHE_LENS[0])
        if isinstance(engine, CannotCapture):
            bench.note(f"{precision} batch 1", str(engine))
        else:
            figures = {"us": step_us(engine), "kernels": engine.kernels, "note": engine.note, "built_s": engine.built_s}
            bench.note(f"{precision} batch 1", figures)


STAGES: dict[str, Callable[[Bench], None]] = {
    f.__name__: f for f in (times, correct, kernels, tune, tune16, eager, plain, compiled, cublas, quantized)
}
DEFAULT = ("times", "eager", "plain", "kernels", "correct", "compiled")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times of one decode step as a CUDA graph, and what is behind them.")
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default {' '.join(DEFAULT)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long a tuning stage may take")
    parser.add_argument("--limit", type=float, default=220.0, help="seconds for all stages together")
    given = parser.parse_args(arguments)
    if unknown := [stage for stage in given.stages if stage not in STAGES]:
        parser.error(f"no stage {unknown[0]!r}: there are {', '.join(STAGES)}")
    if not 0 < given.limit < float("inf"):
        parser.error(f"--limit {given.limit} is not a number of seconds above 0")
    return given


def run(stages: Iterable[str], bench: Bench, limit_s: float) -> int:
    """Each stage in turn; one that fails doesn't take the others' figures along. Returns how many failures there were,
    among them what was not reached within `limit_s` seconds."""
    end = time.perf_counter() + limit_s
    for stage in stages:
        print(f"== {stage}", flush=True)
        start = time.perf_counter()
        try:
            if start >= end:
                raise OutOfTime(f"not reached within {limit_s:.0f} s")
            with limited(end - start):
                STAGES[stage](bench)
        except (Exception, OutOfTime) as error:
            bench.fail(stage, error)
        bench.note(f"{stage}, seconds", time.perf_counter() - start)
        torch.cuda.empty_cache()
    for line in side_by_side(bench.beside):
        print(line)
    bench.note("us a step, by batch size and way", {str(b): ways for b, ways in bench.beside.items()})
    return bench.failed


def side_by_side(beside: Mapping[int, Mapping[str, float]]) -> list[str]:
    """A line a way, with us a step and the share of the floor for each batch size; a dash where it wasn't timed."""
    beside = dict(sorted(beside.items()))
    heads = [f"batch {batch_size}, us" for batch_size in beside]
    lines = ["  ".join([" " * 40, *(f"{head:>14} {'of floor':>8}" for head in heads)])]
    for way, words in WAYS.items():
        if not any(way in ways for ways in beside.values()):
            continue
        cells = []
        for ways in beside.values():
            took_us = ways.get(way)
            share = "-" if took_us is None else f"{ways['floor'] / took_us:.0%}"
            cells.append(f"{'-' if took_us is None else f'{took_us:,.0f}':>14} {share:>8}")
        lines.append("  ".join([f"{words:<40}", *cells]))
    return lines if beside else []


def main() -> int:
    given = parse()
    if not torch.cuda.is_available():
        print("graph_step.py needs a CUDA card: torch sees none here", file=sys.stderr)
        return 2
    start = time.perf_counter()
    bench = Bench.on_cuda(given.json, given.seconds)
    return min(1, run(given.stages or DEFAULT, bench, given.limit - (time.perf_counter() - start)))


if __name__ == "__main__":
    sys.exit(main())
