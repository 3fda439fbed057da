"""Every claim in one table. A claim is a belief made testable, with the reason for its number beside the number."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.verdicts import Bound, Claim

_GPU = frozenset({"cuda"})
_SERVED = frozenset({"served"})
_GPUS = frozenset({"cuda", "gpus2"})
_EQUAL = "equal tokens are equal: exactly in float32, up to proven near ties in half precision"


def _same_tokens(what: str = "rows explained") -> Bound:
    return Bound(what, _EQUAL, at_least=1.0, unit="%")


_TABLE = (
    Claim(
        "batching.throughput",
        "batch 16 gives many times the tokens per second of batch 1",
        (
            Bound(
                "throughput", "16 rows share one read of the weights; the T4 lost a tenth of the ideal 16x", at_least=10
            ),
        ),
        _GPU,
        "decode_wall",
        "14.7x",
    ),
    Claim(
        "batching.latency",
        "each user's latency barely moves at batch 16",
        (Bound("e2e", "a quarter more wait is where a user would notice; the T4 added 9 %", at_most=1.25),),
        _GPU,
        "decode_wall",
        "1.09x",
    ),
    Claim(
        "batching.nobody_gets_sixteenth",
        "nobody gets faster by being batched either",
        (Bound("e2e", "every user still waits for all decode steps; 5 % is room for scheduling luck", at_least=0.95),),
        frozenset(),
        "decode_wall",
        "1.09x",
    ),
    Claim(
        "batching.tpot",
        "time per output token barely grows at batch 16",
        (Bound("tpot", "the step reads the same weights; the T4 added 5 %", at_most=1.25),),
        _GPU,
        "decode_wall",
        "1.05x",
    ),
    Claim(
        "batching.ttft_grows",
        "prefilling 16 long prompts takes longer than one",
        (
            Bound(
                "ttft",
                "a quarter more is where a user would notice, as for latency; an H200, whose host takes 20 to 32 ms to "
                "launch either, gave 1.4x to 2.7x in five runs of one day",
                at_least=1.25,
            ),
        ),
        frozenset(),
        "prefill_wall",
        "2.4x at 37 tokens",
    ),
    Claim(
        "batching.memory",
        "16 chats cost little memory beside the weights, and it is KV cache and activations",
        (
            Bound(
                "growth over weights", "the T4 grew 6 %; 15 % leaves room for another allocator", at_most=0.15, unit="%"
            ),
            Bound("growth over KV cache", "less than the KV cache's own bytes means the counter is wrong", at_least=1),
        ),
        _GPU | {"kv_bytes"},
        None,
        "6%",
    ),
    Claim(
        "batching.same_tokens",
        "a row's tokens don't depend on its batch mates",
        (_same_tokens(),),
    ),
    Claim(
        "prefix.prefill_1484",
        "a cached prefix makes prefill several times faster",
        (Bound("full over cached", "the article's 'several': under half its smaller figure", at_least=3),),
        frozenset(),
        "prefill_wall",
        "6.9x, 11.3x",
    ),
    Claim(
        "prefix.prefill_device_bound",
        "once the prefix keeps the card busy, caching it makes prefill faster",
        (Bound("full over cached", "half the wait gone is a fix worth shipping", at_least=2),),
        _GPU,
        "prefill_wall",
    ),
    Claim(
        "prefix.decode_unchanged",
        "decode takes the same time after a cached and a full prefill",
        (
            Bound(
                "cached over full", "an equivalence: both ends of the interval within 5 %", at_least=0.95, at_most=1.05
            ),
        ),
        frozenset(),
        "decode_wall",
        "1.82 / 1.82 s",
    ),
    Claim(
        "prefix.not_free",
        "the cached request still costs most of the uncached one",
        (Bound("cached over full e2e", "most is half or more; decode is what is left", at_least=0.5, unit="%"),),
        _GPU,
        "decode_wall",
        "82%",
    ),
    Claim(
        "prefix.same_answer",
        "a cached and a full prefill give the same tokens",
        (_same_tokens("answers explained"),),
    ),
    Claim(
        "prefix.one_word",
        "one changed word early in the system prompt ends the match there",
        (Bound("reusable share", "the word is in the first sentence of 40 policies", below=0.05, unit="%"),),
        t4="15 of 1,484",
    ),
    Claim(
        "prefix.timestamp_first",
        "a timestamp at the top breaks reuse for every request; at the end it doesn't",
        (
            Bound(
                "reusable, timestamp first",
                "only the words before the first differing digit match",
                below=0.05,
                unit="%",
            ),
            Bound(
                "reusable, timestamp last",
                "all of the shared prefix but the tokens merged with the stamp",
                at_least=0.95,
                unit="%",
            ),
        ),
    ),
    Claim(
        "prefix.built_once",
        "building the prefix cache costs about one full prefill",
        (
            Bound(
                "build over full",
                "the same tokens less a short suffix; 25 % for what hosts do",
                at_least=0.8,
                at_most=1.25,
            ),
        ),
        frozenset(),
        "prefill_wall",
        "0.47 / 0.47 s",
    ),
    Claim(
        "quant.int8_memory",
        "int8 is not exactly half",
        (Bound("int8 over fp16", "embeddings, norms and scales stay 16-bit or wider", above=0.50, at_most=0.65),),
        frozenset({"cuda", "article_sizes"}),
        None,
        "0.59",
    ),
    Claim(
        "quant.nf4_memory",
        "nf4 is not exactly a quarter",
        (Bound("nf4 over fp16", "what stays 16-bit weighs more beside fewer bits", above=0.25, at_most=0.45),),
        frozenset({"cuda", "article_sizes"}),
        None,
        "0.41",
    ),
    Claim(
        "quant.bytes_explained",
        "measured bytes are low-bit linears, their constants, and what stays as it was",
        (
            Bound("int8 worst module off by", "storages are what shapes say; 3 % for padding", at_most=0.03, unit="%"),
            Bound("nf4 worst module off by", "storages are what shapes say; 3 % for padding", at_most=0.03, unit="%"),
        ),
    ),
    Claim(
        "quant.not_always_faster",
        "bitsandbytes int8 is not faster than fp16 at batch 1",
        (Bound("int8 over fp16 tpot", "not faster is at least as long", at_least=1.0),),
        _GPU,
        "decode_wall",
    ),
    Claim(
        "quant.quality_not_binary",
        "nf4 loses some quality, not all of it",
        (
            Bound("KL to reference", "bfloat16 rounding alone loses 5e-5", above=1e-4, unit="nats"),
            Bound("NLL over reference", "a tenth more surprise on the eval set is 'some'", at_most=1.10),
        ),
        frozenset({"trained"}),
    ),
    Claim(
        "quant.more_chats",
        "the memory that nf4 frees holds more chats",
        (
            Bound(
                "chats over computed", "2,048 tokens each; 3 % is less than one chat in 31", at_least=0.97, at_most=1.03
            ),
        ),
        _GPU | {"kv_bytes"},
    ),
    Claim(
        "attention.exact",
        "SDPA is exact attention, not an approximation",
        (
            Bound(
                "SDPA error over reference error",
                "twice what naive attention in the same precision is off float64",
                at_most=2,
            ),
        ),
    ),
    Claim(
        "attention.flops",
        "attention's math grows 4x when the length doubles, whichever kernel runs",
        (
            Bound("growth per doubling", "4*B*H*L*L*D without causal halving", at_least=3.9, at_most=4.1),
            Bound("SDPA over naive", "the same math", at_least=1.0, at_most=1.0),
        ),
        t4="0.81, 51.5 GFLOP",
    ),
    Claim(
        "attention.naive_memory",
        "naive attention's extra memory grows 4x per doubling",
        (Bound("growth per doubling", "the score matrix is L x L; small terms at 512", at_least=3.5, at_most=4.5),),
        _GPU,
        None,
        "12.8 to 774 MiB",
    ),
    Claim(
        "attention.sdpa_memory",
        "SDPA's extra memory grows about linearly and is far less",
        (
            Bound("growth per doubling", "the output is linear; a quadratic part would show as 4x", at_most=2.5),
            Bound("naive over SDPA at 4,096", "the T4 saved 129 times", at_least=50),
        ),
        _GPU,
        None,
        "0.8 to 6.0 MiB",
    ),
    Claim(
        "attention.time_quadratic",
        "SDPA's own time still grows towards 4x when the length doubles",
        (Bound("8,192 over 4,096", "device time; 3x shows the square through the part that isn't", at_least=3),),
        _GPU,
        "attention_device",
    ),
    Claim(
        "attention.kernel",
        "the attention kernel is known from the run, and allowed is not used",
        (
            Bound("cells with a named kernel", "every traced cell says what ran", at_least=1.0, unit="%"),
            Bound("kernels the card can't have", "flash needs capability 8.0", at_most=0, unit=""),
        ),
        t4="allowed is not used",
    ),
    Claim(
        "speculation.same_tokens",
        "speculation gives the target's own greedy output",
        (
            _same_tokens("outputs explained"),
            Bound("acceptance", "none accepted or all accepted proves nothing", above=0.0, below=1.0, unit="%"),
        ),
        frozenset({"draft"}),
        t4="equal",
    ),
    Claim(
        "speculation.not_free_speed",
        "a 0.5B draft for a 1.5B target does not give the guessed 2x",
        (Bound("alone over with draft", "well short of 2x", below=1.5),),
        frozenset({"cuda", "draft", "trained"}),
        "request_wall",
        "0.71x",
    ),
    Claim(
        "speculation.cost_model",
        "speed follows acceptance and draft cost (arXiv:2211.17192)",
        (Bound("measured over predicted", "a quarter for what the formula leaves out", at_least=0.8, at_most=1.25),),
        frozenset({"cuda", "draft"}),
        "request_wall",
    ),
    Claim(
        "speculation.verify_cheap",
        "checking 5 tokens costs about one decode step at batch 1",
        (Bound("5 tokens over 1", "the step waits for weights, not for math", at_most=1.3),),
        _GPU,
        "decode_wall",
    ),
    Claim(
        "speculation.predictable",
        "a predictable text is accepted more often than open text",
        (Bound("counting less open acceptance", "more by more than one check's luck", above=0.0, unit="%"),),
        frozenset({"draft", "trained"}),
    ),
    Claim(
        "bigger_gpu.card_is_idle",
        "in stock decode the card waits for the host most of the time",
        (
            Bound(
                "idle share",
                "most is more than half: then no faster card can halve a token's time",
                above=0.5,
                unit="%",
            ),
        ),
        _GPU,
        "decode_wall",
    ),
    Claim(
        "bigger_gpu.software_first",
        "recording the decode step gains more at batch 1 than a card of twice the bandwidth could",
        (
            Bound(
                "graph's speed-up over a doubled card's",
                "above 1 the software gains more; the doubled card's is Amdahl's upper bound from the measured busy share",
                above=1,
            ),
        ),
        _GPU,
        "decode_wall",
    ),
    Claim(
        "bigger_gpu.bandwidth_is_not_speed",
        "with the same stock software, x times the T4's bandwidth gives far less than x times its speed",
        (
            Bound(
                "speed ratio over bandwidth ratio",
                "under half of what was paid for arrives; an H200 with 13x the bandwidth gave 1.3x to 2.1x the speed",
                below=0.5,
            ),
        ),
        frozenset({"cuda", "article_sizes"}),
        "decode_wall",
    ),
    Claim(
        "bigger_gpu.memory_bound_when_fed",
        "a recorded decode step takes longer by the time that memory needs for what it reads",
        (
            Bound(
                "a byte of weights over a copied byte",
                "the draft's step and the target's: a quarter for the target's further kernels, 3 us each on an H200",
                at_least=0.75,
                at_most=1.25,
            ),
            Bound(
                "a byte of KV cache over a copied byte",
                "16 rows of 256 and of 4,096 positions: a quarter for reading many short rows instead of one long",
                at_least=0.75,
                at_most=1.25,
            ),
        ),
        frozenset({"cuda", "article_sizes", "draft"}),
        "decode_wall",
    ),
    Claim(
        "parallel.tp_not_linear",
        "splitting every matrix over N GPUs does not make a token N times faster",
        tuple(
            Bound(what, f"{why}; the line itself is 100 %", below=1.0, unit="%")
            for what, why in (
                ("wall", "speed-up over N, as a user waits"),
                ("device", "the same with the GPUs' own time, without waiting for hosts"),
                ("wide, wall", "the same at a shape whose step is mostly reading weights, where splitting pays most"),
                ("wide, device", "the same there with the GPUs' own time"),
            )
        ),
        _GPUS | {"tensor_plan"},
        "decode_wall",
    ),
    Claim(
        "parallel.tp_pays_for_sync",
        "every layer of a split model waits twice for all GPUs, and that is a part of each token's time",
        (
            Bound(
                "all-reduces per layer",
                "two: attention and MLP each end in a matrix whose columns are split; half for this machine's noise floor",
                at_least=1.5,
                at_most=2.5,
                unit="",
            ),
            Bound(
                "share of the step",
                "a twentieth of the GPUs' own time: less would hide in noise",
                at_least=0.05,
                unit="%",
            ),
        ),
        _GPUS | {"tensor_plan"},
        "decode_wall",
    ),
    Claim(
        "parallel.tp_memory",
        "a GPU holds its slices and what stays whole, no more",
        (Bound("held over predicted", "shapes say what is split; 3 % for padding", at_least=0.97, at_most=1.03),),
        _GPUS | {"tensor_plan"},
    ),
    Claim(
        "parallel.pp_same_latency",
        "splitting the layers does not shorten a request, and each stage idles while another works",
        (
            Bound("wall", "e2e over one GPU's: the same work in a row; 5 % for scheduling luck", at_least=0.95),
            Bound("device", "the stages' own time over one GPU's: no work went away", at_least=0.95),
            Bound(
                "idle share at one request",
                "over (stages - 1) / stages, the least there can be; a tenth for clocks that start apart",
                at_least=0.9,
            ),
            Bound(
                "idle share left",
                "with four prefills in flight a stage; the formula leaves 20 to 22 % of it, so half is a fix worth having",
                at_most=0.5,
            ),
        ),
        _GPUS | {"pipeline_plan"},
        "decode_wall",
    ),
    Claim(
        "parallel.replicas_scale",
        "N replicas give N times the tokens, and no user waits longer or shorter",
        (
            Bound("tokens per second", "over N times one; a tenth for the host and memory they share", at_least=0.9),
            Bound(
                "tpot", "the worst replica's over one alone; the same tenth on either side", at_least=0.9, at_most=1.1
            ),
        ),
        _GPUS,
        "decode_wall",  # replicas can't take turns; what whole requests differ by shows in the interval
    ),
    Claim(
        "parallel.idle_replica_is_idle",
        "one replica that batches 16 requests gives more tokens than N replicas that don't batch",
        (Bound("tokens per second", "more is more: the others' GPUs might as well be off", above=1.0),),
        _GPUS,
        "decode_wall",
    ),
    Claim(
        "parallel.same_tokens",
        "a split model says what the whole one says",
        (_same_tokens("tensor parallel rows explained"), _same_tokens("pipeline rows explained")),
        _GPUS | {"tensor_plan", "pipeline_plan"},
    ),
    Claim(
        "serving.batching_throughput",
        "a server gives sixteen users at once many times the tokens per second of one",
        (
            Bound(
                "throughput, 16 users over 1",
                "a quarter of the ideal 16x: scheduling, Python and the wire take theirs; a vLLM on two CPU cores gave 7x",
                at_least=4,
            ),
        ),
        _SERVED,
        "serving_e2e",
    ),
    Claim(
        "serving.batching_latency",
        "each of sixteen users waits hardly longer than one alone",
        (
            Bound(
                "e2e, 16 users over 1",
                "twice is where one stranger ahead in a line would do as well; a line of sixteen is 8.5x on average",
                at_most=2,
            ),
        ),
        _SERVED,
        "serving_e2e",
    ),
    Claim(
        "serving.server_batches",
        "the same engine gives sixteen users more when it batches continuously than one at a time",
        (Bound("throughput, batching over not", "twice is worth a switch of the server", at_least=2),),
        _SERVED,
        "serving_e2e",
    ),
    Claim(
        "serving.prefix_ttft",
        "a prefix that the server has read makes the first token come several times sooner",
        (Bound("ttft, new over shared prefix", "several, as for a prefix within one process", at_least=3),),
        _SERVED,
        "serving_ttft",
        "6.9x, 11.3x",
    ),
    Claim(
        "serving.prefix_decode_unchanged",
        "the tokens after the first take as long with a shared prefix as without",
        (
            Bound(
                "tpot, shared over new prefix",
                "an equivalence: both ends within 10 %, twice what is asked of one process without a wire",
                at_least=0.9,
                at_most=1.1,
            ),
        ),
        _SERVED,
        "serving_tpot",
    ),
    Claim(
        "serving.prefix_one_word",
        "one word changed in the first sentence, and the server reads the whole prefix again",
        (Bound("ttft, changed over shared prefix", "what the hit had gained is gone", at_least=3),),
        _SERVED,
        "serving_ttft",
    ),
    Claim(
        "serving.prefix_hits_counted",
        "the server's own counters show the hits of a shared prefix, and none for new prompts",
        (
            Bound("hit, shared prefix", "all but the question and a last partial block", at_least=0.8, unit="%"),
            Bound("hit, new prompts", "they differ from their first words on", at_most=0.1, unit="%"),
        ),
        _SERVED,
    ),
    Claim(
        "serving.continuous_beats_static",
        "seats that are filled as they get free serve mixed lengths faster than groups that wait for their longest",
        (
            Bound(
                "throughput, continuous over static",
                "groups of 8 of these lengths leave half their seats' time empty; a third more is the least of it",
                at_least=1.3,
            ),
            Bound("mean wait, static over continuous", "a free seat is taken at once", above=1),
        ),
        _SERVED,
        "serving_e2e",
    ),
    Claim(
        "serving.queue_is_in_ttft",
        "with more arrivals than seats the first token comes later, and the ones after it as before",
        (
            Bound("ttft, crowd over as many as seats", "half of a twofold crowd waits for a whole answer", at_least=2),
            Bound("tpot, crowd over as many as seats", "a quarter for reading the next ones' prompts", at_most=1.25),
        ),
        _SERVED,
        "serving_ttft",
    ),
    Claim(
        "serving.long_prompt_freezes",
        "a long prompt that arrives freezes the answers that are being written",
        (Bound("worst gap, with over without", "three times the worst gap is a pause that shows", at_least=3),),
        _SERVED,
        "serving_tpot",
    ),
    Claim(
        "serving.chunks_shorten_freeze",
        "reading a long prompt in chunks shortens that freeze",
        (Bound("worst gap, whole over chunks", "half the pause gone is what chunks are for", at_least=2),),
        _SERVED,
        "serving_tpot",
    ),
    Claim(
        "serving.pages_fit_more",
        "pages let more short chats run at once than reserving the longest for each",
        (Bound("at once over reserved", "the paper's smaller gain (arXiv:2309.06180)", at_least=2),),
        _SERVED,
    ),
    Claim(
        "serving.average_hides",
        "near saturation one user in a hundred waits far longer than most for the first token",
        (Bound("ttft, p99 over p50", "twice what is typical is another experience", at_least=2),),
        _SERVED,
        "serving_ttft",
    ),
    Claim(
        "serving.same_tokens",
        "a user among sixteen gets the tokens of a user alone",
        (_same_tokens("answers explained"),),
        _SERVED,
    ),
)

CLAIMS: Mapping[str, Claim] = MappingProxyType({claim.id: claim for claim in _TABLE})
"""Every claim by id, in the order of the stations."""
