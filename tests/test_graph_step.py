"""The pure parts of scripts/graph_step.py; the rest needs a card."""

from __future__ import annotations

import pytest

from scripts.graph_step import kernel_order, kernel_table, parse, replay_span


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
