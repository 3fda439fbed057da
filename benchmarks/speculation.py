"""Speculative decoding: a draft proposes tokens, the target checks them, and what that saves or costs.

The loop under test is the library's assisted generation. Both sides of every comparison run through `generate`, so that
its overhead is in both, and every forward of both models is counted where it happens.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.estimates import Estimate, counted, median_interval, paired_ratio, unusable
from benchmarks.ledger import Cell
from benchmarks.phases import EagerEngine, Prompt, Reference, logit_error, reference
from benchmarks.rows import Phases, kernels
from benchmarks.timing import Clock, quiet
from benchmarks.tokens import Gap, Match, compare, share_explained
from benchmarks.traces import trace
from benchmarks.workloads import Ids, Tokenizer, Workload, counting, open_text, question_ids

DRAFT_LEN = 5
"""Tokens that the draft proposes a cycle. At 60 % acceptance a sixth would add 0.05 tokens a cycle (arXiv:2211.17192,
equation 1), less than a draft step costs; and five is what `speculation.verify_cheap` checks."""

RESTARTS = 2
"""How often a comparison goes on after a near tie, so that what follows it is compared too."""

VERIFY_REPEATS = 8
"""Forwards a timing of `verify_s` averages over: one forward is too short to be told from the host's hiccups."""

QUESTIONS = ("How do I reset my password?", "Can I get my money back?")


def greedy_config(output_len: int, **draft: Any) -> Any:
    """A GenerationConfig that makes `generate` an argmax loop of exactly `output_len` tokens.

    It sets every field that changes tokens. Fields that must stay None (the end of text, which would end an output
    early; processors of every kind) are filled from `model.generation_config` whatever is passed, so `generate` also
    lends the model this very config. There is no minimum length: without an end of text it could change nothing.
    `draft` are the fields that only a draft has.
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
        **draft,
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
    one token; 0 without a draft.
    """

    tokens: Ids
    wall_s: float
    target_forwards: int
    drafted: int

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
    target: EagerEngine, prompt: Ids, output_len: int, clock: Clock, draft: EagerEngine | None = None
) -> Generated:
    """The target's greedy output of exactly `output_len` tokens, alone or assisted by a draft.

    Raises RuntimeError when the output has another length, or when the draft's and the target's counts contradict each
    other: figures of such an output would be wrong.
    """
    ids = torch.tensor([prompt], device=target.device)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "generation_config": greedy_config(output_len)}
    with ExitStack() as scope:
        scope.enter_context(_lent(target.model, greedy_config(output_len)))
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
    tokens = tuple(said[0, len(prompt) :].tolist())
    if len(tokens) != output_len:
        raise RuntimeError(f"{output_len} tokens were asked for and {len(tokens)} generated: lengths must be fixed")
    # Each check reads one token that is certain (the first: the whole prompt) and the drafted ones behind it.
    checked = sum(checks) - len(prompt) - (len(checks) - 1)
    if checked != len(proposals):
        raise RuntimeError(f"the draft ran {len(proposals)} times, the target checked {checked} tokens: counts differ")
    return Generated(tokens, wall_s, len(checks), len(proposals))


# The same tokens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """An assisted output beside the target's own: the comparison, and each piece that was generated for it."""

    match: Match
    pieces: tuple[Generated, ...]


def check(target: EagerEngine, draft: EagerEngine, workload: Workload, clock: Clock) -> Checked:
    """The assisted output of a one-row workload against the target's own greedy output.

    After a near tie both go on as different texts, so the rest is asked for once more behind the reference's own
    tokens, up to RESTARTS times.
    """
    (prompt,) = workload.prompts
    told = reference(target, prompt, workload.output_len)
    return follow(target, draft, prompt, told, logit_error(target, prompt, told), clock)


def follow(
    target: EagerEngine, draft: EagerEngine, prompt: Ids, told: Reference, error: float, clock: Clock
) -> Checked:
    """`check` against a given reference and logit error."""
    start, output_len = 0, len(told.tokens)
    differences, pieces = [], []
    match = Match(0)
    for _ in range(1 + RESTARTS):
        said = generate(target, prompt + told.tokens[:start], output_len - start, clock, draft)
        pieces.append(said)
        match = compare(told.tokens[start:], said.tokens, Gap(told.logits[start:].tolist()), error)
        differences += [replace(d, position=start + d.position) for d in match.differences]
        start += match.compared
        if not match.differences or not match.explained or start >= output_len:
            break
    whole = compare(told.tokens, told.tokens, Gap([]), error)  # whether the reference itself proves anything
    return Checked(Match(start, tuple(differences), whole.vacuous), tuple(pieces))


def conversations(tokenizer: Tokenizer, output_len: int) -> dict[str, Workload]:
    """Prompts that a draft finds easy and hard: questions, counting, open text."""
    return {
        **{q: Workload(q, (question_ids(tokenizer, q),), output_len) for q in QUESTIONS},
        "counting": counting(tokenizer, output_len),
        "open": open_text(tokenizer, output_len),
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
    """Acceptance on counting less acceptance on open text, in the first piece of each: one output, undisturbed."""
    easy, hard = (checked[name].pieces[0].acceptance_rate for name in ("counting", "open"))
    if easy is None or hard is None:
        return unusable("nothing was drafted")
    return counted(easy - hard, {"counting": (easy,), "open": (hard,)})


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


class Verifier:
    """Forwards of several tokens over a cache whose length stays the same: what a check costs."""

    def __init__(self, engine: EagerEngine, workload: Workload, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._cache = engine.prefill(Prompt.of(workload.prompts, engine.device)).cache
        self._ids = torch.tensor([row[:DRAFT_LEN] for row in workload.prompts], device=engine.device)
        self.cache_len = self._cache.get_seq_length()

    @torch.inference_mode()
    def forward(self, tokens: int) -> None:
        """One forward of `tokens` tokens a row with the logits of all of them, and the cache as it was."""
        self._engine.model(self._ids[:, :tokens], cache=self._cache, use_cache=True)
        self._clock.sync()

    def restore(self, tokens: int) -> None:
        """Cut the cache back. Raises RuntimeError when it doesn't have its length again."""
        self._cache.crop(-tokens)
        if (held := self._cache.get_seq_length()) != self.cache_len:
            raise RuntimeError(f"the cache holds {held} positions instead of {self.cache_len}: lengths must stay equal")

    def seconds(self, tokens: int) -> float:
        """Mean wall seconds of a forward; cutting the cache back is not part of it."""
        spent = 0.0
        for _ in range(VERIFY_REPEATS):
            spent += self._clock.time(lambda: self.forward(tokens))
            self.restore(tokens)
        return spent / VERIFY_REPEATS


def verify_ratio(many_s: Sequence[float], one_s: Sequence[float]) -> Estimate:
    return paired_ratio(many_s, one_s, (f"{DRAFT_LEN} tokens_s", "1 token_s"))


# Cells ----------------------------------------------------------------------------------------------------------------


def row(name: str, workload: Workload, target: EagerEngine, precision: str, outputs: Sequence[Generated]) -> Cell:
    """The target alone, through `generate`. `outputs` are one a round."""
    return Cell(
        id=f"speculation.{name}",
        station="speculation",
        phase="row",
        workload=workload.record | {"generation": greedy_config(workload.output_len).to_diff_dict()},
        engine="transformers generate",
        precision=precision,
        wall_s=tuple(o.wall_s for o in outputs),
        figures=_figures(outputs),
        kernels=_attention(target, workload),
        unavailable={"device_s": _NO_DEVICE_S, "acceptance_rate": "no draft"},
    )


def draft_row(
    workload: Workload,
    target: EagerEngine,
    draft: EagerEngine,
    precision: str,
    alone: Sequence[Generated],
    with_draft: Sequence[Generated],
    draft_alone: Sequence[Generated],
) -> Cell:
    """The target with its draft, with what the rounds say about its speed: the ratio, c, and what both predict."""
    rounds = list(zip(alone, with_draft, draft_alone, strict=True))
    costs = [step_cost(a, d) for a, _, d in rounds]
    last = with_draft[-1]
    return Cell(
        id="speculation.with_draft",
        station="speculation",
        phase="row",
        workload=workload.record | {"generation": draft_config(workload.output_len).to_diff_dict()},
        engine="transformers generate",
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
        kernels={"verify": _verify_trace(target, workload)["attention"]}
        | {f"draft {phase}": ran for phase, ran in _attention(draft, workload).items()},
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


def _attention(engine: EagerEngine, workload: Workload) -> dict[str, object]:
    """What attention ran in each phase."""
    phases = Phases.of(engine, workload)
    return {"prefill": kernels(phases.prefill)["attention"], "decode": kernels(phases.decode)["attention"]}


def _verify_trace(engine: EagerEngine, workload: Workload) -> dict[str, object]:
    checker = Verifier(engine, workload, Clock())
    return kernels(trace(lambda: checker.forward(DRAFT_LEN), engine.device))


def verify_cell(
    workload: Workload, engine: EagerEngine, precision: str, many_s: Sequence[float], one_s: Sequence[float]
) -> Cell:
    """Checking DRAFT_LEN tokens a row beside one decode step, at the workload's batch size."""
    checker = Verifier(engine, workload, Clock())
    traced = trace(lambda: checker.forward(DRAFT_LEN), engine.device)
    return Cell(
        id=f"speculation.verify.{workload.batch_size}",
        station="speculation",
        phase="verify",
        workload=workload.record | {"checked": DRAFT_LEN, "cache_len": checker.cache_len},
        engine=engine.name,
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
