"""The bigger-GPU station: honest machines uphold its claims, and every liar is refuted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from benchmarks import bigger_gpu
from benchmarks.bigger_gpu import KV_CACHE, REPLAYS, WEIGHTS, Pair, Published
from benchmarks.decoder import TorchOps, read
from benchmarks.estimates import unusable
from benchmarks.graphs import GraphEngine, static_engine
from benchmarks.rigs import random_model
from benchmarks.roofline import Roofline
from benchmarks.runs import Run
from benchmarks.verdicts import Word
from benchmarks.workloads import Workload
from tests.pretend import verdict

H200_BYTES_PER_S = 4.26e12


def runs(tpot_s: float, rounds: int = 10, wobble: float = 0.01) -> list[Run]:
    """Requests whose steps take so long, a little more in every other round."""
    paces = [tpot_s * (1 + wobble * (n % 2)) for n in range(rounds)]
    return [Run(1, 37, tuple(itertools.accumulate([0.02, *[pace] * 16]))) for pace in paces]


# The card is idle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tpot_s", "word"),
    [
        (0.018, Word.HOLDS),
        (0.007, Word.HOLDS),
        (0.006, Word.INCONCLUSIVE),
        (0.004, Word.REFUTED),
        (0.003, Word.REFUTED),
    ],
)
def test_a_card_that_works_three_milliseconds_of_a_step_is_idle_in_longer_ones(tpot_s: float, word: Word) -> None:
    assert verdict("bigger_gpu.card_is_idle", bigger_gpu.idle_share(runs(tpot_s), [0.003, 0.0031, 0.003])).word is word


def test_a_card_busier_than_the_clock_says_is_not_idle_by_less_than_nothing() -> None:
    seen = bigger_gpu.idle_share(runs(0.003), [0.0033])
    assert (seen.value, seen.low) == (0.0, 0.0)
    assert verdict("bigger_gpu.card_is_idle", seen).word is Word.REFUTED


def test_the_idle_share_is_that_of_the_middle_round() -> None:
    seen = bigger_gpu.idle_share(runs(0.02, wobble=0), [0.001, 0.003, 0.009])
    assert seen.value == pytest.approx(0.85)
    assert set(seen.raw) == {"busy_s", "tpot_s"}


@pytest.mark.parametrize(("stock", "device_s"), [(runs(0.02), []), ([], [0.003]), ([Run(1, 37, (1.0, 1.0))], [0.003])])
def test_without_a_trace_or_a_clock_no_share_is_claimed(stock: list[Run], device_s: list[float]) -> None:
    assert verdict("bigger_gpu.card_is_idle", bigger_gpu.idle_share(stock, device_s)).word is Word.INCONCLUSIVE


# Software first -------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1.5))
def test_a_doubled_card_at_most_doubles(busy_share: float) -> None:
    assert 1 <= bigger_gpu.doubled_card(busy_share) <= 2


def test_amdahl_by_hand() -> None:
    assert bigger_gpu.doubled_card(0.0) == 1
    assert bigger_gpu.doubled_card(0.5) == pytest.approx(4 / 3)
    assert bigger_gpu.doubled_card(1.0) == 2


@pytest.mark.parametrize(
    ("stock_s", "graph_s", "word"),
    [
        (0.018, 0.0012, Word.HOLDS),
        (0.018, 0.018, Word.REFUTED),  # a graph that gains nothing
        (0.018, 0.017, Word.REFUTED),  # ... or less than the doubled card's 9 %
        (0.003, 0.0028, Word.REFUTED),  # a card that always worked gains twice when doubled
    ],
)
def test_software_comes_first_where_it_gains_more_than_a_doubled_card(
    stock_s: float, graph_s: float, word: Word
) -> None:
    seen = bigger_gpu.software_first(runs(stock_s), runs(graph_s), [0.003])
    assert verdict("bigger_gpu.software_first", seen).word is word


def test_both_gains_are_told() -> None:
    seen = bigger_gpu.software_first(runs(0.018, wobble=0), runs(0.0012, wobble=0), [0.003])
    assert "15x as fast" in seen.note and "1.09x at most" in seen.note
    assert seen.value == pytest.approx(15 / (1 / (1 - 1 / 12)))


@pytest.mark.parametrize("device_s", [[], [0.003]])
def test_no_gain_is_claimed_of_a_clock_that_stood_still_or_without_a_trace(device_s: list[float]) -> None:
    still = [Run(1, 37, (1.0, 1.0))] * 10 if device_s else runs(0.02)
    seen = bigger_gpu.software_first(still, runs(0.001), device_s)
    assert verdict("bigger_gpu.software_first", seen).word is Word.INCONCLUSIVE


# Bandwidth is not speed -----------------------------------------------------------------------------------------------


def test_the_t4s_figures_are_the_published_ones() -> None:
    assert Published.t4() == Published(tpot_s=0.0378, bandwidth_bytes_per_s=320e9)


@pytest.mark.parametrize(
    ("tpot_s", "word"),
    [(0.018, Word.HOLDS), (0.0378, Word.HOLDS), (0.0378 / 13.3, Word.REFUTED), (0.0012, Word.REFUTED)],
)
def test_bandwidth_that_arrives_as_speed_refutes_the_claim(tpot_s: float, word: Word) -> None:
    seen = bigger_gpu.speed_over_bandwidth(runs(tpot_s), H200_BYTES_PER_S, Published.t4())
    assert verdict("bigger_gpu.bandwidth_is_not_speed", seen).word is word
    assert "13.3x the bandwidth" in seen.note


def test_a_card_is_compared_with_a_t4_only_where_it_is_bigger_and_runs_the_same_software() -> None:
    t4 = Published.t4()
    seen = bigger_gpu.speed_over_bandwidth(runs(0.018), H200_BYTES_PER_S, t4)
    assert bigger_gpu.no_comparison("eager", H200_BYTES_PER_S, t4, seen) is None
    other_software = bigger_gpu.no_comparison("graph", H200_BYTES_PER_S, t4, seen)
    assert other_software is not None and "stock engine" in other_software and "13.3x" in other_software
    no_bigger = bigger_gpu.no_comparison("eager", 250e9, t4, seen)
    assert no_bigger is not None and "0.78x" in no_bigger


def test_the_table_shows_both_ratios_and_whose_they_are() -> None:
    asked = Workload("1 x 37 tokens", (tuple(range(1, 38)),), 17)
    seen = bigger_gpu.speed_over_bandwidth(runs(0.0189, wobble=0), 3.2e12, Published.t4())
    cell = bigger_gpu.t4_cell("eager", "fp16", asked, runs(0.0189, wobble=0), seen)
    assert cell.figures == pytest.approx({"tpot_s": 0.0189, "bandwidth_ratio": 10.0, "speed_ratio": 2.0})
    assert "published" in cell.note
    broken = bigger_gpu.t4_cell("eager", "fp16", asked, runs(0.0189), unusable("the clock stood still"))
    assert broken.figures == {}
    assert broken.unavailable["figures"] == "the clock stood still"


# Memory-bound when fed ------------------------------------------------------------------------------------------------

ONE_GB_S = 1e9 / H200_BYTES_PER_S


def steps_s(base_s: float, rounds: int = 10) -> list[float]:
    return [base_s * (1 + 0.002 * (n % 3)) for n in range(rounds)]


def fed(weights: float, cache: float) -> Word:
    """The verdict where a GB costs so many times what a copy of it costs."""
    seen = {
        what: bigger_gpu.byte_cost(
            steps_s(0.001), steps_s(0.001 + cost * ONE_GB_S), 10**9, bandwidth_bytes_per_s=H200_BYTES_PER_S
        )
        for what, cost in ((WEIGHTS, weights), (KV_CACHE, cache))
    }
    return verdict("bigger_gpu.memory_bound_when_fed", seen).word


@pytest.mark.parametrize(
    ("weights", "cache", "word"),
    [
        (1.0, 1.1, Word.HOLDS),
        (1.0, 1.6, Word.REFUTED),
        (2.0, 1.0, Word.REFUTED),
        (0.5, 1.0, Word.REFUTED),  # faster than memory: then it isn't memory that was read
        (1.0, 0.0, Word.REFUTED),  # a step that doesn't read its cache
        (-1.0, 1.0, Word.REFUTED),
        (1.25, 1.0, Word.INCONCLUSIVE),
    ],
)
def test_a_step_is_bound_by_memory_where_a_byte_costs_what_it_costs_a_copy(
    weights: float, cache: float, word: Word
) -> None:
    assert fed(weights, cache) is word


def test_what_a_step_costs_without_reading_does_not_count() -> None:
    slow, quick = (
        bigger_gpu.byte_cost([base] * 10, [base + ONE_GB_S] * 10, 10**9, H200_BYTES_PER_S) for base in (0.1, 0.001)
    )
    assert slow.value == pytest.approx(1.0) and quick.value == pytest.approx(1.0)
    assert "1 GB more took 234.7 us more" in quick.note


@pytest.mark.parametrize(("large", "more"), [([0.2], 0), ([0.2], -5), ([0.2, 0.3], 10)])
def test_steps_that_read_no_more_are_no_pair(large: list[float], more: int) -> None:
    with pytest.raises(ValueError, match="reads more"):
        bigger_gpu.byte_cost([0.1], large, more, 1e9)


def test_without_rounds_no_byte_has_a_price() -> None:
    assert bigger_gpu.byte_cost([], [], 10, 1e9).problem == "no rounds were measured"


def unrecorded(step: object) -> tuple[torch.Tensor, object]:
    assert callable(step)
    return step(), step


def engine(layers: int, batch_size: int, cache_len: int) -> GraphEngine:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
    model = random_model(AutoConfig.for_model("qwen2", **shape), torch.float32, "cpu")
    decoder = read(model, cache_len)
    return static_engine(model, decoder, TorchOps(), batch_size, cache_len, (1,), unrecorded)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    short = engine(1, 2, 64)
    return {WEIGHTS: Pair(short, engine(3, 2, 64)), KV_CACHE: Pair(short, engine(1, 2, 128))}


def test_a_burst_of_replays_never_runs_past_the_end_of_the_cache(pairs: dict[str, Pair]) -> None:
    for name, side in bigger_gpu.sides(pairs).items():
        subject = bigger_gpu.steps(pairs)[name]
        assert side() > 0
        assert subject.held.lengths.tolist() == [subject.cache_len - 1] * 2
    with pytest.raises(ValueError, match=f"shorter than a burst of {REPLAYS}"):
        bigger_gpu.replay_s(engine(1, 1, 32))


def test_pairs_differ_by_the_bytes_of_two_layers_and_of_64_positions(pairs: dict[str, Pair]) -> None:
    layer = 2 * 32 * 32 + 32 + 2 * (16 * 32 + 16) + 3 * 48 * 32 + 2 * 32
    held = 64 - 1 - REPLAYS + REPLAYS // 2 + 1
    assert pairs[WEIGHTS].more_bytes == 4 * (2 * layer + 2 * 2 * 2 * 16 * held)
    assert pairs[KV_CACHE].more_bytes == 4 * 2 * 2 * 16 * 64


def test_the_claims_figures_come_from_the_rounds_of_their_own_pair(pairs: dict[str, Pair]) -> None:
    prices = {WEIGHTS: 1.0, KV_CACHE: 2.0}
    took: dict[str, Sequence[float]] = {}
    for what, price in prices.items():
        took[f"{what}, less"] = [0.1] * 10
        took[f"{what}, more"] = [0.1 + price * pairs[what].more_bytes / 1e9] * 10
    seen = bigger_gpu.memory_bound(pairs, took, 1e9)
    assert {what: found.value for what, found in seen.items()} == pytest.approx(prices)
    cells = bigger_gpu.fed_cells(pairs, took, Roofline(1e9, 1e12, "made up"), "fp32")
    assert len({cell.id for cell in cells}) == len(cells) == 4
    assert all(cell.figures["share_of_floor"] == pytest.approx(cell.bytes["read"] / 1e9 / cell.device_s[0])  # type: ignore[index]
               for cell in cells)  # fmt: skip


def test_steps_of_different_kernels_are_not_compared(pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    took = {side: [0.1] * 10 for side in bigger_gpu.steps(pairs)}
    monkeypatch.setattr(GraphEngine, "kernels", property(lambda self: "fused" if self.cache_len == 128 else "torch"))
    monkeypatch.setattr(pairs[KV_CACHE].small, "note", "no Triton here")
    seen = bigger_gpu.memory_bound({KV_CACHE: pairs[KV_CACHE]}, took, 1e9)[KV_CACHE]
    assert seen.problem == "the two steps are made of different kernels, torch and fused: no Triton here"


def test_a_machine_without_device_times_has_no_busy_steps() -> None:
    eager = engine(1, 1, 64).eager
    assert bigger_gpu.stock_step_s(eager, Workload("4 tokens", ((1, 2, 3, 4),), 2)) == []
