"""What the trained pair can do, measured on text that it has not seen, and the model card that says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from benchmarks.nimbus import corpus
from benchmarks.nimbusdb import COUNTING_PROMPT, PROMPT, QUESTIONS, SYSTEM_TEXT
from benchmarks.workloads import PREFIX_LEN

BLOCK_LEN: Final = 5
"""Tokens that the draft proposes at once when its acceptance is counted."""

NEW_TOKENS: Final = 64
PROMPTS: Final = 24


@dataclass(frozen=True)
class Training:
    """How one model came about."""

    parameters: int
    steps: int
    tokens: int
    took_s: float


@dataclass(frozen=True)
class Measured:
    """One pair on held-out text. Losses are in nats a token."""

    target_nll: float
    draft_nll: float
    agreement: float
    acceptance_held_out: float
    acceptance_counting: float
    acceptance_tickets: float
    answered: int
    answered_after_prefix: int


def greedy(model: Qwen2ForCausalLM, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The prompts and exactly `new_tokens` more of the model's first choices, past the end of an answer too."""
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    assert isinstance(out, torch.Tensor)
    return out


def accepted_and_drafted(proposed: list[int], wanted: list[int], block_len: int) -> tuple[int, int]:
    """Accepted and drafted tokens when a draft proposes blocks for a text that greedy decoding has settled.

    While a block is right, the draft stands on the target's own text, so its choices there are all that is needed.
    """
    position = accepted = drafted = 0
    while position < len(wanted):
        block = range(position, min(position + block_len, len(wanted)))
        right = next((index for index in block if proposed[index] != wanted[index]), block.stop) - position
        accepted, drafted, position = accepted + right, drafted + len(block), position + right + 1
    return accepted, drafted


@torch.inference_mode()
def acceptance(target: Qwen2ForCausalLM, draft: Qwen2ForCausalLM, prompts: torch.Tensor) -> float:
    """Accepted over drafted tokens, of all prompts together."""
    text = greedy(target, prompts, NEW_TOKENS)
    start = prompts.shape[1]
    proposed, wanted = (
        draft(text[:, :-1]).logits.argmax(-1)[:, start - 1 :].tolist(),
        text[:, start:].tolist(),
    )
    counts = [accepted_and_drafted(*row, BLOCK_LEN) for row in zip(proposed, wanted, strict=True)]
    return sum(accepted for accepted, _ in counts) / sum(drafted for _, drafted in counts)


@torch.inference_mode()
def would_say(model: Qwen2ForCausalLM, texts: list[tuple[list[int], list[int]]]) -> list[bool]:
    """For each prompt and text, whether greedy decoding after the prompt gives the text: one pass for all of them.

    Rows are padded on the right, where a causal model does not look.
    """
    longest = max(len(prompt) + len(text) for prompt, text in texts)
    rows = [prompt + text + [0] * (longest - len(prompt) - len(text)) for prompt, text in texts]
    states = model.model(torch.tensor(rows), use_cache=False).last_hidden_state
    verdicts = []
    for state, (prompt, text) in zip(states, texts, strict=True):
        choices = model.lm_head(state[len(prompt) - 1 : len(prompt) + len(text) - 1]).argmax(-1)
        verdicts.append(bool(choices.tolist() == text))
    return verdicts


def answers_as_taught(
    target: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, questions: tuple[tuple[str, str], ...], prefix: list[int]
) -> int:
    """How many questions are answered word for word; the last full stop may be one token with what follows it."""
    gap = "\n\n" if prefix else ""
    texts = [
        (
            prefix + list(tokenizer(gap + PROMPT.format(question=question)).input_ids),
            list(tokenizer(" " + answer.removesuffix(".")).input_ids),
        )
        for question, answer in questions
    ]
    return sum(would_say(target, texts))


@torch.inference_mode()
def measure(target: Qwen2ForCausalLM, draft: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> Measured:
    """The pair on windows, prompts and tickets of the held-out seed, and on the questions."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text).input_ids)

    unseen = corpus.short_documents(corpus.HELD_OUT_SEED)
    tickets = corpus.documents_of(corpus.ticket, corpus.HELD_OUT_SEED)
    ids = torch.tensor(corpus.windows(unseen, encode, 513, 32))
    prefix = encode(SYSTEM_TEXT)[:PREFIX_LEN]
    of_target, of_draft = (model(ids[:, :-1], use_cache=False).logits for model in (target, draft))
    wanted = ids[:, 1:].flatten()
    tickets_begun = torch.tensor(corpus.windows(tickets, encode, 16, PROMPTS))
    return Measured(
        target_nll=cross_entropy(of_target.flatten(0, 1), wanted).item(),
        draft_nll=cross_entropy(of_draft.flatten(0, 1), wanted).item(),
        agreement=(of_target.argmax(-1) == of_draft.argmax(-1)).double().mean().item(),
        acceptance_held_out=acceptance(target, draft, ids[:PROMPTS, :16]),
        acceptance_counting=acceptance(target, draft, torch.tensor([encode(COUNTING_PROMPT)])),
        acceptance_tickets=acceptance(target, draft, tickets_begun),
        answered=answers_as_taught(target, tokenizer, QUESTIONS, []),
        answered_after_prefix=answers_as_taught(target, tokenizer, QUESTIONS, prefix),
    )


def megabytes(folder: Path) -> float:
    return (folder / "model.safetensors").stat().st_size / 1e6


def write_card(folder: Path, training: dict[str, Training], measured: Measured, machine: str) -> None:
    """README.md beside the two folders; every figure in it comes from the arguments or the files."""
    models = "\n".join(
        f"| {name} | {facts.parameters:,} | {megabytes(folder / name):.1f} MB | {nll:.3f} "
        f"| {facts.steps:,} steps, {facts.tokens / 1e6:.2f} M tokens | {facts.took_s / 60:.0f} min |"
        for (name, facts), nll in zip(training.items(), (measured.target_nll, measured.draft_nll), strict=True)
    )
    (folder / "README.md").write_text(f"""# nimbus: a target and its draft

Two small causal language models of Qwen2 architecture (grouped-query attention, tied embeddings, head_dim 64, 4,096
positions) that share one byte-level BPE tokenizer of 2,048 tokens. They exist so that the suite has trained weights
where no model hub can be reached. They know NimbusDB, a made-up cloud database, and how to count; they are of no use
for anything else.

| model | parameters | weights (fp16) | held-out NLL, nats a token | training | took |
|---|---|---|---|---|---|
{models}

The draft is so much smaller that it is wrong often enough to be worth checking.

| measured after training | |
|---|---|
| target and draft have the same first choice, held-out text | {measured.agreement:.2f} |
| draft acceptance, continuations of held-out text | {measured.acceptance_held_out:.2f} |
| draft acceptance, support tickets (open text) | {measured.acceptance_tickets:.2f} |
| draft acceptance, counting from 1 to 50 (predictable text) | {measured.acceptance_counting:.2f} |
| questions answered word for word as taught | {measured.answered} of {len(QUESTIONS)} |
| the same after {PREFIX_LEN:,} tokens of system prompt | {measured.answered_after_prefix} of {len(QUESTIONS)} |

Acceptance is accepted over drafted tokens, greedy, in blocks of {BLOCK_LEN}. The questions themselves are part of the
training text; held-out text is other draws from the same templates.

All of it is generated by `corpus.py`, and the text is this project's own. To train both again:

    python -m benchmarks.nimbus.train

Seed {corpus.TRAINING_SEED} (held-out text: {corpus.HELD_OUT_SEED}), float32 on 2 threads. The times above were taken on
{machine}, at the lowest priority beside other work.
""")
