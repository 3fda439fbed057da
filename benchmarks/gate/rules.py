"""What the gate tolerates: one rule for each kind of figure, and the figures that a cell has. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.ledger import HOST_BOUND
from benchmarks.tables import finite

Entry = Mapping[str, Any]
"""A claim or cell as run.json keeps it."""


class Better(StrEnum):
    """Which way a figure may move without being a loss."""

    LOWER = "lower is better"
    HIGHER = "higher is better"
    SAME = "any change counts"


@dataclass(frozen=True)
class Rule:
    """How figures of one kind are judged.

    `figures` matches their names whole. Tolerated is the largest of `relative` times the baseline's figure, `absolute`,
    and, where `floors` says so, the noise that was measured. `timed` figures are measured again before they are
    red. Without `gated` they are reported and never red.
    """

    name: str
    figures: str
    better: Better
    why: str
    relative: float = 0.0
    absolute: float = 0.0
    floors: bool = False
    timed: bool = False
    gated: bool = True

    @property
    def line(self) -> str:
        """The rule for a reader."""
        if not self.gated:
            return f"{self.name}: reported, never red; {self.why}"
        return f"{self.name}: {self.better}, {self._limit}; {self.why}"

    @property
    def claims_line(self) -> str:
        """The same for figures of claims, each of which has its own direction."""
        return f"{self.name}: {self._limit}; {self.why}"

    @property
    def _limit(self) -> str:
        allowed = [f"{100 * self.relative:g}%"] * bool(self.relative) + [f"{self.absolute:g}"] * bool(self.absolute)
        allowed += ["the measured noise"] * self.floors
        again = "; measured again before it is red" * self.timed
        return f"tolerated is {'the largest of ' * (len(allowed) > 1)}{', '.join(allowed) or 'nothing'}{again}"


DECODE_STEP = "figures.decode_device_s"
"""The device time of a decode step as a request's row has it."""

RULES = (
    Rule(
        "what ran",
        r"kernels\..*",
        Better.SAME,
        "another attention kernel is another program, and a fallback to math shows in no single figure",
    ),
    Rule(
        "device time",
        r"device_s|figures\.(naive|sdpa)_device_s",
        Better.LOWER,
        "the card's own time; three traces of a phase differed by at most 1%, H200s at four times of a day by at most 3.0%",
        relative=0.04,
        absolute=2e-6,
        floors=True,
        timed=True,
    ),
    Rule(
        "device time of exchanges between GPUs",
        r"figures\.sync_device_s",
        Better.LOWER,
        "kernels of 6 us each on two H200s, whose sum lay up to 6% from the middle in ten rounds of one run",
        relative=0.15,
        absolute=2e-6,
        timed=True,
    ),
    Rule(
        "CPU time over a yardstick",
        r"figures\.cpu_over_yardstick",
        Better.LOWER,
        "a CPU's own time, in rounds with a fixed computation: equal runs spread by 3% (prefill) and 6% (decode) on a very "
        "busy host",
        relative=0.06,
        floors=True,
        timed=True,
    ),
    Rule(
        "wall time over a yardstick",
        r"figures\.wall_over_yardstick",
        Better.LOWER,
        "neighbours take the core in the middle of a round: equal runs spread by 10% on a very busy host",
        relative=0.35,
        floors=True,
        timed=True,
    ),
    Rule(
        "freed bytes and the chats that they hold",
        r"bytes\.freed|figures\.chats_(held|computed)",
        Better.HIGHER,
        "counted like all bytes; a chat more or less is what rounding to blocks does",
        relative=0.03,
    ),
    Rule(
        "bytes",
        r"bytes\..*",
        Better.LOWER,
        "counted by the allocator or from the storages, which hardly differ between runs",
        relative=0.01,
        absolute=65536,
    ),
    Rule(
        "acceptance",
        r"figures\.(acceptance_rate|mean_acceptance_length)",
        Better.HIGHER,
        "greedy tokens are the same in every run; half precision may flip a near tie",
        relative=0.02,
    ),
    Rule(
        "agreement",
        r"figures\.top1_agreement",
        Better.HIGHER,
        "the eval set is the same in every run",
        absolute=0.004,
    ),
    Rule(
        "loss of quality",
        r"figures\.(nll|nll_ratio|kl)",
        Better.LOWER,
        "the eval set is the same in every run",
        relative=0.02,
        absolute=1e-5,
    ),
    Rule(
        "amount of work",
        r"figures\.(.*_flops|prefix_len|eval_tokens|reference_nll)",
        Better.SAME,
        "another amount of work is another measurement",
        relative=0.001,
    ),
    Rule(
        "wall time of a phase that keeps the card busy",
        r"busy wall_s",
        Better.LOWER,
        "the host has little part in it, yet the median of two samples moves",
        relative=0.25,
        floors=True,
        timed=True,
    ),
    Rule(
        "other times, and what is made of them",
        r".*",
        Better.SAME,
        "wall times of the host, two samples each: between equal runs they differ by tens of per cent",
        gated=False,
    ),
)
"""The first that fits a figure's name judges it. A figure's name is where it stands in its cell: 'bytes.peak'."""

RATIO = Rule(
    "ratio of a claim",
    "",
    Better.HIGHER,
    "both sides were measured in the same rounds; worse is an interval that has left the baseline's behind",
    relative=0.05,
    floors=True,
    timed=True,
)
COUNTED = Rule(
    "counted figure of a claim",
    "",
    Better.HIGHER,
    "no clock and no chance has a part in it",
    relative=0.02,
    absolute=1e-5,
)

CLAIMED: Mapping[tuple[str, str], Better] = {
    ("batching.throughput", "throughput"): Better.HIGHER,
    ("batching.latency", "e2e"): Better.LOWER,
    ("batching.tpot", "tpot"): Better.LOWER,
    ("batching.memory", "growth over weights"): Better.LOWER,
    ("prefix.prefill_1484", "full over cached"): Better.HIGHER,
    ("prefix.prefill_device_bound", "full over cached"): Better.HIGHER,
    ("quant.int8_memory", "int8 over fp16"): Better.LOWER,
    ("quant.nf4_memory", "nf4 over fp16"): Better.LOWER,
    ("quant.quality_not_binary", "NLL over reference"): Better.LOWER,
    ("attention.exact", "SDPA error over reference error"): Better.LOWER,
    ("attention.sdpa_memory", "growth per doubling"): Better.LOWER,
    ("speculation.verify_cheap", "5 tokens over 1"): Better.LOWER,
    # Not the wall time at the wide shape: one GPU's step there waits for the card and the split one's for the hosts, so on
    # slower hosts it would be a loss by itself. At the rig's shape hosts are what both wait for.
    ("parallel.tp_not_linear", "wall"): Better.HIGHER,
    ("parallel.tp_not_linear", "device"): Better.HIGHER,
    ("parallel.tp_not_linear", "wide, device"): Better.HIGHER,
    # Up to its limit there is room for one more all-reduce in every second layer.
    ("parallel.tp_pays_for_sync", "all-reduces per layer"): Better.LOWER,
    ("parallel.tp_pays_for_sync", "share of the step"): Better.LOWER,
    ("parallel.tp_memory", "held over predicted"): Better.LOWER,
    # Its limits only say that a pipeline is no gain; what it costs more than one GPU is lost, and so is idling beyond what
    # filling and draining must leave.
    ("parallel.pp_same_latency", "wall"): Better.LOWER,
    ("parallel.pp_same_latency", "device"): Better.LOWER,
    ("parallel.pp_same_latency", "idle share at one request"): Better.LOWER,
    ("parallel.pp_same_latency", "idle share left"): Better.LOWER,
    # Hosts that keep replicas waiting make its interval wide, and a verdict that held turns before this does.
    ("parallel.replicas_scale", "tokens per second"): Better.HIGHER,
}
"""The figures behind verdicts, by claim and part, of which one way is a loss. Of all others the verdict is what is gated: a
claim's limit doesn't say it (that int8 is no faster is no bar that int8 must stay above)."""


Figure = float | str


def figures(cell: Entry) -> dict[str, Figure]:
    """All that a cell measured, by name: medians of samples, named numbers, and the names of what ran."""
    found: dict[str, Figure] = {}
    for name in ("device_s", "wall_s"):
        samples = sorted(number for value in cell[name] or () if (number := finite(value)) is not None)
        if samples:
            found[name] = samples[len(samples) // 2]
    for group in ("bytes", "figures"):
        found |= {
            f"{group}.{name}": number for name, value in cell[group].items() if (number := finite(value)) is not None
        }
    for name, ran in cell["kernels"].items():
        if name not in ("gqa", "proof", "longest", "n_kernels", "allowed"):
            found[f"kernels.{name}"] = ", ".join(map(str, ran)) if isinstance(ran, list | tuple) else str(ran)
    return found


def rule_of(name: str, cell: Entry) -> Rule:
    """The rule for a figure of a cell, which is the baseline's: the run that is judged has no say in how."""
    idle = finite(cell["host_bound"])
    if name == "wall_s" and idle is not None and idle < HOST_BOUND:
        name = "busy wall_s"
    if name == DECODE_STEP and cell["station"] == "parallel":
        name = "device_s"  # of other stations a row repeats what the step's own cell says
    return next(rule for rule in RULES if re.fullmatch(rule.figures, name))
