"""The roofline: measured for real on this CPU, and floors and regimes by computation."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from benchmarks import roofline
from benchmarks.memory import kv_cache_bytes, tensor_bytes
from benchmarks.phases import EagerEngine
from benchmarks.rigs import random_model
from benchmarks.roofline import Roofline, Work, forward_work
from benchmarks.rows import Phases, served_cells
from benchmarks.runs import Run
from benchmarks.traces import Trace
from benchmarks.workloads import Workload

ROOF = Roofline(bandwidth_bytes_per_s=1e9, matmul_flops_per_s=1e12, how="made up")
WIDE = Work(bytes=10**9, flops=10**9)
"""A second of memory, a millisecond of arithmetic."""
TINY = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip


def tiny(model_type: str = "qwen2", **changed: object) -> torch.nn.Module:
    config = AutoConfig.for_model(model_type, **{**TINY, "tie_word_embeddings": True, **changed})
    return random_model(config, torch.float32, "cpu")


@pytest.fixture(scope="module")
def tied() -> torch.nn.Module:
    return tiny()


def test_this_machine_has_two_roofs_of_a_believable_height() -> None:
    measured = roofline.measure("cpu", torch.float32)
    assert 1e8 < measured.bandwidth_bytes_per_s < 1e13
    assert 1e8 < measured.matmul_flops_per_s < 1e14
    assert "float32" in measured.how and "MiB" in measured.how
    assert json.loads(json.dumps(measured.record)) == dataclasses.asdict(measured)


def test_a_machine_without_free_memory_copies_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "free_bytes", lambda device: 16 * 2**20)
    assert "a copy of 2 MiB" in roofline.measure("cpu", torch.float32).how


def test_a_clock_that_stands_still_gives_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: 1.0)
    with pytest.raises(RuntimeError, match="stood still"):
        roofline.burst_s(lambda: None, "cpu", 3)


def test_a_burst_is_billed_by_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 16.0])
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: next(clock))
    calls: list[int] = []
    assert roofline.burst_s(lambda: calls.append(1), "cpu", 3) == 2.0
    assert len(calls) == 3


@given(st.integers(0, 10**15), st.integers(0, 10**18))
def test_a_floor_is_the_slower_of_reading_and_calculating(count: int, flops: int) -> None:
    work = Work(count, flops)
    assert ROOF.floor_s(work) == max(count / 1e9, flops / 1e12)


@pytest.mark.parametrize(
    ("work", "wall_s", "device_s", "regime"),
    [
        (WIDE, 10.0, 1.5, "host-bound"),
        (WIDE, 10.0, 4.9, "host-bound"),
        (WIDE, 2.0, 1.5, "memory-bound"),
        (WIDE, 10.0, 9.0, "overhead-bound"),
        (Work(10**6, 10**12), 1.3, 1.2, "compute-bound"),
        (WIDE, 1.9, None, "memory-bound"),
        (WIDE, 2.1, None, "overhead-bound"),
    ],
)
def test_the_regime_is_whatever_takes_most_of_the_wait(
    work: Work, wall_s: float, device_s: float | None, regime: str
) -> None:
    assert ROOF.regime(work, wall_s, device_s) == regime


# What a phase can't do without ----------------------------------------------------------------------------------------


def layer_weights() -> int:
    """By hand: q and o of 64 x 64, k and v of 32 x 64, three of 128 x 64, in two layers."""
    return 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)


def test_a_decode_step_reads_each_weight_once_and_every_cached_position(tied: torch.nn.Module) -> None:
    work = forward_work(tied, [(100, 1), (10, 1)])
    assert work.bytes == tensor_bytes(tied) + kv_cache_bytes(tied.config, 112, 4)
    seen = 101 + 11
    assert work.flops == 2 * 2 * layer_weights() + 2 * 2 * 320 * 64 + 4 * 2 * 64 * seen


def test_a_prefill_multiplies_every_token_and_names_only_the_last(tied: torch.nn.Module) -> None:
    work = forward_work(tied, [(0, 50)])
    assert work.flops == 2 * layer_weights() * 50 + 2 * 320 * 64 + 4 * 2 * 64 * (50 * 51 // 2)
    cached = forward_work(tied, [(40, 10)])
    assert cached.flops == 2 * layer_weights() * 10 + 2 * 320 * 64 + 4 * 2 * 64 * (40 * 10 + 55)
    assert cached.bytes == work.bytes


def test_an_embedding_that_is_not_the_head_is_not_read_as_a_whole(tied: torch.nn.Module) -> None:
    apart = forward_work(tiny(tie_word_embeddings=False), [(10, 1)])
    row_bytes = 64 * 4
    assert apart.bytes == forward_work(tied, [(10, 1)]).bytes + row_bytes


def test_joined_weights_are_the_same_work() -> None:
    from benchmarks.decoder import read

    model = tiny()
    before = forward_work(model, [(10, 1)])
    read(model, 64)
    assert forward_work(model, [(10, 1)]) == before


def test_a_mixture_of_experts_has_no_computed_floor() -> None:
    model = tiny()
    model.config.num_experts = 8
    with pytest.raises(ValueError, match="experts"):
        forward_work(model, [(10, 1)])


def test_a_model_without_a_linear_head_has_no_computed_floor() -> None:
    model = tiny(tie_word_embeddings=False)
    model.lm_head = torch.nn.Identity()
    with pytest.raises(ValueError, match="head"):
        forward_work(model, [(10, 1)])


# In the tables --------------------------------------------------------------------------------------------------------

RUNS = [Run(1, 9, (0.5, 1.0, 1.5))]
ASKED = Workload("9 tokens", (tuple(range(1, 10)),), 3)


def traced(device_s: float | None) -> Trace:
    return Trace(device_s, device_s, None, (), (), None if device_s else "the CPU is the device")


def cells(model: torch.nn.Module, roof: Roofline | None) -> list[dict[str, object]]:
    engine = EagerEngine(model)
    phases = Phases.of(engine, ASKED, roofline=roof)
    return [cell.record for cell in served_cells("batching.1", ASKED, engine, "fp32", RUNS, phases)]


def test_a_row_says_how_near_its_phases_are_to_their_floors(tied: torch.nn.Module) -> None:
    row, prefill, decode = cells(tied, ROOF)
    floor_s = ROOF.floor_s(forward_work(tied, [(9, 1)]))
    assert decode["figures"] == {
        "floor_s": floor_s,
        "share_of_floor": floor_s / 0.5,
        "wall_share_of_floor": floor_s / 0.5,
    }
    assert row["figures"]["decode_share_of_floor"] == floor_s / 0.5  # type: ignore[index]
    assert prefill["figures"]["floor_s"] == ROOF.floor_s(forward_work(tied, [(0, 9)]))  # type: ignore[index]
    assert (prefill["note"], decode["note"]) == ("overhead-bound", "overhead-bound")
    assert row["note"] == "prefill overhead-bound, decode overhead-bound"


def test_a_share_is_of_the_time_that_the_card_worked(tied: torch.nn.Module) -> None:
    engine = EagerEngine(tied)
    needed = Phases.of(engine, ASKED, roofline=ROOF).needed
    phases = Phases(traced(0.4), traced(0.1), needed)
    row, prefill, decode = served_cells("batching.1", ASKED, engine, "fp32", RUNS, phases)
    assert decode.figures["share_of_floor"] == pytest.approx(5 * decode.figures["wall_share_of_floor"])
    assert decode.note == "host-bound"
    assert prefill.note == "overhead-bound"
    assert row.figures["decode_host_bound"] == pytest.approx(0.8)


def test_a_model_without_a_floor_says_why_and_the_rest_stands(tied: torch.nn.Module) -> None:
    tied.config.num_experts = 8
    try:
        row, *phases = cells(tied, ROOF)
    finally:
        del tied.config.num_experts
    for cell in (row, *phases):
        assert "experts" in cell["unavailable"]["floor_s"]  # type: ignore[index]
    assert row["figures"]["ttft_s"] == 0.5  # type: ignore[index]
    assert row["note"] == ""


def test_without_a_roofline_nothing_speaks_of_floors(tied: torch.nn.Module) -> None:
    assert not any("floor" in name for cell in cells(tied, None) for name in cell["figures"])  # type: ignore[attr-defined]
