"""Speculative decoding: a draft proposes tokens, the target checks them, and what that saves or costs.

The loop under test is the library's assisted generation. Both sides of every comparison run through `generate`, so that
its overhead is in both, and every forward of both models is counted where it happens.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks.estimates import Estimate, counted, median_interval, paired_ratio, unusable
from benchmarks.ledger import Cell
from benchmarks.phases import EagerEngine, Engine, Prompt, Reference, logit_distance, reference, tolerance
from benchmarks.rows import Phases, kernels
from benchmarks.timing import Clock, quiet
from benchmarks.tokens import Match, Tolerance, compare, share_explained
from benchmarks.traces import Trace, trace
from benchmarks.workloads import Ids, Tokenizer, Workload, counting, open_text, question_ids

DRAFT_LEN = 5
"""Tokens that the draft proposes a cycle. At 60 % acceptance a sixth would add 0.05 tokens a cycle (arXiv:2211.17192,
equation 1), less than a draft step costs; and five is what `speculation.verify_cheap` checks."""

RESTARTS = 2
"""How often a comparison goes on after a near tie, so that what follows it is compared too."""

VERIFY_REPEATS = 4
"""Forwards of either kind that a timing averages over: one is too short to be told from the host's hiccups."""

QUESTIONS = ("How do I reset my password?", "Can I get my money back?")


def greedy_config(output_len: int, **more: Any) -> Any:
    """A GenerationConfig that makes `generate` an argmax loop of exactly `output_len` tokens.

    It sets every field that changes tokens. Fields that must stay None (the end of text, which would end an output
    early; processors of every kind) are filled from `model.generation_config` whatever is passed, so `generate` also
    lends the model this very config. There is no minimum length: without an end of text it could change nothing.
    `more` are fields that change no token of the output: a draft's, and what is returned beside the tokens.
    """
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=output_len,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        repetition_penalty=1.0,
        encoder_repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=None,
        forced_eos_token_id=None,
        pad_token_id=0,  # one row is never padded; None would make the library look for one
        use_cache=True,
        disable_compile=True,
        **more,
    )


def draft_config(output_len: int) -> Any:
    """The draft's config: always DRAFT_LEN proposals (the library's own schedule and confidence threshold would change
    their number from one cycle to the next, and with it what is measured)."""
    return greedy_config(
        output_len,
        num_assistant_tokens=DRAFT_LEN,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )


@contextmanager
def _lent(model: Any, config: Any) -> Iterator[None]:
    """`config` in place of the model's own generation defaults, which come back whatever happens."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _counted(model: Any) -> Iterator[list[int]]:
    """Input lengths of every forward of a model, in order."""
    lengths: list[int] = []

    def count(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lengths.append((args[0] if args else kwargs["input_ids"]).shape[1])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield lengths
    finally:
        hook.remove()


@dataclass(frozen=True)
class Generated:
    """One output, and what it took: seconds from submit to the last token, and forwards of either model.

    `target_forwards` counts the forward that reads the prompt. `drafted` counts draft forwards, each of which proposes
    one token; 0 without a draft. `logits` are the target's behind each token, (output_len, vocab_size) on the CPU, when
    they were asked for: with a draft, those of the very forwards that checked it.
    """

    tokens: Ids
    wall_s: float
    target_forwards: int
    drafted: int
    logits: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def output_len(self) -> int:
        return len(self.tokens)

    @property
    def accepted(self) -> int:
        """Drafted tokens that the target kept: each of its forwards adds one of its own, the rest are the draft's."""
        return self.output_len - self.target_forwards

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted, None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a target forward yields, its own included: 1 when nothing is accepted, at most DRAFT_LEN + 1."""
        return self.output_len / self.target_forwards


def generate(
    target: EagerEngine,
    prompt: Ids,
    output_len: int,
    clock: Clock,
    draft: EagerEngine | None = None,
    *,
    keep_logits: bool = False,
) -> Generated:
    """The target's greedy output of exactly `output_len` tokens, alone or assisted by a draft.

    With `keep_logits` the library keeps every token's logits, which costs time: not for outputs whose `wall_s` counts.

    Raises RuntimeError when the output has another length, or when the draft's and the target's counts contradict each
    other: figures of such an output would be wrong.
    """
    ids = torch.tensor([prompt], device=target.device)
    config = greedy_config(output_len, return_dict_in_generate=True, output_logits=keep_logits)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "generation_config": config}
    with ExitStack() as scope:
        scope.enter_context(_lent(target.model, config))
        checks = scope.enter_context(_counted(target.model))
        proposals: list[int] = []
        if draft is not None:
            scope.enter_context(_lent(draft.model, draft_config(output_len)))
            proposals = scope.enter_context(_counted(draft.model))
            options["assistant_model"] = draft.model
        scope.enter_context(torch.inference_mode())
        scope.enter_context(quiet())
        start = clock.read()
        said = target.model.generate(ids, **options)
        wall_s = clock.read() - start
    tokens = tuple(said.sequences[0, len(prompt) :].tolist())
    if len(tokens) != output_len:
        raise RuntimeError(f"{output_len} tokens were asked for and {len(tokens)} generated: lengths must be fixed")
    # Each check reads one token that is certain (the first: the whole prompt) and the drafted ones behind it.
    checked = sum(checks) - len(prompt) - (len(checks) - 1)
    if checked != len(proposals):
        raise RuntimeError(f"the draft ran {len(proposals)} times, the target checked {checked} tokens: counts differ")
    logits = torch.cat(said.logits).float().cpu() if keep_logits else None
    return Generated(tokens, wall_s, len(checks), len(proposals), logits)


@dataclass(frozen=True)
class Loop:
    """Speculative decoding as an engine does it: the target alone, with its draft, and the draft alone, each giving
    exactly `output_len` greedy tokens after a prompt. `engine` names what runs it in cells; `generate` is the library's
    loop on eager engines, or that of drafts.py on graph engines."""

    engine: str
    target: Engine[Any]
    draft: Engine[Any]
    clock: Clock
    generate: Callable[..., Generated] = generate

    def alone(self, prompt: Ids, output_len: int) -> Generated:
        return self.generate(self.target, prompt, output_len, self.clock)

    def with_draft(self, prompt: Ids, output_len: int, *, keep_logits: bool = False) -> Generated:
        return self.generate(self.target, prompt, output_len, self.clock, self.draft, keep_logits=keep_logits)

    def draft_alone(self, prompt: Ids, output_len: int) -> Generated:
        return self.generate(self.draft, prompt, output_len, self.clock)


# The same tokens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """An assisted output beside the target's own: the comparison, and each piece that was generated for it."""

    match: Match
    pieces: tuple[Generated, ...]


def check(loop: Loop, target: EagerEngine, workload: Workload) -> Checked:
    """The assisted output of a one-row workload against the target's own greedy output on the eager engine.

    After a near tie both go on as different texts, so the rest is asked for once more behind the reference's own
    tokens, up to RESTARTS times.
    """
    (prompt,) = workload.prompts
    told = reference(target, prompt, workload.output_len)
    return follow(loop, prompt, told, tolerance(target, [prompt], [told]))


def follow(loop: Loop, prompt: Ids, told: Reference, rounding: Tolerance) -> Checked:
    """`check` against a given reference and tolerance."""
    start, output_len = 0, len(told.tokens)
    differences, furthest, pieces = [], [], []
    for _ in range(1 + RESTARTS):
        said = loop.with_draft(prompt + told.tokens[:start], output_len - start, keep_logits=True)
        assert said.logits is not None
        pieces.append(replace(said, logits=None))
        match = compare(
            told.tokens[start:],
            said.tokens,
            lambda position, token, start=start: told.gap(start + position, token),  # type: ignore[misc]
            logit_distance(said.logits, told.logits[start:]).tolist(),
            rounding,
        )
        differences += [replace(d, position=start + d.position) for d in match.differences]
        if match.furthest is not None:
            furthest.append(replace(match.furthest, position=start + match.furthest.position))
        start += match.compared
        if not match.differences or not match.explained or start >= output_len:
            break
    whole = compare(told.tokens, told.tokens, told.gap, [0.0] * output_len, rounding)  # does it prove anything?
    worst = max(furthest, key=lambda f: f.distance, default=None)
    match = replace(whole, compared=start, differences=tuple(differences), furthest=worst)
    return Checked(match, tuple(pieces))


def conversations(tokenizer: Tokenizer, output_len: int, told_apart_len: int) -> dict[str, Workload]:
    """Prompts that a draft finds easy and hard: questions, and counting and open text, which `predictable` tells apart."""
    return {
        **{q: Workload(q, (question_ids(tokenizer, q),), output_len) for q in QUESTIONS},
        "counting": counting(tokenizer, told_apart_len),
        "open": open_text(tokenizer, told_apart_len),
    }


def acceptance(pieces: Sequence[Generated]) -> Estimate:
    """accepted / drafted over several outputs."""
    accepted, drafted = sum(p.accepted for p in pieces), sum(p.drafted for p in pieces)
    if not drafted:
        return unusable("nothing was drafted")
    if accepted in (0, drafted):
        which = "none" if not accepted else "all"
        return unusable(f"{which} of {drafted} drafted tokens were accepted: equal outputs then prove nothing")
    return counted(accepted / drafted, {"accepted": (float(accepted),), "drafted": (float(drafted),)})


def same_tokens(checked: Sequence[Checked]) -> dict[str, Estimate]:
    return {
        "outputs explained": share_explained([c.match for c in checked]),
        "acceptance": acceptance([piece for c in checked for piece in c.pieces]),
    }


def predictable(checked: Mapping[str, Checked]) -> Estimate:
    """Acceptance on counting less acceptance on open text, in the first piece of each: one output, undisturbed.

    Uncertain by one check's worth of drafted tokens on either text: where a check happens to begin decides about as many.
    """
    pieces = [checked[name].pieces[0] for name in ("counting", "open")]
    easy, hard = (piece.acceptance_rate for piece in pieces)
    if easy is None or hard is None:
        return unusable("nothing was drafted")
    if easy == hard and easy in (0.0, 1.0):
        which = "all" if easy else "none"
        return unusable(f"{which} of the drafted tokens were accepted on both texts: this pair can't tell them apart")
    luck = max(DRAFT_LEN / piece.drafted for piece in pieces)
    note = f"within {luck:.0%} either way: the drafted tokens of one check"
    raw = {"counting": (easy,), "open": (hard,)}
    return Estimate(easy - hard, easy - hard - luck, easy - hard + luck, len(pieces), raw, note=note)


# Speed ----------------------------------------------------------------------------------------------------------------


def step_cost(alone: Generated, draft_alone: Generated) -> float:
    """c of arXiv:2211.17192: a draft step over a target step, from two outputs of the same length in the same round."""
    return (draft_alone.wall_s / draft_alone.output_len) / (alone.wall_s / alone.output_len)


def predicted_speed(with_draft: Generated, c: float) -> float:
    """How many times faster the draft should make the output, from counts and c alone.

    A target forward costs 1 and a draft forward c, so the output takes `target_forwards + c * drafted` target steps
    instead of `output_len`. Divided by the number of cycles that is mean tokens a cycle / (gamma * c + 1), with gamma
    the mean draft length. Theorem 3.8 of arXiv:2211.17192 has (1 - alpha^(gamma+1)) / (1 - alpha) in the numerator: the
    expected number of tokens a cycle if each drafted token were accepted with the same chance alpha, independently.
    Here that number is counted, so that the model of cost is tested and not the model of acceptance.
    """
    return with_draft.output_len / (with_draft.target_forwards + c * with_draft.drafted)


def speed(
    alone: Sequence[Generated], with_draft: Sequence[Generated], draft_alone: Sequence[Generated]
) -> dict[str, Estimate]:
    """What paired rounds of the three show for the claims about speed."""
    ratio = paired_ratio([a.wall_s for a in alone], [w.wall_s for w in with_draft], ("alone e2e_s", "with draft e2e_s"))
    if ratio.value is None or any(d.wall_s <= 0 for d in draft_alone):
        cost = unusable(ratio.problem or "draft alone: a sample is zero or negative", ratio.n)
    else:
        predicted = [
            predicted_speed(w, step_cost(a, d)) for a, w, d in zip(alone, with_draft, draft_alone, strict=True)
        ]
        measured = [a.wall_s / w.wall_s for a, w in zip(alone, with_draft, strict=True)]
        ratios = [m / p for m, p in zip(measured, predicted, strict=True)]
        cost = median_interval(ratios, {"measured speed": tuple(measured), "predicted speed": tuple(predicted)})
    return {"speculation.not_free_speed": ratio, "speculation.cost_model": cost}


class Verifier(ABC):
    """Steps of several tokens over a cache whose length stays the same: what a check costs."""

    def __init__(self, engine: Engine[Any], workload: Workload, clock: Clock) -> None:
        self.engine, self._clock = engine, clock
        self._state = engine.prefill(Prompt.of(workload.prompts, engine.device))
        self.cache_len: int = self._state.cache.get_seq_length()
        self._ids = torch.tensor([row[:DRAFT_LEN] for row in workload.prompts], device=engine.device)

    @abstractmethod
    def forward(self, tokens: int) -> None:
        """Read `tokens` tokens a row, with the logits of all of them; they stay in the cache until `restore`."""

    @abstractmethod
    def restore(self, tokens: int) -> None:
        """Take them out again. Raises RuntimeError when the cache doesn't have its length again."""

    def traced(self) -> Trace:
        """The trace of one check."""
        found = trace(lambda: self.forward(DRAFT_LEN), self.engine.device)
        self.restore(DRAFT_LEN)
        return found

    def pair(self) -> tuple[float, float]:
        """Mean wall seconds of checking DRAFT_LEN tokens and of a step of one, timed in turn so that both meet the same
        host. Cutting the cache back is not part of either."""
        spent = {DRAFT_LEN: 0.0, 1: 0.0}
        for repeat in range(VERIFY_REPEATS):
            for tokens in (DRAFT_LEN, 1) if repeat % 2 else (1, DRAFT_LEN):
                spent[tokens] += self._clock.time(partial(self.forward, tokens))
                self.restore(tokens)
        return spent[DRAFT_LEN] / VERIFY_REPEATS, spent[1] / VERIFY_REPEATS


class EagerVerifier(Verifier):
    """Forwards of the model over the library's own cache."""

    @torch.inference_mode()
    def forward(self, tokens: int) -> None:
        self.engine.model(self._ids[:, :tokens], cache=self._state.cache, use_cache=True)
        self._clock.sync()

    def restore(self, tokens: int) -> None:
        self._state.cache.crop(-tokens)
        if (held := self._state.cache.get_seq_length()) != self.cache_len:
            raise RuntimeError(f"the cache holds {held} positions instead of {self.cache_len}: lengths must stay equal")


def verify_ratio(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """`pairs` are of Verifier.pair, one a round."""
    many_s, one_s = zip(*pairs, strict=True)
    return paired_ratio(many_s, one_s, (f"{DRAFT_LEN} tokens_s", "1 token_s"))


# Cells ----------------------------------------------------------------------------------------------------------------

ALONE, WITH_DRAFT = "speculation.alone", "speculation.with_draft"
"""The ids of the two rows."""


def row(workload: Workload, loop: Loop, precision: str, outputs: Sequence[Generated]) -> Cell:
    """The target alone. `outputs` are one a round."""
    return Cell(
        id=ALONE,
        station="speculation",
        phase="row",
        workload=workload.record | {"generation": greedy_config(workload.output_len).to_diff_dict()},
        engine=loop.engine,
        precision=precision,
        wall_s=tuple(o.wall_s for o in outputs),
        figures=_figures(outputs),
        kernels=_attention(loop.target, workload),
        unavailable={"device_s": _NO_DEVICE_S, "acceptance_rate": "no draft"},
    )


def draft_row(
    workload: Workload,
    loop: Loop,
    check: Trace,
    precision: str,
    alone: Sequence[Generated],
    with_draft: Sequence[Generated],
    draft_alone: Sequence[Generated],
) -> Cell:
    """The target with its draft, with what the rounds say about its speed: the ratio, c, and what both predict. `check` is the
    trace of one check."""
    rounds = list(zip(alone, with_draft, draft_alone, strict=True))
    costs = [step_cost(a, d) for a, _, d in rounds]
    last = with_draft[-1]
    return Cell(
        id=WITH_DRAFT,
        station="speculation",
        phase="row",
        workload=workload.record | {"generation": draft_config(workload.output_len).to_diff_dict()},
        engine=loop.engine,
        precision=precision,
        wall_s=tuple(o.wall_s for o in with_draft),
        figures=_figures(with_draft)
        | {
            "speed_over_alone": statistics.median(a.wall_s / w.wall_s for a, w, _ in rounds),
            "acceptance_rate": last.accepted / last.drafted if last.drafted else 0.0,
            "drafted": float(last.drafted),
            "accepted": float(last.accepted),
            "mean_acceptance_length": last.mean_acceptance_length,
            "c": statistics.median(costs),
            "predicted_speed": statistics.median(predicted_speed(w, c) for w, c in zip(with_draft, costs, strict=True)),
        },
        kernels={"verify": kernels(check)["attention"]}
        | {f"draft {phase}": ran for phase, ran in _attention(loop.draft, workload).items()},
        unavailable={"device_s": _NO_DEVICE_S},
    )


_NO_DEVICE_S = "of a request only its phases have one"


def _figures(outputs: Sequence[Generated]) -> dict[str, float]:
    e2e_s = statistics.median(o.wall_s for o in outputs)
    return {
        "e2e_s": e2e_s,
        "output_tokens_per_s": outputs[0].output_len / e2e_s,
        "target_forwards": float(outputs[0].target_forwards),
    }


def _attention(engine: Engine[Any], workload: Workload) -> dict[str, object]:
    """What attention ran in each phase."""
    phases = Phases.of(engine, workload)
    return {"prefill": kernels(phases.prefill)["attention"], "decode": kernels(phases.decode)["attention"]}


def verify_id(workload: Workload) -> str:
    return f"speculation.verify.{workload.batch_size}"


def verify_cell(workload: Workload, checker: Verifier, precision: str, pairs: Sequence[tuple[float, float]]) -> Cell:
    """Checking DRAFT_LEN tokens a row beside one decode step, at the workload's batch size."""
    traced = checker.traced()
    many_s, one_s = zip(*pairs, strict=True)
    return Cell(
        id=verify_id(workload),
        station="speculation",
        phase="verify",
        workload=workload.record | {"checked": DRAFT_LEN, "cache_len": checker.cache_len},
        engine=checker.engine.name,
        precision=precision,
        wall_s=tuple(many_s),
        device_s=(traced.device_s,) if traced.device_s is not None else None,
        figures={
            "one_step_s": statistics.median(one_s),
            "over_one_step": statistics.median(many / one for many, one in zip(many_s, one_s, strict=True)),
        },
        kernels=kernels(traced),
        unavailable={} if traced.device_s is not None else {"device_s": traced.reason or "no trace"},
    )
