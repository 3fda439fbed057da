"""The pure parts of scripts/graph_step.py; the rest needs a card."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import graph_step
from scripts.graph_step import (
    Bench,
    OutOfTime,
    kernel_order,
    kernel_table,
    limited,
    parse,
    replay_span,
    run,
    side_by_side,
)


@pytest.mark.parametrize(("cache_len", "step_len"), [(256, 1), (256, 5), (2048, 1), (64, 5)])
def test_timed_replays_stay_inside_the_cache(cache_len: int, step_len: int) -> None:
    start_len, count = replay_span(cache_len, step_len)
    assert start_len >= 0 and count >= 1
    assert start_len + count * step_len < cache_len


@pytest.mark.parametrize(("batch_size", "launched"), [(1, 143), (16, 200)])
def test_a_step_of_28_layers_launches_as_many_kernels_as_a_profile_shows(batch_size: int, launched: int) -> None:
    assert len(kernel_order(28, batch_size)) == launched


def test_kernels_are_summed_by_kind_with_the_gap_before_them() -> None:
    spans_ns = [(1000, 3000), (3500, 7500), (8500, 10500), (10000, 14000)]
    first, second, third = kernel_table(spans_ns, ["embed", "qkv", "out", "qkv"], {"qkv": 8000})
    assert (first.gap_us, second.gap_us, third.gap_us) == (0.0, 0.0, 1.0)  # 0.5 before one qkv, half under the other
    assert (second.kind, second.count, second.mean_us, second.total_us) == ("qkv", 2, 4.0, 8.0)
    assert second.bytes_per_s == pytest.approx(2e9) and third.bytes_per_s is None


def test_a_replay_of_other_kernels_than_expected_is_refused() -> None:
    with pytest.raises(ValueError, match="1 kernels ran in a replay, 2 were expected"):
        kernel_table([(0, 1)], ["embed", "qkv"], {})


def test_an_unknown_stage_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["tims"])
    assert "no stage 'tims': there are times, correct" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["0", "nan", "inf", "-1"])
def test_a_limit_is_a_number_of_seconds(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--limit", limit])
    assert "seconds above 0" in capsys.readouterr().err


# A run of several stages ----------------------------------------------------------------------------------------------


def bench(json_path: Path | None = None) -> Bench:
    made = Bench(None, SimpleNamespace(), 1e12, json_path)  # type: ignore[arg-type]
    made.floor_us = lambda batch_size=0, cache_len=0: 700.0  # type: ignore[method-assign]
    return made


def test_a_block_that_takes_too_long_is_left_even_when_it_swallows_errors() -> None:
    start = time.perf_counter()

    def stubborn() -> None:
        while time.perf_counter() - start < 5:
            with contextlib.suppress(Exception), limited(0.05):
                time.sleep(1)

    with pytest.raises(OutOfTime, match="stopped after"):
        stubborn()
    assert time.perf_counter() - start < 4
    with limited(0.05):
        pass
    time.sleep(0.1)  # the alarm is off again


def fails(_bench: Bench) -> None:
    raise ValueError("no room")


def half_fails(of: Bench) -> None:
    of.stand(1, "fused", 1400.0)
    of.tried("one way", lambda: fails(of))
    of.stand(1, "eager wall", 70000.0)


def stuck(_bench: Bench) -> None:
    time.sleep(5)


def test_what_fails_or_is_stuck_takes_no_other_figures_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {"fails": fails, "half_fails": half_fails, "stuck": stuck, "late": half_fails}
    monkeypatch.setattr(graph_step, "STAGES", stages)
    kept = tmp_path / "graphs.json"
    assert run(stages, bench(kept), 0.8) == 4
    said = capsys.readouterr().out
    figures = json.loads(kept.read_text())
    assert figures["fails failed"] == figures["one way failed"] == "ValueError: no room"
    assert "OutOfTime" in figures["stuck failed"] and "OutOfTime" in figures["late failed"]
    assert figures["us a step, by batch size and way"] == {
        "1": {"floor": 700.0, "fused": 1400.0, "eager wall": 70000.0}
    }
    assert "ours of fused kernels, captured" in said


def test_ways_stand_side_by_side_with_their_shares_of_the_floor() -> None:
    lines = side_by_side({1: {"floor": 700.0, "fused": 1400.0}, 16: {"floor": 750.0, "eager wall": 30000.0}})
    assert [line.split() for line in lines] == [
        ["batch", "1,", "us", "of", "floor", "batch", "16,", "us", "of", "floor"],
        ["eager,", "wall", "-", "-", "30,000", "2%"],
        ["ours", "of", "fused", "kernels,", "captured", "1,400", "50%", "-", "-"],
        ["floor", "700", "100%", "750", "100%"],
    ]
    assert side_by_side({}) == []
