"""Are two greedy outputs the same? Exactly in float32; in half precision up to near ties that are proven.

Other matrix shapes round differently, so in half precision two right programs can pick different tokens where two logits
nearly tie. Such a difference is excused only when the reference's own logits show the tie: the gap between the two
tokens is at most a bound that comes from the logit error measured on this machine (`logit_error` in phases.py),
never from the subject under test. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.estimates import Estimate, unusable

NEAR_TIE_FACTOR = 4.0
"""Bound on the gap over the measured logit error. Two logits each move by up to one error on either side of the
comparison, so a gap of 4 errors is the most that rounding alone can turn around."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """The first place where two outputs part: both tokens and the gap between them in the reference's logits."""

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
class Match:
    """One row compared: where it differs, every difference shown, and why the comparison may prove nothing."""

    compared: int
    differences: tuple[Difference, ...] = ()
    vacuous: str | None = None

    @property
    def explained(self) -> bool:
        """Equal, or different only at near ties."""
        return all(d.near_tie for d in self.differences)


def vacuous(reference: Sequence[int]) -> str | None:
    """Why an output proves nothing: too short, or one token over and over (as a model of NaN gives)."""
    if len(reference) < 2:
        return "fewer than two tokens were compared"
    if len(set(reference)) == 1:
        return f"the reference is token {reference[0]} repeated"
    return None


def compare(
    reference: Sequence[int], subject: Sequence[int], gap: Gap, logit_error: float, *, forced: bool = False
) -> Match:
    """Compare a subject's tokens with the reference's.

    `gap(position, token)` is how far the reference's logit of `token` lies under its top logit at `position`.
    `logit_error` is the measured error in logits, 0 in float32, where any difference is then a difference. With
    `forced` the subject was fed the reference's tokens, so every position stands for itself and all are compared;
    otherwise everything after the first difference is another text and is not compared.
    """
    if len(reference) != len(subject):
        raise ValueError(
            f"{len(reference)} reference and {len(subject)} subject tokens: lengths are fixed before comparing"
        )
    bound = NEAR_TIE_FACTOR * logit_error
    if not math.isfinite(bound):
        return Match(0, vacuous="the logits are not numbers")
    differences: list[Difference] = []
    compared = len(reference)
    for position, (wanted, got) in enumerate(zip(reference, subject, strict=True)):
        if wanted == got:
            continue
        distance = gap(position, got)
        differences.append(Difference(position, wanted, got, distance if math.isfinite(distance) else math.inf, bound))
        if not forced:
            compared = position + 1
            break
    return Match(compared, tuple(differences), vacuous(reference))


class Gap:
    """How far under the top a token's logit lies, from recorded logits: rows[position][token]."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self.rows = rows

    def __call__(self, position: int, token: int) -> float:
        row = self.rows[position]
        return float(max(row)) - float(row[token])


def share_explained(matches: Sequence[Match]) -> Estimate:
    """Share of rows that are equal up to near ties, with what a reader must know; unusable when any row is vacuous."""
    if not matches:
        return unusable("no rows were compared")
    if reasons := {m.vacuous for m in matches if m.vacuous}:
        return unusable("a vacuous comparison proves nothing: " + ", ".join(sorted(reasons)), len(matches))
    explained = sum(m.explained for m in matches) / len(matches)
    exact = sum(not m.differences for m in matches)
    note = f"{exact} of {len(matches)} rows equal token for token"
    worst = max((d for m in matches for d in m.differences), key=lambda d: d.gap - d.bound, default=None)
    if worst is not None:
        note += f", worst difference at {worst}"
    return Estimate(explained, explained, explained, len(matches), note=note)
