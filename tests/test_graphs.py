"""The graph engine's step without the graph: the same function over the same static tensors, run on the CPU.

What needs a card (the recording itself, the fused kernels) is proven by the engine at build time, with `prove`, which
is tested here to refuse liars.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import graphs
from benchmarks.decoder import Dense, TorchOps, Unsupported, read
from benchmarks.graphs import CannotCapture, GraphEngine, capture, prove, static_engine
from benchmarks.phases import EagerEngine, Prompt, StoredPrefix, decode, reference
from benchmarks.rigs import random_model
from benchmarks.tokens import vacuous

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "num_key_value_heads": 1, "tie_word_embeddings": False, "rope_parameters": LLAMA3},
    "llama with biases": {"model_type": "llama", "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
}


def tiny(**shape: Any) -> Any:
    from transformers import AutoConfig

    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    rest = {"num_attention_heads": 4, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1}
    known = {**sizes, **rest, **shape}
    model = random_model(AutoConfig.for_model(known.pop("model_type"), **known), torch.float32, "cpu")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    return model


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(**SHAPES[request.param])


def unrecorded(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """A step that runs again instead of being replayed, into the same buffer."""
    logits = step()

    def replay() -> None:
        logits.copy_(step())

    return logits, replay


def engine_of(
    model: Any, batch_size: int, step_lens: Sequence[int] = (1,), cache_len: int = 64, ops: Any = None
) -> GraphEngine:
    return static_engine(model, read(model, cache_len), ops or TorchOps(), batch_size, cache_len, step_lens, unrecorded)


def prompt_of(*lengths: int) -> Prompt:
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [tuple(torch.randint(2, 128, (n,), generator=generator).tolist()) for n in lengths]
    return Prompt.of(rows, "cpu")


def rows_of(prompt: Prompt) -> list[tuple[int, ...]]:
    mask = torch.ones_like(prompt.ids) if prompt.mask is None else prompt.mask
    return [tuple(ids[real.bool()].tolist()) for ids, real in zip(prompt.ids, mask, strict=True)]


@pytest.mark.parametrize("lengths", [(9,), (9, 9, 9), (12, 3, 7, 1)], ids=["alone", "equal rows", "unequal rows"])
def test_decoding_gives_the_eager_engines_tokens(model: Any, lengths: tuple[int, ...]) -> None:
    prompt = prompt_of(*lengths)
    engine = engine_of(model, len(lengths))
    wanted = [reference(engine.eager, row, 24).tokens for row in rows_of(prompt)]
    assert any(vacuous(row) is None for row in wanted)
    assert list(decode(engine, engine.prefill(prompt), 24)) == wanted  # type: ignore[arg-type]


def test_decoding_goes_on_after_a_cached_prefix(model: Any) -> None:
    prefix = rows_of(prompt_of(11))[0]
    engine = engine_of(model, 1)
    stored = StoredPrefix(engine.eager, prefix)
    suffix = prompt_of(5)
    wanted = reference(engine.eager, prefix + rows_of(suffix)[0], 16).tokens
    for _ in range(2):  # a second use finds the stored prefix unchanged
        assert decode(engine, engine.prefill(suffix, stored.take()), 16) == (wanted,)  # type: ignore[arg-type]


def test_padding_after_a_cached_prefix_is_dropped_too(model: Any) -> None:
    prefix, engine = rows_of(prompt_of(6))[0], engine_of(model, 2)
    both = EagerEngine(model).prefill(Prompt.of([prefix, prefix], "cpu")).cache
    suffixes = prompt_of(2, 7)
    state = engine.prefill(suffixes, both)
    assert engine.held.lengths.tolist() == [8, 13]
    wanted = [reference(engine.eager, prefix + row, 8).tokens for row in rows_of(suffixes)]
    assert list(decode(engine, state, 8)) == wanted  # type: ignore[arg-type]


def test_several_tokens_at_once_are_checked_as_one_by_one(model: Any) -> None:
    prompt = prompt_of(9, 4)
    engine = engine_of(model, 2, step_lens=(1, 5))
    told = [reference(engine.eager, row, 8).tokens for row in rows_of(prompt)]
    draft = torch.tensor([row[:5] for row in told])
    assert engine.step(engine.prefill(prompt), draft).choices.tolist() == [list(row[1:6]) for row in told]


def test_rejected_tokens_are_forgotten(model: Any) -> None:
    prompt = prompt_of(9)
    engine = engine_of(model, 1, step_lens=(1, 5))
    told = reference(engine.eager, rows_of(prompt)[0], 10).tokens
    wrong = torch.tensor([[*told[:2], *((token + 1) % 128 for token in told[2:5])]])
    state = engine.rewind(engine.step(engine.prefill(prompt), wrong), 3)
    assert state.choices.tolist() == [list(told[1:3])]
    assert state.next_tokens.tolist() == [told[2]]
    assert decode(engine, state, 7) == (told[2:9],)  # type: ignore[arg-type]


def test_forced_tokens_replace_the_greedy_ones_and_mix_with_them(model: Any) -> None:
    prompt, engine = prompt_of(9), engine_of(model, 1)
    eager_state, state = engine.eager.prefill(prompt), engine.prefill(prompt)
    for forced in (torch.tensor([7]), None, None, torch.tensor([99]), None):
        eager_state, state = engine.eager.step(eager_state, forced), engine.step(state, forced)
        torch.testing.assert_close(state.logits, eager_state.logits, atol=1e-4, rtol=1e-4)
        assert state.next_tokens.tolist() == eager_state.next_tokens.tolist()


def test_a_second_batch_finds_nothing_of_the_first(model: Any) -> None:
    engine = engine_of(model, 1)
    decode(engine, engine.prefill(prompt_of(40)), 20)  # type: ignore[arg-type]
    wanted = reference(engine.eager, rows_of(prompt_of(3))[0], 12).tokens
    assert decode(engine, engine.prefill(prompt_of(3)), 12) == (wanted,)  # type: ignore[arg-type]


def test_joined_weights_are_held_once_and_the_model_runs_on_unchanged() -> None:
    model = tiny(**SHAPES["llama with biases"])
    ids = prompt_of(9).ids
    before = model(ids).logits
    decoder = read(model, 32)
    attention = model.model.layers[0].self_attn
    joined = decoder.layers[0].qkv
    assert isinstance(joined, Dense)
    for module in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert module.weight.untyped_storage().data_ptr() == joined.weight.untyped_storage().data_ptr()
    assert torch.equal(model(ids).logits, before)
    again = read(model, 32).layers[0].qkv
    assert isinstance(again, Dense) and again.weight.data_ptr() == joined.weight.data_ptr(), "joined a second time"


def test_modules_with_an_arithmetic_of_their_own_are_called_as_they_are() -> None:
    class Other(nn.Linear):
        """As a quantized linear is: a subclass with its own forward."""

    model = tiny(**SHAPES["qwen2"])
    for layer in model.model.layers:
        for module in layer.mlp.gate_proj, layer.mlp.up_proj, layer.self_attn.k_proj:
            module.__class__ = Other
    engine = engine_of(model, 1)
    prove(engine)
    weight = model.model.layers[0].mlp.gate_proj.weight
    assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size(), "joined although not plain"


def test_an_engine_proves_itself_against_the_models_own_forward(model: Any) -> None:
    prove(engine_of(model, 1, (1, 5)))
    prove(engine_of(model, 5, (1, 5)))


class WrongScale(TorchOps):
    """Liar: attention slightly too sharp."""

    def attend(self, qkv: Any, decoder: Any, keys: Any, values: Any, lengths: Any) -> Any:
        end = decoder.heads * decoder.head_dim
        qkv = torch.cat([qkv[:, :end] * 1.1, qkv[:, end:]], -1)
        return super().attend(qkv, decoder, keys, values, lengths)


class Forgetful(TorchOps):
    """Liar: positions stand still."""

    def choose(self, logits: Any, choices: Any, lengths: Any) -> None:
        super().choose(logits, choices, torch.zeros_like(lengths))


class SecondBest(TorchOps):
    """Liar: right logits, wrong choice."""

    def choose(self, logits: Any, choices: Any, lengths: Any) -> None:
        super().choose(logits, choices, lengths)
        choices.copy_(logits.topk(2).indices[:, 1].view_as(choices))


class Nothing(TorchOps):
    """Liar: gives NaN, which no comparison with a bound may let through."""

    def norm_gated(self, x: Any, norm: Any, projection: Any) -> Any:
        return super().norm_gated(x, norm, projection) * float("nan")


@pytest.mark.parametrize("liar", [WrongScale, Forgetful, SecondBest, Nothing])
def test_the_proof_refuses_a_step_that_computes_something_else(liar: type[TorchOps]) -> None:
    with pytest.raises(Unsupported, match=r"its logits differ|its greedy choices"):
        prove(engine_of(tiny(**SHAPES["qwen2"]), 2, ops=liar()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_proof_accepts_what_is_only_rounding(dtype: torch.dtype) -> None:
    prove(engine_of(tiny(**SHAPES["qwen2"]).to(dtype), 2, (1, 5)))


def test_the_proof_refuses_a_step_that_ignores_where_rows_start() -> None:
    engine = engine_of(tiny(**SHAPES["qwen2"]), 4)
    copied = engine._copy
    engine._copy = lambda cache, mask: copied(cache, None)  # type: ignore[method-assign]
    with pytest.raises(Unsupported, match="its logits differ"):
        prove(engine)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"model_type": "gpt2"}, "the model has parts"),
        ({"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 2}, "k_norm, q_norm"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "not SiLU"),
        ({"model_type": "qwen2", "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 8,
          "max_window_layers": 0}, "sliding_attention"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
         "dynamic"),
    ],
    ids=["gpt2", "qwen3", "another activation", "sliding window", "dynamic positions"],
)  # fmt: skip
def test_a_model_of_another_kind_is_refused_with_the_reason(shape: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        read(tiny(**shape), 32)


def test_without_cuda_the_reason_is_a_value() -> None:
    answer = capture(tiny(**SHAPES["qwen2"]), 1, 32)
    assert isinstance(answer, CannotCapture)
    assert str(answer) == "cannot be captured: no CUDA on this machine, and graphs are CUDA's"


class OnCuda:
    """A model as far as `capture` looks before it builds."""

    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory at batch 4 with a cache of 128"),
        (Unsupported("its layers are odd"), "its layers are odd"),
        (RuntimeError("PTXAS failed\nwith pages of output"), "RuntimeError: PTXAS failed"),
    ],
    ids=["memory", "model", "compiler"],
)
def test_whatever_goes_wrong_while_capturing_is_a_value(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def failing(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(graphs, "_captured", failing)
    assert capture(OnCuda(), 4, 128) == CannotCapture(reason)


def test_without_fused_kernels_the_engine_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(model: Any, batch_size: int, cache_len: int, step_lens: Any, make_ops: Any, note: str) -> Any:
        if make_ops is graphs._fused_ops:
            raise Unsupported("no Triton here")
        engine = engine_of(built, batch_size)
        engine.note = note
        return engine

    built = tiny(**SHAPES["qwen2"])
    monkeypatch.setattr(graphs, "_captured", captured)
    engine = capture(OnCuda(), 1, 64)
    assert isinstance(engine, GraphEngine) and engine.note == "no Triton here" and engine.kernels == "torch"
    assert engine.built_s > 0


def test_a_full_cache_is_an_error_that_names_the_remedy() -> None:
    engine = engine_of(tiny(**SHAPES["qwen2"]), 1, cache_len=16)
    state = engine.prefill(prompt_of(15))
    state = engine.step(state)
    with pytest.raises(ValueError, match="longer cache_len"):
        engine.step(state)
    with pytest.raises(ValueError, match="17 positions in a static cache of 16"):
        engine.prefill(prompt_of(17))


def test_a_cache_without_room_for_a_recording_is_refused() -> None:
    with pytest.raises(Unsupported, match="a cache of 10 has no room"):
        engine_of(tiny(**SHAPES["qwen2"]), 1, step_lens=(1, 5), cache_len=10)


def test_bad_batches_and_steps_are_refused() -> None:
    engine = engine_of(tiny(**SHAPES["qwen2"]), 2)
    with pytest.raises(ValueError, match="1 rows for an engine that was captured for 2"):
        engine.prefill(prompt_of(4))
    state = engine.prefill(prompt_of(4, 4))
    with pytest.raises(ValueError, match="steps of 3 tokens were not captured"):
        engine.step(state, torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="can't be rewound"):
        engine.rewind(state, 5)


def test_no_row_is_rewound_below_nothing() -> None:
    engine = engine_of(tiny(**SHAPES["qwen2"]), 2)
    state = engine.step(engine.prefill(prompt_of(2, 9)))
    with pytest.raises(ValueError, match="1 tokens were read since the prefill of rows of unequal length"):
        engine.rewind(state, 2)
    assert engine.held.lengths.tolist() == [3, 10]
    engine.rewind(state, 1)
    assert engine.held.lengths.tolist() == [2, 9]


def test_a_state_rewound_beyond_its_last_step_wants_to_be_told_its_tokens() -> None:
    engine = engine_of(tiny(**SHAPES["qwen2"]), 1)
    prompt = prompt_of(9)
    state = engine.prefill(prompt)
    wanted = state.next_tokens.tolist()
    state = engine.rewind(state, 1)
    for use in (lambda: state.next_tokens, lambda: state.logits, lambda: engine.step(state)):
        with pytest.raises(RuntimeError, match="tell its step the tokens"):
            use()
    assert engine.step(state, prompt.ids[:, -1]).next_tokens.tolist() == wanted


def test_a_state_of_the_past_is_refused() -> None:
    engine = engine_of(tiny(**SHAPES["qwen2"]), 1)
    first = engine.prefill(prompt_of(4))
    kept = first.next_tokens
    second = engine.step(first)
    for use in (lambda: first.logits, lambda: first.next_tokens, lambda: engine.step(first)):
        with pytest.raises(RuntimeError, match="of the past"):
            use()
    before = kept.clone()
    engine.step(second)
    assert torch.equal(kept, before), "tokens handed out must not change under the caller"


def test_the_models_weights_survive_a_copy_after_joining() -> None:
    model = tiny(**SHAPES["qwen2"])
    ids = prompt_of(9).ids
    read(model, 32)
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
