"""What the claims about serving measure: the sides of each, as loads of one server, and what their rounds show.

A function that ends in `_sides` gives the loads of a comparison, the one of the bare name what the rounds show for its
claims. Everything rests on `Server` of benchmarks.serving; nothing here speaks HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.estimates import Estimate, counted, median_interval, paired_ratio, unusable
from benchmarks.ledger import Cell
from benchmarks.rigs import SEED
from benchmarks.serving import (
    ALL_SERVED,
    MOST_SEATS,
    OUTPUT_LEN,
    TRIES,
    USERS,
    Broken,
    ClientBusy,
    NotServed,
    Server,
    cell_of,
)
from benchmarks.serving.answers import Answer, Ask, percentile
from benchmarks.serving.loads import (
    LOAD_S,
    Rate,
    Stretch,
    Targets,
    arriving,
    closed,
    groups,
    mixed_lens,
    poisson,
    sweep,
)
from benchmarks.serving.metrics import Change
from benchmarks.timing import Rounds
from benchmarks.tokens import Difference, Match, Tolerance, compare, share_explained
from benchmarks.workloads import PREFIX_LEN

if TYPE_CHECKING:
    from benchmarks.session import Observed


def _median(stretch: Stretch, figure: Callable[[Answer], float | None]) -> float:
    """NaN, which no verdict rests on, where no answer has the figure."""
    values = [v for a in stretch.answers if (v := figure(a)) is not None]
    return statistics.median(values) if values else math.nan


def _mean(stretch: Stretch, figure: Callable[[Answer], float | None]) -> float:
    values = [v for a in stretch.answers if (v := figure(a)) is not None]
    return statistics.fmean(values) if values else math.nan


def _ttft(answer: Answer) -> float:
    return answer.ttft_s


def _tpot(answer: Answer) -> float | None:
    return answer.tpot_s


def _e2e(answer: Answer) -> float:
    return answer.e2e_s


def _tokens_per_s(stretch: Stretch) -> float:
    told = stretch.output_tokens_per_s
    assert told is not None  # a stretch without counts is Broken
    return told


# Batching -------------------------------------------------------------------------------------------------------------


def batching_sides(server: Server) -> dict[str, Callable[[], Stretch]]:
    """One user who asks four times, since a single short answer is a matter of luck, and sixteen who ask once."""
    return {
        "one": lambda: server.closed(server.prompts.many(4), 1),
        "sixteen": lambda: server.closed(server.prompts.many(USERS), USERS),
    }


def batching(rounds: Rounds[Stretch]) -> dict[str, Observed]:
    """What one user and sixteen at once show."""
    one, sixteen = rounds["one"], rounds["sixteen"]
    names = ("16 users", "1 user")
    return {
        "serving.batching_throughput": paired_ratio(
            [*map(_tokens_per_s, sixteen)], [*map(_tokens_per_s, one)], (f"{names[0]} tokens/s", f"{names[1]} tokens/s")
        ),
        "serving.batching_latency": paired_ratio(
            [_median(s, _e2e) for s in sixteen],
            [_median(s, _e2e) for s in one],
            (f"{names[0]} e2e_s", f"{names[1]} e2e_s"),
        ),
    }


def row(server: Server, users: int) -> Cell:
    """A row of the table of users at once."""
    stretch = server.closed(server.prompts.many(users), users)
    figures = {
        "ttft_s": _median(stretch, _ttft),
        "tpot_s": _median(stretch, _tpot),
        "e2e_s": _median(stretch, _e2e),
        "output_tokens_per_s": _tokens_per_s(stretch),
    }
    return cell_of(server, f"users_{users}", f"{users} user{'s' * (users > 1)}", stretch, figures, phase="users")


def server_batches(rounds: Rounds[Stretch]) -> dict[str, Observed]:
    """The same sixteen users with and without batching on the server's side."""
    together, alone = ([*map(_tokens_per_s, rounds[side])] for side in ("together", "alone"))
    names = ("batching tokens/s", "one at a time tokens/s")
    return {"serving.server_batches": paired_ratio(together, alone, names)}


# Prefixes -------------------------------------------------------------------------------------------------------------

DECODED = 17


def prefix_sides(server: Server) -> dict[str, Callable[[], Stretch]]:
    """A prompt that nobody asked before, one after the shared prefix, and one after it with a word changed at its start.

    The shared prefix is asked for once more right before, unmeasured: servers with little room drop what they keep, some
    of them all of it at once, and this is about what a hit saves.
    """
    prompts = server.prompts

    def warm() -> Stretch:
        server.closed([prompts.after_shared(2)], 1)
        return server.closed([prompts.after_shared(DECODED)], 1)

    return {
        "cold": lambda: server.closed([prompts.long(PREFIX_LEN, DECODED)], 1),
        "warm": warm,
        "changed": lambda: server.closed([prompts.after_shared(DECODED, prompts.mark())], 1),
    }


def prefix(rounds: Rounds[Stretch]) -> dict[str, Observed]:
    ttft = {side: [_median(s, _ttft) for s in rounds[side]] for side in ("cold", "warm", "changed")}
    tpot = {side: [_median(s, _tpot) for s in rounds[side]] for side in ("cold", "warm")}
    note = f"prompts of {rounds['warm'][0].answers[0].prompt_tokens} tokens"
    return {
        "serving.prefix_ttft": paired_ratio(ttft["cold"], ttft["warm"], ("cold ttft_s", "warm ttft_s")).noted(note),
        "serving.prefix_decode_unchanged": paired_ratio(tpot["warm"], tpot["cold"], ("warm tpot_s", "cold tpot_s")),
        "serving.prefix_one_word": paired_ratio(ttft["changed"], ttft["warm"], ("changed ttft_s", "warm ttft_s")),
    }


REUSED = 1.5
"""Cold over warm below which a server reuses no prefix."""


def needs_reuse(observed: Mapping[str, Observed]) -> None:
    """Raises NotServed where the server reuses no prefix: then there is no hit that a changed word could lose."""
    seen = observed["serving.prefix_ttft"]
    if isinstance(seen, Estimate) and seen.problem is None and seen.high is not None and (seen.value or 0) < REUSED:
        raise NotServed("this server reuses no prefix, so a changed word has nothing to lose")


def prefix_hits(server: Server) -> Observed:
    """Share of prompt tokens that the server says it found in its cache: after the shared prefix, and for new prompts."""
    server.closed([server.prompts.after_shared(2)], 1)
    shares = []
    for asks in (
        [server.prompts.after_shared(2) for _ in range(3)],
        [server.prompts.long(PREFIX_LEN, 2) for _ in range(3)],
    ):
        before = server.snapshot()
        server.closed(asks, 1)
        after = server.snapshot()
        share = Change(before, after).hit_share if before and after else None
        if share is None:
            raise NotServed("this server shows no counter of prefix hits")
        shares.append(share)
    return {"hit, shared prefix": counted(shares[0]), "hit, new prompts": counted(shares[1])}


# Continuous and static ------------------------------------------------------------------------------------------------

BATCH = 8
MIXED = 24
SHORTEST = 8
LONGEST = (256, 128, 64)
STEPS_A_ROUND = 3.0
"""Steps that a round of both sides takes, over the longest answer: computed for BATCH seats and MIXED answers."""

ROUNDS = 7
"""Rounds that must fit in the budget: those of the first look, and a little."""


def mixed_work(server: Server, budget_s: float) -> tuple[int, ...]:
    """Output lengths as in mixed_lens, the longest so long that ROUNDS rounds of both sides fit in the budget."""
    probe = server.closed(server.prompts.many(BATCH), BATCH)
    step_s = probe.wall_s / OUTPUT_LEN
    longest = next((n for n in LONGEST if ROUNDS * STEPS_A_ROUND * n * step_s <= budget_s), LONGEST[-1])
    return mixed_lens(MIXED, SEED, SHORTEST, longest)


def static_sides(server: Server, lens: Sequence[int]) -> dict[str, Callable[[], Stretch]]:
    """The same lengths as groups that wait for their longest member, and as users who fill each seat that gets free."""

    def asks() -> list[Ask]:
        return [server.prompts.short(n) for n in lens]

    return {
        "static": lambda: server.load(lambda: groups(server.client.send, asks(), BATCH)),
        "continuous": lambda: server.closed(asks(), BATCH),
    }


def continuous(rounds: Rounds[Stretch]) -> dict[str, Observed]:
    static, flowing = rounds["static"], rounds["continuous"]
    empty = [statistics.median(s.empty_seats(BATCH) for s in side) for side in (static, flowing)]
    lens = [a.ask.output_len for a in static[0].answers]
    note = (
        f"answers of {min(lens)} to {max(lens)} tokens, {BATCH} seats, empty {empty[0]:.0%} of the time with static "
        f"batches and {empty[1]:.0%} without"
    )
    throughput = paired_ratio(
        [*map(_tokens_per_s, flowing)], [*map(_tokens_per_s, static)], ("continuous tokens/s", "static tokens/s")
    )
    wait = paired_ratio(
        [s.mean_wait_s for s in static], [s.mean_wait_s for s in flowing], ("static wait_s", "continuous wait_s")
    )
    return {
        "serving.continuous_beats_static": {
            "throughput, continuous over static": throughput.noted(note),
            "mean wait, static over continuous": wait,
        }
    }


# Queues ---------------------------------------------------------------------------------------------------------------

CROWD = 2
"""Arrivals for each seat."""


def known_seats(server: Server) -> int:
    if server.seats is None:
        raise NotServed(f"this server writes more than {MOST_SEATS} answers at once: no queue was reached")
    return server.seats


def queue_sides(server: Server) -> dict[str, Callable[[], Stretch]]:
    """As many arrivals as seats, and CROWD times as many, all at once. Raises NotServed for unknown seats."""
    seats = known_seats(server)

    def burst(n: int) -> Callable[[], Stretch]:
        return lambda: server.load(lambda: arriving(server.client.send, server.prompts.many(n), [0.0] * n))

    return {"fits": burst(seats), "crowd": burst(CROWD * seats)}


def queue(rounds: Rounds[Stretch]) -> dict[str, Observed]:
    fits, crowd = rounds["fits"], rounds["crowd"]
    ttft = paired_ratio(
        [_mean(s, _ttft) for s in crowd], [_mean(s, _ttft) for s in fits], ("crowd ttft_s", "fits ttft_s")
    )
    tpot = paired_ratio(
        [_mean(s, _tpot) for s in crowd], [_mean(s, _tpot) for s in fits], ("crowd tpot_s", "fits tpot_s")
    )
    return {
        "serving.queue_is_in_ttft": {
            "ttft, crowd over as many as seats": ttft,
            "tpot, crowd over as many as seats": tpot,
        }
    }


def queue_cell(server: Server) -> Cell:
    """One crowd with the server's own account of its queue beside the client's ttft, where it has one."""
    seats = known_seats(server)
    n = CROWD * seats
    before = server.snapshot()
    stretch = server.load(lambda: arriving(server.client.send, server.prompts.many(n), [0.0] * n))
    after = server.snapshot()
    queue_s = Change(before, after).mean_queue_s if before and after else None
    ttft_s = _mean(stretch, _ttft)
    figures = {"mean_ttft_s": ttft_s, "mean_tpot_s": _mean(stretch, _tpot)}
    missing = {} if queue_s is not None else {"queue_s": "the server reports no queue time"}
    if queue_s is not None:
        figures |= {"queue_s": queue_s, "ttft_less_queue_s": ttft_s - queue_s}
    return cell_of(server, "queue", f"{n} at once, {seats} seat{'s' * (seats > 1)}", stretch, figures, missing)


def noted_queue(observed: Observed, cell: Cell) -> Observed:
    """With what the server's queue time explains of the ttft, where it reports one."""
    if "queue_s" not in cell.figures or isinstance(observed, Estimate):
        return observed
    f = cell.figures
    note = f"of a mean ttft of {f['mean_ttft_s']:.3g} s in a crowd the server reports {f['queue_s']:.3g} s in its queue"
    first, *others = observed
    return {first: observed[first].noted(note), **{what: observed[what] for what in others}}


# Long prompts ---------------------------------------------------------------------------------------------------------

LONG_LEN = 3000
STREAMS = 4
STREAM_LEN = 64


async def _disturbed(server: Server, after_s: float, long: Ask | None) -> tuple[Stretch, Answer | None]:
    """Running streams, and a long prompt that arrives among them `after_s` later."""
    late: list[Answer] = []

    async def arrive() -> None:
        if long is not None:
            await asyncio.sleep(after_s)
            late.append(await server.client.send(long, time.perf_counter()))

    asks = server.prompts.many(STREAMS, STREAM_LEN)
    stretch, _ = await asyncio.gather(closed(server.client.send, asks, STREAMS), arrive())
    return stretch, late[0] if late else None


def worst_gap_s(streams: Sequence[Answer], from_s: float, to_s: float) -> float | None:
    """The longest wait between two pieces of any stream that overlaps [from_s, to_s]; None when none was running."""
    return max(
        (b - a for s in streams for a, b in itertools.pairwise(s.text_s) if b > from_s and a < to_s),
        default=None,
    )


def freeze_s(server: Server, after_s: float, *, long: bool) -> float:
    """The worst gap of running streams while a long prompt is being read, or in the same time without one.

    Tried again where the streams were over when the prompt arrived. Raises Broken when they are every time.
    """
    for _ in range(TRIES):
        ask = server.prompts.long(LONG_LEN, 2) if long else None
        late: list[Answer | None] = []

        async def load(ask: Ask | None = ask, late: list[Answer | None] = late) -> Stretch:
            stretch, answer = await _disturbed(server, after_s, ask)
            late.append(answer)
            return stretch

        streams = server.load(load)
        (answer,) = late
        if answer is not None and not answer.ok:
            raise Broken(f"the long prompt got no answer: {answer.shortfall}")
        from_s, to_s = (answer.submit_s, answer.text_s[0]) if answer else (streams.start_s + after_s, streams.end_s)
        gap_s = worst_gap_s(streams.answers, from_s, to_s)
        if gap_s is not None:
            return gap_s
    raise Broken(f"no stream was running when the long prompt arrived, {TRIES} times")


def arrival_s(server: Server) -> float:
    """When a quarter of the streams' tokens are there: seconds after their start, from TRIES without a long prompt."""
    tries = [server.closed(server.prompts.many(STREAMS, STREAM_LEN), STREAMS) for _ in range(TRIES)]
    return statistics.median(
        _median(stretch, lambda a, s=stretch: a.text_s[len(a.text_s) // 4] - s.start_s)  # type: ignore[misc]
        for stretch in tries
    )


def freeze_sides(server: Server) -> dict[str, Callable[[], float]]:
    """The worst gap with a long prompt arriving, and without one."""
    after_s = arrival_s(server)
    return {
        "long": lambda: freeze_s(server, after_s, long=True),
        "none": lambda: freeze_s(server, after_s, long=False),
    }


def freezes(rounds: Rounds[float]) -> dict[str, Observed]:
    seen = paired_ratio(rounds["long"], rounds["none"], ("worst gap_s with", "worst gap_s without"))
    return {"serving.long_prompt_freezes": seen.noted(f"{STREAMS} streams, a prompt of about {LONG_LEN:,} tokens")}


def chunks(rounds: Rounds[float]) -> dict[str, Observed]:
    names = ("worst gap_s, read whole", "worst gap_s, in chunks")
    return {"serving.chunks_shorten_freeze": paired_ratio(rounds["whole"], rounds["chunked"], names)}


# Pages ----------------------------------------------------------------------------------------------------------------


def pages(server: Server) -> Estimate:
    """Short chats that really ran at once, over what reserving the maximum length of each would allow: as many are sent as it
    takes until some must wait, and where none had to the figure is a lower bound.

    Raises NotServed when the size of the KV cache or the maximum length is unknown, and when more chats than MOST_SEATS would be
    needed to tell. Raises Broken where nobody can tell what ran at once.
    """
    shot = server.snapshot()
    kv_tokens = server.kv_tokens or (shot.kv_tokens if shot else None)
    if kv_tokens is None or server.max_len is None:
        raise NotServed("the server doesn't tell how many tokens its KV cache and one conversation may hold")
    reserved = kv_tokens // server.max_len
    if reserved < 1:
        raise NotServed(f"its KV cache of {kv_tokens:,} tokens holds no conversation of {server.max_len:,}")
    if 3 * reserved > MOST_SEATS:
        raise NotServed(
            f"it holds {reserved} conversations of {server.max_len:,} tokens: {MOST_SEATS} chats can't fill it"
        )
    seen = server.crowd(min(MOST_SEATS, 4 * reserved + 8), 2 * OUTPUT_LEN)
    at_once = seen.at_once
    if seen.all_served:
        limit = "at least: none of them had to wait"
    elif server.told_seats and at_once >= ALL_SERVED * server.told_seats:
        limit = f"its {server.told_seats} seats were the limit, not its pages"
    elif server.told_seats or server.kv_tokens:  # a server of ours without seats has only pages to fill
        limit = "its pages were the limit"
    else:
        limit = "its pages or its seats were the limit"
    return counted(
        at_once / reserved,
        {"at once": (float(at_once),), "reserved": (float(reserved),)},
        f"{at_once} of {seen.users} short chats ran at once in {kv_tokens:,} tokens of KV cache, which holds {reserved} of the "
        f"maximum length {server.max_len:,}; {limit}",
    )


# Averages -------------------------------------------------------------------------------------------------------------

NEAR_SATURATION = 0.85
MOST_USERS = 64
SECONDS_A_STRETCH = 1.5
FEWEST_ARRIVALS = 16
MOST_ARRIVALS = 200

SLOWEST_PER_S = 1.1 * FEWEST_ARRIVALS / LOAD_S
"""Arrivals a second at which FEWEST_ARRIVALS are sent within the time of a load; a tenth more, since gaps are drawn and may add
up to more than their mean."""

TARGETS = Targets(ttft_s=1.0, tpot_s=0.1)
"""Good is: it begins within a second, and writes ten tokens a second, which is faster than people read."""


def capacity_per_s(server: Server) -> float:
    """Answers a second of as many users as seats, up to MOST_USERS, who ask again at once."""
    users = min(MOST_USERS, server.seats or MOST_USERS)
    stretch = server.closed(server.prompts.many(2 * users), users)
    return len(stretch.answers) / stretch.wall_s


def poisson_load(server: Server, rate_per_s: float, seed: int) -> Callable[[], Awaitable[Stretch]]:
    """Poisson arrivals for about SECONDS_A_STRETCH, at least FEWEST_ARRIVALS and at most MOST_ARRIVALS."""
    n = max(FEWEST_ARRIVALS, min(MOST_ARRIVALS, round(rate_per_s * SECONDS_A_STRETCH)))
    arrivals_s = poisson(rate_per_s, n, seed)
    return lambda: arriving(server.client.send, server.prompts.many(n), arrivals_s)


def busy_sides(server: Server, rate_per_s: float) -> dict[str, Callable[[], Stretch]]:
    """One side: stretches of Poisson arrivals, each with a seed of its own. Where the client was late, which a busy
    neighbour can do, the next seed is tried."""
    seeds = itertools.count(SEED)

    def load() -> Stretch:
        for _ in range(TRIES - 1):
            with contextlib.suppress(ClientBusy):
                return server.load(poisson_load(server, rate_per_s, next(seeds)))
        return server.load(poisson_load(server, rate_per_s, next(seeds)))

    return {"load": load}


def average(rounds: Rounds[Stretch], rate_per_s: float) -> dict[str, Observed]:
    """p99 of ttft over its median; each stretch's own, since seeds differ."""
    loads = rounds["load"]
    spread = [percentile([a.ttft_s for a in s.answers], 0.99) / _median(s, _ttft) for s in loads]
    middle = loads[len(loads) // 2]
    ttft = [a.ttft_s for a in middle.answers]
    note = (
        f"{len(ttft)} Poisson arrivals at {rate_per_s:.3g}/s: ttft mean {statistics.fmean(ttft):.3g} s, "
        f"p50 {percentile(ttft, 0.5):.3g} s, p99 {percentile(ttft, 0.99):.3g} s"
    )
    return {"serving.average_hides": median_interval(spread, {"p99 over p50": tuple(spread)}).noted(note)}


def rate_cells(server: Server, budget_s: float) -> list[Cell]:
    """The rate sweep as cells: rates that double until saturation, with the goodput of each. A server so slow that a quarter
    of its capacity is below SLOWEST_PER_S begins there."""

    def at(rate_per_s: float) -> Rate:
        stretch = server.any_load(poisson_load(server, rate_per_s, SEED))
        return Rate(rate_per_s, stretch, TARGETS)

    found = sweep(at, max(SLOWEST_PER_S, capacity_per_s(server) / 4), budget_s, time.monotonic)
    return [_rate_cell(server, number, rate) for number, rate in enumerate(found)]


def _rate_cell(server: Server, number: int, rate: Rate) -> Cell:
    good = [a for a in rate.stretch.answers if a.ok]
    figures = {
        "sent_per_s": rate.sent_per_s,
        "answered_per_s": rate.answered_per_s,
        "goodput_per_s": rate.goodput_per_s,
        "good_share": rate.good_share,
        "failed": float(len(rate.stretch.answers) - len(good)),
    }
    if good:
        ttft = [a.ttft_s for a in good]
        tpot = [t for a in good if (t := a.tpot_s) is not None]
        figures |= {"ttft_p50_s": percentile(ttft, 0.5), "ttft_p99_s": percentile(ttft, 0.99)}
        figures |= {"tpot_p50_s": percentile(tpot, 0.5)} if tpot else {}
    note = f"good: ttft within {TARGETS.ttft_s:g} s and tpot within {TARGETS.tpot_s:g} s"
    problem = rate.stretch.client_problem
    return cell_of(
        server,
        f"rate_{number}",
        f"{rate.offered_per_s:.3g} arrivals/s",
        rate.stretch,
        figures,
        note="; ".join(filter(None, (note, problem))),
        phase="rate",
    )


# The same tokens ------------------------------------------------------------------------------------------------------

STORED = 0.25
"""A repeated question answered in less than this share of the time it took alone, in a crowd, was not computed again."""


LOGIT_ERROR = {"float32": 2.0**-10, "float16": 2.0**-7, "bfloat16": 2.0**-4}
"""What rounding may move a logprob by. Half a step between neighbouring numbers of the format at logits of 16 to 32; in
float32, whose step is far smaller, room for sums in another order. A server whose format is unknown gets bfloat16's."""


MOST_LOGIT_ERROR = {"float16": 0.4, "bfloat16": 2.0}
"""What rounding moved logits by where it moved them most: 0.37 between two right computations of 28 layers of random weights in
float16 (a third of batching.same_tokens' bound in cards/nvidia-h200.json), five times as much in bfloat16. A difference within it
is no proof of a mistake, and beyond LOGIT_ERROR none of a tie."""


def same_tokens(server: Server) -> Estimate:
    """Sixteen questions one by one, and then all at once: the same text, up to near ties where logprobs prove them."""
    asks = [Ask(a.prompt, a.output_len, logprobs=5) for a in server.prompts.many(USERS, 2 * OUTPUT_LEN // 3)]
    alone, crowd = server.closed(asks, 1), server.closed(asks, USERS)
    took = [_median(s, _e2e) for s in (alone, crowd)]
    if took[1] < STORED * took[0]:
        return unusable(
            f"a vacuous comparison proves nothing: repeated questions took {took[1] / took[0]:.0%} of their first time, so "
            "their answers were stored"
        )
    pairs = list(zip(alone.answers, crowd.answers, strict=True))
    untold = sum(a.text != b.text and not _told_tokens(a, b) for a, b in pairs)
    if untold and server.dtype != "float32":
        return unusable(
            f"{untold} of {USERS} answers differ, and without logprobs a near tie is no other than a mistake"
        )
    seen = share_explained([_match(a, b, LOGIT_ERROR, server.dtype) for a, b in pairs])
    if seen.value == 1 or seen.problem or server.dtype == "float32":
        return seen
    if share_explained([_match(a, b, MOST_LOGIT_ERROR, server.dtype) for a, b in pairs]).value == 1:
        return unusable(f"{seen.note}; half precision was seen to move logits as far as this, and less far")
    return seen


def _told_tokens(alone: Answer, crowd: Answer) -> bool:
    """Whether the server gave the tokens of both answers, and as many."""
    return bool(alone.tokens) and len(alone.tokens) == len(crowd.tokens)


def _match(alone: Answer, crowd: Answer, logit_errors: Mapping[str, float], dtype: str | None) -> Match:
    """By tokens and logprobs where both answers have them, else by their text, which then must be equal."""
    reference, subject = alone.tokens, crowd.tokens
    if not _told_tokens(alone, crowd):
        words = set(alone.text.split())
        at = next((i for i, (x, y) in enumerate(zip(alone.text, crowd.text, strict=False)) if x != y), 0)
        different = () if alone.text == crowd.text else (Difference(at, 0, 1, math.inf, 0.0),)
        return Match(len(alone.text), different, vacuous=None if len(words) > 1 else "an answer of one word repeated")
    ids = {token: i for i, token in enumerate(dict.fromkeys((*reference, *subject)))}
    names = list(ids)

    def gap(position: int, token: int) -> float:
        top = alone.top_logprobs[position]
        return max(top.values()) - top[names[token]] if names[token] in top else math.inf

    far = [
        abs(x[token] - y[token]) if token in x and token in y else 0.0
        for token, x, y in zip(reference, alone.top_logprobs, crowd.top_logprobs, strict=True)
    ]
    tolerance = Tolerance.of(logit_errors[dtype or "bfloat16"], exact=dtype == "float32")
    return compare([ids[t] for t in reference], [ids[t] for t in subject], gap, far, tolerance)
