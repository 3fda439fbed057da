"""run.json: written as it goes, whole or not at all, strict JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.claims import CLAIMS
from benchmarks.estimates import counted, paired_ratio, unusable
from benchmarks.ledger import SCHEMA_VERSION, Cell, Ledger, NotWritten, verdict_record, write_json
from benchmarks.verdicts import Setting, judge


def cell(name: str = "batching.1.decode", **changes: Any) -> Cell:
    known: dict[str, Any] = {"wall_s": (0.2, 0.1, 0.3), "device_s": (0.05, 0.05, 0.05)} | changes
    return Cell(name, "batching", "decode", {"batch_size": 1}, "eager", "fp16", **known)


def ledger(folder: Path) -> Ledger:
    return Ledger(folder, {"name": "a card"}, {"name": "nimbus"}, "eager")


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_nothing_is_written_before_there_is_something_to_write(tmp_path: Path) -> None:
    kept = ledger(tmp_path / "reports")
    assert not kept.begun
    assert not (tmp_path / "reports").exists()


def test_every_cell_and_verdict_is_on_disk_as_soon_as_it_is_known(tmp_path: Path) -> None:
    kept = ledger(tmp_path / "new" / "reports")
    kept.cell(cell())
    assert [c["id"] for c in read(kept.path)["cells"]] == ["batching.1.decode"]
    assert read(kept.path)["claims"] == []
    kept.verdict(judge(CLAIMS["batching.latency"], paired_ratio([1.0] * 20, [1.0] * 20)), "eager")
    kept.note("machine_after", {"name": "a card"})
    run = read(kept.path)
    assert [(c["id"], c["verdict"], c["n"]) for c in run["claims"]] == [("batching.latency", "HOLDS", 20)]
    assert run["schema_version"] == SCHEMA_VERSION
    assert run["machine_after"] == {"name": "a card"}
    assert {"suite_version", "started_at", "machine", "rig", "engine", "noise_floor", "calibration"} <= set(run)


def test_what_is_measured_again_stands_once_as_measured_last(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    for figure in (1.0, 2.0):
        kept.cell(cell(figures={"top": figure}))
        kept.verdict(judge(CLAIMS["batching.same_tokens"], counted(figure)), "eager")
    run = read(kept.path)
    assert [c["figures"]["top"] for c in run["cells"]] == [2.0]
    assert [c["observed"] for c in run["claims"]] == [2.0]


def test_a_verdict_that_another_engine_contradicts_says_why(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    kept.cell(cell(wall_s=(0.02,), device_s=(0.003,)))
    for engine, figure in (("eager", 1.0), ("graph", 2.0)):
        seen = paired_ratio([figure] * 20, [1.0] * 20)
        kept.verdict(judge(CLAIMS["batching.latency"], seen), engine)
        kept.verdict(judge(CLAIMS["batching.tpot"], paired_ratio([1.0] * 20, [1.0] * 20)), engine)
    said = {(c["id"], c["engine"]): (c["verdict"], c["disagreement"]) for c in read(kept.path)["claims"]}
    assert said.pop(("batching.latency", "graph")) == (
        "REFUTED",
        "in an eager step the card waits for the host 85% of the time, which hides what a replay shows",
    )
    assert set(said.values()) == {("HOLDS", None)}


def test_the_run_before_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    for figure in (1.0, 2.0, 3.0):
        ledger(tmp_path).cell(cell(figures={"run": figure}))
    assert read(tmp_path / "run.json")["cells"][0]["figures"] == {"run": 3.0}
    assert read(tmp_path / "run.previous.json")["cells"][0]["figures"] == {"run": 2.0}


def test_an_earlier_run_that_cannot_be_kept_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "run.previous.json" / "full").mkdir(parents=True)
    write_json(tmp_path / "run.json", {"earlier": True})
    kept = ledger(tmp_path)
    for _ in range(2):
        with pytest.raises(NotWritten, match=r"^the report can't be written: .*run\.previous\.json.*another --report$"):
            kept.cell(cell())
    assert read(tmp_path / "run.json") == {"earlier": True}
    assert kept.run["cells"]


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"round": 1})

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_json(path, {"round": 2})
    assert read(path) == {"round": 1}


def test_a_value_that_is_no_json_changes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"round": 1})
    with pytest.raises(TypeError):
        write_json(path, {"round": object()})
    assert read(path) == {"round": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_numbers_that_json_has_no_word_for_become_null_at_any_depth(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": math.nan, "b": [math.inf, {"c": (-math.inf, 1.5)}], 3: "x"})
    assert read(tmp_path / "a.json") == {"a": None, "b": [None, {"c": [None, 1.5]}], "3": "x"}


def test_text_of_any_script_survives_in_any_locale(tmp_path: Path) -> None:
    names = {"suffix": "Где мой пароль?", "rig": "模型", "note": "naïve 🙂"}
    write_json(tmp_path / "a.json", names)
    assert read(tmp_path / "a.json") == names
    assert "模型" in (tmp_path / "a.json").read_bytes().decode("utf-8")


def test_host_bound_is_the_share_of_the_wait_in_which_the_card_was_idle() -> None:
    assert cell().host_bound == pytest.approx(0.75)
    assert cell(device_s=None, unavailable={"device_s": "no CUDA"}).host_bound is None
    assert cell(wall_s=None, unavailable={"wall_s": "no clock"}).host_bound is None
    assert cell(device_s=(0.3, 0.3, 0.3)).host_bound == 0


def test_an_unavailable_figure_is_null_with_its_reason_and_never_zero() -> None:
    record = cell(device_s=None, unavailable={"device_s": "no CUDA"}).record
    assert record["device_s"] is None
    assert record["host_bound"] is None
    assert record["unavailable"] == {"device_s": "no CUDA", "host_bound": "no CUDA"}


def test_a_verdict_is_kept_with_all_that_a_sceptic_needs() -> None:
    seen = paired_ratio([3.0] * 20, [1.0] * 20, ("sixteen", "one"))
    record = verdict_record(judge(CLAIMS["batching.latency"], seen, Setting(floors={"decode_wall": 0.01})), "eager")
    assert record["verdict"] == "REFUTED"
    assert record["interval"] == [3, 3]
    assert record["required"] == "<= 1.25x"
    assert record["t4"] == "1.09x"
    parts = record["parts"]
    assert isinstance(parts, list)
    assert parts[0]["raw"] == {"sixteen": [3.0] * 20, "one": [1.0] * 20}


@pytest.mark.parametrize("setting", [Setting(lacks={"cuda": "no CUDA"}), Setting()])
def test_a_claim_that_shows_nothing_has_null_figures_and_a_reason(setting: Setting) -> None:
    verdict = judge(CLAIMS["batching.latency"], unusable("the clock ran backwards"), setting)
    record: Mapping[str, Any] = verdict_record(verdict, "eager")
    assert record["observed"] is None
    assert record["reason"]
    assert record["interval"] in (None, [None, None])
    assert record["n"] == 0


@pytest.mark.parametrize("name", ["wall_s", "device_s"])
def test_a_time_that_is_missing_without_a_reason_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"batching.1.decode has no {name}"):
        cell(**{name: None})
    assert cell(**{name: None, "unavailable": {name: "no clock"}}).record["unavailable"] == {
        name: "no clock",
        "host_bound": "no clock",
    }


def test_every_null_of_a_cell_has_its_reason(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    kept.cell(cell(wall_s=(0.0, 0.0), figures={"nll": math.nan, "top": 1.0}, bytes={"peak": math.inf}))
    (written,) = read(kept.path)["cells"]
    nulls = {name for name in ("wall_s", "device_s", "host_bound") if written[name] is None}
    nulls |= {name for kind in ("figures", "bytes") for name, value in written[kind].items() if value is None}
    assert nulls == {"host_bound", "nll", "peak"}
    assert nulls == set(written["unavailable"])
    assert written["unavailable"]["host_bound"] == "the clock stood still"


def test_half_a_character_costs_no_run(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"lone": "\ud800x"})
    assert read(tmp_path / "run.json") == {"lone": "?x"}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"whole": True})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"whole": False})
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    assert read(path) == {"whole": True}
