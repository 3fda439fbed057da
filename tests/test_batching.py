"""The batching station: what holds on an honest engine is refuted on every liar."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from benchmarks import batching
from benchmarks.claims import CLAIMS, Word
from benchmarks.memory import OutOfMemory, kv_cache_bytes, tensor_bytes
from benchmarks.phases import EagerEngine, Request, State, serve
from benchmarks.rigs import random_model
from benchmarks.runs import Run
from benchmarks.timing import Clock, quiet
from benchmarks.workloads import Workload
from tests.pretend import Pretend, verdict

ROUNDS = 10


def rows_of(batch_size: int, prompt_len: int = 37, output_len: int = 48) -> Workload:
    prompts = tuple(tuple((row + i) % 50 for i in range(prompt_len)) for row in range(batch_size))
    return Workload(f"{batch_size} rows", prompts, output_len)


def served(pretend: Pretend, workload: Workload) -> list[Run]:
    with quiet():
        return [serve(Request(pretend.engine, workload), pretend.time.clock).run for _ in range(ROUNDS)]


def one_after_the_other(rows: int, _cache: object) -> float:
    """Rows don't share the read of the weights."""
    return 0.020 * rows


def a_share_each(rows: int, _cache: object) -> float:
    """Somebody took the batch's time over its size for what a user waits."""
    return 0.020 / rows


SIXTEEN = [
    ("batching.throughput", one_after_the_other),
    ("batching.latency", one_after_the_other),
    ("batching.tpot", one_after_the_other),
    ("batching.nobody_gets_sixteenth", a_share_each),
]


def sixteen_over_one(pretend: Pretend) -> dict[str, Any]:
    return batching.sixteen_over_one(served(pretend, rows_of(1)), served(pretend, rows_of(16)))


def test_an_engine_whose_rows_share_each_step_upholds_all_four() -> None:
    observed = sixteen_over_one(Pretend(prefill_s=lambda rows, new, cached: 0.020))
    assert {id for id, _ in SIXTEEN} == set(observed)
    for id, estimate in observed.items():
        assert verdict(id, estimate).word is Word.HOLDS, verdict(id, estimate).line


@pytest.mark.parametrize(("claim_id", "lie"), SIXTEEN, ids=[id for id, _ in SIXTEEN])
def test_an_engine_that_lies_about_its_steps_is_refuted(claim_id: str, lie: Callable[[int, object], float]) -> None:
    observed = sixteen_over_one(Pretend(prefill_s=lambda rows, new, cached: 0.020, step_s=lie))[claim_id]
    assert verdict(claim_id, observed).word is Word.REFUTED


def test_a_batch_that_takes_two_fifths_longer_is_not_hardly_slower() -> None:
    slower = Pretend(
        prefill_s=lambda rows, new, cached: 0.020, step_s=lambda rows, cache: 0.020 * (1 + (rows - 1) / 15 * 0.4)
    )
    observed = sixteen_over_one(slower)
    assert verdict("batching.latency", observed["batching.latency"]).word is Word.REFUTED
    assert verdict("batching.tpot", observed["batching.tpot"]).word is Word.REFUTED
    assert verdict("batching.throughput", observed["batching.throughput"]).word is Word.HOLDS


@pytest.mark.parametrize(
    ("prefill_s", "word"),
    [
        (lambda rows, new, cached: 0.010 + 0.0001 * rows * new, Word.HOLDS),
        (lambda rows, new, cached: 0.010 + 0.0001 * new, Word.REFUTED),  # only the first prompt is read
    ],
    ids=["honest", "one prompt read"],
)
def test_sixteen_prompts_take_longer_to_read(prefill_s: Callable[[int, int, int], float], word: Word) -> None:
    pretend = Pretend(prefill_s=prefill_s)
    one, sixteen = (served(pretend, rows_of(n, 512, 1)) for n in (1, 16))
    assert verdict("batching.ttft_grows", batching.ttft_grows(one, sixteen)["batching.ttft_grows"]).word is word


# Memory and tokens, on a real small model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> EagerEngine:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("qwen2", vocab_size=8192, num_key_value_heads=2, max_position_embeddings=512, **shape)
    return EagerEngine(random_model(config, torch.float32, "cpu"))


def memory_word(
    small: EagerEngine, monkeypatch: pytest.MonkeyPatch, peak: Callable[[Workload], int | OutOfMemory | None]
) -> Word:
    monkeypatch.setattr(batching, "peak_bytes", lambda engine, workload: peak(workload))
    return verdict("batching.memory", batching.memory_growth(small, rows_of(1, 8, 8), rows_of(16, 8, 8))).word


def kv_bytes(small: EagerEngine, workload: Workload) -> int:
    return kv_cache_bytes(small.model.config, workload.batch_size * (8 + 8 - 1), 4)


def test_kv_cache_and_some_activations_are_little_memory(small: EagerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_word(small, monkeypatch, lambda w: int(1.2 * kv_bytes(small, w))) is Word.HOLDS


def test_a_cache_that_sets_aside_all_positions_for_each_row_is_refuted(
    small: EagerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = kv_cache_bytes(small.model.config, 512, 4)
    assert 15 * whole > 0.15 * tensor_bytes(small.model)
    assert memory_word(small, monkeypatch, lambda w: w.batch_size * whole) is Word.REFUTED


def test_a_counter_that_sees_less_than_the_cache_itself_is_refuted(
    small: EagerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory_word(small, monkeypatch, lambda w: kv_bytes(small, w) // 2) is Word.REFUTED


@pytest.mark.parametrize("peak", [None, OutOfMemory()], ids=["no counter", "out of memory"])
def test_memory_that_was_not_counted_is_never_a_pass(
    peak: OutOfMemory | None, small: EagerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory_word(small, monkeypatch, lambda _: peak) is Word.INCONCLUSIVE


class Leaking(EagerEngine):
    """Each row hears a little of the row before it."""

    def step(self, state: State, tokens: torch.Tensor | None = None) -> State:
        state = super().step(state, tokens)
        state.logits = state.logits + 0.5 * state.logits.roll(1, 0) * (state.logits.shape[0] > 1)
        return state


@pytest.mark.parametrize(("kind", "word"), [(EagerEngine, Word.HOLDS), (Leaking, Word.REFUTED)])
def test_rows_that_hear_each_other_are_refuted(kind: type[EagerEngine], word: Word, small: EagerEngine) -> None:
    prompts = tuple(tuple((7 * row + 13 * i * i) % 8000 for i in range(4 + 3 * row)) for row in range(4))
    observed = batching.same_tokens(kind(small.model), Workload("unequal", prompts, 8))
    assert verdict("batching.same_tokens", observed).word is word


def test_every_claim_of_the_station_has_met_its_liar_here() -> None:
    met = {id for id, _ in SIXTEEN} | {"batching.ttft_grows", "batching.memory", "batching.same_tokens"}
    assert met == {id for id, claim in CLAIMS.items() if claim.station == "batching"}


# Rows -----------------------------------------------------------------------------------------------------------------


def sampled(call: Callable[[], Any], warm_up: Callable[[], object]) -> list[Any]:
    warm_up()
    return [call() for _ in range(3)]


class Full(EagerEngine):
    """A card on which more than two rows don't fit."""

    def prefill(self, prompt: Any, cache: Any = None) -> State:
        if prompt.ids.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().prefill(prompt, cache)


def test_a_row_that_does_not_fit_says_so_and_the_others_are_measured(small: EagerEngine) -> None:
    ticks = itertools.count()
    clock = Clock(lambda: float(next(ticks)))
    full = Full(small.model)
    cells = {n: batching.row(full, rows_of(n, 8, 8), clock, "fp32", sampled) for n in (1, 2, 4, 1)}
    (gone,) = cells[4]
    assert (gone.id, gone.phase, gone.note, gone.wall_s) == ("batching.4", "row", "out of memory", None)
    assert set(gone.unavailable) == {"wall_s", "device_s", "figures"}
    assert [cell.id for cell in cells[2]] == ["batching.2", "batching.2.prefill", "batching.2.decode"]


def test_another_failure_of_a_row_is_no_lack_of_memory(small: EagerEngine) -> None:
    class Broken(EagerEngine):
        def prefill(self, prompt: Any, cache: Any = None) -> State:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        batching.row(Broken(small.model), rows_of(1, 8, 8), Pretend().time.clock, "fp32", sampled)
