"""Are two greedy outputs the same? Exactly in float32; in half precision up to near ties that are proven.

Two things are asked of a row. Its tokens: other matrix shapes round differently, so in half precision two right programs
can pick different tokens where two logits nearly tie. Such a difference is excused only when the reference's own logits
show the tie: the gap between the two tokens is at most `Tolerance.gap`. And its logits: a model that is sure of its words
says the same ones although a stranger's text leaks into its cache, so equal tokens alone prove little. Nowhere may the
logits lie further from the reference's than `Tolerance.distance`.

Both bounds come from the logit error measured on this machine (`logit_error` in phases.py), never from the subject under
test. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.estimates import Estimate, unusable

NEAR_TIE_FACTOR = 4.0
"""Bound on the gap over the measured logit error. Two logits each move by up to one error on either side of the
comparison, so a gap of 4 errors is the most that rounding alone can turn around."""

DISTANCE_FACTOR = 3.0
"""Bound on how far any logit lies from the reference's, over the measured logit error. Right programs were seen up to
1.4 errors away in float16 and 1.7 in bfloat16 (H200, Qwen2.5-1.5B's shape, eager and graph), and 0.9 in float32. The
mildest lies there: one wrong cache position of 1,484 4.4 in float16, a tenth of a neighbour's logits 5.8 in bfloat16 and
28 in float16; a leaked position, a visible pad token or a prefix that was used before 14 to 430. In bfloat16 one wrong
position within a long prefix hides below 3 errors; in float32 it is 400 away."""

Ids = tuple[int, ...]

Gap = Callable[[int, int], float]
"""How far the reference's logit of a token lies under its top logit: of (position, token)."""


@dataclass(frozen=True)
class Tolerance:
    """What rounding alone explains on this machine, in logits: the widest `gap` between two tokens that one may stand
    for the other, and the longest `distance` of any logit from the reference's."""

    gap: float
    distance: float

    @staticmethod
    def of(logit_error: float, *, exact: bool) -> Tolerance:
        """From the measured error. `exact` (float32): tokens must be equal, only the logits may differ by rounding."""
        return Tolerance(0.0 if exact else NEAR_TIE_FACTOR * logit_error, DISTANCE_FACTOR * logit_error)


@dataclass(frozen=True)
class Difference:
    """A place where two outputs part: both tokens and the gap between them in the reference's logits."""

    position: int
    reference_token: int
    subject_token: int
    gap: float
    bound: float

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.bound

    def __str__(self) -> str:
        word = "near tie" if self.near_tie else "not a tie"
        return (
            f"position {self.position}: token {self.reference_token} became {self.subject_token}, "
            f"gap {self.gap:.3g}, bound {self.bound:.3g} ({word})"
        )


@dataclass(frozen=True)
class Furthest:
    """The position where the logits lie furthest from the reference's, and how far they may."""

    position: int
    distance: float
    bound: float

    @property
    def rounding(self) -> bool:
        return self.distance <= self.bound

    def __str__(self) -> str:
        return f"position {self.position}: logits {self.distance:.3g} apart, bound {self.bound:.3g}"


@dataclass(frozen=True)
class Match:
    """One row compared: every difference of a token, where its logits lie furthest apart (None when none were compared),
    why the comparison may prove nothing (`vacuous`), whether its reference only goes to and fro (`cyclic`), and what is
    wrong whatever was said (`fault`)."""

    compared: int
    differences: tuple[Difference, ...] = ()
    furthest: Furthest | None = None
    vacuous: str | None = None
    cyclic: bool = False
    fault: str | None = None

    @property
    def explained(self) -> bool:
        """Tokens equal or different only at near ties, and logits that differ by rounding only."""
        rounding = self.furthest is None or self.furthest.rounding
        return self.fault is None and rounding and all(d.near_tie for d in self.differences)


def vacuous(reference: Sequence[int]) -> str | None:
    """Why an output proves nothing: too short, or one token over and over (as a model of NaN gives)."""
    if len(reference) < 2:
        return "fewer than two tokens were compared"
    if len(set(reference)) == 1:
        return f"the reference is token {reference[0]} repeated"
    return None


def cyclic(reference: Sequence[int]) -> bool:
    """Whether an output goes to and fro between two tokens from its start, at least twice.

    A model that sees nothing but its last token ends so, whatever leaks into its cache; a longer cycle needs to know more.
    Counting ("1, 2, 3") repeats only its comma.
    """
    return len(reference) >= 4 and all(a == b for a, b in zip(reference, reference[2:], strict=False))


def compare(
    reference: Sequence[int],
    subject: Sequence[int],
    gap: Gap,
    distances: Sequence[float],
    tolerance: Tolerance,
    *,
    forced: bool = False,
) -> Match:
    """Compare a subject's tokens and logits with the reference's.

    `distances` are the subject's logits' from the reference's, one a position. With `forced` the subject was fed the
    reference's tokens, so every position stands for itself and all are compared; otherwise everything after the first
    differing token is another text and is not compared. Raises ValueError for unequal lengths.
    """
    if not len(reference) == len(subject) == len(distances):
        raise ValueError(
            f"{len(reference)} reference and {len(subject)} subject tokens with {len(distances)} distances: "
            "lengths are fixed before comparing"
        )
    if not math.isfinite(tolerance.distance):
        return Match(0, vacuous="the logits are not numbers")
    differences: list[Difference] = []
    compared = len(reference)
    for position, (wanted, got) in enumerate(zip(reference, subject, strict=True)):
        if wanted == got:
            continue
        differences.append(Difference(position, wanted, got, _or_infinite(gap(position, got)), tolerance.gap))
        if not forced:
            compared = position + 1
            break
    far = [Furthest(i, _or_infinite(distance), tolerance.distance) for i, distance in enumerate(distances[:compared])]
    furthest = max(far, key=lambda f: f.distance, default=None)
    return Match(compared, tuple(differences), furthest, vacuous(reference), cyclic(reference))


def _or_infinite(distance: float) -> float:
    """What is no number explains nothing."""
    return distance if math.isfinite(distance) else math.inf


def share_explained(matches: Sequence[Match]) -> Estimate:
    """Share of rows that are equal up to rounding, with what a reader must know.

    Unusable when any row is vacuous, or when all go to and fro between two tokens: some rows of a sound model may, and a
    stranger's text still shows in their logits, but where all do the model may be deaf to its context.
    """
    if not matches:
        return unusable("no rows were compared")
    if reasons := {m.vacuous for m in matches if m.vacuous}:
        return unusable("a vacuous comparison proves nothing: " + ", ".join(sorted(reasons)), len(matches))
    if all(m.cyclic for m in matches):
        return unusable(
            "a vacuous comparison proves nothing: every row goes to and fro between two tokens", len(matches)
        )
    explained = sum(m.explained for m in matches) / len(matches)
    exact = sum(not m.differences for m in matches)
    notes = [f"{exact} of {len(matches)} rows equal token for token"]
    worst = max((d for m in matches for d in m.differences), key=lambda d: d.gap - d.bound, default=None)
    if worst is not None:
        notes.append(f"worst difference at {worst}")
    furthest = max((m.furthest for m in matches if m.furthest), key=lambda f: f.distance - f.bound, default=None)
    if furthest is not None:
        notes.append(f"furthest at {furthest}")
    notes += sorted({m.fault for m in matches if m.fault})
    return Estimate(explained, explained, explained, len(matches), note=", ".join(notes))
