"""The words of the page: for each station the instinct, the question, what each verdict says, why, and what to try.

A sentence about a machine exists once for HOLDS and once for REFUTED, so that no text can say more than the run did;
what was not decided is said in the claim's own words. `{seen}` is the observed figure and `{required}` the limit.
Only what is true of every machine stands outside of verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.tables import finite, plain
from benchmarks.verdicts import Word, format_figure


@dataclass(frozen=True)
class Said:
    """What one claim's verdict means to the reader who just guessed."""

    holds: str
    refuted: str


@dataclass(frozen=True)
class Station:
    """A station's words. `answers` are by claim id, in the order in which they are told; `try_` is a shell command."""

    title: str
    instinct: str = ""
    question: str = ""
    guess: str = ""
    answers: Mapping[str, Said] = field(default_factory=dict)
    why: tuple[str, ...] = ()
    try_: str = ""
    try_for: str = ""


STATIONS = {
    "batching": Station(
        "Batching",
        "Serve every chat by itself. In a batch each of them waits for all the others.",
        "Sixteen chats are decoded together instead of one. How long does each of them wait?",
        "The usual guesses: sixteen times as long, or a sixteenth.",
        {
            "batching.throughput": Said(
                "Together they got {seen} the tokens per second of one.",
                "Together they got {seen} the tokens per second of one: less than the {required} that batching promises.",
            ),
            "batching.latency": Said(
                "Each of them waited {seen} as long as a lone chat: hardly anybody would notice.",
                "Each of them waited {seen} as long as a lone chat, and that is felt: here batching has a price.",
            ),
            "batching.nobody_gets_sixteenth": Said(
                "Nobody was served faster for being in company: {seen} the wait of a lone chat.",
                "In company each chat was even served faster: {seen} the wait of a lone one.",
            ),
            "batching.ttft_grows": Said(
                "What does grow is the wait for the first token, {seen} for sixteen long prompts.",
                "Not even the first token came later: {seen} for sixteen long prompts.",
            ),
        },
        (
            "A decode step has to read all the weights, for one chat as for sixteen. Whoever is in the batch shares that "
            "read, so the tokens per second add up while the step takes about as long, until the card's arithmetic, or "
            "the KV caches that each chat brings along, are what takes the time.",
            "Prefill is different: it computes on every prompt token at once, so sixteen prompts are sixteen times the "
            "work. And the time of a batch divided by its size is nobody's wait.",
        ),
        "python -m pytest myths/test_batching.py --batch-sizes 1,16,64 --new-tokens 128",
        "Where does a larger batch stop being cheap, and which columns move when the answers are longer?",
    ),
    "prefix": Station(
        "Prefix reuse",
        "With the system prompt in the cache, a request costs next to nothing.",
        "Every request begins with the same 1,484 tokens, and their keys and values are kept. What gets faster?",
        "The usual guess: all of it.",
        {
            "prefix.prefill_1484": Said(
                "Prefill did: a full one took {seen} as long as a cached one.",
                "Not prefill as believed: a full one took {seen} as long as a cached one, where {required} was required.",
            ),
            "prefix.prefill_device_bound": Said(
                "Once the prefix is long enough to keep the card busy, a full prefill took {seen} as long as a cached one.",
                "Even a prefix that keeps the card busy was read only {seen} as fast from the cache.",
            ),
            "prefix.decode_unchanged": Said(
                "The answer took as long to write as before: {seen} the time.",
                "The answer did not take the same time to write: {seen} that after a full prefill.",
            ),
            "prefix.not_free": Said(
                "So the whole request still cost {seen} of an uncached one.",
                "The whole request fell to {seen} of an uncached one: here prefill was most of it.",
            ),
        },
        (
            "Prefill turns each prompt token into keys and values, and those depend on nothing but the tokens before. Who "
            "keeps them skips that work, and with it part of the wait for the first token. Decode still writes one token "
            "after another over the same cache and saves nothing.",
            "The match is token by token from the first one on. A name or a timestamp at the top ends it there, so "
            "what never changes goes first and the question last.",
        ),
        'python -m pytest myths/test_prefix_reuse.py --suffix "your own question"',
        "The same shared prompt, and a question from your own users.",
    ),
    "quant": Station(
        "Quantization",
        "Fewer bits make a smaller download and a broken model.",
        "The weights are loaded with 8 and with 4 bits instead of 16. How much memory is left of the original?",
        "The usual guess: exactly a half, exactly a quarter.",
        {
            "quant.int8_memory": Said(
                "int8 took {seen} of the 16-bit model: more than half.",
                "int8 took {seen} of the 16-bit model, outside of {required}.",
            ),
            "quant.nf4_memory": Said(
                "nf4 took {seen}: more than a quarter.",
                "nf4 took {seen}, outside of {required}.",
            ),
            "quant.not_always_faster": Said(
                "And it was no speed-up: a token took int8 {seen} as long.",
                "It was faster, too: a token took int8 {seen} as long.",
            ),
            "quant.quality_not_binary": Said(
                "nf4 lost some quality and not all of it: {seen} on the eval set.",
                "nf4's loss on the eval set is not the one that was claimed: {seen}, required {required}.",
            ),
            "quant.more_chats": Said(
                "The memory that it freed really held the chats that arithmetic promises: {seen}.",
                "The memory that it freed held {seen} of the chats that arithmetic promises.",
            ),
        },
        (
            "Only the linear layers inside the blocks go to low bits. Embeddings, norms and the output head stay as they "
            "were, and each block of weights brings constants to scale it back. The smaller the model, the more those weigh.",
            "A step reads fewer bytes and then has to unpack them. Which of the two weighs more is up to the kernels. And "
            "quality is no yes or no: it is a number on your own eval set.",
        ),
        'python -m pytest myths/test_quantization.py --quant-prompt "a question from your own work"',
        "Which of the three answers would you trust?",
    ),
    "attention": Station(
        "Attention memory",
        "FlashAttention is fast because it leaves out some of the math.",
        "The sequence gets twice as long. What happens to the arithmetic, and what to the extra memory?",
        "The usual guess: a fused kernel makes both grow in a straight line.",
        {
            "attention.flops": Said(
                "The arithmetic grew {seen} per doubling, whichever kernel ran.",
                "The arithmetic is not what attention's should be: {seen}, required {required}.",
            ),
            "attention.naive_memory": Said(
                "Naive attention's extra memory grew {seen} with it.",
                "Naive attention's extra memory grew {seen} per doubling, not fourfold.",
            ),
            "attention.sdpa_memory": Said(
                "The fused kernel's extra memory grew only {seen} per doubling.",
                "The fused kernel's extra memory is not the small, linear one that was claimed: {seen}.",
            ),
            "attention.time_quadratic": Said(
                "Its time still grew {seen} when the length doubled.",
                "Its time grew {seen} when the length doubled: short of the square at these lengths.",
            ),
            "attention.exact": Said(
                "And it is exact: its error is {seen} that of naive attention in the same precision.",
                "Its error is {seen} that of naive attention in the same precision, where {required} was required.",
            ),
        },
        (
            "Naive attention writes a score for every pair of tokens to memory. A fused kernel computes the same scores "
            "tile by tile, keeps running sums and never stores the square. The work stays quadratic; what falls is memory "
            "and the traffic to it.",
            "Which kernel ran is a question for the run. The flags only say which ones are allowed.",
        ),
        "python -m pytest myths/test_attention_memory.py -v -k kernel",
        "Which kernel does your card pick, for one row and for padded ones?",
    ),
    "speculation": Station(
        "Speculative decoding",
        "A draft model is free speed: switch it on and decoding is twice as fast.",
        "A small draft proposes five tokens, the target checks them at once. How much faster is the answer?",
        "The usual guess: about twice.",
        {
            "speculation.not_free_speed": Said(
                "Not twice: {seen} the speed of the target alone.",
                "A good deal: {seen} the speed of the target alone.",
            ),
            "speculation.cost_model": Said(
                "Acceptance and the draft's cost predict it: measured over predicted is {seen}.",
                "Acceptance and the draft's cost alone do not explain it: measured over predicted is {seen}.",
            ),
            "speculation.verify_cheap": Said(
                "The check itself is cheap: five tokens took {seen} as long as one.",
                "The check itself is not cheap here: five tokens took {seen} as long as one.",
            ),
            "speculation.same_tokens": Said(
                "The text is the target's own.",
                "The text is not shown to be the target's own: {seen}, required {required}.",
            ),
            "speculation.predictable": Said(
                "Predictable text was accepted more often, by {seen} of the drafted tokens.",
                "Predictable text was accepted no more often: {seen} of the drafted tokens.",
            ),
        },
        (
            "A check of a few tokens reads the weights once, like a single step. But the draft has to write those tokens "
            "first, one after the other. What is gained is the tokens accepted a check; what is paid is that check and every "
            "draft step before it.",
            "It pays when a draft step costs a small fraction of a target step and the draft is mostly right. A large batch "
            "leaves the card less room for it.",
        ),
        "python -m pytest myths/test_speculative_decoding.py --target ID_OR_DIR --draft ID_OR_DIR",
        "A larger target with the same small draft: the draft's share of the cost falls.",
    ),
    "bigger_gpu": Station(
        "A bigger GPU",
        "The service is slow, so it needs a bigger GPU.",
        "One chat is decoded with stock software. For how much of each token's time does the card work?",
        "The usual guess: nearly all of it.",
        {
            "bigger_gpu.card_is_idle": Said(
                "The card was idle for {seen} of it.",
                "The card was idle for {seen} of it: mostly it worked.",
            ),
            "bigger_gpu.software_first": Said(
                "Recording the step and replaying it gained {seen} what a card of twice the bandwidth could at most.",
                "Recording the step and replaying it gained only {seen} what a card of twice the bandwidth could at most.",
            ),
            "bigger_gpu.bandwidth_is_not_speed": Said(
                "Of what its bandwidth has over the T4's, its speed with the same stock software has {seen}.",
                "Of what its bandwidth has over the T4's, its speed has {seen}: that much of the bandwidth is felt.",
            ),
            "bigger_gpu.memory_bound_when_fed": Said(
                "Replayed, a step took longer by what memory needs for the bytes it reads. Only there bandwidth decides.",
                "Replayed, a step's time does not follow the bytes that it reads: {seen}, required {required}.",
            ),
        },
        (
            "A step waits for whichever is slowest: the host that launches its kernels, the memory that its weights come from, "
            "or the arithmetic. A bigger card speeds up the last two.",
        ),
        "python -m pytest myths/test_bigger_gpu.py -m gpu -v",
        "Is it the card that your users wait for?",
    ),
    "parallel": Station(
        "More GPUs",
        "Twice the GPUs, half the wait.",
        "One model is split over several GPUs. How many times faster does a user's token come?",
        "The usual guess: as many times as there are GPUs.",
        {
            "parallel.tp_not_linear": Said(
                "Fewer: splitting every matrix gave {seen} of that.",
                "Not clearly fewer: splitting every matrix gave {seen} of that.",
            ),
            "parallel.tp_pays_for_sync": Said(
                "Every layer waits for all GPUs, and that is part of each token's time.",
                "What the GPUs wait for each other is not what was claimed: {seen}, required {required}.",
            ),
            "parallel.pp_same_latency": Said(
                "Splitting by layers shortened nothing: a request took {seen} as long.",
                "Splitting by layers is not what was claimed: {seen}, required {required}.",
            ),
            "parallel.replicas_scale": Said(
                "Whole copies add up: {seen} of the tokens that their number promises.",
                "Whole copies did not add up as claimed: {seen}, required {required}.",
            ),
            "parallel.idle_replica_is_idle": Said(
                "And one copy that batches gave {seen} the tokens of all copies that don't.",
                "One copy that batches gave {seen} the tokens of all copies that don't.",
            ),
        },
        (
            "Tensor parallelism splits every matrix, and in every layer the GPUs wait for each other. A pipeline hands a request "
            "from stage to stage, so a lone request keeps one stage busy and the others idle. Replicas share nothing.",
            "A card that idles because nobody batches is not helped by a second one that idles too.",
        ),
        "python -m pytest myths/test_parallelism.py -m gpu -v",
        "What does your second GPU bring, and to whom?",
    ),
    "serving": Station(
        "Serving",
        "Latency is one number, and the average tells it.",
        "Sixteen users ask a server at once that batches continuously. What does each of them notice?",
        "The usual guess: a sixteenth of the speed.",
        {
            "serving.batching_throughput": Said(
                "Together they got {seen} the tokens per second of one.",
                "Together they got {seen} the tokens per second of one, where {required} was required.",
            ),
            "serving.batching_latency": Said(
                "Each of them waited {seen} as long as a user alone.",
                "Each of them waited {seen} as long as a user alone: that is felt.",
            ),
            "serving.prefix_ttft": Said(
                "A prefix that the server had read made the first token come {seen} sooner.",
                "A prefix that the server had read changed the first token's wait by {seen}, where {required} was required.",
            ),
            "serving.queue_is_in_ttft": Said(
                "With more users than seats, the queue is in the first token's wait: {seen} as long.",
                "With more users than seats, waiting is not as claimed: {seen}, required {required}.",
            ),
            "serving.long_prompt_freezes": Said(
                "A long prompt that arrived froze the answers being written: a gap of {seen}.",
                "A long prompt that arrived hardly froze the answers being written: a gap of {seen}.",
            ),
            "serving.average_hides": Said(
                "Near saturation one user in a hundred waited {seen} as long as most for the first token.",
                "Near saturation one user in a hundred waited {seen} as long as most, less than claimed.",
            ),
        },
        (
            "A server that batches continuously lets requests join and leave between two steps, so that no seat stays empty "
            "while somebody waits.",
            "The first token's wait has the queue and the prefill in it, the gaps after it have decode. One average hides "
            "whichever hurts.",
        ),
        "python -m pytest myths/test_serving.py --endpoint URL",
        "Your own server, under your own load.",
    ),
}
"""Stations of the article, in its order, then those beyond it. One that isn't here is shown by its verdicts and tables."""


def answer(said: Said, claim: Mapping[str, Any]) -> str:
    """What a claim's verdict says; nothing but its own words and its reason where it was not decided. Plain text."""
    seen = format_figure(finite(claim["observed"]), plain(claim["unit"] or "", 10))
    required = plain(claim["required"], 120).replace(">=", "\u2265").replace("<=", "\u2264")
    if claim["verdict"] == Word.HOLDS:
        return said.holds.format(seen=seen, required=required)
    if claim["verdict"] == Word.REFUTED:
        return said.refuted.format(seen=seen, required=required)
    reason = plain(claim["reason"]) or "no reason was given"
    statement = plain(claim["statement"])
    if claim["verdict"] == Word.INCONCLUSIVE:
        shown = f"{seen} seen" if claim["observed"] is not None else "nothing usable seen"
        return f"Not settled here: {statement} ({shown}, {required} required; {reason})."
    return f"Not judged here: {statement} ({reason})."
