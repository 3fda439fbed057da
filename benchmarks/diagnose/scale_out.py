"""What one process on one card can't show: a serving engine's scheduler and cache, and several GPUs. No torch.

Used where a run has them. More GPUs come last of all fixes: an unbatched replica, copied, is as idle as before.
"""

from __future__ import annotations

from benchmarks.diagnose.evidence import Evidence, Gain, Kind, times
from benchmarks.diagnose.fixes import SERVER, Fix, Metric, Stage, Untold, gib, ms, number, percent, suite, worth

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


def beside(seen: Evidence, *myths: str) -> tuple[str, ...]:
    """The stations to measure again beside a missing one, so that the next run has all of it: () for a run of one GPU."""
    return (*myths, "parallelism") if seen.several_gpus else ()


def tensor_parallel(seen: Evidence) -> tuple[Fix | None, str]:
    """(a token's time with every matrix split over the GPUs where that gains, what was measured in a clause, or "").

    N GPUs can't make it more than N times faster. No fix without a batching table, which tunes one replica.
    """
    if (measured := _split_matrices(seen)) is None:
        return None, ""
    gain, basis, gpus = measured
    fix = _last(seen, "tensor parallel", Metric.TPOT, gain, basis, gpus) if seen.batches(seen.engine) else None
    return fix, f"tensor parallel gave {gain.text} in TPOT ({basis})"


def _split_matrices(seen: Evidence) -> tuple[Gain, str, float] | None:
    """(gain in a token's time, how it came about, number of GPUs)."""
    one, split = seen.request("parallel.tensor_target_one"), seen.request("parallel.tensor_target_split")
    if not one or not split or not one[0].decode or not split[0].decode:
        return None
    gpus = split[1]
    gain = _per_gpu(seen, "parallel.tp_not_linear", "wall", gpus) or one[0].decode.over(split[0].decode)
    basis = f"{ms(one[0].decode.wall_s)} to {ms(split[0].decode.wall_s)} a token on {number(gpus)} GPUs"
    if own := _per_gpu(seen, "parallel.tp_not_linear", "device", gpus):
        basis += f", {times(own.value)} in the cards' own time"
    if waits := seen.ratio("parallel.tp_pays_for_sync", part="share of the step"):
        basis += f"; all-reduces take {percent(min(1.0, waits.value))} of the cards' time"
    return gain, basis, gpus


def replicas(seen: Evidence) -> tuple[Fix | None, str]:
    """(whole copies of the model, each user served as before, where that gains; what was measured in a clause, or "").

    Judged on the graph engine where that was measured: it is what a tuned replica decodes by.
    """
    for served_by, engine in (("replicas, graph", "graph"), ("replicas", seen.engine)):
        one = seen.request("parallel.replica_alone", (served_by,))
        every = seen.request("parallel.replicas_together", (served_by,))
        if not one or not every or not one[0].tokens_per_s or not every[0].tokens_per_s:
            continue
        gpus = every[1]
        gain = _per_gpu(seen, "parallel.replicas_scale", "tokens per second", gpus, engine)
        gain = gain or Gain(every[0].tokens_per_s / one[0].tokens_per_s)
        basis = f"{number(one[0].tokens_per_s)} to {number(every[0].tokens_per_s)} tok/s at the median on {number(gpus)} GPUs"
        basis += ", engine graph" if engine == "graph" else ""
        if slower := seen.ratio("parallel.replicas_scale", engine, "tpot"):
            basis += f"; a user's token takes {slower.text} as long"
        return _last(seen, "replicas", Metric.THROUGHPUT, gain, basis, gpus), f"replicas gave {gain.text} ({basis})"
    return None, ""


def pipeline(seen: Evidence) -> str:
    """What splitting the layers over the GPUs cost, in a clause; "" where it wasn't measured."""
    split = seen.request("parallel.pipeline_split")
    if not split or not (part := split[0].bytes.get("weights_per_gpu")):
        return ""
    costs = f": {said}" if (said := _pipeline_costs(seen)) else ""
    return f"a pipeline put {gib(part)} of weights on each of {number(split[1])} GPUs{costs}"


def _pipeline_costs(seen: Evidence) -> str:
    said = []
    if longer := seen.ratio("parallel.pp_same_latency", part="wall"):
        said.append(f"a request takes {longer.text} as long")
    if idle := seen.idle_shares:
        (fewest, share), (most, left) = idle[0], idle[-1]
        said.append(
            f"the GPUs idle {percent(min(1.0, share))} of the time with {fewest} prefill{'s' * (fewest > 1)} in flight"
        )
        said += [f"{percent(min(1.0, left))} with {most}"] if most > fewest else []
    return ", ".join(said)


def split_weights(seen: Evidence) -> list[Fix]:
    """Room for chats with the weights spread over the GPUs: the memory of all of them less their parts of the weights."""
    made = []
    whole = seen.weight_bytes.get(seen.full_precision or "")
    matrices = _split_matrices(seen)
    for id, name, costs in (
        ("parallel.pipeline_split", "pipeline parallel", _pipeline_costs(seen)),
        ("parallel.tensor_target_split", "tensor parallel", matrices[1] if matrices else ""),
    ):
        split = seen.request(id)
        part = split[0].bytes.get("weights_per_gpu") if split else None
        if not split or not part or not whole or not seen.memory_bytes or seen.memory_bytes <= max(whole, part):
            continue
        gpus = split[1]
        gain = Gain(gpus * (seen.memory_bytes - part) / (seen.memory_bytes - whole), kind=Kind.COMPUTED)
        shares = f"{gib(part)} of weights on each of {number(gpus)} GPUs instead of {gib(whole)} on one"
        cap = gpus * seen.memory_bytes / (seen.memory_bytes - whole)
        if fix := _last(seen, name, Metric.CHATS, gain, f"{shares}; {costs}" if costs else shares, cap):
            made.append(fix)
    return made


def untuned(seen: Evidence, measured: str) -> list[Untold]:
    """Why more GPUs are not among the fixes, where a run has `measured` them and nothing that tunes one."""
    if not measured or seen.batches(seen.engine):
        return []
    why = "each comes after one tuned replica, and what tunes one isn't in the run: it has no batching table"
    command = suite(seen, "batching", beside=beside(seen))
    return [Untold("which of tensor parallel, a pipeline and replicas to add", why, command)]


def _per_gpu(seen: Evidence, id: str, part: str, gpus: float, engine: str | None = None) -> Gain | None:
    """A claim's figure over the number of GPUs, as the figure itself."""
    share = seen.ratio(id, engine, part)
    if share is None or share.low is None or share.high is None:
        return None
    return Gain(share.value * gpus, share.low * gpus, share.high * gpus)


def _last(seen: Evidence, name: str, metric: Metric, gain: Gain, basis: str, cap: float) -> Fix | None:
    gain = gain.capped(cap)
    if not worth(gain):
        return None
    command = suite(seen, "batching", beside=beside(seen))
    return Fix(name, metric, gain, f"{basis}; {LAST}", command, cap, Stage.SCALE_OUT)
