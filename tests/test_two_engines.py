"""Claims about decode on both engines, through pytest's own door, with steps that run again instead of being replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import benchmarks.graphs
from benchmarks.decoder import TorchOps, read
from benchmarks.graphs import CannotCapture, static_engine
from tests.test_graphs import unrecorded
from tests.test_suite import MYTHS, Ran, no_cuda, pytest_here, report

__all__ = ["no_cuda", "report"]  # fixtures, used by their names

SHORT = ("--new-tokens", "8", "--prefix-len", "128", "--batch-sizes", "1,2")

SAME_TOKENS = (
    MYTHS / "test_batching.py",
    MYTHS / "test_speculative_decoding.py",
    *SHORT,
    "-k",
    "fifteen_others or targets_own",
)


def without_recording(model: Any, batch_size: int, cache_len: int, step_lens: Any = (1,)) -> Any:
    return static_engine(model, read(model, cache_len), TorchOps(), batch_size, cache_len, step_lens, unrecorded)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(benchmarks.graphs, "lacking", lambda device: None)
    monkeypatch.setattr(benchmarks.graphs, "capture", without_recording)
    return monkeypatch


def words(ran: Ran) -> dict[tuple[str, str], str]:
    return {(claim["id"], claim["engine"]): claim["verdict"] for claim in ran.run["claims"]}


def test_both_engines_are_judged_and_stand_apart(graphs: pytest.MonkeyPatch, report: Path) -> None:
    ran = pytest_here(report, *SAME_TOKENS)
    claims = ("batching.same_tokens", "speculation.same_tokens")
    assert words(ran) == {(claim, engine): "HOLDS" for claim in claims for engine in ("eager", "graph")}
    assert ran.run["engine"] == "eager and graph"
    assert "graph engine: 2 HOLDS" in ran.said


def test_an_engine_that_lies_is_refuted_and_the_other_stands(graphs: pytest.MonkeyPatch, report: Path) -> None:
    def off_by_one(model: Any, *shape: Any, **more: Any) -> Any:
        """The step sees one token less than it should: rows forget the last token of their prompt."""
        engine = without_recording(model, *shape, **more)
        copy = engine._copy

        def forgetful(cache: Any, mask: Any) -> None:
            copy(cache, mask)
            engine.held.lengths.sub_(1)

        engine._copy = forgetful
        return engine

    graphs.setattr(benchmarks.graphs, "capture", off_by_one)
    ran = pytest_here(report, *SAME_TOKENS[:1], *SHORT, "-k", "fifteen_others")
    assert words(ran) == {("batching.same_tokens", "eager"): "HOLDS", ("batching.same_tokens", "graph"): "REFUTED"}


def test_without_a_graph_engine_the_reason_is_the_verdict_and_eager_goes_on(
    graphs: pytest.MonkeyPatch, report: Path
) -> None:
    refused = CannotCapture("out of memory at batch 16 with a cache of 256")
    graphs.setattr(benchmarks.graphs, "capture", lambda *shape, **more: refused)
    ran = pytest_here(report, MYTHS / "test_batching.py", *SHORT, "-k", "fifteen_others or batching_row and 2-")
    assert words(ran) == {("batching.same_tokens", "eager"): "HOLDS", ("batching.same_tokens", "graph"): "NOT JUDGED"}
    rows = {cell["engine"]: cell for cell in ran.run["cells"] if cell["id"] == "batching.2"}
    assert rows["eager"]["wall_s"]
    assert rows["graph"]["unavailable"]["wall_s"] == str(refused)
    assert ran.code == pytest.ExitCode.OK
    assert str(refused) in ran.said


def test_one_engine_alone_can_be_asked_for(graphs: pytest.MonkeyPatch, report: Path) -> None:
    ran = pytest_here(report, *SAME_TOKENS[:1], *SHORT, "-k", "fifteen_others", "--engine", "graph")
    assert {claim["engine"] for claim in ran.run["claims"]} == {"graph"}


def test_an_unknown_engine_is_refused(report: Path) -> None:
    ran = pytest_here(report, *SAME_TOKENS, "--engine", "jax")
    assert ran.error.endswith("--engine jax: choose eager, graph, both")
