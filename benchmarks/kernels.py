"""The operations of a decode step as fused Triton kernels: five a layer at batch 1.

A decode step reads every weight once and computes next to nothing, so a kernel is good when it keeps the memory bus
full: weights stream through in wide rows, everything else (norm, bias, activation, residual) happens on the way. At
batch 1 a projection is a sum of products in float32; up to FEW_ROWS rows it is a narrow matrix product; beyond that
cuBLAS takes over.

At one row kernels overlap on cards of compute capability 9.0 and up (programmatic dependent launch): a kernel starts
while the one before it ends, loads its weights, and only then waits for its input. Every kernel waits before it reads
anything that the step computes, and before it writes anything.

Importing this module needs Triton, which CUDA builds of torch bring along.
"""

# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator"
# Triton has no types, and its kernels' parameters are pointers and compile-time values.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from benchmarks.decoder import Decoder, Dense, Norm, Projection, Tensor, Unsupported, gated

FEW_ROWS = 64
"""The most rows (batch * step_len) that go through the narrow matrix product, on cards whose matrix units Triton knows
(compute capability 8.0 and up); on others it is one."""


@triton.jit
def _one_row(
    x_ptr, gain_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, eps,
    OUT: tl.constexpr, IN: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = weight @ norm(x): ROWS outputs a program. The norm's scale is a factor of the sum, so one pass does."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    real = row < OUT
    at = weight_ptr + row[:, None] * IN + column[None, :]
    inside = real[:, None] & (column < IN)[None, :]
    weight = tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT)
    if GATED:
        second = tl.load(at + OUT * IN, mask=inside, other=0.0, eviction_policy=EVICT)
    if PDL:
        gdc_wait()
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    total_up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    squares = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in tl.static_range(0, IN, COLUMNS):
        x = tl.load(x_ptr + start + column, mask=start + column < IN, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(gain_ptr + start + column, mask=start + column < IN, other=0.0).to(tl.float32)
        this = weight.to(tl.float32)
        if GATED:
            this_up = second.to(tl.float32)
        if start + COLUMNS < IN:  # on its way while this one is summed
            inside = real[:, None] & (start + COLUMNS + column < IN)[None, :]
            weight = tl.load(at + start + COLUMNS, mask=inside, other=0.0, eviction_policy=EVICT)
            if GATED:
                second = tl.load(at + OUT * IN + start + COLUMNS, mask=inside, other=0.0, eviction_policy=EVICT)
        total += this * x[None, :]
        if GATED:
            total_up += this_up * x[None, :]
    out = tl.sum(total, axis=1)
    scale = 1.0
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / IN + eps)
        out *= scale
    if BIAS:
        out += tl.load(bias_ptr + row, mask=real, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(total_up, axis=1) * scale
        if BIAS:
            up += tl.load(bias_ptr + OUT + row, mask=real, other=0.0).to(tl.float32)
        out = out / (1.0 + tl.exp(-out)) * up
    if RESIDUAL:
        out += tl.load(residual_ptr + row, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _few_rows(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, n_rows,
    OUT: tl.constexpr, IN: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    MEMBERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out = x @ weight.T for up to MEMBERS rows of x, already normalised; ROWS outputs a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    member = tl.arange(0, MEMBERS)
    real = row < OUT
    total = tl.zeros((MEMBERS, ROWS), dtype=tl.float32)
    total_up = tl.zeros((MEMBERS, ROWS), dtype=tl.float32)
    for start in tl.range(0, IN, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        inside = column < IN
        x_at = x_ptr + member[:, None] * IN + column[None, :]
        x = tl.load(x_at, mask=(member < n_rows)[:, None] & inside[None, :], other=0.0)
        at = weight_ptr + row[None, :] * IN + column[:, None]
        weight = tl.load(at, mask=real[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        if GATED:
            second = tl.load(at + OUT * IN, mask=real[None, :] & inside[:, None], other=0.0)
            total_up = tl.dot(x, second, total_up, input_precision="ieee")
    if BIAS:
        total += tl.load(bias_ptr + row, mask=real, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            total_up += tl.load(bias_ptr + OUT + row, mask=real, other=0.0).to(tl.float32)[None, :]
        total = total / (1.0 + tl.exp(-total)) * total_up
    out_at = member[:, None] * OUT + row[None, :]
    kept = (member < n_rows)[:, None] & real[None, :]
    if RESIDUAL:
        total += tl.load(residual_ptr + out_at, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_at, total.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _rms_norm(x_ptr, gain_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row a program."""
    if PDL:
        gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    gain = tl.load(gain_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    at = tl.program_id(0) * WIDTH + column
    x = tl.load(x_ptr + at, mask=column < WIDTH, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(out_ptr + at, (x * scale * gain).to(out_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _turned(base_ptr, cos_ptr, sin_ptr, position, real, HALF: tl.constexpr):
    """Both halves of rotated vectors: base_ptr and position are a column of pointers and of positions."""
    dim = tl.arange(0, HALF)[None, :]
    kept = real[:, None]
    first = tl.load(base_ptr[:, None] + dim, mask=kept, other=0.0).to(tl.float32)
    second = tl.load(base_ptr[:, None] + HALF + dim, mask=kept, other=0.0).to(tl.float32)
    table = position[:, None] * (2 * HALF) + dim  # the table's second half repeats its first
    cos = tl.load(cos_ptr + table, mask=kept, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=kept, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _attend(
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, lengths_ptr, part_ptr, best_ptr, weight_ptr, arrived_ptr, out_ptr,
    scaling, cache_len,
    STEP_LEN: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, QUERIES: tl.constexpr,
    NEW: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of a batch row's new tokens, one KV head and one of SPLITS parts of the cache a program.

    The first part also rotates the new keys, writes them and the new values to the cache, and attends to them. The part
    that arrives last puts all parts together, in their order, so that the sum doesn't depend on who was last.
    """
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    part = tl.program_id(1)
    member = head // KV_HEADS
    kv_head = head % KV_HEADS
    width: tl.constexpr = 2 * HALF
    heads: tl.constexpr = GROUP * KV_HEADS
    row_len: tl.constexpr = (heads + 2 * KV_HEADS) * width
    half = tl.arange(0, HALF)[None, :]
    dim = tl.arange(0, width)[None, :]

    # Old slots were filled by earlier steps: loaded before the wait for this one's queries.
    held_len = tl.load(lengths_ptr + member)
    cache = head.to(tl.int64) * cache_len * width
    slot = part * BLOCK + tl.arange(0, BLOCK)
    old = (slot < held_len)[:, None]
    at = cache + slot[:, None] * width
    key_1 = tl.load(keys_ptr + at + half, mask=old, other=0.0)
    key_2 = tl.load(keys_ptr + at + HALF + half, mask=old, other=0.0)
    value = tl.load(values_ptr + at + dim, mask=old, other=0.0)
    if PDL:
        gdc_wait()

    query = tl.arange(0, QUERIES)  # a group's heads times the new tokens
    token = query % STEP_LEN
    real = query < GROUP * STEP_LEN
    query_at = qkv_ptr + (member * STEP_LEN + token) * row_len + (kv_head * GROUP + query // STEP_LEN) * width
    query_1, query_2 = _turned(query_at, cos_ptr, sin_ptr, held_len + token, real, HALF)
    scale = scaling * 1.4426950408889634  # exp2 is the cheaper exp
    dtype = qkv_ptr.dtype.element_ty
    query_1 = query_1.to(dtype)
    query_2 = query_2.to(dtype)

    best = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((QUERIES,), dtype=tl.float32)
    mixed = tl.zeros((QUERIES, width), dtype=tl.float32)
    if part == 0:
        new = tl.arange(0, NEW)
        written = new < STEP_LEN
        new_at = qkv_ptr + (member * STEP_LEN + new) * row_len + (heads + kv_head) * width
        new_1, new_2 = _turned(new_at, cos_ptr, sin_ptr, held_len + new, written, HALF)
        new_1 = new_1.to(dtype)
        new_2 = new_2.to(dtype)
        new_value = tl.load(new_at[:, None] + KV_HEADS * width + dim, mask=written[:, None], other=0.0)
        to = cache + (held_len + new)[:, None] * width
        tl.store(keys_ptr + to + half, new_1, mask=written[:, None])
        tl.store(keys_ptr + to + HALF + half, new_2, mask=written[:, None])
        tl.store(values_ptr + to + dim, new_value, mask=written[:, None])
        score = tl.dot(query_1, tl.trans(new_1), input_precision="ieee")
        score = tl.dot(query_2, tl.trans(new_2), score, input_precision="ieee") * scale
        score = tl.where(written[None, :] & (new[None, :] <= token[:, None]), score, float("-inf"))
        best = tl.max(score, axis=1)
        share = tl.exp2(score - best[:, None])
        weight = tl.sum(share, axis=1)
        mixed = tl.dot(share.to(dtype), new_value, input_precision="ieee")

    for start in range(part * BLOCK, held_len, SPLITS * BLOCK):
        score = tl.dot(query_1, tl.trans(key_1), input_precision="ieee")
        score = tl.dot(query_2, tl.trans(key_2), score, input_precision="ieee") * scale
        score = tl.where((start + tl.arange(0, BLOCK) < held_len)[None, :], score, float("-inf"))
        this_value = value
        slot = start + SPLITS * BLOCK + tl.arange(0, BLOCK)  # the next block is on its way
        old = (slot < held_len)[:, None]
        at = cache + slot[:, None] * width
        key_1 = tl.load(keys_ptr + at + half, mask=old, other=0.0)
        key_2 = tl.load(keys_ptr + at + HALF + half, mask=old, other=0.0)
        value = tl.load(values_ptr + at + dim, mask=old, other=0.0)
        higher = tl.maximum(best, tl.max(score, axis=1))
        share = tl.exp2(score - higher[:, None])
        fade = tl.exp2(best - higher)
        weight = weight * fade + tl.sum(share, axis=1)
        mixed = tl.dot(share.to(dtype), this_value, mixed * fade[:, None], input_precision="ieee")
        best = higher

    out_at = (member * STEP_LEN + token) * (heads * width) + (kv_head * GROUP + query // STEP_LEN) * width
    if SPLITS == 1:
        out = mixed / weight[:, None]
        tl.store(out_ptr + out_at[:, None] + dim, out.to(out_ptr.dtype.element_ty), mask=real[:, None])
    else:
        mine = (head * SPLITS + part) * QUERIES + query
        tl.store(best_ptr + mine, best)
        tl.store(weight_ptr + mine, weight)
        tl.store(part_ptr + mine[:, None] * width + dim, mixed, mask=real[:, None])
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(arrived_ptr + head, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            highest = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
            for other in tl.static_range(SPLITS):
                highest = tl.maximum(highest, tl.load(best_ptr + (head * SPLITS + other) * QUERIES + query))
            weight = tl.zeros((QUERIES,), dtype=tl.float32)
            mixed = tl.zeros((QUERIES, width), dtype=tl.float32)
            for other in tl.static_range(SPLITS):
                its = (head * SPLITS + other) * QUERIES + query
                fade = tl.exp2(tl.load(best_ptr + its) - highest)
                weight += tl.load(weight_ptr + its) * fade
                its_mixed = tl.load(part_ptr + its[:, None] * width + dim, mask=real[:, None], other=0.0)
                mixed += its_mixed * fade[:, None]
            out = mixed / weight[:, None]
            tl.store(out_ptr + out_at[:, None] + dim, out.to(out_ptr.dtype.element_ty), mask=real[:, None])
            tl.store(arrived_ptr + head, 0)


@triton.jit
def _choose(
    logits_ptr, best_ptr, token_ptr, arrived_ptr, choices_ptr, lengths_ptr,
    VOCAB: tl.constexpr, STEP_LEN: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, ALL_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Argmax of one row's part a program; the last one to arrive of a row decides, and the lowest token wins a tie."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
    logit = logit.to(tl.float32)
    best, where = tl.max(logit, axis=0, return_indices=True)
    tl.store(best_ptr + row * PARTS + part, best)
    tl.store(token_ptr + row * PARTS + part, part * BLOCK + where)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == PARTS - 1:
        tl.debug_barrier()
        other = tl.arange(0, ALL_PARTS)
        bests = tl.load(best_ptr + row * PARTS + other, mask=other < PARTS, other=float("-inf"))
        _, winner = tl.max(bests, axis=0, return_indices=True)
        tl.store(choices_ptr + row, tl.load(token_ptr + row * PARTS + winner).to(tl.int64))
        tl.store(arrived_ptr + row, 0)
        if row % STEP_LEN == STEP_LEN - 1:
            tl.store(lengths_ptr + row // STEP_LEN, tl.load(lengths_ptr + row // STEP_LEN) + STEP_LEN)


# Launching them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How a projection is cut: outputs and inputs a program takes at a time, its warps, and loads on their way at once
    (the latter for the narrow matrix product only)."""

    rows: int
    columns: int
    warps: int
    stages: int = 1


KINDS = ("qkv", "out", "gate_up", "down", "head")
ONE_ROW: Mapping[str, Tile] = {
    "qkv": Tile(4, 512, 2),
    "out": Tile(4, 512, 2),
    "gate_up": Tile(4, 512, 2),
    "down": Tile(4, 1024, 4),
    "head": Tile(8, 512, 2),
}
FEW_ROWS_TILES: Mapping[str, Tile] = {
    "qkv": Tile(16, 256, 4, 4),
    "out": Tile(16, 256, 4, 4),
    "gate_up": Tile(32, 128, 4, 4),
    "down": Tile(16, 256, 4, 5),
    "head": Tile(64, 128, 4, 4),
}


@dataclass(frozen=True)
class Tuning:
    """What was found best by measuring, and may differ from card to card.

    `overlap` is programmatic dependent launch, of one row only. `splits` is the most parts that a cache is attended to
    in, `block` the slots a part takes at a time.
    """

    most_rows: int
    one_row: Mapping[str, Tile]
    few_rows: Mapping[str, Tile]
    evict: str
    overlap: bool
    splits: int
    block: int
    attention_warps: int

    @staticmethod
    def of(device: torch.device) -> Tuning:
        capability = torch.cuda.get_device_capability(device)
        overlap = capability >= (9, 0)
        if capability < (8, 0):
            return Tuning(1, ONE_ROW, FEW_ROWS_TILES, "evict_first", overlap, 16, 16, 4)
        return Tuning(FEW_ROWS, ONE_ROW, FEW_ROWS_TILES, "evict_first", overlap, 16, 64, 4)


class FusedOps:
    """`decoder.Ops` in fused kernels. Raises Unsupported for shapes that they are not made for."""

    def __init__(self, decoder: Decoder, batch_size: int, tuning: Tuning | None = None) -> None:
        self.tuning = tuning or Tuning.of(decoder.embedding.device)
        half = decoder.head_dim // 2
        if half < 16 or half & (half - 1):
            raise Unsupported(f"the fused attention is for head sizes of 32, 64, 128 ..., not {decoder.head_dim}")
        table = decoder.cos[:, :half], decoder.cos[:, half:], decoder.sin[:, :half], decoder.sin[:, half:]
        if not (torch.equal(table[0], table[1]) and torch.equal(table[2], table[3])):
            raise Unsupported("the rotary table's halves differ")
        self._device = decoder.embedding.device
        self._decoder = decoder  # keeps the identities below unique
        self._kinds = {id(p): kind for layer in decoder.layers for kind, p in _projections(layer).items()}
        self._kinds[id(decoder.head)] = "head"
        self._arrived = torch.zeros(batch_size * decoder.kv_heads, dtype=torch.int32, device=self._device)
        self._space: dict[tuple[str, int], Tensor] = {}

    def norm_linear(self, x: Tensor, norm: Norm, projection: Projection) -> Tensor:
        return self._project(x, projection, norm=norm)

    def norm_gated(self, x: Tensor, norm: Norm, projection: Projection) -> Tensor:
        return self._project(x, projection, norm=norm, is_gated=True)

    def linear_add(self, x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
        return self._project(x, projection, residual=residual)

    def _project(
        self,
        x: Tensor,
        projection: Projection,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        n_rows = x.shape[0]
        fused = isinstance(projection, Dense) and n_rows <= self.tuning.most_rows
        if norm is not None and not (fused and n_rows == 1):
            x = self._normed(x, norm)
        if not fused:
            y = projection(x)
            y = gated(y) if is_gated else y
            return y if residual is None else residual + y
        assert isinstance(projection, Dense)
        kind = self._kinds[id(projection)]
        out_len = projection.weight.shape[0] // (2 if is_gated else 1)
        out = x.new_empty(n_rows, out_len)
        if n_rows == 1:
            pdl = self._overlaps(n_rows)
            tile = self.tuning.one_row[kind]
            _one_row[(triton.cdiv(out_len, tile.rows),)](
                x, norm.weight if norm else None, projection.weight, projection.bias, residual, out,
                norm.eps if norm else 0.0,
                OUT=out_len, IN=x.shape[1], NORM=norm is not None, BIAS=projection.bias is not None,
                RESIDUAL=residual is not None, GATED=is_gated, ROWS=tile.rows, COLUMNS=tile.columns,
                EVICT=self.tuning.evict, PDL=pdl, num_warps=tile.warps, **_launch(pdl),
            )  # fmt: skip
            return out
        tile = self.tuning.few_rows[kind]
        _few_rows[(triton.cdiv(out_len, tile.rows),)](
            x, projection.weight, projection.bias, residual, out, n_rows,
            OUT=out_len, IN=x.shape[1], BIAS=projection.bias is not None, RESIDUAL=residual is not None,
            GATED=is_gated, MEMBERS=max(16, triton.next_power_of_2(n_rows)), ROWS=tile.rows, COLUMNS=tile.columns,
            STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
        return out

    def _overlaps(self, n_rows: int) -> bool:
        """Whether a kernel may start beside the one before it. With several rows it takes the other's place instead: on an
        H200 a step of one row took 1.14 ms with and 1.24 without, of 16 rows 2.15 with and 1.74 without."""
        return self.tuning.overlap and n_rows == 1

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        out = torch.empty_like(x)
        pdl = self._overlaps(x.shape[0])
        width = x.shape[1]
        block = triton.next_power_of_2(width)
        _rms_norm[(x.shape[0],)](
            x, norm.weight, out, norm.eps, WIDTH=width, BLOCK=block, PDL=pdl, num_warps=4 if block <= 2048 else 8,
            **_launch(pdl),
        )  # fmt: skip
        return out

    def attend(self, qkv: Tensor, decoder: Decoder, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        batch_size, kv_heads, cache_len, head_dim = keys.shape
        group = decoder.heads // kv_heads
        step_len = qkv.shape[0] // batch_size
        queries = max(16, triton.next_power_of_2(group * step_len))
        splits = self._splits(batch_size * kv_heads, cache_len)
        out = qkv.new_empty(qkv.shape[0], decoder.heads * head_dim)
        n_parts = batch_size * kv_heads * splits * queries
        pdl = self._overlaps(qkv.shape[0])
        _attend[(batch_size * kv_heads, splits)](
            qkv, decoder.cos, decoder.sin, keys, values, lengths,
            self._floats("mixed", n_parts * head_dim), self._floats("best", n_parts), self._floats("weight", n_parts),
            self._arrived, out, decoder.scaling, cache_len,
            STEP_LEN=step_len, GROUP=group, KV_HEADS=kv_heads, HALF=head_dim // 2, QUERIES=queries,
            NEW=max(16, triton.next_power_of_2(step_len)), BLOCK=self.tuning.block, SPLITS=splits, PDL=pdl,
            num_warps=self.tuning.attention_warps, **_launch(pdl),
        )  # fmt: skip
        return out

    def _splits(self, n_heads: int, cache_len: int) -> int:
        """Parts enough to give every multiprocessor a program, where the cache has as many blocks."""
        blocks = triton.cdiv(cache_len, self.tuning.block)
        programs = triton.cdiv(_processors(self._device), n_heads)
        return int(max(1, min(self.tuning.splits, blocks, programs)))

    def choose(self, logits: Tensor, choices: Tensor, lengths: Tensor) -> None:
        n_rows, vocab_size = logits.shape
        block = 4096
        parts = triton.cdiv(vocab_size, block)
        pdl = self._overlaps(n_rows)
        _choose[(n_rows, parts)](
            logits, self._floats("top logit", n_rows * parts), self._ints("top token", n_rows * parts),
            self._ints("rows arrived", n_rows), choices, lengths,
            VOCAB=vocab_size, STEP_LEN=choices.shape[1], BLOCK=block, PARTS=parts,
            ALL_PARTS=triton.next_power_of_2(parts), PDL=pdl, num_warps=8, **_launch(pdl),
        )  # fmt: skip

    def _floats(self, name: str, size: int) -> Tensor:
        return self._buffer(name, size, torch.float32)

    def _ints(self, name: str, size: int) -> Tensor:
        return self._buffer(name, size, torch.int32)

    def _buffer(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Scratch space that all layers and steps of a shape share; made before a capture, by the runs that warm up."""
        key = name, size
        if key not in self._space:
            self._space[key] = torch.zeros(size, dtype=dtype, device=self._device)
        return self._space[key]


def _projections(layer: Any) -> dict[str, Projection]:
    return {"qkv": layer.qkv, "out": layer.out, "gate_up": layer.gate_up, "down": layer.down}


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _launch(overlap: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if overlap else {}
