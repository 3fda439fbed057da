"""Quantization: bytes by module against computed ones, quality figures, room for chats, and the liars of each claim."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import quantization
from benchmarks.claims import CLAIMS
from benchmarks.estimates import FULL_LOOK, counted
from benchmarks.memory import OutOfMemory
from benchmarks.phases import EagerEngine, Prompt, decode
from benchmarks.quantization import Quality, Room, bytes_explained, expected_bytes, module_bytes
from benchmarks.rigs import Loader, Rig, Source
from benchmarks.runs import Run
from benchmarks.timing import Clock
from benchmarks.verdicts import Word, judge
from benchmarks.workloads import Workload

SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
QUICK = settings(deadline=None, max_examples=20)


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % 500 for letter in text]

    def decode(self, token_ids: Any) -> str:
        return "".join(f"<{token}>" for token in token_ids)


def loader(*, tied: bool = True, dtype: str = "float32") -> Loader:
    source = Source("tiny", config=SHAPE | {"tie_word_embeddings": tied})
    return Loader(Rig("own", source, None, "random", dtype, "cpu"))


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """One tiny model in every precision; nothing may change them."""
    own = loader()
    return {name or "fp": own.model(own.rig.target, name) for name in (None, "int8", "nf4")}


@pytest.fixture(scope="module")
def engines(models: dict[str, Any]) -> dict[str, EagerEngine]:
    return {name: EagerEngine(model) for name, model in models.items()}


def total(modules: tuple[quantization.ModuleBytes, ...]) -> int:
    return sum(m.bytes for m in modules)


# Bytes ----------------------------------------------------------------------------------------------------------------


GPT2 = {"model_type": "gpt2", "vocab_size": 128, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64}


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_linears_that_are_written_as_convolutions_are_counted_too(precision: str) -> None:
    own = Loader(Rig("own", Source("gpt2", config=GPT2), None, "random", "float32", "cpu"))
    reference, model = own.model(own.rig.target), own.model(own.rig.target, precision)
    bnb = [m for m in module_bytes(model) if m.kind == precision]
    assert {m.name.split(".")[-1] for m in bnb} == {"c_attn", "c_proj", "c_fc"}
    (explained,) = bytes_explained(reference, {precision: model}).values()
    assert explained.value == 0, explained.note


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_byte_is_explained_before_and_after_the_first_forward(tied: bool, dtype: str) -> None:
    own = loader(tied=tied, dtype=dtype)
    reference = own.model(own.rig.target)
    for precision in ("int8", "nf4"):
        model = own.model(own.rig.target, precision)
        fresh = total(module_bytes(model))
        assert fresh == total(expected_bytes(reference, precision))
        model(torch.arange(9)[None])  # int8's scales move from the weight to the module's state
        seen = quantization.unexplained(module_bytes(model), expected_bytes(reference, precision))
        assert (total(module_bytes(model)), seen.value) == (fresh, 0.0)


def test_constants_are_counted_that_the_librarys_footprint_misses(models: dict[str, Any]) -> None:
    rows = sum(m.shape[0] for m in module_bytes(models["int8"]) if m.kind == "int8" and m.shape)
    assert total(module_bytes(models["int8"])) - models["int8"].get_memory_footprint() == 4 * rows
    missed = total(module_bytes(models["nf4"])) - models["nf4"].get_memory_footprint()
    linears = [m for m in module_bytes(models["nf4"]) if m.kind == "nf4"]
    assert missed == sum(4 * m.shape[0] * m.shape[1] // 64 + 64 for m in linears if m.shape)


def test_tied_weights_count_once_and_the_head_stays_wide(models: dict[str, Any]) -> None:
    by_name = {m.name: m for m in module_bytes(models["nf4"])}
    assert by_name["model.embed_tokens"].bytes == 512 * 128 * 4
    assert (by_name["lm_head"].kind, by_name["lm_head"].bytes) == ("Linear", 0)


def test_a_model_without_data_is_refused() -> None:
    with pytest.raises(ValueError, match="meta device"):
        module_bytes(torch.nn.Linear(2, 2, device="meta"))


def test_a_precision_without_a_formula_is_refused(models: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="int8 or nf4, not fp4"):
        expected_bytes(models["fp"], "fp4")


def test_bytes_are_explained_by_a_true_quantization_and_by_no_liar(models: dict[str, Any]) -> None:
    claim = CLAIMS["quant.bytes_explained"]
    true = {"int8": models["int8"], "nf4": models["nf4"]}
    assert judge(claim, bytes_explained(models["fp"], true)).word is Word.HOLDS
    for name, liar in {
        "int8 is the unquantized model": {"int8": models["fp"]},
        "nf4 is int8": {"nf4": models["int8"]},
        "nf4 is fp4, which has the same bytes": {"nf4": _quantized_as(loader(), bnb_4bit_quant_type="fp4")},
        "nf4 with quantized constants": {
            "nf4": _quantized_as(loader(), bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        },
        "the head is quantized too": {"int8": _with_head_in_int8(models["int8"])},
        "one linear stayed wide": {"int8": _with_one_wide_linear(models["int8"])},
    }.items():
        verdict = judge(claim, bytes_explained(models["fp"], true | liar))
        assert verdict.word is Word.REFUTED, name
        assert "worst module" in verdict.line


def _quantized_as(own: Loader, **options: Any) -> Any:
    from transformers import BitsAndBytesConfig

    model = own.model(own.rig.target)
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options)
    return type(model).from_pretrained(
        None, config=model.config, state_dict=model.state_dict(), quantization_config=asked, device_map={"": "cpu"}
    )


def _with_head_in_int8(model: Any) -> Any:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    liar = copy.deepcopy(model)
    head = Linear8bitLt(128, 512, bias=False, has_fp16_weights=False)
    head.weight = Int8Params(liar.lm_head.weight.data.clone(), requires_grad=False).to("cpu")
    liar.lm_head = head
    return liar


def _with_one_wide_linear(model: Any) -> Any:
    liar = copy.deepcopy(model)
    liar.model.layers[0].self_attn.k_proj = torch.nn.Linear(128, 64)
    return liar


@QUICK
@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_the_distance_of_two_byte_counts_is_a_share_and_zero_only_when_equal(a: int, b: int) -> None:
    off = quantization.off_by(a, b)
    assert 0 <= off <= 1 and off == quantization.off_by(b, a) and (off == 0) == (a == b)


# Memory after load ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half() -> Any:
    own = loader(dtype="float16")
    return own.model(own.rig.target)


@pytest.mark.parametrize(
    ("id", "key", "true", "lies"),
    [
        ("quant.int8_memory", "target int8", 0.583, (0.5, 0.49, 1.0)),
        ("quant.nf4_memory", "target nf4", 0.403, (0.25, 0.2, 0.583)),
    ],
)
def test_memory_after_load_is_neither_exactly_the_bits_nor_unquantized(
    id: str, key: str, true: float, lies: tuple[float, ...], half: Any
) -> None:
    def word(share: float) -> Word:
        whole = 3_087_000_000
        seen = {"target fp16": whole, key: round(share * whole)}
        return judge(CLAIMS[id], quantization.loaded_ratio(seen, half, key, "target fp16")).word

    assert word(true) is Word.HOLDS
    assert {word(lie) for lie in lies} == {Word.REFUTED}


def test_bytes_that_were_not_counted_are_never_compared(half: Any, models: dict[str, Any]) -> None:
    claim = CLAIMS["quant.int8_memory"]
    for seen in ({}, {"target fp16": 0, "target int8": 0}, {"target fp16": 1000, "target int8": 600}):
        verdict = judge(claim, quantization.loaded_ratio(seen, half, "target int8", "target fp16"))
        assert verdict.word is Word.INCONCLUSIVE, seen
    seen = {"target fp32": 10**9, "target int8": 3 * 10**8}
    wide = quantization.loaded_ratio(seen, models["fp"], "target int8", "target fp32")
    assert "32-bit" in (wide.problem or "")


# Time -----------------------------------------------------------------------------------------------------------------


def test_a_quantization_that_is_faster_refutes_that_it_is_not() -> None:
    def runs(tpot_s: float) -> list[Run]:
        return [Run(1, 37, tuple(0.1 + tpot_s * step for step in range(16))) for _ in range(FULL_LOOK)]

    claim = CLAIMS["quant.not_always_faster"]
    seen = quantization.slower(runs(0.018), runs(0.060))["quant.not_always_faster"]
    assert (round(seen.value or 0, 2), judge(claim, seen).word) == (3.33, Word.HOLDS)
    assert judge(claim, quantization.slower(runs(0.018), runs(0.009))["quant.not_always_faster"]).word is Word.REFUTED


def test_a_row_has_times_bytes_and_the_answer(engines: dict[str, EagerEngine]) -> None:
    def sampled(call: Callable[[], Run], warm_up: Callable[[], object]) -> list[Run]:
        return [call()]

    workload = Workload("tiny", ((1, 2, 3),), 3)
    first, *phases, modules = quantization.row(engines["int8"], workload, Clock(), "int8", 12345, "A cache.", sampled)
    assert (first.id, first.station, first.note) == ("quant.int8", "quant", "answer: A cache.")
    assert first.bytes == {"loaded": 12345.0, "storages": float(total(module_bytes(engines["int8"].model)))}
    assert {"tpot_s", "output_tokens_per_s"} <= set(first.figures)
    assert {p.phase for p in phases} == {"prefill", "decode"}
    assert modules.phase == "modules"
    assert sum(modules.bytes.values()) == first.bytes["storages"]
    assert {"int8", "Embedding"} <= set(modules.bytes)
    bare, *_ = quantization.row(engines["fp"], workload, Clock(), "fp32", None, None, sampled)
    assert "loaded" not in bare.bytes and {"loaded", "answer"} <= set(bare.unavailable)


def test_an_answer_ends_where_the_text_ends_and_is_one_short_line(engines: dict[str, EagerEngine]) -> None:
    class Chatty(Letters):
        def decode(self, token_ids: Any) -> str:
            return " Fine,\n thanks.<|endoftext|>Question: and you?"

    class Endless(Letters):
        def decode(self, token_ids: Any) -> str:
            return "word " * 100

    assert quantization.answer(engines["fp"], Chatty(), "How are you?", 4) == "Fine, thanks."
    assert len(quantization.answer(engines["fp"], Endless(), "How are you?", 4)) == 160


# Quality --------------------------------------------------------------------------------------------------------------


ROWS = [tuple((7 * i + j * j) % 512 for i in range(40)) for j in range(3)]


def test_quality_of_a_model_beside_itself_is_perfect(engines: dict[str, EagerEngine]) -> None:
    same = quantization.quality(engines["fp"], engines["fp"], ROWS)
    assert (same.tokens, same.top1_agreement, same.kl, same.nll_ratio) == (3 * 39, 1.0, 0.0, 1.0)


def test_quality_figures_are_those_of_a_direct_computation(engines: dict[str, EagerEngine]) -> None:
    seen = quantization.quality(engines["fp"], engines["nf4"], ROWS[:1])
    ids = torch.tensor([ROWS[0]])
    with torch.no_grad():
        p, q = (torch.log_softmax(engines[name].model(ids).logits[0, :-1].double(), -1) for name in ("fp", "nf4"))
    divergence = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean").item()
    nll = torch.nn.functional.nll_loss(q, ids[0, 1:]).item()
    assert seen.kl == pytest.approx(divergence, rel=1e-3) and seen.nll == pytest.approx(nll, rel=1e-4)
    assert 0 < seen.top1_agreement < 1


def test_quality_is_not_binary_and_both_extremes_are_refuted(engines: dict[str, EagerEngine]) -> None:
    claim = CLAIMS["quant.quality_not_binary"]
    lossless = quantization.quality(engines["fp"], engines["fp"], ROWS)
    assert judge(claim, quantization.not_binary(lossless)).word is Word.REFUTED, "nothing was quantized"
    broken = copy.deepcopy(engines["fp"].model)
    with torch.no_grad():
        broken.model.norm.weight.mul_(-1)
    prompt = Prompt.of([row[:8] for row in ROWS], "cpu")
    likely = decode(engines["fp"], engines["fp"].prefill(prompt), 32)
    ruined = quantization.quality(engines["fp"], EagerEngine(broken), likely)
    assert judge(claim, quantization.not_binary(ruined)).word is Word.REFUTED, "the model was destroyed"
    assert judge(claim, quantization.not_binary(Quality(2040, 0.975, 0.698, 0.70, 4.3e-4))).word is Word.HOLDS
    silent = Quality(2040, 0.0, 0.698, float("nan"), float("nan"))
    assert judge(claim, quantization.not_binary(silent)).word is Word.INCONCLUSIVE


def test_the_eval_set_is_the_same_every_time_and_as_long_as_it_says() -> None:
    rows = quantization.eval_rows(Letters())
    assert rows == quantization.eval_rows(Letters())
    assert [len(row) for row in rows] == [256] * 8


# More chats -----------------------------------------------------------------------------------------------------------


@QUICK
@given(st.integers(1, 10**6), st.integers(0, 10**8))
def test_as_many_chats_are_held_as_whole_ones_fit(chat_bytes: int, freed_bytes: int) -> None:
    freed_bytes = min(freed_bytes, 40 * chat_bytes)
    held = [0]

    def add_chat() -> int:
        held[0] += chat_bytes
        return held[0]

    assert quantization.chats_within(freed_bytes, add_chat, 100) == freed_bytes // chat_bytes


def test_a_counter_that_does_not_grow_ends_and_is_refuted() -> None:
    planned = Room(31 * 56_000_000, 56_000_000)
    held = quantization.chats_within(planned.freed_bytes, lambda: 0, 2 * planned.computed + 2)
    seen = quantization.more_chats(Room(planned.freed_bytes, planned.chat_bytes, held))
    assert judge(CLAIMS["quant.more_chats"], seen).word is Word.REFUTED


@pytest.mark.parametrize(("cache_dtype", "word"), [(torch.float32, Word.HOLDS), (torch.float64, Word.REFUTED)])
def test_chats_are_held_for_real_and_a_wider_cache_than_promised_is_refuted(
    cache_dtype: torch.dtype, word: Word, engines: dict[str, EagerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines["nf4"]
    held: list[int] = [0]
    monkeypatch.setattr(quantization, "CHAT_LEN", 64)
    monkeypatch.setattr(quantization, "resident_bytes", lambda device: 1000 + held[0])

    def prefill(prompt: Any) -> Any:
        state = engine.prefill(prompt)
        for layer in state.cache.layers:
            layer.keys, layer.values = layer.keys.to(cache_dtype), layer.values.to(cache_dtype)
            held[0] += layer.keys.nbytes + layer.values.nbytes
        return state

    subject: Any = SimpleNamespace(model=engine.model, device="cpu", prefill=prefill)
    planned = quantization.room(subject, {"target fp32": 900_000, "target nf4": 700_000}, "target nf4", "target fp32")
    assert planned.computed == 200_000 // (2 * 64 * 64 * 4)
    seen = quantization.hold_chats(subject, Letters(), planned)
    assert judge(CLAIMS["quant.more_chats"], quantization.more_chats(seen)).word is word


def test_chats_that_do_not_fit_or_cannot_be_counted_are_not_a_pass() -> None:
    claim = CLAIMS["quant.more_chats"]
    assert judge(claim, quantization.more_chats(OutOfMemory("no room"))).word is Word.INCONCLUSIVE
    assert judge(claim, quantization.more_chats(Room(10, 100, 0))).word is Word.INCONCLUSIVE
    assert judge(claim, counted(1.0)).word is Word.HOLDS


def test_the_cell_of_chats_says_what_was_only_computed(engines: dict[str, EagerEngine]) -> None:
    planned = Room(1000, 100)
    tried = quantization.room_cell("nf4", planned, Room(1000, 100, 10), engines["nf4"])
    assert (tried.figures["chats_held"], tried.figures["chats_computed"]) == (10.0, 10.0)
    for seen, why in ((planned, "computed only"), (OutOfMemory("no room"), "no room")):
        cell = quantization.room_cell("nf4", planned, seen, engines["nf4"])
        assert "chats_held" not in cell.figures and cell.unavailable["chats_held"] == why
