"""Regime curves: the turning point is found by doubling, and a search ends for a reason whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import curves
from benchmarks.curves import Curve, Limits, Point, batch_curve, curve_cells, prefix_curve, search
from benchmarks.phases import Engine
from benchmarks.tables import tables_of
from tests.pretend import Pretend, PretendCache

TOKENS = tuple(range(1, 40))
ENDLESS = Limits(1, 4096, 1e9)


def found(turns_at: int, limits: Limits = ENDLESS) -> Curve:
    return search(lambda size: {"size": float(size)}, lambda p: p.size >= turns_at, limits, "cpu", lambda: 0.0)


@given(st.integers(1, 2048))
def test_the_answer_is_the_first_size_that_turned(turns_at: int) -> None:
    curve = found(turns_at)
    assert curve.turned is not None
    assert turns_at <= curve.turned < 2 * turns_at
    assert [point.size for point in curve.points] == [2**n for n in range(len(curve.points))]
    assert curve.points[-1].size == 2 * curve.turned  # one more, to be sure


def test_one_slow_moment_is_no_turning_point() -> None:
    curve = search(lambda size: {}, lambda p: p.size in (2, 16, 32), ENDLESS, "cpu", lambda: 0.0)
    assert curve.turned == 16


def test_a_regime_that_never_changes_has_no_turning_point() -> None:
    assert found(5000) == Curve(found(5000).points, None, "not found up to 4,096")
    last = found(4096)
    assert last.turned is None and last.ended.startswith("only seen at 4,096, the last size")


def test_larger_factors_make_fewer_points() -> None:
    curve = found(60, Limits(1, 1024, 1e9, factor=4))
    assert [point.size for point in curve.points] == [1, 4, 16, 64, 256]
    assert curve.turned == 64


def out_of_memory(size: int) -> dict[str, float] | str:
    if size > 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    return {}


def no_engine(size: int) -> dict[str, float] | str:
    return {} if size <= 4 else "cannot be captured"


@pytest.mark.parametrize(
    ("measure", "ended"),
    [(out_of_memory, "out of memory at 8"), (no_engine, "cannot be captured at 8")],
)
def test_what_ends_a_search_is_told_and_the_points_before_stand(
    measure: Callable[[int], dict[str, float] | str], ended: str
) -> None:
    curve = search(measure, lambda p: False, ENDLESS, "cpu", lambda: 0.0)
    assert (curve.turned, curve.ended) == (None, ended)
    assert [point.size for point in curve.points] == [1, 2, 4]


def test_a_search_ends_with_its_budget_but_not_without_a_point() -> None:
    seconds = iter(range(0, 1000, 3))
    curve = search(lambda size: {}, lambda p: False, Limits(1, 4096, 5.0), "cpu", lambda: float(next(seconds)))
    assert curve.ended == "the budget of 5 s was over before 4"
    assert [point.size for point in curve.points] == [1, 2]


def test_other_errors_are_no_end_of_a_curve() -> None:
    def broken(size: int) -> dict[str, float] | str:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        search(broken, lambda p: False, ENDLESS, "cpu")


# The two curves -------------------------------------------------------------------------------------------------------


def pretend(positions: int = 100_000, **costs: Any) -> Pretend:
    made = Pretend(**costs)
    made.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=positions))  # type: ignore[attr-defined]
    return made


def launches_then_tokens(rows: int, new: int, cached: int) -> float:
    """A host that needs 20 ms to launch, and a card that needs 10 us a token: they are even at 2,000 tokens."""
    return max(0.020, 1e-5 * new)


def test_a_prefix_wins_once_its_tokens_take_twice_the_launches() -> None:
    card = pretend(prefill_s=launches_then_tokens)
    card.time.s = 0.0
    curve = prefix_curve(card.engine, card.time.clock, TOKENS, Limits(128, 32768, 1e9), lambda: 0.0)
    assert curve.turned == 8192  # 4,096 tokens take 41 ms beside 20 and a copy of 1 ms: 1.95x
    assert curve.points[0].figures == pytest.approx({"full_s": 0.02, "cached_s": 0.021, "prefill_speedup": 20 / 21})


def test_a_cache_that_saves_nothing_never_wins() -> None:
    card = pretend(prefill_s=lambda rows, new, cached: 0.02)
    assert prefix_curve(card.engine, card.time.clock, TOKENS, Limits(128, 1024, 1e9), lambda: 0.0).turned is None


def test_the_models_positions_end_the_prefix_curve() -> None:
    card = pretend(positions=600, prefill_s=launches_then_tokens)
    curve = prefix_curve(card.engine, card.time.clock, TOKENS, Limits(128, 32768, 1e9), lambda: 0.0)
    assert [point.size for point in curve.points] == [128, 256, 512]
    assert curve.ended == "the model has 600 positions, which ends the search at 1,024"


def memory_then_math(rows: int, cache: PretendCache) -> float:
    """20 ms of weights, and 0.5 ms of arithmetic a row beside it: they are even at 40 rows."""
    return max(0.020, 0.0005 * rows)


def test_users_stop_being_cheap_where_their_arithmetic_takes_longer_than_the_weights() -> None:
    card = pretend(step_s=memory_then_math)
    curve = batch_curve(lambda rows: card.engine, "cpu", card.time.clock, TOKENS, ENDLESS, lambda: 0.0)
    assert curve.turned == 64
    figures = {point.size: point.figures for point in curve.points}
    assert figures[1] == pytest.approx({"tpot_s": 0.02, "output_tokens_per_s": 50.0})
    assert figures[32]["added_share"] == pytest.approx(1.0)
    assert figures[64] == pytest.approx(
        {"tpot_s": 0.032, "output_tokens_per_s": 2000.0, "added_tokens_per_s": 12.5, "added_share": 0.25}
    )


def test_an_engine_that_serves_one_after_the_other_is_never_cheap() -> None:
    card = pretend(step_s=lambda rows, cache: 0.020 * rows)
    assert batch_curve(lambda rows: card.engine, "cpu", card.time.clock, TOKENS, ENDLESS, lambda: 0.0).turned == 2


def test_a_batch_without_an_engine_ends_the_curve_with_its_reason() -> None:
    card = pretend()

    def engine_for(rows: int) -> Engine[Any] | str:
        return card.engine if rows < 8 else "cannot be captured: out of memory"

    curve = batch_curve(engine_for, "cpu", card.time.clock, TOKENS, ENDLESS, lambda: 0.0)
    assert curve.ended == "cannot be captured: out of memory at 8"


def test_where_there_are_no_graphs_the_curve_says_so() -> None:
    model = cast(Any, SimpleNamespace(model=torch.nn.Linear(1, 1)))
    model.model.device = torch.device("cpu")
    assert "CUDA" in str(curves.recorded(model)(4))


# On the card ----------------------------------------------------------------------------------------------------------

CURVE = Curve((Point(1, {"tpot_s": 0.02}), Point(2, {"tpot_s": 0.04, "added_share": 0.0})), 2, "found")


def test_a_curve_is_a_table_of_its_points_and_a_figure_of_its_answer() -> None:
    cells = [cell.record for cell in curve_cells(curves.BATCHING, CURVE, "eager", "fp16")]
    assert [cell["id"] for cell in cells] == ["batching.curve.1", "batching.curve.2", "batching.curve"]
    points, answer = tables_of(cells)["batching"]
    assert points.title.startswith("curve")
    assert [row[points.columns.index("batch")] for row in points.rows] == ["1", "2"]
    assert answer.columns[-1] == "no longer cheap at users"
    assert answer.rows[0][-1] == "2"


def test_a_curve_without_an_answer_says_why_it_ended() -> None:
    *_, answer = curve_cells(curves.PREFIX, Curve((), None, "out of memory at 128"), "eager", "fp16")
    assert answer.figures == {}
    assert answer.unavailable["caching_wins_2x_from_tokens"] == "out of memory at 128"


@pytest.mark.parametrize("limits", [*curves.PREFIX_LIMITS.values(), *curves.BATCH_LIMITS.values(), curves.GRAPH_LIMITS])
def test_every_search_reaches_its_last_size(limits: Limits) -> None:
    size = limits.first
    while size < limits.last:
        size *= limits.factor
    assert size == limits.last
