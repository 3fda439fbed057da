"""Baselines: hostile files, like with like, what is kept, and bars that never sink unseen."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import benchmarks.run_file
from benchmarks.__main__ import main
from benchmarks.gate import accept, compare
from benchmarks.gate.baseline import NOISIEST, card_path, find, kept, known_at, other_software, read_baseline, unlike
from benchmarks.run_file import RunFileError, read_run
from benchmarks.series import ARTICLE
from tests.gated import changed, entry, some_run, written

RUN = some_run()
CARDS = Path(__file__).parents[1] / "benchmarks" / "cards"


# Hostile files --------------------------------------------------------------------------------------------------------


def _first(kind: str) -> Any:
    return lambda run: run[kind][0]


def _deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


HOSTILE = {
    "a future schema": lambda run: run.update(schema_version=99),
    "no schema": lambda run: run.pop("schema_version"),
    "text for a number": lambda run: run["cells"][0]["figures"].update(tpot_s="fast"),
    "text for samples": lambda run: run["cells"][0].update(wall_s="fast"),
    "a negative time": lambda run: run["cells"][0].update(wall_s=[-1.0]),
    "a negative figure": lambda run: run["cells"][0]["figures"].update(tpot_s=-0.1),
    "negative bytes": lambda run: run["cells"][0]["bytes"].update(peak=-1),
    "a sample that is none": lambda run: run["cells"][0].update(device_s=[None]),
    "true for a number": lambda run: run["cells"][0]["bytes"].update(peak=True),
    "a number beyond floats": lambda run: run["cells"][0]["bytes"].update(peak=10**400),
    "HTML in a name": lambda run: run["cells"][0].update(id="<script>alert(1)</script>"),
    "an escape in a name": lambda run: run["claims"][0].update(id="\x1b[2J"),
    "an escape in a figure's name": lambda run: run["cells"][0]["figures"].update({"\x1b[2J": 1.0}),
    "HTML in a kernel's name": lambda run: run["cells"][0]["kernels"].update({"<b>": ["flash"]}),
    "a kernel that is a number": lambda run: run["cells"][0]["kernels"].update(attention=1.5),
    "a command in an engine": lambda run: run["claims"][0].update(engine="::error::"),
    "a claim twice": lambda run: run["claims"].append(run["claims"][0]),
    "a cell twice": lambda run: run["cells"].append(run["cells"][0]),
    "a part twice": lambda run: run["claims"][0]["parts"].append(run["claims"][0]["parts"][0]),
    "a floor that hides any loss": lambda run: run["noise_floor"].update(prefill_wall=9.0),
    "a negative floor": lambda run: run["noise_floor"].update(prefill_wall=-0.1),
    "noise that hides any loss": lambda run: run["cells"][0]["figures"].update(x_noise=5.0),
    "a verdict without an interval": lambda run: run["claims"][0]["parts"][0].update(interval=None),
    "an interval elsewhere": lambda run: run["claims"][0]["parts"][0].update(interval=[0.0, 0.1]),
    "an interval and nothing observed": lambda run: run["claims"][0]["parts"][0].update(observed=None),
    "a verdict on nothing": lambda run: run["claims"][0].update(parts=[]),
    "no engine": lambda run: run["claims"][0].pop("engine"),
    "an engine that is no text": lambda run: run["claims"][0].update(engine=[]),
    "no verdict of the four": lambda run: run["claims"][0].update(verdict="FINE"),
    "nested deeply": lambda run: run["machine"].update(more=_deep(40)),
    "an endless list": lambda run: run["cells"][0].update(wall_s=[1.0] * 30_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_baseline_is_one_clear_line(name, tmp_path):
    path = written(changed(RUN, HOSTILE[name]), tmp_path / "evil.json")
    with pytest.raises(RunFileError) as refused:
        read_baseline(path)
    assert str(refused.value).isprintable()
    assert "evil.json" in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        json.dumps(RUN).encode()[:-40],
        b"[" * 100_000,
        b'{"schema_version": 1' + b"," * 9,
        json.dumps(RUN).replace("0.028", "NaN").encode(),
        json.dumps(RUN).replace("0.028", "-Infinity").encode(),
        json.dumps(RUN).replace("0.028", "1e999").encode(),
    ],
)
def test_a_torn_or_broken_baseline_is_one_clear_line(content, tmp_path):
    path = tmp_path / "torn.json"
    path.write_bytes(content)
    with pytest.raises(RunFileError, match=r"torn\.json") as refused:
        read_baseline(path)
    assert str(refused.value).isprintable()


def test_a_huge_baseline_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks.run_file, "LONGEST_BYTES", 2**20)
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: takes no room
    with pytest.raises(RunFileError, match="larger than 1 MiB"):
        read_baseline(path)


@pytest.mark.parametrize("read", [read_run, read_baseline, known_at])
def test_a_pipe_is_refused_and_not_waited_for(read, tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(RunFileError, match=r"pipe\.json is a pipe"):
        read(tmp_path / "pipe.json")


@pytest.mark.parametrize("target", ["link.json", "nowhere.json"])
@pytest.mark.parametrize("read", [read_run, read_baseline, known_at])
def test_a_link_in_a_circle_or_to_nothing_is_one_line_and_no_lack_of_a_baseline(read, target, tmp_path):
    (tmp_path / "link.json").symlink_to(target)
    with pytest.raises(RunFileError, match=r"link\.json can't be (read|written)") as refused:
        read(tmp_path / "link.json")
    assert str(refused.value).isprintable()


def test_a_link_to_a_baseline_is_one(tmp_path):
    (tmp_path / "link.json").symlink_to(written(RUN, tmp_path / "run.json"))
    assert known_at(tmp_path / "link.json") == read_run(tmp_path / "run.json")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a run."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, below in inside for place in _places(below, (*at, key)))]


PLACES = _places(RUN)[1:]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for one example after another."""
    return tmp_path_factory.mktemp("held") / "held.json"


@settings(max_examples=25)
@given(place=st.sampled_from(PLACES), value=_JSON)
def test_whatever_stands_anywhere_in_a_baseline_it_is_refused_in_a_line_or_compared(held, place, value):
    def put(run: Any) -> None:
        for key in place[:-1]:
            run = run[key]
        run[place[-1]] = value

    try:
        read = read_baseline(written(changed(RUN, put), held))
    except RunFileError as refused:
        said = [str(refused)]
    else:
        accept.accepted(read, None)
        said = [finding.line for finding in compare(RUN, read)] + unlike(RUN, read) + other_software(RUN, read)
    assert all(line.isprintable() for line in said)


# Like with like -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: run["machine"].update(name="Tesla T4"), "name is NVIDIA H200 here, Tesla T4 in the baseline"),
        (lambda run: run["machine"].update(capability=[7, 5]), "capability is 9.0 here, 7.5 in the baseline"),
        (lambda run: run["machine"].update(memory_bytes=75_000_000_000), "memory is 139.7 GiB here, 69.8 GiB"),
        (lambda run: run["machine"].update(memory_bytes=None), "memory is 139.7 GiB here, unknown"),
        (lambda run: run["machine"].update(gpus=2), "number of GPUs is 1 here, 2 in the baseline"),
        (lambda run: run["machine"].update(device="cpu"), "device is cuda here, cpu in the baseline"),
        (lambda run: run["rig"].update(name="smollm2"), "rig is qwen2.5 here, smollm2 in the baseline"),
        (lambda run: run["rig"].update(weights="random"), "the rig's weights is trained here, random"),
        (lambda run: run["rig"].update(dtype="float32"), "the rig's dtype is float16 here, float32"),
        (lambda run: run["rig"].update(target="a/b"), "the rig's target is Qwen/Qwen2.5-1.5B here, a/b"),
        (lambda run: run.update(engine="graph"), "engine is eager here, graph in the baseline"),
    ],
)
def test_unlike_machines_rigs_and_engines_are_not_compared(change, said):
    (line,) = unlike(RUN, changed(RUN, change))
    assert line.startswith(said)


def test_a_tuple_is_like_the_list_that_json_makes_of_it():
    assert unlike(changed(RUN, lambda run: run["machine"].update(capability=(9, 0))), RUN) == []


def test_cpus_are_told_apart_by_their_cores():
    cpu = changed(RUN, lambda run: run["machine"].update(device="cpu"))
    fewer = changed(cpu, lambda run: run["machine"]["cpu"].update(cores=2))
    assert unlike(cpu, fewer) == ["cores is 16 here, 2 in the baseline"]


def test_other_software_is_a_remark_and_no_refusal():
    newer = changed(
        RUN, lambda run: (run["machine"].update(driver="580"), run["machine"]["versions"].update(torch="2.12"))
    )
    assert unlike(RUN, newer) == []
    assert other_software(RUN, newer) == [
        "driver is 570.1 here, 580 in the baseline",
        "torch is 2.11.0+cu130 here, 2.12 in the baseline",
    ]


def test_the_baseline_of_this_machine_is_found_by_what_it_is_of(tmp_path):
    written(changed(RUN, lambda run: run["machine"].update(name="Tesla T4")), tmp_path / "a.json")
    assert find(RUN, tmp_path) is None
    written(RUN, tmp_path / "b.json")
    assert find(RUN, tmp_path) == tmp_path / "b.json"
    written(RUN, tmp_path / "c.json")
    with pytest.raises(RunFileError, match=r"b\.json and c\.json"):
        find(RUN, tmp_path)


def test_a_card_is_not_held_against_two_of_its_kind():
    two = read_baseline(CARDS / "nvidia-h200-x2.json")
    one = changed(two, lambda run: run["machine"].update(gpus=1))
    assert find(two, CARDS) == CARDS / "nvidia-h200-x2.json" and find(one, CARDS) is None


def test_an_editors_mark_at_the_start_of_a_file_is_no_harm(tmp_path):
    path = written(RUN, tmp_path / "run.json")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_run(path)["cells"] == read_run(written(RUN, tmp_path / "plain.json"))["cells"]


@pytest.mark.parametrize("gpus", ["two", -3, 10**15, 2.5, [2], True])
def test_a_number_of_gpus_is_one(gpus, tmp_path):
    with pytest.raises(RunFileError, match="gpus"):
        read_run(written(changed(RUN, lambda run: run["machine"].update(gpus=gpus)), tmp_path / "run.json"))


@pytest.mark.parametrize("to", ["a file/x.json", "x" * 300 + ".json"])
def test_a_baseline_that_cannot_be_written_is_one_line(to, tmp_path, capsys):
    (tmp_path / "a file").write_text("", encoding="utf-8")
    run = written(RUN, tmp_path / "run.json")
    assert main(["accept", str(run), "--to", str(tmp_path / to)]) == 2
    said = capsys.readouterr().err
    assert "can't be written" in said and "name another file" in said and said.count("\n") == 1


def test_an_endpoint_may_be_an_engine(tmp_path):
    asked = changed(RUN, lambda run: [claim.update(engine="endpoint 127.0.0.1:8000/v1") for claim in run["claims"]])
    assert read_baseline(written(asked, tmp_path / "run.json"))


def test_the_cards_of_the_suite_can_be_read():
    for path in CARDS.glob("*.json"):
        if path != ARTICLE:
            read_baseline(path)


def test_the_articles_figures_are_no_baseline_even_of_a_rig_like_theirs(tmp_path, capsys):
    t4 = read_run(ARTICLE)
    run = changed(RUN, lambda run: run.update({k: t4[k] for k in ("machine", "rig", "engine")}))
    assert unlike(run, t4) == []
    assert find(run, CARDS) is None
    assert card_path(run, CARDS).name == "tesla-t4-run.json"
    with pytest.raises(RunFileError, match="the article's figures"):
        read_baseline(ARTICLE)
    with pytest.raises(RunFileError, match="no figure with an interval"):
        read_baseline(written(t4, tmp_path / "copy.json"))
    before = ARTICLE.read_bytes()
    assert main(["accept", str(written(run, tmp_path / "run.json")), "--to", str(ARTICLE)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert ARTICLE.read_bytes() == before


def test_a_name_that_another_baseline_has_is_made_longer_until_it_is_free(tmp_path):
    two = changed(RUN, lambda run: run["machine"].update(gpus=2))
    expected = ["nvidia-h200", "nvidia-h200-qwen2-5-trained", *(f"nvidia-h200-qwen2-5-trained-{n}" for n in (2, 3))]
    for n, stem in enumerate(expected):
        mine = changed(RUN, lambda run, n=n: run["rig"].update(target=f"x/{n}"))
        assert card_path(mine, tmp_path) == tmp_path / f"{stem}.json"
        written(mine, tmp_path / f"{stem}.json")
        assert card_path(mine, tmp_path) == find(mine, tmp_path) == tmp_path / f"{stem}.json"
    assert card_path(two, tmp_path) == tmp_path / "nvidia-h200-x2.json"


def test_the_baseline_that_somebody_named_is_the_one_to_be_replaced(tmp_path):
    mine = written(RUN, tmp_path / "mine.json")
    assert card_path(RUN, tmp_path) == mine


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("NVIDIA H200", "nvidia-h200.json"),
        ("../../etc/\x1b[2J", "etc-2j.json"),
        (None, "cuda.json"),
        ("\u6f22", "machine.json"),
    ],
)
def test_a_card_names_its_file(name, file, tmp_path):
    run = changed(RUN, lambda run: run["machine"].update(name=name))
    assert card_path(run, tmp_path) == tmp_path / file


# What is kept ---------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_that_nobody_asked_for():
    secret = "SECRET"

    def spill(run: Any) -> None:
        run.update(host=secret, calibration={"note": secret}, machine_after={"name": secret})
        run["machine"].update(host=secret, kernel=secret, os=secret, neighbours=[{"pid": 1, "name": secret}])
        run["rig"].update(path=secret)
        run["cells"][0].update(note=secret, prompt=secret)
        run["cells"][0]["workload"].update(name=f"full: {secret}", prompt=secret)
        run["cells"][0]["kernels"].update(proof=[secret])
        run["claims"][0].update(prompt=secret)
        run["claims"][0]["parts"][0].update(raw={secret: [1.0]})

    assert secret not in json.dumps(kept(changed(RUN, spill)))


def test_a_kept_run_is_still_a_run_and_the_same_to_the_gate(tmp_path):
    read = read_baseline(written(kept(RUN), tmp_path / "kept.json"))
    assert not [f for f in compare(RUN, read) if f.outcome not in ("same", "reported")]


# Accepting ------------------------------------------------------------------------------------------------------------


def _accepted(change: Any) -> accept.Accepted:
    return accept.accepted(changed(RUN, change), kept(RUN))


def _factor(id: str, group: str, name: str, factor: float) -> Any:
    return lambda run: entry(run, id)[group].update({name: factor * entry(run, id)[group][name]})


def test_within_the_tolerance_the_baseline_keeps_its_own_figure_so_that_no_bar_creeps():
    found = _accepted(_factor("batching.1", "bytes", "peak", 1.009))
    assert found.changes == ()
    assert entry(found.baseline, "batching.1")["bytes"]["peak"] == 3e9


def test_a_gain_raises_the_bar():
    found = _accepted(_factor("batching.1", "bytes", "peak", 0.9))
    (change,) = found.changes
    assert not change.lowers
    assert entry(found.baseline, "batching.1")["bytes"]["peak"] == pytest.approx(2.7e9)


@pytest.mark.parametrize(
    ("id", "change"),
    [
        ("batching.1", _factor("batching.1", "bytes", "peak", 1.1)),
        ("speculation.with_draft", _factor("speculation.with_draft", "figures", "acceptance_rate", 0.5)),
        ("prefix.one_word", lambda run: entry(run, "prefix.one_word").update(verdict="REFUTED")),
        ("prefix.one_word", lambda run: entry(run, "prefix.one_word").update(verdict="NOT JUDGED")),
        ("prefix.one_word", lambda run: run["claims"].remove(entry(run, "prefix.one_word"))),
        ("batching.1", lambda run: run["cells"].remove(entry(run, "batching.1"))),
        ("batching.1", lambda run: entry(run, "batching.1")["bytes"].pop("peak")),
        ("prefix.one_word", lambda run: entry(run, "prefix.one_word").update(required="< 99%")),
        ("prefix.one_word", lambda run: entry(run, "prefix.one_word")["parts"][0].update(required="< 99%")),
        ("prefix.one_word", lambda run: entry(run, "prefix.one_word")["parts"][0].update(what="another")),
        ("noise_floor.decode_device", lambda run: run["noise_floor"].update(decode_device=0.4)),
    ],
)
def test_a_bar_gets_lower_only_by_name(id, change):
    found = _accepted(change)
    assert [c.key[0] for c in found.unnamed([])] == [id]
    assert found.unnamed([id]) == []
    assert found.unnamed([id.split(".")[0]]) == []
    assert found.unnamed(["something.else", id[:-1]]) != []


def test_a_refuted_claim_that_holds_now_lowers_nothing():
    before = changed(kept(RUN), lambda run: entry(run, "prefix.one_word").update(verdict="REFUTED"))
    found = accept.accepted(RUN, before)
    assert [(c.key[0], c.lowers) for c in found.changes] == [("prefix.one_word", False)]
    assert entry(found.baseline, "prefix.one_word")["verdict"] == "HOLDS"


def test_an_undecided_verdict_leaves_a_decided_one_standing_and_is_settled_by_one():
    undecided = changed(RUN, lambda run: entry(run, "prefix.prefill_1484").update(verdict="INCONCLUSIVE"))
    assert entry(accept.accepted(undecided, kept(RUN)).baseline, "prefix.prefill_1484")["verdict"] == "HOLDS"
    assert entry(accept.accepted(RUN, kept(undecided)).baseline, "prefix.prefill_1484")["verdict"] == "HOLDS"


def test_an_undecided_verdict_under_another_limit_is_no_excuse_for_the_limit():
    looser = changed(
        RUN, lambda run: entry(run, "prefix.prefill_1484").update(verdict="INCONCLUSIVE", required=">= 1x")
    )
    found = accept.accepted(looser, kept(RUN))
    assert {c.key[0] for c in found.unnamed([])} == {"prefix.prefill_1484"}
    assert entry(found.baseline, "prefix.prefill_1484")["verdict"] == "INCONCLUSIVE"


def test_a_noisier_day_is_no_reason_to_tolerate_more():
    found = _accepted(lambda run: run["noise_floor"].update(prefill_wall=0.4, decode_wall=NOISIEST + 1))
    assert found.baseline["noise_floor"] == {"prefill_wall": 0.02, "prefill_device": 0.01}


@pytest.mark.parametrize("idle", [0.7, None])
def test_by_what_a_cell_is_judged_gets_no_weaker_by_accepting(idle):
    def faster(run: Any) -> None:
        entry(run, "batching.1.prefill").update(device_s=[0.08], host_bound=idle)
        entry(run, "batching.1.prefill")["figures"].update(device_s_noise=0.5)
        entry(run, "yardstick.prefill")["figures"].update(cpu_over_yardstick=0.7, cpu_over_yardstick_noise=0.4)

    found = _accepted(faster).baseline
    assert entry(found, "batching.1.prefill")["device_s"] == [0.08]
    assert entry(found, "batching.1.prefill")["host_bound"] == pytest.approx(0.1)
    assert "device_s_noise" not in entry(found, "batching.1.prefill")["figures"]
    assert entry(found, "yardstick.prefill")["figures"]["cpu_over_yardstick"] == pytest.approx(0.7)
    assert entry(found, "yardstick.prefill")["figures"]["cpu_over_yardstick_noise"] == 0.01


def test_accepting_says_that_no_time_is_gated_yet_and_that_the_yardstick_is_new(tmp_path, capsys):
    card = tmp_path / "card.json"

    def of_a_cpu(run: Any) -> None:
        run["machine"].update(device="cpu")
        run["cells"] = [cell | {"device_s": None} for cell in run["cells"]]

    gated = changed(RUN, of_a_cpu)
    ungated = changed(gated, lambda run: run["cells"].remove(entry(run, "yardstick.prefill")))
    assert main(["accept", str(written(ungated, tmp_path / "run.json")), "--to", str(card)]) == 0
    assert "no time is gated yet" in capsys.readouterr().out
    assert main(["accept", str(written(gated, tmp_path / "run.json")), "--to", str(card)]) == 0
    said = capsys.readouterr().out
    assert "changes yardstick.prefill (eager) cell" in said
    assert "no time" not in said


def test_of_a_card_whose_run_has_no_time_nothing_is_said_about_a_cpu(tmp_path, capsys):
    untimed = changed(RUN, lambda run: run.update(cells=[]))
    assert main(["accept", str(written(untimed, tmp_path / "run.json")), "--to", str(tmp_path / "card.json")]) == 0
    assert "CPU" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run["machine"].update(name="\ud800x"),
        lambda run: run["claims"][0].update(reason="\ud800x"),
        lambda run: run["machine"]["versions"].update({"\ud800x": "1", "torch": "\udfff"}),
    ],
)
def test_half_a_character_is_written_as_a_question_mark(change, tmp_path):
    card = tmp_path / "card.json"
    assert main(["accept", str(written(changed(RUN, change), tmp_path / "run.json")), "--to", str(card)]) == 0
    assert "?x" in card.read_text(encoding="utf-8")
    assert read_baseline(card)


def test_accepting_prints_each_change_and_writes_only_what_was_named(tmp_path, capsys):
    card = tmp_path / "cards" / "card.json"
    run = written(RUN, tmp_path / "run.json")
    assert main(["accept", str(run), "--to", str(card)]) == 0
    assert "prefix.one_word (eager) verdict: HOLDS, new" in capsys.readouterr().out
    before = card.read_text(encoding="utf-8")
    fatter = written(changed(RUN, _factor("batching.1", "bytes", "peak", 1.1)), tmp_path / "fatter.json")
    assert main(["accept", str(fatter), "--to", str(card)]) == 1
    said = capsys.readouterr()
    assert "LOWERS batching.1 (eager) bytes.peak: worse, 3,300,000,000, in the baseline 3,000,000,000" in said.out
    assert "add --lower batching.1" in said.err
    assert card.read_text(encoding="utf-8") == before
    assert main(["accept", str(fatter), "--to", str(card), "--lower", "batching.1"]) == 0
    assert entry(json.loads(card.read_text(encoding="utf-8")), "batching.1")["bytes"]["peak"] == pytest.approx(3.3e9)


@pytest.mark.parametrize(
    "change",
    [lambda run: run["machine"].update(name="Tesla T4"), lambda run: (run["claims"].clear(), run["cells"].clear())],
)
def test_what_can_be_no_baseline_of_this_file_is_refused_in_a_line(change, tmp_path, capsys):
    card = written(kept(RUN), tmp_path / "card.json")
    assert main(["accept", str(written(changed(RUN, change), tmp_path / "run.json")), "--to", str(card)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# The jobs -------------------------------------------------------------------------------------------------------------


def test_every_action_of_the_jobs_is_pinned_by_its_whole_commit_and_nothing_may_write():
    jobs = (Path(__file__).parents[1] / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)", jobs)
    assert used
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action) for action in used)
    assert re.findall(r"^permissions:\n((?:  .*\n)+)", jobs, re.MULTILINE) == ["  contents: read\n"]
    assert "permissions:" not in jobs.replace("permissions:", "", 1)
