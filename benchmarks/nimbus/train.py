"""Train the embedded pair: `python -m benchmarks.nimbus.train` writes `target/`, `draft/` and the model card.

Both learn from the same text, and the draft, an eighth of the size, is sometimes wrong about it. Short windows come
first because they are cheap; windows of the full system prompt come last, at a learning rate that is already falling.
Every step's data follows from the seed, so a killed run goes on from its last checkpoint as if nothing had happened.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from benchmarks.nimbus import card, corpus
from benchmarks.nimbusdb import END, SYSTEM_TEXT

HERE: Final = Path(__file__).parent
PAD: Final = "<|pad|>"
VOCABULARY: Final = 2048
TOKENS_PER_STEP: Final = 2048
SHORT_WINDOW: Final = 512
LONG_WINDOW: Final = 2048
LONG_SHARE: Final = 0.3
WARM_UP_STEPS: Final = 40
CHECKPOINT_EVERY: Final = 50


@dataclass(frozen=True)
class Size:
    """One model's shape, and the training that suits it."""

    hidden: int
    heads: int
    kv_heads: int
    layers: int
    intermediate: int
    learning_rate: float
    steps: int

    def config(self) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=1,
        )


SIZES: Final = {
    "target": Size(hidden=256, heads=4, kv_heads=2, layers=6, intermediate=704, learning_rate=2e-3, steps=650),
    "draft": Size(hidden=128, heads=2, kv_heads=1, layers=2, intermediate=384, learning_rate=4e-3, steps=600),
}


TOKENIZER_DOCUMENTS: Final = 8000


def train_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE over the training text: any input can be encoded, and the domain's words are one token.

    The split into words is Qwen2's own, because every loader rebuilds it from the model's type.
    """
    split = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = split.normalizer, split.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = islice(corpus.short_documents(corpus.TRAINING_SEED), TOKENIZER_DOCUMENTS)
    tokenizer.train_from_iterator([*(text.removesuffix(END) for text in sample), SYSTEM_TEXT], trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,  # pairs, as its BPE takes them
        pad_token=PAD,
        model_max_length=4096,
    )


def batches(tokenizer: Qwen2Tokenizer, steps: int) -> list[torch.Tensor]:
    """One batch a step, all of the same number of tokens: short windows, then long ones, then both in turn.

    The mixed end keeps the models from forgetting how to answer without a system prompt.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer.backend_tokenizer.encode(text).ids)

    def of_length(length: int, documents: corpus.Documents, count: int) -> list[torch.Tensor]:
        rows = TOKENS_PER_STEP // length
        windows = corpus.windows(documents(corpus.TRAINING_SEED), encode, length + 1, count * rows)
        return [torch.tensor(windows[first : first + rows]) for first in range(0, len(windows), rows)]

    long_steps = round(steps * LONG_SHARE)
    short = of_length(SHORT_WINDOW, corpus.short_documents, steps - long_steps)
    long = of_length(LONG_WINDOW, corpus.long_documents, long_steps)
    mixed_from = len(short) - long_steps // 2
    mixed = [batch for pair in zip(long[::2], short[mixed_from:], strict=False) for batch in pair]
    return [*short[:mixed_from], *long[1::2], *mixed]


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a fiftieth."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


def train(name: str, size: Size, data: list[torch.Tensor], checkpoint: Path) -> tuple[Qwen2ForCausalLM, float]:
    """The trained model and the seconds that took, going on from the checkpoint where there is one."""
    torch.manual_seed(corpus.TRAINING_SEED)
    model = Qwen2ForCausalLM(size.config())
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=size.learning_rate,
        betas=(0.9, 0.95),
    )
    first, spent_s = 0, 0.0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, spent_s = saved["step"], saved["spent_s"]
    started = time.monotonic() - spent_s
    model.train()
    for step in range(first, len(data)):
        factor = learning_rate_factor(step, len(data))
        for group in optimizer.param_groups:
            group["lr"] = size.learning_rate * factor
        ids = data[step]
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done, spent_s = step + 1, time.monotonic() - started
        if done % 20 == 0:
            print(f"{name} step {done}/{len(data)} loss {loss.item():.3f} {spent_s:.0f} s", flush=True)
        if done % CHECKPOINT_EVERY == 0 or done == len(data):
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": done,
                "spent_s": spent_s,
            }
            torch.save(state, checkpoint)
    return model, spent_s


def write(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """A folder that plain `from_pretrained` takes, in half precision because that halves the repository's share."""
    model.half()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=0, pad_token_id=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def processor() -> str:
    """The processor's name where the system tells it."""
    described = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in described.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({len(names) or os.cpu_count()} cores)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nimbus.train", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=HERE, help="where the folders and the card go (default: the package)"
    )
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("reports/nimbus"), help="where a killed run goes on from"
    )
    options = parser.parse_args()

    torch.set_num_threads(2)
    tokenizer = train_tokenizer()
    models: dict[str, Qwen2ForCausalLM] = {}
    training: dict[str, card.Training] = {}
    for name, size in SIZES.items():
        data = batches(tokenizer, size.steps)
        models[name], took_s = train(name, size, data, options.checkpoints / f"{name}-{size.steps}.pt")
        parameters = models[name].num_parameters()
        training[name] = card.Training(parameters, len(data), len(data) * TOKENS_PER_STEP, took_s)
        write(models[name], tokenizer, options.out / name)
    # Measured as stored: half the precision, read back in full.
    target, draft = (Qwen2ForCausalLM.from_pretrained(options.out / name, dtype=torch.float32) for name in SIZES)
    measured = card.measure(target, draft, tokenizer)
    print(measured)
    card.write_card(options.out, training, measured, processor())


if __name__ == "__main__":
    main()
