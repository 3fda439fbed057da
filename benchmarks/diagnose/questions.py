"""The four questions of the decision map, answered from one run's evidence: TTFT, TPOT, throughput, memory. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from benchmarks.claims import CLAIMS
from benchmarks.diagnose.evidence import QUANTIZED, Evidence, Kind, Request, Timed, times
from benchmarks.diagnose.fixes import (
    ASIDE,
    SERVER,
    Fix,
    Metric,
    Reach,
    Stage,
    Untold,
    batching,
    fastest_rate,
    gib,
    graph_engine,
    graph_throughput,
    ms,
    number,
    percent,
    prefill_off_host,
    prefix_caching,
    prefix_gain,
    same_batch,
    stops_being_cheap,
    suite,
)
from benchmarks.diagnose.scale_out import beside, pipeline, replicas, served, split_weights, tensor_parallel, untuned
from benchmarks.diagnose.smaller_models import quantization, quantized_speed, speculation
from benchmarks.ledger import HOST_BOUND
from benchmarks.tables import plain

CONTEXT_LEN = 2048
"""Tokens of a chat where none are given: those of the quantization station's chats."""

UNCHANGED = CLAIMS["batching.tpot"].bounds[0].at_most or 1.0
"""A token that takes up to so many times as long in a batch counts as no slower, as in the claim."""


@dataclass(frozen=True)
class Targets:
    """What the service must reach; None where nothing is asked. Seconds, tokens per second over all users, chats at once
    and tokens a chat. Raises ValueError for what isn't a positive finite number."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    throughput_per_s: float | None = None
    chats: float | None = None
    context_len: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{field.name} must be a positive number, not {value!r}")

    @property
    def given(self) -> bool:
        return self != Targets()


@dataclass(frozen=True)
class Step:
    """One question of the map. `lit` where the path goes on from here to fixes."""

    question: str
    evidence: str
    answer: str
    lit: bool


@dataclass(frozen=True)
class Finding:
    """What became of one question.

    `needed` is how many times better its metric must get, None without a target; `fixes` are all that apply, whether or not
    the question is lit. For the question of hardware: `share` of the metric's time that the device works once the fixes
    are in place, the `ceiling` of all fixes together and whether it is the roofline's and so no software's to break
    (`hard`), why they may give more than the run shows (`open_ended`), and what hardware would need (`wanted`).
    """

    question: str
    evidence: str
    metric: Metric
    fixes: tuple[Fix, ...] = ()
    untold: tuple[Untold, ...] = ()
    asked: bool = False
    needed: float | None = None
    known: bool = True
    target: str = ""
    share: float | None = None
    ceiling: float | None = None
    hard: bool = False
    open_ended: str = ""
    wanted: str = ""

    @staticmethod
    def unknown(
        question: str, metric: Metric, asked: bool, note: Untold, measured: str = "", more: Sequence[Untold] = ()
    ) -> Finding:
        """The run lacks the very figure, as `note` says. `measured`: what it has all the same."""
        evidence = "; ".join(part for part in (note.why, measured) if part)
        return Finding(question, evidence, metric, untold=(note, *more), asked=asked, known=False)

    @property
    def step(self) -> Step:
        return Step(self.question, self.evidence, *self._answer)

    @property
    def _answer(self) -> tuple[str, bool]:
        if not self.known:
            return "can't be told from this run", False
        if self.asked:
            if self.needed is None or self.needed <= 1:
                return f"no: the target is met ({self.target})", False
            return f"yes: {times(self.needed)} better is needed ({self.target})", True
        own = [fix for fix in self.fixes if fix.metric is self.metric and fix.stage is not Stage.SCALE_OUT]
        if not own:
            aside = [fix.metric.value for fix in self.fixes if fix.metric in ASIDE]
            but = f", but the {' and the '.join(aside)}" if aside else ""
            return f"no target, and nothing avoidable in this run{but}", bool(aside)
        best = max(own, key=lambda fix: fix.gain.value)
        upto = "up to " if best.gain.kind is Kind.AT_MOST else ""
        return f"no target: {upto}{_avoidable(best)}", True

    @property
    def kept(self) -> list[Fix]:
        """The fixes, each with whether it reaches the target; more devices only where nothing measured does."""
        judged = [replace(fix, reaches=self._reached(fix)) for fix in self.fixes]
        enough = any(fix.reaches is Reach.ENOUGH and fix.stage is not Stage.SCALE_OUT for fix in judged)
        return [fix for fix in judged if not (enough and fix.stage is Stage.SCALE_OUT)]

    def _reached(self, fix: Fix) -> Reach | None:
        if self.needed is None or fix.metric in ASIDE:
            return None
        if fix.gain.value < self.needed:
            return Reach.SHORT
        sure = fix.gain.kind is Kind.MEASURED or (fix.gain.kind is Kind.COMPUTED and fix.metric is Metric.CHATS)
        return Reach.ENOUGH if sure and (fix.gain.low or fix.gain.value) >= self.needed else Reach.MAYBE

    @property
    def together(self) -> float:
        """The most that the fixes could give together, more devices left out. Optimistic on purpose: fixes overlap, and
        hardware is the answer only where not even their product is enough. What one of them gives alone, as measured, no
        ceiling takes away."""
        product, measured, exclusive = 1.0, 1.0, dict[str, float]()
        for fix in self.fixes:
            if fix.stage is Stage.SCALE_OUT or fix.metric in ASIDE:
                continue
            if fix.gain.kind in (Kind.MEASURED, Kind.UNPAIRED):
                measured = max(measured, fix.gain.value)
            if fix.either:
                exclusive[fix.either] = max(fix.gain.value, exclusive.get(fix.either, 1.0))
            else:
                product *= fix.gain.value
        product *= math.prod(exclusive.values())
        return product if self.ceiling is None else max(measured, min(product, self.ceiling))


def _avoidable(fix: Fix) -> str:
    if fix.metric in (Metric.TTFT, Metric.TPOT):
        return f"{percent(1 - 1 / fix.gain.value)} of it is avoidable"
    return f"{times(fix.gain.value)} is possible"


# Time to first token --------------------------------------------------------------------------------------------------


def ttft(seen: Evidence, targets: Targets) -> Finding:
    """Judged by the slowest first token of a lone request: the prefix station's long prompt where the run has it."""
    short = next((row for row in seen.batches(seen.engine) if row.prefill), None)
    full = [pair[0] for pair in seen.prefix_pairs]
    row = max(full, key=lambda r: r.prefill.wall_s if r.prefill else 0.0, default=short)
    if row is None or row.prefill is None:
        return Finding.unknown("TTFT high?", Metric.TTFT, targets.ttft_s is not None, _no_table(seen, "TTFT"))
    said = [f"{ms(row.prefill.wall_s)} for a prompt of {_len(row)}"]
    if row is not short and short and short.prefill:
        said.append(f"{ms(short.prefill.wall_s)} for one of {_len(short)}")
    if (share := row.prefill.device_share) is not None and not seen.on_cpu:
        said.append(f"the card works {percent(share)} of it")
    caching = prefix_caching(seen)
    gain, _ = prefix_gain(seen)
    if gain and not (isinstance(caching, Fix) and caching.metric is Metric.TTFT):
        said.append(f"a cached prefix gains nothing ({gain.text})")
    notes: list[Fix | Untold | None] = []
    if seen.ratio("serving.queue_is_in_ttft") is None:
        queue = "time in the queue, which users feel as TTFT"
        notes.append(Untold(queue, "here no request waited for another", SERVER))
    fixes = [prefill_off_host(seen, row), caching, *served(seen, Metric.TTFT), *notes]
    finding = _finding("TTFT high?", said, Metric.TTFT, fixes, row.prefill.wall_s, targets.ttft_s, ms)
    cached = [pair[1].prefill for pair in seen.prefix_pairs if pair[1].prefill]
    return _bounded(seen, finding, row.prefill, [row.prefill, *cached])


def _no_table(seen: Evidence, what: str) -> Untold:
    """No row of the batching table has it, or there are none: only there is one GPU measured as it comes and tuned."""
    why = "no row of the run's table has one" if seen.batches(seen.engine) else "the run has no batching table"
    return Untold(what, why, suite(seen, "batching", beside=beside(seen)))


def _len(row: Request) -> str:
    length = row.prompt_len or row.prefix_len
    if length is None:
        return "a length that isn't in the run"
    return f"{number(length)} tokens" if row.prompt_len else f"{number(length)} tokens and a question"


# Time per output token ------------------------------------------------------------------------------------------------


def tpot(seen: Evidence, targets: Targets) -> Finding:
    """Judged at the smallest batch, where a user's tokens come fastest."""
    rows = [row for row in seen.batches(seen.engine) if row.decode]
    base = rows[0] if rows else seen.precision(None)
    split, over_gpus = tensor_parallel(seen)
    if base is None or base.decode is None:
        asked, note = targets.tpot_s is not None, _no_table(seen, "TPOT")
        return Finding.unknown("TPOT high?", Metric.TPOT, asked, note, over_gpus, untuned(seen, over_gpus))
    decode, grown = base.decode, None
    said = [f"{ms(decode.wall_s)} a token at batch {base.batch_size}"]
    notes: list[Fix | Untold | None] = []
    if rows and rows[-1].decode and rows[-1] is not base:
        grown = rows[-1].decode.wall_s / decode.wall_s
    if decode.device_s and not seen.on_cpu:
        said.append(f"the card works {ms(decode.device_s)} of it ({percent(decode.device_share or 0.0)})")
    elif not seen.on_cpu and not seen.at_server:
        waits = "whether the card or the host is what decode waits for"
        notes.append(Untold(waits, "no device time in this run", suite(seen, "batching")))
        if grown and grown < 1 / HOST_BOUND:
            said.append("it waits for weights or for the host, not for arithmetic, since more rows hardly slow it down")
    if decode.floor_s:
        said.append(f"reading what it needs takes {ms(decode.floor_s)}")
    first_s = base.figures.get("first_tpot_s", 0.0)
    if decode.wall_s < HOST_BOUND * first_s:
        said.append(f"the first request of its lengths waited {ms(first_s)}: serve each length once before users come")
    if grown:
        said.append(f"{times(grown)} as long at batch {rows[-1].batch_size}")
    draft, remark = speculation(seen)
    slower = [f"{times(1 / g.value)} as long in {name}" for name, g in quantized_speed(seen).items() if g.value < 1]
    said += [remark] if remark else []
    said += [f"a token takes {', '.join(slower)}"] if slower else []
    said += [over_gpus] if over_gpus and split is None else []
    fixes: list[Fix | Untold | None] = [
        graph_engine(seen),
        draft,
        *quantization(seen, for_speed=True),
        split,
    ]
    fixes += [*served(seen, Metric.PAUSE), *notes, *untuned(seen, over_gpus)]
    finding = _finding("TPOT high?", said, Metric.TPOT, fixes, decode.wall_s, targets.tpot_s, ms)
    finding = _bounded(seen, finding, decode, _steps(seen, base))
    if finding.ceiling and isinstance(draft, Fix):
        # A check yields several tokens, so a token can take less than a step.
        return replace(finding, ceiling=finding.ceiling * draft.cap if draft.cap else None)
    return replace(finding, hard=finding.hard and draft is None)


def _steps(seen: Evidence, base: Request) -> list[Timed]:
    """A decode step of `base`'s batch size on each engine, and at batch 1 in each precision: as measured, and as reading its
    weights would take it, since the library's low-bit kernels are not the only ones."""
    rows = [row for engine in (seen.engine, *seen.other_engines) for row in seen.batches(engine)]
    same = [base, *(row for row in rows if row.batch_size == base.batch_size)]
    same += [row for name in QUANTIZED if (row := seen.precision(name))]
    read = [seen.weights_s(name) for name in QUANTIZED]
    return [row.decode for row in same if row.decode] + [Timed(s, floor_s=s) for s in read if s]


# Throughput -----------------------------------------------------------------------------------------------------------


def throughput(seen: Evidence, targets: Targets, first: Finding, each: Finding) -> Finding:
    """Judged at the smallest batch of the stock engine, as one who serves alone has it. Batching is judged on the engine
    that the fixes of TPOT bring: what a batch gains on a card that waits is not what it gains later.

    `first` and `each` are what became of TTFT and TPOT: their targets and fixes bound the batch.
    """
    stock = seen.batches(seen.engine)
    copied, by_copies = replicas(seen)
    if not stock or stock[0].tokens_per_s is None:
        asked, note = targets.throughput_per_s is not None, _no_table(seen, "throughput")
        more = untuned(seen, by_copies)
        return Finding.unknown("Throughput low?", Metric.THROUGHPUT, asked, note, by_copies, more)
    base, now, graph = stock[0], stock[0].tokens_per_s, graph_throughput(seen)
    faster = same_batch(seen, base) if graph else None
    engine = faster.engine if faster else seen.engine
    every, curve = seen.batches(engine), seen.batch_curve(engine)
    tables = [_within(seen, rows, targets, first, each) for rows in (every, _curve(seen, engine, targets))]
    said = [_rates(stock)]
    if faster:
        said.append(f"{_rates(every)} on engine {plain(engine, 40)}")
    if len(tables[0]) < len(every):
        said.append(f"the other targets and the memory leave {len(tables[0])} of {len(every)} measured batch sizes")
    said += [by_copies] if by_copies and copied is None else []
    batch = batching(seen, tables)
    fixes: list[Fix | Untold | None] = [graph, batch, copied, *served(seen, Metric.THROUGHPUT)]
    rising = _rising(every, curve) if len(tables[0]) == len(every) else ""
    if rising:
        last = max(row.batch_size for row in (*every, *curve))
        sizes = ",".join(str(size) for size in (base.batch_size, 2 * last, 4 * last, 8 * last))
        command = SERVER if seen.at_server else suite(seen, "batching", f"--batch-sizes {sizes}")
        fixes.append(Untold("what larger batches give", rising, command))
    if seen.ratio("serving.continuous_beats_static") is None:
        why = "a batch of this run starts and ends together; chats come and go"
        fixes.append(Untold("what continuous batching gains", why, SERVER))
    target = targets.throughput_per_s
    finding = _finding("Throughput low?", said, Metric.THROUGHPUT, fixes, now, target, _rate, more_is_better=True)
    sizes_left = {row.batch_size for rows in tables for row in rows}
    forms = [
        row for name in (seen.engine, *seen.other_engines) for row in (*seen.batches(name), *seen.batch_curve(name))
    ]
    rates = [fastest_rate(row) for row in forms if row.batch_size in sizes_left]
    ceiling = max(rate or math.inf for rate in rates) / now
    unmeasured = rising or _unmeasured(finding.fixes)
    if isinstance(batch, Untold):
        unmeasured = f"{batch.what} can't be told: {batch.why}"
        finding = replace(finding, known=finding.asked or bool(finding.fixes))
    return replace(finding, ceiling=ceiling if ceiling < math.inf else None, open_ended=unmeasured)


def _rates(rows: Sequence[Request]) -> str:
    best = max(rows, key=lambda row: row.tokens_per_s or 0.0)
    shown = [rows[0]] if best is rows[0] else [rows[0], best]
    return ", ".join(f"{_rate(row.tokens_per_s or 0.0)} at batch {row.batch_size}" for row in shown)


def _curve(seen: Evidence, engine: str, targets: Targets) -> list[Request]:
    """The decode curve of an engine, as far as it may be read beside the table. Its points are few and noisy, so its first
    is no slower than the table's first decode step; and where throughput isn't asked for, a batch counts while a token
    hardly takes longer than there."""
    table, curve = seen.batches(engine), seen.batch_curve(engine)
    if not table or not curve or table[0].decode is None or table[0].batch_size != curve[0].batch_size:
        return []
    step_s = table[0].decode.wall_s
    rate = max(curve[0].tokens_per_s or 0.0, table[0].batch_size / step_s)
    first = replace(
        curve[0], tokens_per_s=rate, decode=Timed(min(step_s, curve[0].decode.wall_s if curve[0].decode else step_s))
    )
    slowest_s = UNCHANGED * step_s if targets.throughput_per_s is None else math.inf
    return [first, *(row for row in curve[1:] if row.decode and row.decode.wall_s <= slowest_s)]


def _within(seen: Evidence, rows: Sequence[Request], targets: Targets, first: Finding, each: Finding) -> list[Request]:
    """The smallest batch, and the others that the memory and the other targets leave: no more rows than chats, and each
    user's TTFT and TPOT within theirs once their own fixes are in place, or, where even those fall short, no slower than
    unbatched."""
    stock = bool(rows) and rows[0].engine == seen.engine
    most = min(targets.chats or math.inf, _fit(seen, targets.context_len or CONTEXT_LEN))

    def kept(row: Timed | None, base: Timed | None, target: float | None, relief: float) -> bool:
        if row is None or base is None or target is None:
            return True
        return row.wall_s <= max(target * relief, UNCHANGED * base.wall_s)

    return [
        row
        for place, row in enumerate(rows)
        if place == 0
        or (
            row.batch_size <= most
            and kept(row.prefill, rows[0].prefill, targets.ttft_s, first.together)
            and kept(row.decode, rows[0].decode, targets.tpot_s, each.together if stock else 1.0)
        )
    ]


def _rising(table: Sequence[Request], curve: Sequence[Request]) -> str:
    """Why a larger batch may give more than the run shows; "" where the run has seen the end of cheap users."""
    if stops_being_cheap(table) or stops_being_cheap(curve):
        return ""
    last = max(row.batch_size for row in (*table, *curve))
    return (
        f"at batch {last}, the largest of this run, a further user still adds half of what the first one gets, or more"
    )


def _rate(value: float) -> str:
    return f"{number(value)} tok/s"


# Memory ---------------------------------------------------------------------------------------------------------------


def memory(seen: Evidence, targets: Targets) -> Finding:
    """Judged by how many chats of the context's length fit beside the weights."""
    asked = targets.chats is not None or targets.context_len is not None
    chats, context_len = targets.chats or 1.0, targets.context_len or CONTEXT_LEN
    command = suite(seen, "quantization", beside=beside(seen, "batching"))
    weights, total = seen.weight_bytes.get(seen.full_precision or ""), seen.memory_bytes
    if weights is None or total is None:
        lacks = [what for what, known in (("the weights", weights), ("the memory", total)) if known is None]
        why = f"the run lacks the bytes of {' and of '.join(lacks)}"
        return Finding.unknown(
            "Memory full?", Metric.CHATS, asked, Untold("what fits into memory", why, command), pipeline(seen)
        )
    said = [f"weights take {gib(weights)} of {gib(total)} ({percent(min(1.0, weights / total))})"]
    fixes = [*quantization(seen, for_speed=False), *served(seen, Metric.CHATS), *split_weights(seen)]
    notes = [*_unpaged(seen)]
    exact, most = seen.kv_bytes_per_token, seen.most_bytes_per_token
    chat = (exact or most or math.nan) * context_len
    fit = _fit(seen, context_len) if exact else max(0.0, total - weights) / chat
    wanted = f"{number(chats)} chats of {number(context_len)} tokens"
    if exact:
        said.append(f"a chat of {number(context_len)} tokens {gib(chat)}: {_whole(fit)} fit")
    elif most:
        said.append(f"a chat of {number(context_len)} tokens at most {gib(chat)}: at least {_whole(fit)} fit")
    elif seen.on_cpu:
        said.append("what a chat takes is counted on a GPU only")
    known = bool(exact) or fit >= chats  # an upper bound can show that they fit, and not that they don't
    if not known:
        why = "what a token takes in the KV cache isn't in the run" + (", but for an upper bound" if most else "")
        if seen.on_cpu:
            why, command = f"{why}; it is counted on a GPU only", "pytest myths/test_quantization.py -m gpu"
        notes = [Untold("how many chats fit", why, command), *notes]
    finding = Finding(
        "Memory full?", "; ".join(said), Metric.CHATS, tuple(fixes), tuple(notes), asked, known=known or not asked
    )
    if not asked or not known:
        return finding
    return replace(
        finding,
        needed=chats / fit if fit else math.inf,
        target=f"{wanted}, {'' if exact else 'at least '}{_whole(fit)} fit",
        wanted=f"{wanted} need {gib(min(seen.weight_bytes.values()) + chats * chat)} with the smallest weights of this run",
    )


def _fit(seen: Evidence, context_len: float) -> float:
    """How many chats of so many tokens fit beside the weights; infinite where the run can't bound it."""
    weights, token = seen.weight_bytes.get(seen.full_precision or ""), seen.kv_bytes_per_token
    if weights is None or token is None or seen.memory_bytes is None:
        return math.inf
    return max(0.0, seen.memory_bytes - weights) / (token * context_len)


def _unpaged(seen: Evidence) -> list[Untold]:
    fewer = "the suite measures none; at best it holds twice as many chats as now"
    notes = [Untold("what a KV cache in 8 bits holds", fewer, SERVER)]
    if seen.ratio("serving.pages_fit_more") is None:
        why = "the suite's caches are as long as their chats; a server that reserves the longest fits fewer"
        notes.append(Untold("what a paged KV cache gains", why, SERVER))
    if seen.math_fallback():
        why = "SDPA fell back to its math kernel, which builds the whole score matrix"
        notes.append(Untold("what an attention kernel without that matrix saves", why, suite(seen, "attention_memory")))
    return notes


def _whole(count: float) -> str:
    return number(math.floor(count)) if count < 1e9 else number(count)


# What they share ------------------------------------------------------------------------------------------------------


def _finding(
    question: str,
    said: Sequence[str],
    metric: Metric,
    found: Sequence[Fix | Untold | None],
    now: float,
    target: float | None,
    shown: Callable[[float], str],
    *,
    more_is_better: bool = False,
) -> Finding:
    """A finding on a figure that the run has: `found` is what can be done about it, and what can't be told."""
    finding = Finding(
        question,
        "; ".join(said),
        metric,
        tuple(fix for fix in found if isinstance(fix, Fix)),
        tuple(note for note in found if isinstance(note, Untold)),
        target is not None,
    )
    if target is None:
        return finding
    needed = target / now if more_is_better else now / target
    return replace(finding, needed=needed, target=f"{shown(now)}, target {shown(target)}")


def _bounded(seen: Evidence, finding: Finding, phase: Timed, forms: Sequence[Timed]) -> Finding:
    """The finding with what bounds its fixes: `forms` are what the phase is now and could be once they are in place."""
    floors = [form.floor_s for form in forms if form.floor_s]
    known = floors or [form.device_s for form in forms if form.device_s]
    after = [fix.device_share for fix in finding.fixes if fix.device_share]
    share = max(after, default=phase.device_share)
    return replace(
        finding,
        share=1.0 if seen.on_cpu else share,
        ceiling=phase.wall_s / min(known) if known else None,
        hard=bool(floors),
        open_ended=_unmeasured(finding.fixes),
    )


def _unmeasured(fixes: Sequence[Fix]) -> str:
    """Why these fixes may give more than the run shows: where only the host's wait bounds a gain, the engine that ends it
    may bring faster kernels too."""
    names = [fix.name for fix in fixes if fix.gain.kind is Kind.AT_MOST]
    return f"{names[0]} isn't measured, and may bring faster kernels too" if names else ""
