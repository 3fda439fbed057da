"""The attention station's subject: exactness, FLOPs, growth and the table, each with a liar that is refuted."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import attention
from benchmarks.attention import (
    FORMULAS,
    HEAD_DIM,
    HEADS,
    Attention,
    error_ratio,
    expected_flops,
    flops,
    growth_per_doubling,
    measure_row,
    naive,
    next_launches,
    qkv,
    sdpa,
)
from benchmarks.claims import CLAIMS
from benchmarks.estimates import counted, paired_ratio
from benchmarks.timing import Clock
from benchmarks.traces import AttentionRun, Trace
from benchmarks.verdicts import Verdict, Word, judge

quickly = settings(deadline=None, max_examples=50)
CPU_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def exactness(attend: Attention, dtype: torch.dtype = torch.float32, kv_heads: int = HEADS) -> Verdict:
    return judge(CLAIMS["attention.exact"], counted(error_ratio(128, dtype, "cpu", attend, kv_heads)))


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [12, 2, 1])
def test_sdpa_is_as_exact_as_naive_attention_of_its_precision(dtype: torch.dtype, kv_heads: int) -> None:
    assert exactness(sdpa, dtype, kv_heads).word is Word.HOLDS


def test_naive_attention_is_its_own_reference_and_an_exact_one_has_no_error() -> None:
    def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return naive(query.double(), key.double(), value.double())

    assert error_ratio(64, torch.float32, "cpu", naive) == pytest.approx(1)
    assert error_ratio(64, torch.float32, "cpu", exact) < 1e-6


def test_a_reference_without_error_neither_divides_by_zero_nor_accuses() -> None:
    """One key: softmax is 1 and the output is the value itself, exactly, in any precision."""
    assert error_ratio(1, torch.float16, "cpu") == 0.0


def test_float64_has_no_wider_judge() -> None:
    with pytest.raises(ValueError, match="float32 or narrower"):
        error_ratio(16, torch.float64, "cpu")


def test_a_liar_that_skips_half_of_the_keys_is_refuted() -> None:
    def liar(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return sdpa(query, key[:, :, ::2], value[:, :, ::2])

    assert exactness(liar).word is Word.REFUTED
    assert exactness(liar, torch.bfloat16).word is Word.REFUTED


def test_a_liar_that_repeats_heads_in_the_wrong_order_is_refuted() -> None:
    def liar(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        groups = HEADS // key.shape[1]
        return sdpa(query, key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1))

    assert exactness(liar, kv_heads=2).word is Word.REFUTED
    assert exactness(liar, kv_heads=1).word is Word.HOLDS, "one KV head has no order to get wrong"


def test_a_liar_that_masks_the_future_is_refuted() -> None:
    assert exactness(partial(F.scaled_dot_product_attention, is_causal=True)).word is Word.REFUTED


def test_a_liar_that_gives_nan_never_holds_though_it_is_right_without_grouped_heads() -> None:
    def liar(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return sdpa(query, key, value) * (1.0 if key.shape[1] == HEADS else float("nan"))

    verdict = judge(CLAIMS["attention.exact"], attention.exactness(torch.float32, "cpu", liar))
    assert verdict.word is Word.INCONCLUSIVE
    assert "nan" in verdict.line


def test_tensors_are_the_same_for_a_seed_and_bad_sizes_are_named() -> None:
    first, again = qkv(8, torch.float16, "cpu", seed=3), qkv(8, torch.float16, "cpu", seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert [tuple(t.shape) for t in qkv(8, torch.float16, "cpu", kv_heads=2)] == [
        (1, 12, 8, 64),
        (1, 2, 8, 64),
        (1, 2, 8, 64),
    ]
    with pytest.raises(ValueError, match="divisor of 12"):
        qkv(8, torch.float16, "cpu", kv_heads=5)


# --- FLOPs ------------------------------------------------------------------------------------------------------------


def flops_verdict(growth: float, equality: float) -> Word:
    observed = {"growth per doubling": counted(growth), "SDPA over naive": counted(equality)}
    return judge(CLAIMS["attention.flops"], observed).word


@pytest.mark.parametrize("kv_heads", [12, 2])
@pytest.mark.parametrize("length", [64, 128])
def test_naive_fused_and_math_attention_count_the_closed_form(length: int, kv_heads: int) -> None:
    inputs = qkv(length, torch.float32, "cpu", kv_heads=kv_heads)
    expected = expected_flops(1, HEADS, length, HEAD_DIM)
    assert flops(partial(naive, *inputs)) == expected
    assert flops(partial(sdpa, *inputs)) == expected
    with sdpa_kernel(SDPBackend.MATH):
        assert flops(partial(sdpa, *inputs)) == expected


def test_the_closed_form_gives_the_articles_figures() -> None:
    assert expected_flops(1, 12, 512, 64) / 1e9 == pytest.approx(0.81, abs=0.005)
    assert expected_flops(1, 12, 4096, 64) / 1e9 == pytest.approx(51.5, abs=0.05)


def test_the_flops_claim_holds_for_what_is_counted_here() -> None:
    counts = {length: flops(partial(sdpa, *qkv(length, torch.float32, "cpu"))) for length in (64, 128, 256)}
    plain = flops(partial(naive, *qkv(256, torch.float32, "cpu")))
    assert flops_verdict(growth_per_doubling(counts), counts[256] / plain) is Word.HOLDS


def test_an_attention_op_without_a_formula_is_an_error_that_names_it_and_never_zero() -> None:
    without = {op: formula for op, formula in FORMULAS.items() if op is not CPU_OP}
    with pytest.raises(LookupError, match="_scaled_dot_product_flash_attention_for_cpu"):
        flops(partial(sdpa, *qkv(16, torch.float32, "cpu")), without)
    assert flops(partial(naive, *qkv(16, torch.float32, "cpu")), without) > 0


def test_a_liar_that_halves_its_flops_for_a_causal_mask_is_refuted() -> None:
    inputs = qkv(64, torch.float32, "cpu")
    halved = FORMULAS | {CPU_OP: lambda *shapes, **_: FORMULAS[CPU_OP](*shapes) // 2}  # type: ignore[operator]
    ratio = flops(partial(sdpa, *inputs), halved) / flops(partial(naive, *inputs))
    assert ratio == 0.5
    assert flops_verdict(4.0, ratio) is Word.REFUTED


def test_a_liar_whose_math_grows_linearly_is_refuted() -> None:
    def window(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return sdpa(query, key[:, :, -32:], value[:, :, -32:])

    counts = {length: flops(partial(window, *qkv(length, torch.float32, "cpu"))) for length in (64, 128)}
    assert flops_verdict(growth_per_doubling(counts), 1.0) is Word.REFUTED


# --- growth -----------------------------------------------------------------------------------------------------------


@quickly
@given(st.integers(1, 20), st.floats(0.5, 8), st.floats(1e-6, 1e12), st.permutations([1, 2, 4, 8]))
def test_growth_finds_the_factor_of_a_power_law_in_any_order(
    start: int, factor: float, scale: float, steps: list[int]
) -> None:
    doublings = {1: 0, 2: 1, 4: 2, 8: 3}
    values = {start * step: scale * factor ** doublings[step] for step in steps}
    assert growth_per_doubling(values) == pytest.approx(factor)


def test_growth_per_doubling_is_right_where_the_lengths_do_not_double() -> None:
    assert growth_per_doubling({100: 10.0, 300: 90.0}) == pytest.approx(4)


@pytest.mark.parametrize("values", [{}, {512: 1.0}, {512: 0.0, 1024: 1.0}, {512: 1.0, 1024: float("nan")}])
def test_growth_of_too_little_is_refused(values: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="growth needs"):
        growth_per_doubling(values)


MIB = 2**20
T4_NAIVE = {512: 12.8 * MIB, 4096: 774 * MIB}
T4_SDPA = {512: 0.8 * MIB, 4096: 6.0 * MIB}


def sdpa_memory(subject: dict[int, float]) -> Word:
    observed = {
        "growth per doubling": counted(growth_per_doubling(subject)),
        "naive over SDPA at 4,096": counted(T4_NAIVE[4096] / subject[4096]),
    }
    return judge(CLAIMS["attention.sdpa_memory"], observed).word


def test_the_articles_bytes_are_two_score_matrices_and_an_output() -> None:
    for length, seen in T4_NAIVE.items():
        scores, output = 2 * HEADS * length**2, 2 * HEADS * length * HEAD_DIM
        assert 2 * scores + output == pytest.approx(seen, rel=0.01)
        assert output == pytest.approx(T4_SDPA[length], rel=0.07)


def test_memory_liars_are_refuted() -> None:
    """Naive attention that doesn't keep its scores, and SDPA that does (the math fallback)."""
    assert judge(CLAIMS["attention.naive_memory"], counted(growth_per_doubling(T4_NAIVE))).word is Word.HOLDS
    assert judge(CLAIMS["attention.naive_memory"], counted(growth_per_doubling(T4_SDPA))).word is Word.REFUTED
    assert sdpa_memory(T4_SDPA) is Word.HOLDS
    assert sdpa_memory(T4_NAIVE) is Word.REFUTED


def test_a_liar_whose_time_is_linear_is_refuted() -> None:
    claim, rounds = CLAIMS["attention.time_quadratic"], range(10)
    quadratic = paired_ratio([3.9e-4 + n * 1e-6 for n in rounds], [1e-4 + n * 1e-7 for n in rounds])
    linear = paired_ratio([2.0e-4 + n * 1e-6 for n in rounds], [1e-4 + n * 1e-7 for n in rounds])
    assert judge(claim, quadratic).word is Word.HOLDS
    assert judge(claim, linear).word is Word.REFUTED


# --- time on the card -------------------------------------------------------------------------------------------------


@quickly
@given(st.integers(1, 999), st.floats(0, 2e-3, exclude_max=True))
def test_a_batch_that_was_too_short_gets_longer_within_bounds(launches: int, seconds: float) -> None:
    more = next_launches(launches, seconds)
    assert min(2 * launches, attention.MOST_LAUNCHES) <= more <= attention.MOST_LAUNCHES


def test_a_device_timer_replays_one_batch_that_lasts_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []

    def fake_capture(call: object, launches: int) -> object:
        captured.append(launches)
        return lambda: launches

    monkeypatch.setattr(attention, "_captured", fake_capture)
    monkeypatch.setattr(attention, "_replay_s", lambda replay: replay() * 1e-4)
    timer = attention.device_timer(lambda: None)
    assert (timer(), timer()) == (pytest.approx(1e-4), pytest.approx(1e-4))
    assert captured[-1] * 1e-4 >= attention.SHORTEST_BATCH_S
    assert len(captured) == 2, "the second batch was chosen from the first, and readings don't capture"


def test_the_cpu_has_no_device_seconds() -> None:
    assert attention.device_seconds(lambda: None, "cpu") is None


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_row_on_the_cpu_has_flops_time_and_kernel_and_no_bytes() -> None:
    row = measure_row(64, torch.float32, "cpu", Clock())
    assert row.naive_flops == row.sdpa_flops == expected_flops(1, HEADS, 64, HEAD_DIM)
    assert row.naive_s and row.sdpa_s
    assert (row.naive_bytes, row.sdpa_bytes, row.naive_device_s, row.sdpa_device_s) == (None,) * 4
    assert (row.kernel, row.note) == ("flash_cpu", "bytes and device time need a GPU")


def test_a_side_that_does_not_fit_is_out_of_memory_and_the_other_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = 2 * 4 * HEADS * 256**2
    monkeypatch.setattr(attention, "fits", lambda needed, device: needed < scores)
    row = measure_row(256, torch.float32, "cpu", Clock())
    assert "naive: out of memory" in row.note
    assert (row.naive_flops, row.naive_s) == (None, None)
    assert row.sdpa_flops and row.sdpa_s and row.kernel == "flash_cpu"


def test_running_out_in_the_middle_is_a_note_and_no_abort() -> None:
    def hungry(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")

    row = measure_row(16, torch.float32, "cpu", Clock(), subject=hungry)
    assert "SDPA: out of memory" in row.note
    assert (row.sdpa_flops, row.sdpa_s, row.kernel) == (None, None, None)
    assert row.naive_flops


def test_the_row_names_what_ran_for_its_subject() -> None:
    row = measure_row(16, torch.float32, "cpu", Clock(), subject=naive)
    assert row.kernel == "naive"


# --- which kernel ran -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "capability", "word"),
    [
        ("flash_cpu", None, Word.HOLDS),
        ("flash", None, Word.REFUTED),
        ("efficient", None, Word.REFUTED),
        ("cudnn", None, Word.REFUTED),
        ("flash", (7, 5), Word.REFUTED),
        ("efficient", (7, 5), Word.HOLDS),
        ("flash", (9, 0), Word.HOLDS),
    ],
)
def test_a_trace_that_names_what_the_device_cannot_have_run_is_refuted(
    backend: str, capability: tuple[int, int] | None, word: Word
) -> None:
    traced = Trace(None, None, None, (), (AttentionRun(backend, None, 1),))
    assert judge(CLAIMS["attention.kernel"], attention.kernels_named({"a": traced}, capability)).word is word
