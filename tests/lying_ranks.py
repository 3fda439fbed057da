"""Workers for the tests of the parallel station: ranks that lie when told to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.parallel.pipeline import StageEngine
from benchmarks.parallel.ranks import Group, Rank, TensorParallelEngine
from benchmarks.phases import EagerEngine, State


class Deaf(TensorParallelEngine):
    """Adds its own share of the answer twice instead of waiting for the other ranks' shares."""

    def _forward(self, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None) -> State:
        honest = torch.distributed.all_reduce
        torch.distributed.all_reduce = lambda tensor, *_, **__: tensor.mul_(2)
        try:
            return super()._forward(ids, cache, mask)
        finally:
            torch.distributed.all_reduce = honest


class Rounding(StageEngine):
    """Off by the last places of a float32, as if it added in another order."""

    def _forward(self, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None) -> State:
        state = super()._forward(ids, cache, mask)
        return replace(state, logits=state.logits * (1 + 2**-22))


class LyingRank(Rank):
    def lie(self, name: str, lie: str) -> None:
        """From now on the split model is wrong: slices that nobody adds up ("deaf"), a pipeline whose later stages don't
        know where they are in the text, as transformers' own does, left to itself ("lost"), or one that "rounds"."""
        engine: type[EagerEngine] = {"deaf": Deaf, "lost": EagerEngine, "rounds": Rounding}[lie]
        self.engines[name] = engine(self.engines[name].model)


def join(group: Group, rank: int) -> LyingRank:
    return LyingRank(group, rank)
