"""Fixes that change the model that answers: a draft beside it, or its weights in fewer bits. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.diagnose.evidence import QUANTIZED, Evidence, Gain, Kind, times
from benchmarks.diagnose.fixes import SMALLEST, Fix, Metric, Untold, gib, ms, number, percent, suite, worth
from benchmarks.tables import plain

SPECULATION_ENGINES = ("transformers generate", "eager")
"""Names under which the stock engine's speculation stands: its cells' and its claims'."""

# Speculation ----------------------------------------------------------------------------------------------------------


def drafted_speed(tokens_per_check: float, gamma: float, c: float, check: float = 1.0) -> float:
    """How many times faster a draft makes decode: tokens that a check yields over what a cycle costs, in target steps.

    arXiv:2211.17192, theorem 3.8, with the expected number of tokens counted instead of derived from an acceptance rate, and
    `check` (what checking a whole draft costs beside one step; the paper has 1) measured.
    """
    return tokens_per_check / (gamma * c + check)


def speculation(seen: Evidence) -> tuple[Fix | Untold | None, str]:
    """The draft of this run, on the first engine where it gains: (fix or what isn't known, a clause on what was seen)."""
    command = suite(seen, "speculative_decoding", "--target ID_OR_DIR --draft ID_OR_DIR")
    unknown: Untold | None = Untold("what a draft gains", "the run has no speculation with a draft", command)
    said: list[str] = []
    for engines in (SPECULATION_ENGINES, *((engine,) for engine in seen.other_engines)):
        draft = _Draft.of(seen, engines)
        if draft is None:
            continue
        where = "" if engines is SPECULATION_ENGINES else f" on engine {plain(engines[0], 40)}"
        if draft.best is not None and draft.best < SMALLEST:
            # At this cost no weights could help, trained or not.
            unknown = None
            said.append(f"{draft.cost}, so even a draft that is always right gives {times(draft.best)}{where}")
        elif not seen.trained:
            why = "random weights: how many guesses would be accepted means nothing"
            return Untold("what a draft gains" + where, why, command.replace(" --weights random", "")), "".join(
                said[:1]
            )
        elif draft.gain is not None and worth(draft.gain):
            basis = f"{draft.words}; measured at batch 1: a full batch leaves less room for it"
            fix = Fix("speculative decoding" + where, Metric.TPOT, draft.gain, basis, command, draft.cap)
            return fix, "".join(said[:1])
        elif draft.gain is not None:
            unknown = None
            said.append(f"a draft is no gain{where} ({draft.gain.text})")
    return unknown, "".join(said[:1])


@dataclass(frozen=True)
class _Draft:
    """What a run shows of a draft on one engine. `best` is what it would give if all its guesses were right, `formula` what
    its counts predict, `cap` the tokens that a check yields: a check takes at least a step."""

    gain: Gain | None
    best: float | None
    formula: float | None
    cap: float | None
    cost: str
    words: str

    @staticmethod
    def of(seen: Evidence, engines: Sequence[str]) -> _Draft | None:
        figures = seen.cell_figures("speculation.with_draft", engines)
        if not figures:
            return None
        c, per_check = figures.get("c"), figures.get("mean_acceptance_length")
        drafted, forwards = figures.get("drafted"), figures.get("target_forwards")
        gamma = drafted / forwards if drafted and forwards else None
        check = seen.cell_figures("speculation.verify.1", (seen.engine, *engines)).get("over_one_step", 1.0)
        best = drafted_speed(gamma + 1, gamma, c, check) if gamma and c else None
        formula = drafted_speed(per_check, gamma, c, check) if gamma and c and per_check else None
        cap = per_check or (gamma + 1 if gamma else None)
        gain = _speed_with_draft(seen, engines, figures)
        if gain is None and formula:
            gain = Gain(formula, kind=Kind.COMPUTED)
        cost = f"a draft step costs {number(c)} target steps" if c else ""
        kept = (
            f"{percent(min(1.0, figures['acceptance_rate']))} of guesses kept" if "acceptance_rate" in figures else ""
        )
        predicted = f"the formula gives {times(formula)}" if formula else ""
        words = ", ".join(part for part in (kept, cost, predicted) if part) or "a draft beside the target"
        return _Draft(gain.capped(cap) if gain else None, best, formula, cap, cost, words)


def _speed_with_draft(seen: Evidence, engines: Sequence[str], figures: Mapping[str, float]) -> Gain | None:
    """Alone over with a draft: the claim where it has an interval, else the row with the range of its samples."""
    claimed = seen.ratio("speculation.not_free_speed", engines[-1])
    if claimed and claimed.low is not None:
        return claimed
    measured = figures.get("speed_over_alone") or figures.get("speed_ratio")
    if measured is None:
        return claimed
    alone, helped = (seen.request(f"speculation.{name}", engines) for name in ("alone", "with_draft"))
    if alone and helped and alone[0].e2e and helped[0].e2e:
        ends = alone[0].e2e.over(helped[0].e2e)
        if ends.low is not None and ends.high is not None and ends.low <= measured <= ends.high:
            return Gain(measured, ends.low, ends.high)
    return Gain(measured, kind=Kind.UNPAIRED)


# Quantization ---------------------------------------------------------------------------------------------------------


def quantized_speed(seen: Evidence) -> dict[str, Gain]:
    """Gain in TPOT of each quantized precision at batch 1; under 1 where it is slower."""
    full = seen.precision(None)
    found: dict[str, Gain] = {}
    for name in QUANTIZED:
        row = seen.precision(name)
        if full is None or row is None or full.decode is None or row.decode is None:
            continue
        slower = seen.ratio("quant.not_always_faster") if name == "int8" else None
        gain = full.decode.over(row.decode)
        if slower and slower.low and slower.high:
            gain = Gain(1 / slower.value, 1 / slower.high, 1 / slower.low)
        found[name] = gain.capped(full.decode.wall_s / row.decode.least_s if row.decode.least_s else None)
    return found


def quantization(seen: Evidence, *, for_speed: bool) -> list[Fix]:
    """Weights in fewer bits: `for_speed` a token's time, else the room for KV cache with the freed bytes in it."""
    speeds, full = quantized_speed(seen), seen.full_precision
    fixes = []
    for name in QUANTIZED:
        weights = seen.weight_bytes.get(name)
        shown = f"weights in {name}"
        command = suite(seen, "quantization", '--quant-prompt "YOUR QUESTION"')
        if for_speed:
            if name in speeds and worth(speeds[name]):
                row = seen.precision(name)
                base = seen.precision(None)
                assert row and row.decode and base and base.decode
                cap = base.decode.wall_s / row.decode.least_s if row.decode.least_s else None
                basis = f"{ms(base.decode.wall_s)} to {ms(row.decode.wall_s)} a token; {quality(seen, name)}"
                gain = speeds[name]
                fixes.append(Fix(shown, Metric.TPOT, gain, basis, command, cap, either="precision"))
            continue
        if full is None or weights is None or seen.memory_bytes is None:
            continue
        held, freed = seen.weight_bytes[full], seen.weight_bytes[full] - weights
        room = seen.memory_bytes - held
        if room <= 0 or freed <= 0:
            continue
        gain = Gain((room + freed) / room, kind=Kind.COMPUTED)
        if not worth(gain):
            continue
        price = f"; a token takes {times(1 / speeds[name].value)} as long" if name in speeds else ""
        basis = (
            f"weights {gib(held)} to {gib(weights)}, room for the KV cache {gib(room)} to {gib(room + freed)}{price}"
        )
        cap = seen.memory_bytes / room
        basis = f"{basis}; {quality(seen, name)}"
        fixes.append(Fix(shown, Metric.CHATS, gain, basis, command, cap, either="precision"))
    return fixes


def quality(seen: Evidence, precision: str) -> str:
    """What is known of a precision's answers, in a clause."""
    figures = seen.cell_figures(f"quant.quality.{precision}", (seen.engine,))
    if "nll_ratio" in figures and "top1_agreement" in figures:
        agreed = percent(min(1.0, figures["top1_agreement"]))
        return f"{agreed} of next tokens agree, NLL {times(figures['nll_ratio'])}: check it on your own task"
    return "quality isn't in this run: check it on your own task"
