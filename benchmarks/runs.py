"""A served request as a value: the raw instants are stored, everything that people quote is derived."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.estimates import Estimate, paired_ratio, unusable

CLOCK_STOOD_STILL = "the clock stood still or ran backwards between two tokens"


@dataclass(frozen=True)
class Run:
    """One static batch, served from submit to its last token.

    `token_s` holds, for every decode position, the seconds from submit until the whole batch had that token;
    `output_len` tokens were generated for each of `batch_size` rows.
    """

    batch_size: int
    prompt_len: int
    token_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not self.token_s:
            raise ValueError("a run has at least one row and one token")

    @property
    def clock_advanced(self) -> bool:
        """Whether every token came after the one before it, and the first after the submit."""
        return all(later > earlier for earlier, later in itertools.pairwise((0.0, *self.token_s)))

    @property
    def output_len(self) -> int:
        return len(self.token_s)

    @property
    def ttft_s(self) -> float:
        """Submit to the first generated token."""
        return self.token_s[0]

    @property
    def e2e_s(self) -> float:
        """Submit to the last generated token: what each user of the batch waits."""
        return self.token_s[-1]

    @property
    def decode_s(self) -> float:
        """First token to last token."""
        return self.e2e_s - self.ttft_s

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first: (e2e - ttft) / (output_len - 1), as vLLM's serving benchmark has it.

        Raises ValueError for a single token, which has no time per output token.
        """
        if self.output_len < 2:
            raise ValueError("one output token has no tpot")
        return self.decode_s / (self.output_len - 1)

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between tokens."""
        return tuple(b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False))

    @property
    def output_tokens_per_s(self) -> float:
        """Over all rows of the batch; infinite, and so in no verdict, where the clock stood still."""
        return self.batch_size * self.output_len / self.e2e_s if self.e2e_s else math.inf

    @property
    def wall_per_request_s(self) -> float:
        """e2e over batch size. No user waits this long: it is the article's column that people misread."""
        return self.e2e_s / self.batch_size


def ratio(name: str, over: Sequence[Run], under: Sequence[Run], names: tuple[str, str]) -> Estimate:
    """Paired ratio of a derived figure of two sides' runs: `name` is a property of Run.

    Unusable when the clock of any run stood still or ran backwards between two tokens: then no figure of it is a time.
    """
    if not all(run.clock_advanced for run in (*over, *under)):
        return unusable(CLOCK_STOOD_STILL, len(over))
    return paired_ratio(
        [float(getattr(r, name)) for r in over],
        [float(getattr(r, name)) for r in under],
        (f"{names[0]} {name}", f"{names[1]} {name}"),
    )
