"""Prefill and decode beside a yardstick: the times of a CPU that a later run, on a busier or slower day, can be held to.

The wall time of one and the same prefill differed by a factor of two from minute to minute on a shared host. Two things
bring that to 3 % for a prefill and 6 % for decode steps: CPU time, which does not count the moments in which somebody
else had the core, and a yardstick, a fixed computation of the same kind that is measured in the same rounds, so that
clocks, caches and heat hit both and cancel. The yardstick is plain torch, written here: a change to the suite, to
transformers or to the model is none to it. A card needs no yardstick: its device time is its own (see traces.py).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from benchmarks import workloads
from benchmarks.calibration import FLOOR_CONFIDENCE
from benchmarks.estimates import median_interval
from benchmarks.ledger import Cell
from benchmarks.phases import Prompt
from benchmarks.timing import Rounds, interleave

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.phases import EagerEngine

PROMPT_LEN = 256
STEPS = 8
FEWEST_ROUNDS, MOST_ROUNDS = 20, 80
BUDGET_S = 12.0
"""Seconds of rounds; the fewest are made however long they take."""

QUIET_ENOUGH = 0.01
"""Rounds are added until both ratios are known to this share of themselves, a sixth of what the gate tolerates."""

WIDTH, LAYERS, HEADS = 256, 6, 4
"""The yardstick's size, that of the embedded target: never to be changed, or no baseline holds any more."""


@dataclass(frozen=True)
class Spent:
    """Seconds of one call: on the wall, and of CPU time over all threads of this process."""

    wall_s: float
    cpu_s: float


def spent(call: Callable[[], object]) -> Spent:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


class Yardstick:
    """A transformer's arithmetic with seeded weights: linears, attention and norms of fixed shapes, without a cache."""

    def __init__(self) -> None:
        seeded = torch.Generator().manual_seed(20)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=seeded) / math.sqrt(rows)

        shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 8 * WIDTH), (4 * WIDTH, WIDTH))
        self._layers = [tuple(weight(*shape) for shape in shapes) for _ in range(LAYERS)]

    @torch.inference_mode()
    def _forward(self, length: int) -> None:
        """One pass over `length` positions."""
        x: torch.Tensor = torch.ones(1, length, WIDTH)
        for into_heads, out_of_heads, up, down in self._layers:
            q, k, v = (F.layer_norm(x, (WIDTH,)) @ into_heads).view(1, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
            x += attended.transpose(1, 2).reshape(1, length, WIDTH) @ out_of_heads
            gate, value = (F.layer_norm(x, (WIDTH,)) @ up).chunk(2, -1)
            x += (F.silu(gate) * value) @ down

    def prefill(self) -> None:
        self._forward(PROMPT_LEN)

    def decode(self) -> None:
        for _ in range(3 * STEPS):  # as long as the model's own steps, which launch more
            self._forward(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """CPU time is summed over threads, and threads that wait for each other spend it without working."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(engine: EagerEngine, tokenizer: workloads.Tokenizer, precision: str) -> list[Cell]:
    """Prefill of PROMPT_LEN tokens and STEPS decode steps, each in turn with the yardstick: one cell each."""
    yardstick = Yardstick()
    prompt = Prompt.of([workloads.prefix_ids(tokenizer, PROMPT_LEN)], engine.device)
    short = Prompt.of([workloads.prefix_ids(tokenizer, workloads.PROMPT_LEN)], engine.device)

    def decode() -> Spent:
        state = engine.prefill(short)

        def steps() -> None:
            nonlocal state
            for _ in range(STEPS):
                state = engine.step(state)

        return spent(steps)

    sides = {
        "prefill": lambda: spent(lambda: engine.prefill(prompt)),
        "prefill yardstick": lambda: spent(yardstick.prefill),
        "decode yardstick": lambda: spent(yardstick.decode),
        "decode": decode,
    }
    with _one_thread():
        rounds = interleave(sides, _settled, BUDGET_S, min_rounds=FEWEST_ROUNDS, max_rounds=MOST_ROUNDS)
    lengths = {"prefill": (PROMPT_LEN, 1), "decode": (workloads.PROMPT_LEN, STEPS)}
    return [_cell(phase, rounds, *lengths[phase], engine.name, precision) for phase in lengths]


def _settled(rounds: Rounds[Spent]) -> bool:
    return len(rounds) >= FEWEST_ROUNDS and all(
        noise(_over(rounds, phase, "cpu_s")) <= QUIET_ENOUGH for phase in ("prefill", "decode")
    )


def _over(rounds: Rounds[Spent], phase: str, field: str) -> list[float]:
    """The paired ratios of a phase over its yardstick, one a round."""
    pairs = zip(rounds[phase], rounds[f"{phase} yardstick"], strict=True)
    return [getattr(a, field) / getattr(b, field) for a, b in pairs]


def noise(ratios: Sequence[float]) -> float:
    """How far the interval of the ratios' median reaches from it, as a share of it; 0.1 is ten per cent."""
    seen = median_interval(ratios, confidence=FLOOR_CONFIDENCE)
    if seen.value is None or seen.low is None or seen.high is None:
        raise ValueError(f"no yardstick without times above 0: {seen.problem}")
    return max(seen.high / seen.value, seen.value / seen.low) - 1


def _cell(phase: str, rounds: Rounds[Spent], prompt_len: int, output_len: int, engine: str, precision: str) -> Cell:
    cpu = _over(rounds, phase, "cpu_s")
    figures: Mapping[str, float] = {
        "cpu_over_yardstick": statistics.median(cpu),
        "cpu_over_yardstick_noise": noise(cpu),
        "wall_over_yardstick": statistics.median(_over(rounds, phase, "wall_s")),
        "cpu_s": statistics.median(one.cpu_s for one in rounds[phase]),
        "yardstick_cpu_s": statistics.median(one.cpu_s for one in rounds[f"{phase} yardstick"]),
    }
    return Cell(
        id=f"yardstick.{phase}",
        station="yardstick",
        phase=phase,
        workload={
            "name": f"{prompt_len} tokens" if phase == "prefill" else f"{output_len} steps",
            "batch_size": 1,
            "prompt_len": prompt_len,
            "output_len": output_len,
        },
        engine=engine,
        precision=precision,
        wall_s=tuple(one.wall_s for one in rounds[phase]),
        figures=figures,
        unavailable={"device_s": "the CPU is the device", "host_bound": "the CPU is the device"},
        note=f"{len(rounds)} rounds in turn with a fixed computation",
    )
