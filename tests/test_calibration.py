"""Noise floors: A/A on fakes, what becomes of it in run.json, and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import calibration
from benchmarks.__main__ import main
from benchmarks.calibration import FLOOR_CONFIDENCE, Calibration, Floor, a_a, calibrate, floor_of, keep, table
from benchmarks.claims import CLAIMS
from benchmarks.estimates import median_interval, paired_ratio
from benchmarks.session import Options, Session
from benchmarks.verdicts import Word

KNOWN = Calibration(
    {"decode_wall": Floor("decode_wall", 0.02, 40, 1.001, 0.99, 1.02, 0.05)},
    {"decode_device": "no CUDA"},
    "2026-11-30T10:00:00+00:00",
)
MACHINE: dict[str, Any] = {"name": "a card", "driver": "1", "versions": {"torch": "2.13"}}


def noisy(share: float, seed: int = 0) -> Callable[[], dict[str, float]]:
    random = Random(seed)
    return lambda: {"wall": math.exp(random.gauss(0, share))}


def floor(found: Mapping[str, Floor | str], metric: str = "wall") -> Floor:
    known = found[metric]
    assert isinstance(known, Floor), known
    return known


def session(folder: Path, **options: Any) -> Session:
    return Session(Options(rig="nimbus", report=folder, **options), "cpu")


# A/A ------------------------------------------------------------------------------------------------------------------


def test_a_noisier_machine_has_a_higher_floor() -> None:
    floors = [floor(a_a(noisy(share), math.inf)).floor for share in (0.01, 0.05, 0.25)]
    assert floors == sorted(floors)
    assert 0.002 < floors[0] < 0.02
    assert 0.03 < floors[2] < 0.5


def test_more_rounds_lower_the_floor() -> None:
    assert floor(a_a(noisy(0.1), math.inf, 160)).floor < floor(a_a(noisy(0.1), math.inf, 10)).floor


def test_a_quiet_machine_is_not_measured_longer_than_needed() -> None:
    found = floor(a_a(noisy(0.0005), math.inf))
    assert found.n == 10
    assert found.floor < 0.005


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.1, 10), min_size=20, max_size=40))
def test_the_floor_reaches_from_one_to_the_far_end_of_the_interval(values: list[float]) -> None:
    pairs = list(zip(values, values[::-1], strict=True))
    found = floor_of("wall", paired_ratio(*map(list, zip(*pairs, strict=True))))
    reach = median_interval([a / b for a, b in pairs], confidence=FLOOR_CONFIDENCE)
    assert reach.low is not None
    assert reach.high is not None
    if isinstance(found, Floor):
        assert (found.low, found.high) == (reach.low, reach.high)
        assert found.floor == max(reach.high - 1, 1 / reach.low - 1) > 0
        assert found.median_s in values
    else:
        assert reach.low == reach.high == 1


def test_a_calibration_that_a_run_made_for_itself_is_not_carried_over() -> None:
    record = Calibration(KNOWN.floors, quick=True).record
    run = {"machine": MACHINE, "rig": {}, "calibration": record}
    assert Calibration.of_run(run, MACHINE, {}) is None
    assert Calibration.of_run(run | {"calibration": record | {"quick": False}}, MACHINE, {}) is not None


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([1.0] * 40, "identical"),
        ([1.0] * 20 + [math.nan] + [1.0] * 20, "not a number"),
        ([1.0] * 20 + [0.0] + [1.0] * 20, "zero or negative"),
        ([1.0, 1.1] * 9, "8 rounds within the budget"),
        ([1.0, 1.1, 1.0, 1.1], "1 round"),
    ],
)
def test_samples_that_show_no_floor_give_a_reason_and_never_zero(samples: list[float], reason: str) -> None:
    waiting = iter(samples)
    rounds = (len(samples) - 2) // 2
    found = a_a(lambda: {"wall": next(waiting)}, math.inf, rounds)["wall"]
    assert isinstance(found, str)
    assert reason in found


def test_metrics_of_one_call_are_kept_apart() -> None:
    random = Random(3)

    def sample() -> dict[str, float]:
        return {"quiet": 1 + 0.001 * random.random(), "noisy": 1 + random.random(), "broken": math.nan}

    found = a_a(sample, math.inf, 40)
    assert floor(found, "quiet").floor < 0.01 < floor(found, "noisy").floor
    assert isinstance(found["broken"], str)


def test_the_cpu_has_wall_floors_and_a_reason_for_every_device_floor(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig

    from benchmarks.phases import EagerEngine
    from benchmarks.rigs import random_model

    suite = session(tmp_path)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("qwen2", vocab_size=4096, num_key_value_heads=1, **shape)
    engine = EagerEngine(random_model(config, torch.float32, "cpu"))
    found = calibrate(suite, engine, suite.loader.tokenizer(), 30.0, rounds=10)
    assert set(found.floors) == {"prefill_wall", "decode_wall", "request_wall"}
    of_graphs = {metric for metric in found.unavailable if metric.startswith("graph.")}
    assert set(found.unavailable) - of_graphs == {"prefill_device", "decode_device", "attention_device"}
    assert all(f.n == 10 and f.floor > 0 and f.median_s > 0 for f in found.floors.values())
    of_engine = {c.noise for c in CLAIMS.values() if c.noise and "served" not in c.needs}  # a server's are its own
    assert of_engine <= {*found.floors, *found.unavailable}


# run.json -------------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def test_a_run_keeps_its_calibration_and_the_next_run_knows_it(tmp_path: Path) -> None:
    first = session(tmp_path)
    assert first.known_floors() is None
    first.set_floors(KNOWN)
    assert first.setting().floors == {"decode_wall": 0.02}
    first.skip(CLAIMS["batching.latency"], "no CUDA")
    assert read(tmp_path)["noise_floor"] == {"decode_wall": 0.02}
    assert read(tmp_path)["calibration"]["unavailable"] == {"decode_device": "no CUDA"}
    assert read(tmp_path)["unavailable"] == {}
    assert session(tmp_path).known_floors() == KNOWN


def test_it_is_still_known_after_the_first_entry_of_the_new_run(tmp_path: Path) -> None:
    keep(session(tmp_path), KNOWN)
    suite = session(tmp_path)
    suite.skip(CLAIMS["batching.latency"], "no CUDA")
    assert read(tmp_path)["calibration"] is None
    assert "rests on this suite's own clock" in read(tmp_path)["unavailable"]["calibration"]
    assert suite.known_floors() == KNOWN


def test_calibrating_again_keeps_the_run_of_this_machine_and_rig(tmp_path: Path) -> None:
    suite = session(tmp_path)
    suite.skip(CLAIMS["batching.latency"], "no CUDA")
    keep(session(tmp_path), KNOWN)
    run = read(tmp_path)
    assert [c["id"] for c in run["claims"]] == ["batching.latency"]
    assert run["noise_floor"] == {"decode_wall": 0.02}
    assert not (tmp_path / "run.previous.json").exists()


def test_calibrating_another_rig_keeps_the_old_run_beside_it(tmp_path: Path) -> None:
    keep(session(tmp_path), KNOWN)
    other = session(tmp_path, weights="random")
    assert other.known_floors() is None
    keep(other, KNOWN)
    assert read(tmp_path)["rig"]["weights"] == "random"
    assert json.loads((tmp_path / "run.previous.json").read_text(encoding="utf-8"))["rig"]["weights"] == "trained"


def _spoil(run: dict[str, Any], how: str) -> object:
    match how:
        case "another card":
            run["machine"]["name"] = "another card"
        case "another driver":
            run["machine"]["driver"] = "1.0"
        case "another torch":
            run["machine"]["versions"]["torch"] = "1.0"
        case "a floor of zero":
            run["calibration"]["metrics"]["decode_wall"]["floor"] = 0
        case "a floor that is text":
            run["calibration"]["metrics"]["decode_wall"]["floor"] = "low"
        case "a floor that is null":
            run["calibration"]["metrics"]["decode_wall"]["floor"] = None
        case "an unknown field":
            run["calibration"]["metrics"]["decode_wall"]["mood"] = 1
        case "no metrics":
            run["calibration"]["metrics"] = {}
        case "no calibration":
            del run["calibration"]
        case "a list":
            return [run]
    return run


@pytest.mark.parametrize(
    "how",
    [
        "another card",
        "another driver",
        "another torch",
        "a floor of zero",
        "a floor that is text",
        "a floor that is null",
        "an unknown field",
        "no metrics",
        "no calibration",
        "a list",
    ],
)
def test_a_calibration_that_is_not_of_here_or_not_whole_is_not_used(tmp_path: Path, how: str) -> None:
    keep(session(tmp_path), KNOWN)
    assert session(tmp_path).known_floors() == KNOWN
    (tmp_path / "run.json").write_text(json.dumps(_spoil(read(tmp_path), how)), encoding="utf-8")
    assert session(tmp_path).known_floors() is None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"null"])
def test_a_run_that_can_not_be_read_is_moved_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    suite = session(tmp_path)
    assert suite.known_floors() is None
    keep(suite, KNOWN)
    assert session(tmp_path).known_floors() == KNOWN
    assert (tmp_path / "run.previous.json").read_bytes() == content


def test_a_verdict_of_the_session_respects_the_floor(tmp_path: Path) -> None:
    suite = session(tmp_path)
    seen = paired_ratio([1.04, 1.05, 1.06] * 10, [1.0] * 30)
    assert suite.judge("batching.nobody_gets_sixteenth", seen).word is Word.INCONCLUSIVE, "nothing is calibrated yet"
    quiet = Floor("decode_wall", 0.01, 40, 1.0, 0.99, 1.01, 0.05)
    suite.set_floors(Calibration({"decode_wall": quiet}))
    assert suite.judge("batching.nobody_gets_sixteenth", seen).word is Word.HOLDS
    wide = Floor("decode_wall", 0.2, 40, 1.0, 0.85, 1.2, 0.05)
    suite.set_floors(Calibration({"decode_wall": wide}))
    assert suite.judge("batching.nobody_gets_sixteenth", seen).word is Word.INCONCLUSIVE


# The command ----------------------------------------------------------------------------------------------------------


def test_the_table_names_every_metric_with_its_floor_or_the_reason_for_none() -> None:
    head, decode, device = table(KNOWN)
    assert head.split()[:2] == ["metric", "rounds"]
    assert decode.split() == ["decode_wall", "40", "1.0010", "[0.9900,", "1.0200]", "2%", "2%", "of", "50", "ms"]
    assert device.split("none: ")[1] == "no CUDA"


@pytest.fixture
def measured_elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    budgets: list[float] = []

    def known(_session: Session, _engine: object, _tokenizer: object, budget_s: float) -> Calibration:
        budgets.append(budget_s)
        return KNOWN

    monkeypatch.setattr(calibration, "calibrate", known)
    monkeypatch.setattr(Session, "load", lambda *_: None)
    return budgets


def test_the_command_prints_the_table_and_writes_run_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured_elsewhere: list[float]
) -> None:
    words = ["calibrate", "--rig", "nimbus", "--report", str(tmp_path / "new"), "--budget", "7"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "decode_wall" in said
    assert "nimbus" in said
    assert measured_elsewhere == [7.0]
    assert read(tmp_path / "new")["noise_floor"] == {"decode_wall": 0.02}


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--rig", "gpt5"], "choose from"),
        (["--rig", "nimbus", "--target", "x"], "give one of them"),
        (["--budget", "nan"], "seconds above 0"),
        (["--budget", "-1"], "seconds above 0"),
        (["--dtype", "fp4"], "choose from"),
        (["--target", "/no/such/folder"], "neither a folder nor a hub id"),
    ],
)
def test_a_rig_that_can_not_be_had_is_one_line_and_exit_code_two(
    words: list[str], remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *words, "--report", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert remedy in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory: give a smaller --target"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_a_full_memory_or_disk_is_one_line(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: Session, role: str) -> None:
        raise error

    monkeypatch.setattr(Session, "load", fails)
    assert main(["calibrate", "--rig", "nimbus", "--report", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
