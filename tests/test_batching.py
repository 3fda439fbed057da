"""The batching station: what holds on an honest engine is refuted on every liar."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from benchmarks import batching
from benchmarks.claims import CLAIMS
from benchmarks.memory import OutOfMemory, kv_cache_bytes, tensor_bytes
from benchmarks.phases import EagerEngine, Prompt, Request, State, serve
from benchmarks.rigs import random_model
from benchmarks.runs import Run
from benchmarks.timing import Clock, quiet
from benchmarks.verdicts import Word
from benchmarks.workloads import LARGEST_BATCH, Workload
from tests.pretend import Pretend, verdict
from tests.test_graphs import engine_of

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


def test_a_batch_whose_cache_cannot_fit_is_a_row_that_says_so_and_nothing_is_run(
    small: EagerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small.model, "forward", None)
    workload = rows_of(LARGEST_BATCH, 1, 2**22)
    (cell,) = batching.row(small, workload, Clock(), "fp32", sampled=lambda call, warm_up: [call()])
    assert cell.note == "out of memory"
    assert cell.unavailable["wall_s"] == "out of memory"


@pytest.mark.parametrize("peak", [None, OutOfMemory()], ids=["no counter", "out of memory"])
def test_memory_that_was_not_counted_is_never_a_pass(
    peak: OutOfMemory | None, small: EagerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory_word(small, monkeypatch, lambda _: peak) is Word.INCONCLUSIVE


class Leaking(EagerEngine):
    """Each row hears a little of the row before it: a tenth of its logits."""

    share = 0.1

    def _forward(self, *arguments: Any) -> State:
        state = super()._forward(*arguments)
        state.logits = (1 - self.share) * state.logits + self.share * state.logits.roll(1, 0)
        return state


class Loud(Leaking):
    """Each row hears the row before it as well as itself."""

    share = 0.5


class LeakedPosition(EagerEngine):
    """The last position of each row's KV cache is the row's before it."""

    def prefill(self, prompt: Prompt, cache: Any | None = None) -> State:
        state = super().prefill(prompt, cache)
        with torch.inference_mode():
            for layer in state.cache.layers:
                for held in (layer.keys, layer.values):
                    held[:, :, -1] = held[:, :, -1].roll(1, 0).clone()
        return state


class VisiblePad(EagerEngine):
    """The last pad token of each padded row may be looked at."""

    def prefill(self, prompt: Prompt, cache: Any | None = None) -> State:
        assert prompt.mask is not None
        mask = torch.maximum(prompt.mask, prompt.mask.roll(-1, 1))
        mask[:, -1] = 1
        return super().prefill(Prompt(prompt.ids, mask), cache)


UNEQUAL = Workload("unequal", tuple(tuple((7 * r + 13 * i * i) % 8000 for i in range(4 + 3 * r)) for r in range(4)), 8)


@pytest.mark.parametrize("kind", [EagerEngine, Leaking, Loud, LeakedPosition, VisiblePad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
def test_rows_that_hear_each_other_are_refuted(kind: type[EagerEngine], dtype: torch.dtype, small: EagerEngine) -> None:
    eager = small if dtype is torch.float32 else EagerEngine(copy.deepcopy(small.model).to(dtype))
    told = verdict("batching.same_tokens", batching.same_tokens(kind(eager.model), batching.Alone.of(eager, UNEQUAL)))
    assert told.word is (Word.HOLDS if kind is EagerEngine else Word.REFUTED), told.line


@pytest.mark.parametrize("kind", [Leaking, LeakedPosition, VisiblePad])
def test_a_leak_that_changes_no_token_is_seen_in_the_logits(kind: type[EagerEngine], small: EagerEngine) -> None:
    """A model that is sure of its words: one successor of each token stands far above all others."""
    model = copy.deepcopy(small.model)

    def be_sure(_module: Any, args: Any, output: Any) -> None:
        ids = args[0][:, -output.logits.shape[1] :]
        output.logits.scatter_add_(2, (3 * ids[..., None] + 1) % 8000, torch.full((*ids.shape, 1), 100.0))

    model.register_forward_hook(be_sure)
    workload = replace(UNEQUAL, prompts=tuple((*row, 50 + 7 * i) for i, row in enumerate(UNEQUAL.prompts)))
    for engine, word in ((EagerEngine(model), Word.HOLDS), (kind(model), Word.REFUTED)):
        told = verdict(
            "batching.same_tokens", batching.same_tokens(engine, batching.Alone.of(EagerEngine(model), workload))
        )
        assert told.word is word
        assert "4 of 4 rows equal token for token" in told.line and "logits" in told.line


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
    assert set(gone.unavailable) == {"wall_s", "device_s", "host_bound", "figures"}
    assert [cell.id for cell in cells[2]] == ["batching.2", "batching.2.prefill", "batching.2.decode"]


def test_a_row_of_replays_says_how_long_its_steps_took_to_record(small: EagerEngine) -> None:
    ticks = itertools.count()
    clock = Clock(lambda: float(next(ticks)))
    engine = engine_of(copy.deepcopy(small.model), 1)
    engine.built_s = 1.5
    row = batching.row(engine, rows_of(1, 8, 8), clock, "fp32", sampled)[0]
    assert row.figures["built_s"] == 1.5
    assert "built_s" not in batching.row(small, rows_of(1, 8, 8), clock, "fp32", sampled)[0].figures


def test_another_failure_of_a_row_is_no_lack_of_memory(small: EagerEngine) -> None:
    class Broken(EagerEngine):
        def prefill(self, prompt: Any, cache: Any = None) -> State:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        batching.row(Broken(small.model), rows_of(1, 8, 8), Pretend().time.clock, "fp32", sampled)
