"""Workers for the tests of the parallel station: ranks that lie when told to."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.parallel.ranks import PIPELINE, TENSOR_PARALLEL, Group, Rank, TensorParallelEngine
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


class LyingRank(Rank):
    def lie(self, name: str) -> None:
        """From now on the split model is wrong: a pipeline whose later stages don't know where they are in the text (as
        transformers' own does, left to itself), or slices that nobody adds up."""
        model = self.engines[name].model
        self.engines[name] = {PIPELINE: EagerEngine, TENSOR_PARALLEL: Deaf}[name](model)


def join(group: Group, rank: int) -> LyingRank:
    return LyingRank(group, rank)
