"""What one process on one card can't show: a serving engine's scheduler and cache, and several GPUs. No torch.

Used where a run has them. More GPUs come last of all fixes: an unbatched replica, copied, is as idle as before.
"""

from __future__ import annotations

from benchmarks.diagnose.evidence import Evidence, Gain, Kind
from benchmarks.diagnose.fixes import SERVER, Fix, Metric, Stage, gib, ms, number, suite, worth

LAST = "only once one replica is tuned"

SERVED = (
    ("serving.server_batches", None, Metric.THROUGHPUT, "a server that batches continuously"),
    (
        "serving.continuous_beats_static",
        "throughput, continuous over static",
        Metric.THROUGHPUT,
        "filling seats as they get free",
    ),
    ("serving.prefix_ttft", None, Metric.TTFT, "prefix caching in the server"),
    ("serving.chunks_shorten_freeze", None, Metric.PAUSE, "reading long prompts in chunks"),
    ("serving.pages_fit_more", None, Metric.CHATS, "a paged KV cache"),
)
"""Claims about a server whose observed ratio is a gain: the claim, its part, what gets better, what to switch on."""


def served(seen: Evidence, metric: Metric) -> list[Fix]:
    """Fixes that a server's run measured."""
    made = []
    for id, part, of, name in SERVED:
        gain = seen.ratio(id, part=part) if of is metric else None
        if gain is not None and worth(gain):
            made.append(Fix(name, metric, gain, f"claim {id} of this run", SERVER))
    return made


def tensor_parallel(seen: Evidence) -> Fix | None:
    """A token's time with every matrix split over the GPUs. N GPUs can't make it more than N times faster."""
    one, split = seen.request("parallel.tensor_target_one"), seen.request("parallel.tensor_target_split")
    if not one or not split or not one[0].decode or not split[0].decode:
        return None
    gpus = split[1]
    gain = _per_gpu(seen, "parallel.tp_not_linear", "wall", gpus) or one[0].decode.over(split[0].decode)
    times = f"{ms(one[0].decode.wall_s)} to {ms(split[0].decode.wall_s)} a token on {number(gpus)} GPUs"
    return _last(seen, "tensor parallel", Metric.TPOT, gain, times, gpus)


def replicas(seen: Evidence) -> Fix | None:
    """Whole copies of the model: more users, each served as before."""
    one, all_of_them = seen.request("parallel.replica_alone"), seen.request("parallel.replicas_together")
    if not one or not all_of_them or not one[0].tokens_per_s or not all_of_them[0].tokens_per_s:
        return None
    gpus = all_of_them[1]
    gain = _per_gpu(seen, "parallel.replicas_scale", "tokens per second", gpus)
    gain = gain or Gain(all_of_them[0].tokens_per_s / one[0].tokens_per_s)
    rates = f"{number(one[0].tokens_per_s)} to {number(all_of_them[0].tokens_per_s)} tok/s on {number(gpus)} GPUs"
    return _last(seen, "replicas", Metric.THROUGHPUT, gain, rates, gpus)


def split_weights(seen: Evidence) -> list[Fix]:
    """Room for chats with the weights spread over the GPUs: the memory of all of them less their parts of the weights."""
    made = []
    whole = seen.weight_bytes.get(seen.full_precision or "")
    for id, name in (
        ("parallel.pipeline_split", "pipeline parallel"),
        ("parallel.tensor_target_split", "tensor parallel"),
    ):
        split = seen.request(id)
        part = split[0].bytes.get("weights_per_gpu") if split else None
        if not split or not part or not whole or not seen.memory_bytes or seen.memory_bytes <= max(whole, part):
            continue
        gpus = split[1]
        gain = Gain(gpus * (seen.memory_bytes - part) / (seen.memory_bytes - whole), kind=Kind.COMPUTED)
        shares = f"{gib(part)} of weights on each of {number(gpus)} GPUs instead of {gib(whole)} on one"
        cap = gpus * seen.memory_bytes / (seen.memory_bytes - whole)
        if fix := _last(seen, name, Metric.CHATS, gain, shares, cap):
            made.append(fix)
    return made


def _per_gpu(seen: Evidence, id: str, part: str, gpus: float) -> Gain | None:
    """A claim's figure over the number of GPUs, as the figure itself."""
    share = seen.ratio(id, part=part)
    if share is None or share.low is None or share.high is None:
        return None
    return Gain(share.value * gpus, share.low * gpus, share.high * gpus)


def _last(seen: Evidence, name: str, metric: Metric, gain: Gain, basis: str, cap: float) -> Fix | None:
    gain = gain.capped(cap)
    if not worth(gain):
        return None
    return Fix(name, metric, gain, f"{basis}; {LAST}", suite(seen, "parallelism"), cap, Stage.SCALE_OUT)
