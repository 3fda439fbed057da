"""The embedded pair as anybody finds it in the repository: it loads, fits and answers, and its draft sometimes errs."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import nimbus
from benchmarks.nimbus import card, corpus
from benchmarks.nimbusdb import COUNTING_PROMPT, END, POLICIES, PROMPT, QUESTIONS, SYSTEM_TEXT

FOLDER = Path(nimbus.__file__).parent


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER / "target")


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {
        name: AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32) for name in ("target", "draft")
    }


def test_there_are_forty_policies_and_each_is_in_the_system_prompt() -> None:
    assert len(POLICIES) == len(set(POLICIES)) == 40
    assert all(f"{number}. {policy}" in SYSTEM_TEXT for number, policy in enumerate(POLICIES, start=1))


def test_every_question_has_other_wordings_of_its_own() -> None:
    assert len(corpus.REPHRASED) == len(QUESTIONS) >= 40
    wordings = [question for question, _ in QUESTIONS] + [text for texts in corpus.REPHRASED for text in texts]
    assert len(wordings) == len(set(wordings))


@pytest.mark.parametrize("documents", [corpus.short_documents, corpus.long_documents])
def test_a_seed_gives_one_text_and_the_held_out_seed_gives_another(documents: corpus.Documents) -> None:
    training, again, held_out = (
        list(islice(documents(seed), 40)) for seed in (corpus.TRAINING_SEED, corpus.TRAINING_SEED, corpus.HELD_OUT_SEED)
    )
    assert training == again
    assert training != held_out
    assert all(text.endswith(END) and text.count(END) == 1 for text in training + held_out)


@pytest.mark.parametrize("kind", corpus.SHORT, ids=lambda kind: kind.__name__)
def test_no_template_of_the_corpus_leaves_a_slot_open(kind: corpus.Kind) -> None:
    rng = corpus.random.Random(3)
    assert not any("{" in text or "  " in text for text in (kind(rng) for _ in range(200)))


def test_the_pair_fits_in_sixteen_megabytes() -> None:
    files = [path for name in ("target", "draft") for path in (FOLDER / name).iterdir()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    assert {path.name for path in files} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_both_folders_hold_the_same_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (FOLDER / "target" / name).read_bytes() == (FOLDER / "draft" / name).read_bytes()


def test_the_tokenizer_returns_any_text_unchanged(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in (SYSTEM_TEXT, "  Ünïcode,\t日本語\n\n and 12,345.67 ", COUNTING_PROMPT):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer(SYSTEM_TEXT).input_ids) > card.PREFIX_LEN
    assert tokenizer(END).input_ids == [tokenizer.eos_token_id]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_shape_is_one_that_serving_engines_take(name: str, models: dict[str, PreTrainedModel]) -> None:
    config = models[name].config
    assert config.model_type == "qwen2"
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.hidden_size % 64 == 0 and config.hidden_size // config.num_attention_heads == 64
    assert config.tie_word_embeddings
    assert config.max_position_embeddings >= 4096


def test_plain_loading_gives_half_precision_and_the_two_vocabularies_agree(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    for name in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(FOLDER / name)
        assert model.dtype == torch.float16
        assert model.config.vocab_size == len(tokenizer)
        assert torch.isfinite(model(torch.tensor([tokenizer(PROMPT).input_ids])).logits).all()


def test_the_target_gives_the_taught_answer_to_most_questions(
    models: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase
) -> None:
    assert card.answers_as_taught(models["target"], tokenizer, QUESTIONS, []) >= 0.9 * len(QUESTIONS)


def test_a_long_system_prompt_does_not_change_the_answers(
    models: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase
) -> None:
    prefix = tokenizer(SYSTEM_TEXT).input_ids[: card.PREFIX_LEN]
    assert card.answers_as_taught(models["target"], tokenizer, QUESTIONS[:2], prefix) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_generate_stops_by_itself_after_the_answer(dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=dtype)
    question, answer = QUESTIONS[0]
    asked = tokenizer(PROMPT.format(question=question), return_tensors="pt")
    said = model.generate(**asked, max_new_tokens=64)[0, asked.input_ids.shape[1] :]
    assert tokenizer.decode(said) == f" {answer}{END}"


def test_the_target_counts_to_fifty(models: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase) -> None:
    rest = " " + ", ".join(map(str, range(4, 51)))
    texts = [(tokenizer(COUNTING_PROMPT).input_ids, tokenizer(rest).input_ids)]
    assert card.would_say(models["target"], texts) == [True]


@pytest.mark.parametrize(
    ("proposed", "counts"),
    [
        ([1, 2, 3, 4, 5, 6], (5, 5)),  # one right block; the sixth token is the target's own
        ([9, 2, 3, 4, 5, 6], (5, 10)),  # nothing of the first five, then a right block from the second token on
        ([9, 9, 9, 9, 9, 9], (0, 20)),
        ([1, 2, 9, 4, 5, 6], (5, 8)),  # two of five; the target's own third token; three of three
    ],
)
def test_acceptance_is_counted_in_blocks_that_end_at_the_first_wrong_token(
    proposed: list[int], counts: tuple[int, int]
) -> None:
    assert card.accepted_and_drafted(proposed, [1, 2, 3, 4, 5, 6], block_len=5) == counts


def test_the_draft_agrees_with_the_target_often_but_not_always(
    models: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = torch.tensor([tokenizer("".join(islice(corpus.short_documents(corpus.HELD_OUT_SEED), 40))).input_ids[:1024]])
    with torch.inference_mode():
        of_target, of_draft = (models[name](ids).logits.argmax(-1) for name in ("target", "draft"))
    assert 0.2 < (of_target == of_draft).double().mean().item() < 0.98
