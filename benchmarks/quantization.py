"""Quantization: what fewer bits save, what they cost in time, and what they do to the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from benchmarks.estimates import Estimate, counted, unusable
from benchmarks.ledger import Cell
from benchmarks.memory import OutOfMemory, attempt, fits, kv_cache_bytes, resident_bytes, tensor_bytes
from benchmarks.nimbus.corpus import HELD_OUT_SEED, short_documents, windows
from benchmarks.nimbusdb import END
from benchmarks.phases import EagerEngine, Engine, Prompt, Request, decode, serve
from benchmarks.roofline import Roofline
from benchmarks.rows import Phases, Sampled, served_cells
from benchmarks.runs import Run, ratio
from benchmarks.timing import Clock, set_aside
from benchmarks.workloads import Ids, Tokenizer, Workload, encode, prefix_ids, question_ids

Raw = dict[str, tuple[float, ...]]
NF4_BLOCK = 64
"""Weights that share one absmax (bitsandbytes' default)."""

CHAT_LEN = 2048
"""Tokens of one chat in the claim about freed memory."""

EVAL_ROWS, EVAL_LEN = 8, 256
"""The eval set: eight windows of held-out text, 2,040 predicted tokens. A window's logits fit with any vocabulary."""


# Bytes by module ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleBytes:
    """What one module holds itself, without its children.

    `kind` is "int8", "nf4" or "fp4" for a quantized linear, else the class name; `bytes` are those of its storages, the
    constants of its quantization among them. `shape` is (out, in) for a linear of any kind.
    """

    name: str
    kind: str
    dtype: str
    bytes: int
    shape: tuple[int, int] | None = None


def module_bytes(model: torch.nn.Module) -> tuple[ModuleBytes, ...]:
    """Measured bytes of every module that holds tensors, each byte once: tied weights belong to the first holder.

    Weights that a graph engine has joined are parts of one storage, and each module has its part. Bytes of a storage
    that no tensor shows belong to its first holder.
    bitsandbytes keeps its constants outside of parameters and buffers, so that the library's own footprint misses them:
    int8's row scales lie on the weight until the first forward and in the module's state after it, nf4's block maxima
    and code in the weight's quantization state. Raises ValueError for tensors on the meta device, which have no bytes.
    """
    shown: dict[tuple[torch.device, int], set[int]] = {}
    hidden: dict[tuple[torch.device, int], int] = {}
    first_holder: dict[tuple[torch.device, int], int] = {}
    found: list[ModuleBytes] = []
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not own:
            continue
        held = 0
        for tensor in chain(own, _constants(module)):
            if tensor.is_meta:
                raise ValueError(f"{name} is on the meta device, where tensors have no bytes: load its weights first")
            storage = tensor.untyped_storage()
            key = (tensor.device, storage.data_ptr())
            if key not in shown:
                shown[key], hidden[key], first_holder[key] = set(), storage.nbytes(), len(found)
            if tensor.data_ptr() not in shown[key]:
                shown[key].add(tensor.data_ptr())
                part = min(tensor.nbytes, hidden[key])
                hidden[key] -= part
                held += part
        dtype = str(own[0].dtype).removeprefix("torch.")
        found.append(ModuleBytes(name, _kind(module), dtype, held, _linear_shape(module)))
    for key, rest in hidden.items():
        holder = found[first_holder[key]]
        found[first_holder[key]] = replace(holder, bytes=holder.bytes + rest)
    return tuple(found)


def _constants(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that bitsandbytes hangs on a weight, on its quantization state (nested or not), or on a module."""
    weight = getattr(module, "weight", None)
    quant_state = getattr(weight, "quant_state", None)
    for holder in (weight, getattr(module, "state", None), quant_state, getattr(quant_state, "state2", None)):
        for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
            # `idx` are the outlier columns of the last int8 call: what was asked last, not what the weights are.
            if isinstance(value, torch.Tensor) and name != "idx":
                yield value


def _linear_shape(module: torch.nn.Module) -> tuple[int, int] | None:
    """(out, in) of a linear: GPT-2 writes its own as Conv1D, with the weight the other way round."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        columns, rows = module.weight.shape
        return rows, columns
    return (module.out_features, module.in_features) if isinstance(module, torch.nn.Linear) else None


def _kind(module: torch.nn.Module) -> str:
    weight: Any = getattr(module, "weight", None)
    if (quant_state := getattr(weight, "quant_state", None)) is not None:
        return str(quant_state.quant_type)
    if isinstance(module, torch.nn.Linear) and weight.dtype == torch.int8:
        return "int8"
    return type(module).__name__


def expected_bytes(reference: Any, precision: str, absmax_bytes: int = 4) -> tuple[ModuleBytes, ...]:
    """What each module of an unquantized model must hold once it is loaded in `precision`, computed from shapes.

    Every linear but the output head goes to low bits and keeps its bias: int8 has a byte a weight and a float32 scale a
    row (LLM.int8(), arXiv:2208.07339); nf4 half a byte a weight, an absmax of `absmax_bytes` for NF4_BLOCK weights each
    and a code of 16 float32 values (QLoRA, arXiv:2305.14314, without double quantization). The rest stays as it is.
    Raises ValueError for another precision.
    """
    head = reference.get_output_embeddings()
    modules = dict(reference.named_modules())
    expected = []
    for module in module_bytes(reference):
        if module.shape is None or modules[module.name] is head:
            expected.append(module)
            continue
        rows, columns = module.shape
        weights = rows * columns
        if precision == "int8":
            low, constants = weights, 4 * rows
        elif precision == "nf4":
            low, constants = -(-weights // 2), absmax_bytes * -(-weights // NF4_BLOCK) + 16 * 4
        else:
            raise ValueError(f"precision is int8 or nf4, not {precision}")
        weight: Any = modules[module.name].weight
        bias_bytes = module.bytes - weights * weight.element_size()
        dtype = {"int8": "int8", "nf4": "uint8"}[precision]
        expected.append(replace(module, kind=precision, dtype=dtype, bytes=low + constants + bias_bytes))
    return tuple(expected)


def off_by(measured: int, expected: int) -> float:
    """How far two byte counts lie apart, as a share of the larger: 0 when equal, 1 when only one is there at all."""
    return abs(measured - expected) / max(measured, expected, 1)


def unexplained(measured: Sequence[ModuleBytes], expected: Sequence[ModuleBytes]) -> Estimate:
    """The worst module's distance from what is expected of it. A module of another kind explains nothing, however many
    bytes it has: fp4 has exactly those of nf4."""
    found, wanted = ({m.name: m for m in modules} for modules in (measured, expected))
    worst, note = -1.0, ""
    for name in wanted | found:
        held, should = found.get(name), wanted.get(name)
        off = off_by(held.bytes, should.bytes) if held and should and held.kind == should.kind else 1.0
        if off > worst:
            shown = [f"{m.kind} {m.bytes:,} bytes" if m else "nothing" for m in (held, should)]
            worst, note = off, f"worst module {name}: {shown[0]}, expected {shown[1]}"
    raw: Raw = {
        "measured bytes": (float(sum(m.bytes for m in measured)),),
        "expected bytes": (float(sum(m.bytes for m in expected)),),
    }
    return counted(worst, raw, note if worst > 0 else "")


def bytes_explained(reference: Any, quantized: Mapping[str, Any]) -> dict[str, Estimate]:
    """Measured against computed bytes for every precision of the same model, module by module."""
    return {
        f"{precision} worst module off by": unexplained(
            module_bytes(model), expected_bytes(reference, precision, _absmax_bytes(model))
        )
        for precision, model in quantized.items()
    }


def _absmax_bytes(model: torch.nn.Module) -> int:
    """4, but 2 on CPUs with AVX-512 bfloat16: there the first forward packs nf4 weights anew, with bfloat16 maxima."""
    states = (getattr(getattr(m, "weight", None), "quant_state", None) for m in model.modules())
    return 2 if any(getattr(state, "packing_format_for_cpu", False) for state in states) else 4


def loaded_ratio(load_bytes: Mapping[str, int], model: torch.nn.Module, over: str, under: str) -> Estimate:
    """Bytes that loading one precision took over those of the 16-bit reference, as the allocator saw both.

    `over` and `under` are keys of `load_bytes`; `model` is the reference. Unusable when one wasn't measured, or when
    the reference isn't 16-bit or seems smaller than its own weights: a counter that misses weights can't be compared.
    """
    if (itemsize := next(model.parameters()).dtype.itemsize) != 2:
        return unusable(f"the reference has {8 * itemsize}-bit weights: run with --dtype float16")
    if missing := [key for key in (over, under) if load_bytes.get(key, 0) <= 0]:
        return unusable(f"no bytes were counted for loading {' and '.join(missing)}")
    if load_bytes[under] < (weights := tensor_bytes(model)):
        return unusable(f"loading {under} took {load_bytes[under]:,} bytes, fewer than its weights' {weights:,}")
    raw: Raw = {key: (float(load_bytes[key]),) for key in (over, under)}
    return counted(load_bytes[over] / load_bytes[under], raw)


# Time -----------------------------------------------------------------------------------------------------------------


def slower(reference: Sequence[Run], int8: Sequence[Run]) -> dict[str, Estimate]:
    return {"quant.not_always_faster": ratio("tpot_s", int8, reference, ("int8", "reference"))}


def row_id(precision: str) -> str:
    return f"quant.{precision}"


def row(
    engine: Engine[Any],
    workload: Workload,
    clock: Clock,
    precision: str,
    load_bytes: int | None,
    answered: str | None,
    sampled: Sampled[Run],
    roofline: Roofline | None = None,
) -> list[Cell]:
    """One precision of the table: time a token, bytes, and the answer to the user's question (None: random weights)."""

    asked = Request(engine, workload)
    whole = engine.device == "cuda"  # as for a batching row
    begun = asked if whole else replace(asked, workload=replace(workload, output_len=2))
    runs = sampled(lambda: serve(asked, clock).run, lambda: serve(begun, clock))
    modules = module_bytes(engine.model)
    held = {"storages": float(sum(m.bytes for m in modules))}
    missing = {}
    if load_bytes is None:
        missing["loaded"] = "the CPU has no counter of allocated bytes"
    else:
        held["loaded"] = float(load_bytes)
    if answered is None:
        missing["answer"] = "random weights have no text of their own"
    served = served_cells(
        row_id(precision),
        workload,
        engine,
        precision,
        runs,
        Phases.of(engine, workload, roofline=roofline),
        bytes=held,
        unavailable=missing,
        note=f"answer: {answered}" if answered is not None else "",
    )
    return [*served, modules_cell(modules, workload, engine.name, precision)]


def modules_cell(modules: Sequence[ModuleBytes], workload: Workload, engine: str, precision: str) -> Cell:
    """Bytes of the weights by the kind of module that holds them."""
    held: dict[str, float] = {}
    for module in modules:
        held[module.kind] = held.get(module.kind, 0.0) + module.bytes
    return Cell(
        id=f"quant.modules.{precision}",
        station="quant",
        phase="modules",
        workload=workload.record,
        engine=engine,
        precision=precision,
        bytes=held,
        unavailable=dict.fromkeys(("wall_s", "device_s"), "bytes are counted, not timed"),
    )


def answer(engine: EagerEngine, tokenizer: Tokenizer, question: str, output_len: int) -> str:
    """What the model says to a question, up to the end of its answer, in one short line."""
    prompt = Prompt.of([question_ids(tokenizer, question)], engine.device)
    (tokens,) = decode(engine, engine.prefill(prompt), output_len)
    said = " ".join(tokenizer.decode(tokens).split(END)[0].split())
    return said if len(said) <= 160 else said[:157] + "..."


# Quality --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quality:
    """A quantized model beside its reference on the same text, means over `tokens` predicted tokens.

    `top1_agreement` is the share of positions where both name the same next token; `nll` and `reference_nll` are the
    surprise at the text, `kl` the divergence KL(reference || quantized), all in nats a token.
    """

    tokens: int
    top1_agreement: float
    reference_nll: float
    nll: float
    kl: float

    @property
    def nll_ratio(self) -> float:
        return self.nll / self.reference_nll

    @property
    def figures(self) -> dict[str, float]:
        """For the cell."""
        return {
            "eval_tokens": float(self.tokens),
            "top1_agreement": self.top1_agreement,
            "reference_nll": self.reference_nll,
            "nll": self.nll,
            "nll_ratio": self.nll_ratio,
            "kl": self.kl,
        }


def eval_rows(tokenizer: Tokenizer) -> list[Ids]:
    """NimbusDB texts that the embedded pair was not trained on: support answers, tickets, notes, lists."""
    rows = windows(short_documents(HELD_OUT_SEED), lambda text: list(encode(tokenizer, text)), EVAL_LEN, EVAL_ROWS)
    return [tuple(row) for row in rows]


@torch.inference_mode()
def quality(reference: EagerEngine, quantized: EagerEngine, rows: Sequence[Ids]) -> Quality:
    """Compare two models' next-token distributions at every position of some text but the first of each row."""
    agreed, surprise, reference_surprise, divergence, tokens = 0.0, 0.0, 0.0, 0.0, 0
    for row in rows:
        ids = torch.tensor([row], device=reference.device)
        told, said = (_log_probabilities(engine, ids) for engine in (reference, quantized))
        following = ids[0, 1:, None]
        tokens += len(row) - 1
        agreed += float((told.argmax(-1) == said.argmax(-1)).sum())
        reference_surprise -= float(told.gather(-1, following).sum())
        surprise -= float(said.gather(-1, following).sum())
        divergence += float((told.exp() * (told - said)).sum())
    return Quality(tokens, agreed / tokens, reference_surprise / tokens, surprise / tokens, divergence / tokens)


def _log_probabilities(engine: EagerEngine, ids: torch.Tensor) -> torch.Tensor:
    """(length - 1, vocab_size), in float32."""
    logits: torch.Tensor = engine.model(ids, use_cache=False).logits
    return logits[0, :-1].float().log_softmax(-1)


def not_binary(seen: Quality) -> dict[str, Estimate]:
    note = f"top-1 agreement {seen.top1_agreement:.1%} over {seen.tokens:,} tokens"
    raw: Raw = {"NLL": (seen.nll,), "reference NLL": (seen.reference_nll,)}
    return {"KL to reference": counted(seen.kl, note=note), "NLL over reference": counted(seen.nll_ratio, raw, note)}


def quality_cell(precision: str, seen: Quality, engine: EagerEngine) -> Cell:
    return Cell(
        id=f"quant.quality.{precision}",
        station="quant",
        phase="quality",
        workload={"name": "held-out NimbusDB text", "batch_size": 1, "prompt_len": EVAL_LEN, "output_len": 0},
        engine=engine.name,
        precision=precision,
        figures=seen.figures,
        unavailable=dict.fromkeys(("wall_s", "device_s"), "quality is counted, not timed"),
    )


# More chats -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """What freed bytes are good for: chats of CHAT_LEN tokens by computation, and those that really fitted.

    `held` is None where it wasn't tried.
    """

    freed_bytes: int
    chat_bytes: int
    held: int | None = None

    @property
    def computed(self) -> int:
        return self.freed_bytes // self.chat_bytes


def room(engine: EagerEngine, load_bytes: Mapping[str, int], over: str, under: str) -> Room:
    """The bytes that loading `over` takes less than `under` (keys of `load_bytes`), and the size of a chat.

    A cached number is as wide as an embedded one: quantizing weights leaves activations as they are.
    """
    itemsize = engine.model.get_input_embeddings().weight.dtype.itemsize
    return Room(load_bytes[under] - load_bytes[over], kv_cache_bytes(engine.model.config, CHAT_LEN, itemsize))


def chats_within(freed_bytes: int, add_chat: Callable[[], int], at_most: int) -> int:
    """How many chats fit into `freed_bytes`: adds one after another until their bytes no longer fit.

    `add_chat` holds one chat more and returns the bytes of all so far. Gives up after `at_most` chats, since a counter
    that doesn't grow would never end.
    """
    held = 0
    while held < at_most and add_chat() <= freed_bytes:
        held += 1
    return held


def hold_chats(engine: EagerEngine, tokenizer: Tokenizer, planned: Room) -> Room | OutOfMemory:
    """Prefill chats on the card for real, and keep their caches until they take more than was freed."""
    if not fits(planned.freed_bytes + 2 * planned.chat_bytes, engine.device):
        return OutOfMemory(f"{planned.freed_bytes:,} bytes for chats are not free")
    prompt = Prompt.of([prefix_ids(tokenizer, CHAT_LEN)], engine.device)
    engine.prefill(prompt)  # pays for what stays after a first call of this shape
    caches: list[Any] = []
    with set_aside():  # every count collects garbage
        before = _allocated_bytes(engine)

        def add_chat() -> int:
            caches.append(engine.prefill(prompt).cache)
            return _allocated_bytes(engine) - before

        held = attempt(lambda: chats_within(planned.freed_bytes, add_chat, 2 * planned.computed + 2), engine.device)
    return held if isinstance(held, OutOfMemory) else replace(planned, held=held)


def _allocated_bytes(engine: EagerEngine) -> int:
    counted_bytes = resident_bytes(engine.device)
    if counted_bytes is None:
        raise RuntimeError("nothing counts bytes on this device: chats can't be measured here")
    return counted_bytes


def more_chats(seen: Room | OutOfMemory) -> Estimate:
    if isinstance(seen, OutOfMemory):
        return unusable(seen.reason)
    if seen.computed < 1 or seen.held is None:
        return unusable(f"{seen.freed_bytes:,} freed bytes hold no chat of {CHAT_LEN:,} tokens")
    raw: Raw = {"held": (float(seen.held),), "computed": (float(seen.computed),), "freed": (float(seen.freed_bytes),)}
    return counted(seen.held / seen.computed, raw)


def room_cell(precision: str, planned: Room, seen: Room | OutOfMemory, engine: EagerEngine) -> Cell:
    """Chats that the freed bytes hold: as computed (`planned`), and as tried (`seen`; the same where it wasn't)."""
    figures = {"chats_computed": float(planned.computed)}
    unavailable = dict.fromkeys(("wall_s", "device_s"), "bytes are counted, not timed")
    if isinstance(seen, OutOfMemory):
        unavailable["chats_held"] = seen.reason
    elif seen.held is None:
        unavailable["chats_held"] = "computed only"
    else:
        figures["chats_held"] = float(seen.held)
    return Cell(
        id=f"quant.chats.{precision}",
        station="quant",
        phase="chats",
        workload={"name": f"chats of {CHAT_LEN:,} tokens", "batch_size": 1, "prompt_len": CHAT_LEN, "output_len": 0},
        engine=engine.name,
        precision=precision,
        bytes={"freed": float(planned.freed_bytes), "chat": float(planned.chat_bytes)},
        figures=figures,
        unavailable=unavailable,
    )
