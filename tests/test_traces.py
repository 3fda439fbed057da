"""Traces: the union of busy intervals, the names of kernels, and the attention that ran, from events and real calls."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import traces
from benchmarks.attention import naive, qkv, sdpa
from benchmarks.claims import CLAIMS
from benchmarks.estimates import counted
from benchmarks.ledger import Cell
from benchmarks.rows import kernels
from benchmarks.tables import math_fallbacks
from benchmarks.traces import (
    AttentionRun,
    Event,
    Trace,
    busy_s,
    classify,
    from_events,
    impossible,
    short_name,
    trace,
    trace_each,
)
from benchmarks.verdicts import Word, judge

CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"
FLASH = "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 64, 256, 4, false, cutlass::half_t>>"
FLASH_3 = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>"
EFFICIENT = "fmha_cutlassF_f16_aligned_64x64_rf_sm75(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t>::Params)"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 9, false, false>(c10::Half*)"
GEMM = "nvjet_tst_256x32_64x5_2x1_v_bz_TNT"

q, k = (1, 12, 64, 64), (1, 2, 64, 64)

quickly = settings(deadline=None, max_examples=50)
intervals = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 100)).map(lambda t: (float(t[0]), float(t[0] + t[1]))), min_size=1
)


# --- the card busy ----------------------------------------------------------------------------------------------------


@quickly
@given(intervals, st.randoms())
def test_busy_time_is_between_the_longest_interval_and_the_span_in_any_order(
    some: list[tuple[float, float]], luck: random.Random
) -> None:
    busy = busy_s(some)
    assert max(end - start for start, end in some) <= busy <= max(e for _, e in some) - min(s for s, _ in some)
    shuffled = list(some)
    luck.shuffle(shuffled)
    assert busy_s(shuffled) == busy


@quickly
@given(intervals)
def test_busy_time_is_the_number_of_covered_units(some: list[tuple[float, float]]) -> None:
    covered = {unit for start, end in some for unit in range(int(start), int(end))}
    assert busy_s(some) == len(covered)
    assert busy_s(some + some) == len(covered), "streams that overlap count once"


def test_an_idle_gap_is_not_busy_and_nothing_is_no_time() -> None:
    assert busy_s([(0, 1), (5, 6)]) == 2
    assert busy_s([]) == 0


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "word"),
    [
        (CUDNN, "cudnn"),
        (FLASH, "flash"),
        (FLASH_3, "flash"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 128, 4>>", "flash"),
        (EFFICIENT, "efficient"),
        ("triton_tem_fused_flex_attention_0", "flex"),
        (SOFTMAX, None),
        (GEMM, None),
        ("cudnn::bn_fw_inf_1C11_kernel_NCHW", None),
        ("Memcpy DtoH (Device -> Pinned)", None),
    ],
)
def test_a_kernel_is_classified_by_its_name_and_its_short_name_still_proves_it(kernel: str, word: str | None) -> None:
    assert classify(kernel) == word
    assert classify(short_name(kernel)) == word


def test_short_names_lose_template_arguments_only() -> None:
    assert short_name(SOFTMAX) == "softmax_warp_forward"
    assert short_name("void at::native::vectorized_elementwise_kernel<4, F>(int)") == (
        "at::native::vectorized_elementwise_kernel"
    )
    assert short_name(GEMM) == GEMM
    assert "FlashAttnFwdSm90" in short_name(FLASH_3)


# --- CUDA traces, from events -----------------------------------------------------------------------------------------


def sdpa_on_cuda(op: str, kernel: str, key: tuple[int, ...] = q, at: int = 0) -> list[Event]:
    """Host and device events of one eager SDPA call: the kernel starts long after its op has returned."""
    return [
        Event("aten::scaled_dot_product_attention", at, at + 100, id=at + 1, shapes=(q, key, key)),
        Event(f"aten::_scaled_dot_product_{op}", at + 10, at + 90, id=at + 2, shapes=(q, key, key)),
        Event("aten::_inner_forward", at + 20, at + 80, id=at + 3, shapes=(q, key, key)),
        Event(kernel, at + 5000, at + 6000, on_device=True, launched_by=at + 3),
    ]


@pytest.mark.parametrize(
    ("op", "kernel", "backend"),
    [
        ("cudnn_attention", CUDNN, "cudnn"),
        ("flash_attention", FLASH, "flash"),
        ("efficient_attention", EFFICIENT, "efficient"),
        ("attention_math", SOFTMAX, "math"),
    ],
)
def test_each_backend_is_named_by_its_op_and_proven_by_its_kernel(op: str, kernel: str, backend: str) -> None:
    (run,) = from_events(sdpa_on_cuda(op, kernel) + sdpa_on_cuda(op, kernel, at=10_000), "cuda").attention
    assert (run.backend, run.op, run.count) == (backend, f"aten::_scaled_dot_product_{op}", 2)
    assert run.kernels == (short_name(kernel),)


def test_where_op_and_kernel_differ_the_kernel_is_what_ran() -> None:
    (run,) = from_events(sdpa_on_cuda("flash_attention", CUDNN), "cuda").attention
    assert (run.backend, run.op) == ("cudnn", "aten::_scaled_dot_product_flash_attention")


def test_naive_attention_on_a_card_is_proven_by_its_softmax_kernel() -> None:
    events = [
        Event("aten::bmm", 0, 1, shapes=((12, 64, 64), (12, 64, 64))),
        Event("aten::_softmax", 2, 3, id=1, shapes=(q,)),
        Event("aten::bmm", 4, 5, shapes=((12, 64, 64), (12, 64, 64))),
        Event(SOFTMAX, 9, 10, on_device=True, launched_by=1),
    ]
    expected = AttentionRun("naive", "aten::_softmax", 1, "none", ("softmax_warp_forward",))
    assert from_events(events, "cuda").attention == (expected,)


@pytest.mark.parametrize(
    ("op", "kernel", "told"), [("attention_math", SOFTMAX, ["x.1.prefill"]), ("cudnn_attention", CUDNN, [])]
)
def test_a_cell_whose_trace_shows_the_fallback_is_told_as_a_finding(op: str, kernel: str, told: list[str]) -> None:
    traced = kernels(from_events(sdpa_on_cuda(op, kernel), "cuda"))
    made = Cell("x.1.prefill", "x", "prefill", {}, "eager", "fp16", (0.1,), (0.1,), kernels=traced)
    assert math_fallbacks([made.record]) == told


def test_math_fallback_is_a_finding() -> None:
    assert from_events(sdpa_on_cuda("attention_math", SOFTMAX), "cuda").math_fallback
    assert not from_events(sdpa_on_cuda("cudnn_attention", CUDNN), "cuda").math_fallback


def test_an_sdpa_call_whose_op_is_new_is_unknown_and_not_left_out() -> None:
    seen = from_events(sdpa_on_cuda("quantum_attention", GEMM), "cuda")
    assert [run.backend for run in seen.attention] == ["unknown"]
    assert not seen.attention_named


def test_a_graph_replay_shows_only_kernels_and_they_name_the_backend() -> None:
    replayed = [Event(CUDNN, 100 * n, 100 * n + 50, on_device=True) for n in range(3)]
    assert from_events(replayed, "cuda").attention == (AttentionRun("cudnn", None, 3, None, (CUDNN,)),)
    unfused = [Event(name, 100 * n, 100 * n + 50, on_device=True) for n, name in enumerate((GEMM, SOFTMAX, GEMM))]
    assert [run.backend for run in from_events(unfused, "cuda").attention] == ["math"]


def test_a_softmax_over_the_vocabulary_is_not_attention() -> None:
    sampling = [
        Event("aten::bmm", 0, 1, shapes=((12, 1, 64), (12, 64, 9))),
        Event("aten::_softmax", 2, 3, id=1, shapes=((1, 1, 151_936),)),
        Event("aten::bmm", 4, 5, shapes=((12, 1, 9), (12, 9, 64))),
        Event(SOFTMAX, 9, 10, on_device=True, launched_by=1),
    ]
    assert from_events(sampling, "cuda").attention == ()


def test_fewer_kv_heads_are_given_to_the_op_or_copied_before_it() -> None:
    given_fewer = from_events(sdpa_on_cuda("flash_attention", FLASH, key=k), "cuda").attention
    copy = Event("aten::reshape", -10, -5, shapes=((1, 2, 6, 64, 64),))
    copied = from_events([copy, *sdpa_on_cuda("flash_attention", FLASH)], "cuda").attention
    plain = from_events(sdpa_on_cuda("flash_attention", FLASH), "cuda").attention
    assert [run.gqa for run in given_fewer + copied + plain] == ["enable_gqa", "repeat_kv", "none"]


def test_device_time_counts_kernels_and_copies_once_and_no_waiting() -> None:
    zero = 1_796_033_042_292_075_888  # nanoseconds since 1970, as the profiler gives them
    events = [
        Event(GEMM, zero, zero + 1000, on_device=True),
        Event(CUDNN, zero + 500, zero + 1500, on_device=True),  # another stream
        Event("Memcpy DtoD (Device -> Device)", zero + 3000, zero + 3500, on_device=True),
        Event("Stream Sync", zero + 1500, zero + 9000, on_device=True),
    ]
    seen = from_events(events, "cuda")
    assert (seen.device_s, seen.span_s, seen.n_kernels) == (pytest.approx(2e-6), pytest.approx(3.5e-6), 2)
    assert seen.reason is None


def test_kernels_are_the_longest_in_total() -> None:
    events = [Event(f"kernel_{n % 20}", 100 * n, 100 * n + n % 20 + 1, on_device=True) for n in range(40)]
    seen = from_events(events, "cuda", longest=3)
    assert [(t.name, t.count) for t in seen.kernels] == [("kernel_19", 2), ("kernel_18", 2), ("kernel_17", 2)]
    assert seen.kernels[0].total_s == pytest.approx(40e-9)
    assert seen.n_kernels == 40


def test_a_cuda_trace_without_kernels_has_no_device_time_and_says_why() -> None:
    host_only = [event for event in sdpa_on_cuda("cudnn_attention", CUDNN) if not event.on_device]
    seen = from_events(host_only, "cuda")
    assert (seen.device_s, seen.span_s, seen.n_kernels) == (None, None, None)
    assert seen.reason is not None and "CUPTI" in seen.reason
    assert seen.attention[0].kernels == (), "the op is known, and nothing proves it"


def raw(name: str, start: int, end: int, **said: Any) -> SimpleNamespace:
    """One event as the profiler of torch 2.11 hands it out: no activity type, everything a method."""
    known = {"correlation_id": 0, "linked_correlation_id": 0, "start_thread_id": 1, "shapes": [], **said}
    known = {"device_type": DeviceType.CPU, "is_user_annotation": False, **known}
    methods = {"name": name, "start_ns": start, "end_ns": end, **known}
    return SimpleNamespace(**{method: lambda value=value: value for method, value in methods.items()})


def test_ranges_mirrored_onto_the_card_are_no_work_and_launches_are_not_mistaken_for_ops() -> None:
    card = {"device_type": DeviceType.CUDA}
    kineto = [
        raw("aten::_scaled_dot_product_cudnn_attention", 0, 100, correlation_id=7, shapes=[list(q), list(k), list(k)]),
        raw("cudaLaunchKernel", 200, 210, correlation_id=7, linked_correlation_id=7),
        raw("decode step", 0, 300, is_user_annotation=True),
        raw("decode step", 1000, 900_000, is_user_annotation=True, **card),
        raw("Torch-Compiled Region", 0, 300),
        raw("Torch-Compiled Region", 1000, 900_000, **card),
        raw(CUDNN, 1000, 2000, linked_correlation_id=7, **card),
    ]
    result = SimpleNamespace(events=lambda: kineto)
    fake: Any = SimpleNamespace(profiler=SimpleNamespace(kineto_results=result))
    seen = from_events(traces._events(fake), "cuda")
    assert (seen.device_s, seen.n_kernels) == (pytest.approx(1e-6), 1)
    op = "aten::_scaled_dot_product_cudnn_attention"
    assert seen.attention == (AttentionRun("cudnn", op, 1, "enable_gqa", (CUDNN,)),)


def test_a_split_call_counts_once_in_a_graph_replay() -> None:
    combine = "void pytorch_flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<64, 64, 256, 4>>"
    (run,) = from_events([Event(FLASH, 0, 9, on_device=True), Event(combine, 9, 10, on_device=True)], "cuda").attention
    assert (run.backend, run.count, len(run.kernels)) == ("flash", 1, 2)


# --- real calls -------------------------------------------------------------------------------------------------------


def test_the_cpu_runs_its_own_flash_op_and_has_no_device_time() -> None:
    seen = trace(partial(sdpa, *qkv(32, torch.float32, "cpu")), "cpu")
    assert seen.attention == (
        AttentionRun("flash_cpu", "aten::_scaled_dot_product_flash_attention_for_cpu", 1, "none"),
    )
    assert (seen.device_s, seen.reason) == (None, "the CPU is the device")


def test_a_forced_math_kernel_is_seen_as_math() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        seen = trace(partial(sdpa, *qkv(32, torch.float32, "cpu", kv_heads=2)), "cpu")
    assert [(run.backend, run.gqa) for run in seen.attention] == [("math", "enable_gqa")]


@pytest.mark.parametrize(("kv_heads", "gqa"), [(12, "none"), (2, "repeat_kv")])
def test_attention_written_by_hand_is_naive(kv_heads: int, gqa: str) -> None:
    seen = trace(partial(naive, *qkv(32, torch.float32, "cpu", kv_heads=kv_heads)), "cpu")
    assert [(run.backend, run.gqa) for run in seen.attention] == [("naive", gqa)]


@pytest.mark.parametrize(
    ("implementation", "padded", "expected"),
    [
        ("sdpa", False, ("flash_cpu", "enable_gqa")),
        ("sdpa", True, ("flash_cpu", "repeat_kv")),
        ("eager", False, ("naive", "repeat_kv")),
    ],
)
def test_a_models_attention_is_named_layer_by_layer(
    implementation: str, padded: bool, expected: tuple[str, str]
) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation=implementation).eval()
    ids = torch.arange(20).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, : 3 * padded] = 0
    with torch.no_grad():
        seen = trace(lambda: model(ids, attention_mask=mask), "cpu")
    assert [(run.backend, run.gqa, run.count) for run in seen.attention] == [(*expected, 2)]


def test_a_call_without_attention_has_none_and_errors_go_through() -> None:
    assert trace(lambda: torch.ones(4) + 1, "cpu").attention == ()
    with pytest.raises(ZeroDivisionError):
        trace(lambda: 1 / 0, "cpu")
    with pytest.raises(ValueError, match="cpu or cuda, not tpu"):
        trace(lambda: None, "tpu")  # type: ignore[arg-type]


def test_each_of_several_calls_has_its_own_trace() -> None:
    calls = [
        partial(sdpa, *qkv(32, torch.float32, "cpu")),
        lambda: None,
        partial(naive, *qkv(32, torch.float32, "cpu")),
    ]
    first, nothing, second = trace_each(calls, "cpu")
    assert [run.backend for run in first.attention] == ["flash_cpu"]
    assert nothing.attention == ()
    assert [run.backend for run in second.attention] == ["naive"]


def test_the_cards_work_belongs_to_the_call_in_whose_time_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [("traced call 0", 0, 100), ("traced call 1", 200, 300)]
    kernels = [("gemm", 10, 30), ("between", 150, 160), ("gemm", 210, 220), ("softmax", 250, 255)]
    events = [Event(*span) for span in spans] + [Event(*kernel, on_device=True) for kernel in kernels]
    monkeypatch.setattr(traces, "record", lambda call, device: events)
    first, second = trace_each([lambda: None, lambda: None], "cuda")
    assert (first.n_kernels, first.device_s) == (1, pytest.approx(20e-9))
    assert (second.n_kernels, second.device_s) == (2, pytest.approx(15e-9))


@pytest.mark.parametrize(
    ("cuda", "left"),
    [("13.0", {"TEARDOWN_CUPTI": "1"}), ("12.6", {"TEARDOWN_CUPTI": "1"}), ("12.4", {}), ("11.8", {}), (None, {})],
)
def test_the_profiler_lets_go_of_the_card_where_that_is_safe(cuda: str | None, left: dict[str, str]) -> None:
    environ: dict[str, str] = {}
    traces._leave_nothing_behind(environ, cuda)
    assert environ == left
    chosen = {"TEARDOWN_CUPTI": "0"}
    traces._leave_nothing_behind(chosen, cuda)
    assert chosen == {"TEARDOWN_CUPTI": "0"}, "what the user has set stays"


def test_a_profiler_that_does_not_start_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: object) -> None:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES\nat line 1")

    monkeypatch.setattr(traces.profile, "start", refuses)
    seen = trace(lambda: None, "cpu")
    assert seen == Trace(None, None, None, (), (), "the profiler did not start: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")


# --- liars ------------------------------------------------------------------------------------------------------------


def kernel_verdict(seen: list[Trace], capability: tuple[int, int]) -> Word:
    named = sum(t.attention_named for t in seen) / len(seen)
    wrong = sum(len(impossible(t.attention, capability)) for t in seen)
    observed = {"cells with a named kernel": counted(named), "kernels the card can't have": counted(wrong)}
    return judge(CLAIMS["attention.kernel"], observed).word


def test_a_backend_named_from_flags_is_refuted_on_a_card_that_cannot_have_it() -> None:
    assert traces.allowed_backends()["flash"], "allowed is said everywhere, also here without a GPU"
    honest = from_events(sdpa_on_cuda("efficient_attention", EFFICIENT), "cuda")
    liar = replace(honest, attention=tuple(AttentionRun(word, None, 1) for word in traces.allowed_backends()))
    assert kernel_verdict([honest], (7, 5)) is Word.HOLDS
    assert kernel_verdict([liar], (7, 5)) is Word.REFUTED
    assert kernel_verdict([from_events(sdpa_on_cuda("flash_attention", FLASH), "cuda")], (9, 0)) is Word.HOLDS


def test_a_cell_without_a_named_kernel_is_refuted() -> None:
    named = from_events(sdpa_on_cuda("efficient_attention", EFFICIENT), "cuda")
    nothing = from_events([Event(GEMM, 0, 1, on_device=True)], "cuda")
    unknown = from_events(sdpa_on_cuda("quantum_attention", GEMM), "cuda")
    assert kernel_verdict([named, nothing], (7, 5)) is Word.REFUTED
    assert kernel_verdict([named, unknown], (7, 5)) is Word.REFUTED
