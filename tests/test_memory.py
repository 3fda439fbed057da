"""Bytes: the order of a peak measurement with a faked allocator, tied weights, the KV cache, and running out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from benchmarks import memory
from benchmarks.memory import OutOfMemory, attempt, fits, kv_cache_bytes, peak_extra_bytes, resident_bytes, tensor_bytes


class FakeCard:
    """An allocator in plain numbers. The first call also takes a workspace that stays."""

    def __init__(self, resident: int, call_peak: int, workspace: int) -> None:
        self.now = self.peak = resident
        self._call_peak, self._workspace = call_peak, workspace

    def call(self) -> None:
        self.now += self._workspace
        self._workspace = 0
        self.peak = max(self.peak, self.now + self._call_peak)

    def settle(self) -> None: ...

    def reset_peak(self) -> None:
        self.peak = self.now

    def resident_bytes(self) -> int:
        return self.now

    def peak_bytes(self) -> int:
        return self.peak


def test_the_peak_is_over_what_is_resident_without_the_workspace_of_the_first_call() -> None:
    card = FakeCard(resident=10_000, call_peak=700, workspace=8_519_680)
    card.peak = 1_000_000_000  # something big ran before
    assert peak_extra_bytes(card.call, "cuda", card) == 700


def test_a_counter_that_sees_nothing_is_none_and_never_zero() -> None:
    blind = FakeCard(resident=0, call_peak=0, workspace=0)
    assert peak_extra_bytes(blind.call, "cuda", blind) is None
    assert resident_bytes("cuda", blind) is None


def test_the_cpu_has_no_counter_and_the_call_is_not_run_for_it() -> None:
    calls: list[int] = []
    assert peak_extra_bytes(lambda: calls.append(1), "cpu") is None
    assert resident_bytes("cpu") is None
    assert calls == []


def test_tied_weights_and_views_count_once() -> None:
    embedding, head = nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)
    untied = tensor_bytes(nn.ModuleList([embedding, head]))
    head.weight = embedding.weight
    assert (untied, tensor_bytes(nn.ModuleList([embedding, head]))) == (2 * 3200, 3200)
    head.register_buffer("view", embedding.weight.detach()[:50])
    assert tensor_bytes(nn.ModuleList([embedding, head])) == 3200


def test_a_module_without_data_has_no_bytes_to_report() -> None:
    with pytest.raises(ValueError, match="meta device"):
        tensor_bytes(nn.Linear(2, 2, device="meta"))


def test_kv_cache_bytes_are_those_of_a_real_cache() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        cache = model(torch.arange(21).repeat(3, 1)).cache
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kv_cache_bytes(config, tokens=3 * 21, dtype_bytes=4) == real


def test_the_article_models_cache_takes_28_kib_a_token() -> None:
    qwen = SimpleNamespace(num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, hidden_size=1536)
    assert kv_cache_bytes(qwen, tokens=1, dtype_bytes=2) == 28 * 1024


@pytest.mark.parametrize(
    ("model_type", "fields", "other"),
    [
        ("gemma2", {}, "sliding_attention"),
        ("mistral", {"sliding_window": 64}, "sliding_window"),  # says nothing of its layers' types
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("deepseek_v3", {}, "kv_lora_rank"),
        ("falcon", {}, "multi_query"),
        ("gpt_bigcode", {}, None),  # which says that it has one KV head
    ],
)
def test_a_cache_that_is_not_keys_and_values_of_every_position_is_refused(
    model_type: str, fields: dict[str, Any], other: str | None
) -> None:
    config = AutoConfig.for_model(model_type, **fields)
    if other is None:
        assert kv_cache_bytes(config, 1, 2) > 0
        return
    with pytest.raises(ValueError, match=other):
        kv_cache_bytes(config, 1, 2)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_running_out_is_a_value_whoever_reports_it(error: Exception) -> None:
    def fails() -> int:
        raise error

    assert attempt(fails, "cpu") == OutOfMemory("out of memory")


def test_a_real_allocation_that_cannot_be_is_out_of_memory_and_other_errors_go_through() -> None:
    assert isinstance(attempt(lambda: torch.empty(2**55, dtype=torch.uint8), "cpu"), OutOfMemory)
    assert attempt(lambda: 7, "cpu") == 7
    with pytest.raises(RuntimeError, match="shapes cannot"):
        attempt(lambda: torch.ones(2, 3) @ torch.ones(2, 3), "cpu")


def test_what_is_left_is_read_from_the_kernel_and_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 16000 kB\nMemAvailable:   8000 kB\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._available_bytes(tmp_path / "meminfo") == 8_192_000
    assert memory._group_left_bytes(tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._group_left_bytes(tmp_path) is None
    assert memory._available_bytes(tmp_path / "absent") is None


def test_a_cell_fits_up_to_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free: dict[str, Any] = {"bytes": 100}
    monkeypatch.setattr(memory, "free_bytes", lambda device: free["bytes"])
    assert fits(100, "cpu") and not fits(101, "cpu")
    free["bytes"] = None
    assert fits(10**18, "cpu"), "a system that doesn't say leaves it to the allocator"
