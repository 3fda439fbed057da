"""run.schema.json: what the suite writes follows it, and what is no run does not."""

from __future__ import annotations

import copy
import csv
import io
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from benchmarks.cells_csv import cells_csv
from benchmarks.claims import CLAIMS
from benchmarks.estimates import Estimate
from benchmarks.ledger import Cell, Ledger
from benchmarks.machine import record
from benchmarks.run_file import RunFileError, read_run
from benchmarks.verdicts import judge, not_judged

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CARDS = sorted((BENCHMARKS / "cards").glob("*.json"))
SCHEMA = json.loads((BENCHMARKS / "run.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def validator():
    Draft202012Validator.check_schema(SCHEMA)
    return Draft202012Validator(SCHEMA)


def _faults(validator, run):
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(run)]


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_a_card_follows_the_schema(path, validator):
    assert _faults(validator, json.loads(path.read_text(encoding="utf-8"))) == []


@pytest.fixture
def fresh(tmp_path):
    """A run as a Ledger writes it on this machine, with one claim judged for two engines."""
    rig = {"name": "nimbus", "weights": "trained", "target": "t", "draft": None, "dtype": "float32"}
    ledger = Ledger(tmp_path, record("cpu"), rig, "eager and graph")
    ratio = Estimate(15.0, 14.0, 16.0, 10, {"many": (15.0,) * 10, "one": (1.0,) * 10})
    for engine in ("eager", "graph"):
        missing = {"device_s": "the CPU is the device"}
        asked = {"batch_size": 1}
        ledger.cell(
            Cell("batching.1", "batching", "row", asked, engine, "fp32", wall_s=(0.1, 0.2), unavailable=missing)
        )
        ledger.verdict(judge(CLAIMS["batching.throughput"], ratio), engine)
    ledger.verdict(not_judged(CLAIMS["quant.more_chats"], "no CUDA on this machine"), "eager")
    return json.loads(ledger.path.read_text(encoding="utf-8"))


def test_a_fresh_run_follows_the_schema_and_may_judge_a_claim_once_an_engine(fresh, validator):
    assert _faults(validator, fresh) == []
    judged = [(claim["id"], claim["engine"]) for claim in fresh["claims"]]
    assert judged[:2] == [("batching.throughput", "eager"), ("batching.throughput", "graph")]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: run.pop("cells"),
        lambda run: run.update(schema_version=2),
        lambda run: run["claims"][0].update(verdict="PASSED"),
        lambda run: run["claims"][0].pop("engine"),
        lambda run: run["claims"][0].update(interval=[1.0]),
        lambda run: run["claims"][-1].update(reason=""),
        lambda run: run["cells"][0].update(wall_s=0.1),
        lambda run: run["cells"][0].update(host_bound=1.5),
        lambda run: run["cells"][0]["workload"].update(batch_size=0),
        lambda run: run["machine"].update(device="abacus"),
    ],
)
def test_what_is_no_run_fails_the_schema(spoil, fresh, validator):
    spoilt = copy.deepcopy(fresh)
    spoil(spoilt)
    assert _faults(validator, spoilt)


def test_what_the_reader_demands_the_schema_demands_too(fresh, validator, tmp_path):
    """A field without which `report` refuses a run is required by the schema as well."""
    path = tmp_path / "less.json"
    for where in (
        lambda r: r,
        lambda r: r["rig"],
        lambda r: r["cells"][0],
        lambda r: r["claims"][0],
        lambda r: r["machine"],
    ):
        for field in where(fresh):
            less = copy.deepcopy(fresh)
            del where(less)[field]
            path.write_text(json.dumps(less), encoding="utf-8")
            try:
                read_run(path)
            except RunFileError:
                assert _faults(validator, less), f"the reader refuses a run without {field}, the schema doesn't"


def test_every_figure_is_a_line_of_the_csv_and_no_text_a_formula(fresh):
    fresh["machine"]["name"] = '=HYPERLINK("http://evil")'
    fresh["cells"][0]["workload"]["name"] = "@SUM(1+1)*cmd|' /C calc'!A0\n=1,2"
    fresh["cells"][0]["figures"] = {"-dangerous": 1.5, "gain": -2.0}
    rows = list(csv.DictReader(io.StringIO(cells_csv([fresh]))))
    assert [(row["quantity"], row["round"], row["value"]) for row in rows[:4]] == [
        ("wall_s", "1", "0.1"),
        ("wall_s", "2", "0.2"),
        ("'-dangerous", "", "1.5"),
        ("gain", "", "-2.0"),
    ]
    texts = [text for row in rows for name, text in row.items() if name != "value"]
    assert not [text for text in texts if text[:1] in ("=", "+", "-", "@")]
    assert all(text.isprintable() for text in texts)
