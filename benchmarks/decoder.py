"""One decode step, embedding to argmax, as a plain function over tensors that stay where they are.

`read` takes a loaded model apart by structure: any causal LM made of RMSNorm, rotary positions, grouped-query attention
and a gated SiLU MLP, as Llama and Qwen2 are. Whether the structure means what it seems to is not decided here: who
builds on it compares logits with the model's own forward (graphs.py does).

`Ops` is the few operations a step is made of. `TorchOps` says in PyTorch what each computes, on any device; kernels.py
fuses the same operations on CUDA.

Rows of unequal length lie compacted in the cache: a token's slot is its position, so one length a row says everything
a mask would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor


class Unsupported(Exception):
    """The step can't be had; the message is one line that says why."""


@dataclass(frozen=True)
class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Dense:
    """A linear map, weight (out_len, in_len) and bias (out_len,) or None; joined maps stand one under another."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Modules:
    """Linear maps with an arithmetic of their own (int8, nf4): the library's modules, called as they are."""

    parts: tuple[Callable[[Tensor], Tensor], ...]

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [part(x) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


Projection = Dense | Modules


@dataclass(frozen=True)
class Layer:
    """`qkv` and `gate_up` are joined: one read of the input, one kernel."""

    attention_norm: Norm
    qkv: Projection
    out: Projection
    mlp_norm: Norm
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class Decoder:
    """A model taken apart. `cos` and `sin`, (cache_len, head_dim), hold the model's own rotary table."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Norm
    head: Projection
    cos: Tensor
    sin: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]


@dataclass(frozen=True)
class KeyValues:
    """Keys and values, each (layers, batch, kv_heads, cache_len, head_dim), and how many slots each row has filled,
    (batch,), int32, on the device. Slots past a row's length may hold anything finite."""

    keys: Tensor
    values: Tensor
    lengths: Tensor

    @staticmethod
    def empty(decoder: Decoder, batch_size: int, cache_len: int) -> KeyValues:
        like = decoder.embedding
        shape = (len(decoder.layers), batch_size, decoder.kv_heads, cache_len, decoder.head_dim)
        lengths = torch.zeros(batch_size, dtype=torch.int32, device=like.device)
        return KeyValues(like.new_zeros(shape), like.new_zeros(shape), lengths)

    @property
    def cache_len(self) -> int:
        return self.keys.shape[3]


class Ops(Protocol):
    """What a step is made of. `x` is (batch * step_len, hidden_size), a batch row's tokens together."""

    def norm_linear(self, x: Tensor, norm: Norm, projection: Projection) -> Tensor:
        """Project the normalised rows."""

    def norm_gated(self, x: Tensor, norm: Norm, projection: Projection) -> Tensor:
        """silu(gate) * up of the normalised rows; the projection holds gate over up."""

    def linear_add(self, x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
        """Project and add to the residual stream."""

    def attend(self, qkv: Tensor, decoder: Decoder, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Rotate queries and keys, write the new keys and values to their slots, and attend to all slots up to each
        query's own. `keys` and `values` are one layer's."""

    def choose(self, logits: Tensor, choices: Tensor, lengths: Tensor) -> None:
        """Write the greedy choice after each token to `choices`, (batch, step_len), and add step_len to `lengths`."""


def step(decoder: Decoder, held: KeyValues, tokens: Tensor, choices: Tensor, ops: Ops) -> Tensor:
    """Read `tokens`, (batch, step_len), into the cache. Returns logits, (batch, step_len, vocab_size).

    `choices` may be `tokens` itself: with one token a step the next call then goes on by itself.
    """
    x = F.embedding(tokens.flatten(), decoder.embedding)
    for layer, keys, values in zip(decoder.layers, held.keys, held.values, strict=True):
        qkv = ops.norm_linear(x, layer.attention_norm, layer.qkv)
        mixed = ops.attend(qkv, decoder, keys, values, held.lengths)
        x = ops.linear_add(mixed, layer.out, x)
        hidden = ops.norm_gated(x, layer.mlp_norm, layer.gate_up)
        x = ops.linear_add(hidden, layer.down, x)
    logits = ops.norm_linear(x, decoder.norm, decoder.head)
    ops.choose(logits, choices, held.lengths)
    return logits.view(*tokens.shape, -1)


class TorchOps:
    """Each operation in plain PyTorch: the reference for fused kernels, and the step of cards without them."""

    def norm_linear(self, x: Tensor, norm: Norm, projection: Projection) -> Tensor:
        return projection(rms_norm(x, norm))

    def norm_gated(self, x: Tensor, norm: Norm, projection: Projection) -> Tensor:
        return gated(projection(rms_norm(x, norm)))

    def linear_add(self, x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
        return residual + projection(x)

    def attend(self, qkv: Tensor, decoder: Decoder, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        batch_size, cache_len = keys.shape[0], keys.shape[2]
        heads, kv_heads = decoder.heads, decoder.kv_heads
        joined = qkv.view(batch_size, -1, heads + 2 * kv_heads, decoder.head_dim).transpose(1, 2)
        query, key, value = torch.split(joined, [heads, kv_heads, kv_heads], dim=1)
        slots = lengths[:, None].long() + torch.arange(query.shape[2], device=qkv.device)
        cos, sin = decoder.cos[slots][:, None], decoder.sin[slots][:, None]
        query = query * cos + _turned(query) * sin
        rows = torch.arange(batch_size, device=qkv.device)[:, None]
        keys[rows, :, slots] = (key * cos + _turned(key) * sin).transpose(1, 2)
        values[rows, :, slots] = value.transpose(1, 2)
        seen = torch.arange(cache_len, device=qkv.device) <= slots[:, None, :, None]
        mixed = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, scale=decoder.scaling, enable_gqa=heads != kv_heads
        )
        return mixed.transpose(1, 2).reshape(qkv.shape[0], -1)

    def choose(self, logits: Tensor, choices: Tensor, lengths: Tensor) -> None:
        choices.copy_(logits.argmax(-1).view_as(choices))
        lengths.add_(choices.shape[1])


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Rounded to x's dtype before the weight, as transformers does it."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.weight * scaled.to(x.dtype)


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _turned(x: Tensor) -> Tensor:
    """Each pair (x[i], x[i + head_dim/2]) turned a quarter."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


# Taking a model apart ------------------------------------------------------------------------------------------------


def read(model: Any, cache_len: int) -> Decoder:
    """The decoder behind a loaded causal LM, for up to `cache_len` positions. Raises Unsupported.

    Joined weights are made once: the model's own parameters become views of them, so that nothing is held twice and
    the model's forward goes on unchanged. At no time is more than one projection held twice.
    """
    base = model.base_model
    _expect(base, "the model", "embed_tokens", "layers", "norm", "rotary_emb")
    kinds = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise Unsupported(f"its layers are of kinds that the step doesn't know: {', '.join(sorted(kinds))}")
    if type(base.embed_tokens) is not nn.Embedding:
        raise Unsupported(f"its embedding is a {type(base.embed_tokens).__name__}, not a plain table")
    # Inference tensors can't become a parameter's data, whatever mode the caller is in.
    with torch.inference_mode(False), torch.no_grad():
        layers = tuple(_layer(layer, f"layer {i}") for i, layer in enumerate(base.layers))
        attention = base.layers[0].self_attn
        head_dim, scaling = getattr(attention, "head_dim", None), getattr(attention, "scaling", None)
        if head_dim is None or scaling is None:
            raise Unsupported("its attention has no head_dim and scaling")
        cos, sin = _rotary_table(base, cache_len, head_dim)
        head = _joined([model.get_output_embeddings()])
    return Decoder(
        base.embed_tokens.weight,
        layers,
        _norm(base.norm),
        head,
        cos,
        sin,
        attention.q_proj.out_features // head_dim,
        attention.k_proj.out_features // head_dim,
        head_dim,
        float(scaling),
    )


def _layer(layer: Any, name: str) -> Layer:
    _expect(layer, name, "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    attention, mlp = layer.self_attn, layer.mlp
    _expect(attention, f"{name}'s attention", "q_proj", "k_proj", "v_proj", "o_proj")
    _expect(mlp, f"{name}'s MLP", "gate_proj", "up_proj", "down_proj", "act_fn")
    probe = torch.linspace(-4, 4, 9)
    if not torch.allclose(mlp.act_fn(probe), F.silu(probe)):
        raise Unsupported(f"{name}'s activation is {type(mlp.act_fn).__name__}, not SiLU")
    return Layer(
        _norm(layer.input_layernorm),
        _joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        _joined([attention.o_proj]),
        _norm(layer.post_attention_layernorm),
        _joined([mlp.gate_proj, mlp.up_proj]),
        _joined([mlp.down_proj]),
    )


def _expect(module: nn.Module, name: str, *parts: str) -> None:
    found = {n for n, child in module.named_children() if not isinstance(child, nn.Dropout | nn.Identity)}
    if unknown := sorted(found - set(parts)):
        raise Unsupported(f"{name} has parts that the step doesn't know: {', '.join(unknown)}")
    if lacking := sorted(set(parts) - found):
        raise Unsupported(f"{name} has no {', '.join(lacking)}")


def _norm(module: Any) -> Norm:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if eps is None or weight is None:
        raise Unsupported(f"its norm is a {type(module).__name__} without a weight and an epsilon")
    return Norm(weight, float(eps))


def _rotary_table(base: Any, cache_len: int, head_dim: int) -> tuple[Tensor, Tensor]:
    kind = str(getattr(base.rotary_emb, "rope_type", "default"))
    if "dynamic" in kind or kind == "longrope":
        raise Unsupported(f"its rotary table ({kind}) changes with the length of the text")
    weight = base.embed_tokens.weight
    positions = torch.arange(cache_len, device=weight.device)[None]
    cos, sin = (table[0].contiguous() for table in base.rotary_emb(weight, positions))
    if cos.shape != (cache_len, head_dim):
        raise Unsupported(f"its rotary table is {tuple(cos.shape)}, not ({cache_len}, {head_dim}): a part of each head")
    return cos, sin


def _joined(modules: Sequence[Any]) -> Projection:
    """One projection of modules that read the same input."""
    if not all(_is_plain(m) for m in modules):
        return Modules(tuple(modules))
    weights = [m.weight for m in modules]
    joined = _already_joined(weights)
    if joined is None:
        joined = torch.cat([w.data for w in weights])
        for weight, part in zip(weights, torch.split(joined, [len(w) for w in weights]), strict=True):
            weight.data = part
    bias = None
    if any(m.bias is not None for m in modules):
        biases = [m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias.data for m in modules]
        bias = torch.cat(biases)
    return Dense(joined, bias)


def _is_plain(module: Any) -> bool:
    hooks = getattr(module, "_forward_hooks", None) or getattr(module, "_forward_pre_hooks", None)
    return type(module) is nn.Linear and module.weight.is_floating_point() and not hooks


def _already_joined(weights: Sequence[Tensor]) -> Tensor | None:
    """The matrix that these weights are the rows of, when an earlier reading has joined them (or there is only one)."""
    first = weights[0]
    if len(weights) == 1:
        return first.data
    total = sum(w.shape[0] for w in weights)
    end = first.data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not weight.is_contiguous() or weight.data_ptr() != end:
            return None
        end += weight.numel() * weight.element_size()
    return first.data.as_strided((total, first.shape[1]), (first.shape[1], 1))
