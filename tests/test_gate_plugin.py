"""The gate as people call it: from another project by the README's lines, and by the commands that it prints itself."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gate import accept, baseline
from benchmarks.run_file import read_run
from tests.gated import changed, some_run, written
from tests.test_gate import Pace, _ran

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("PYTEST_XDIST_WORKER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    Pace().replaces(monkeypatch)


# From another project -------------------------------------------------------------------------------------------------


def _recipe() -> str:
    """What the README tells a job of another project to run."""
    jobs = (ROOT / "README.md").read_text(encoding="utf-8").split("```yaml")[1].split("```")[0]
    (line,) = re.findall(r"^- run: (.*)", jobs, re.MULTILINE)
    return line


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with settings of its own, a model, a baseline, and this suite as a folder in it. The suite's Python only
    writes down what `make` would have it do."""
    folder = tmp_path / "project"
    suite = folder / "suite"
    shutil.copytree(ROOT / "myths", suite / "myths", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pytest.ini", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, suite / name)
    python = suite / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nfor word; do echo "$word"; done > asked\n', encoding="utf-8")
    python.chmod(0o755)
    (suite / ".venv" / ".ready").touch()
    (folder / "model").symlink_to(ROOT / "benchmarks" / "nimbus" / "target")
    (folder / "inference-baseline.json").write_text("{}", encoding="utf-8")
    (folder / "pyproject.toml").write_text("[project]\nname = 'another'\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("joined", ["=", " "])
def test_the_readmes_job_runs_the_myths_of_the_suite_whatever_the_project_around_it_has(joined, project, monkeypatch):
    line = re.sub(r"(--(?:target|baseline))=", rf"\1{joined}", _recipe()).replace("-m gpu ", "")
    assert f"--target{joined}$PWD/model" in line and "gpu" not in line
    subprocess.run(["sh", "-c", line], cwd=project, check=True, capture_output=True)
    words = (project / "suite" / "asked").read_text(encoding="utf-8").splitlines()
    assert words[:2] == ["-m", "pytest"]
    monkeypatch.chdir(project / "suite")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main([*words[2:], "--collect-only", "-qq", "-k", "one_changed_word_ends"])
    assert code == 0, said.getvalue()
    assert re.findall(r"^\S+::\S+", said.getvalue(), re.MULTILINE) == [
        "myths/test_prefix_reuse.py::test_one_changed_word_ends_the_match"
    ]


# By what it says itself -----------------------------------------------------------------------------------------------


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of benchmarks/cards."""
    folder = tmp_path / "cards"
    folder.mkdir()
    monkeypatch.setattr(baseline, "CARDS", folder)
    monkeypatch.setattr(accept, "CARDS", folder)
    return folder


def _named(said: str) -> list[str]:
    """The words after `python -m benchmarks` of the command that a gate's line ends with."""
    python, option, package, *words = shlex.split(said[said.index("python -m") :])
    assert (python, option, package) == ("python", "-m", "benchmarks")
    return words


def test_the_command_that_is_named_makes_the_baseline_that_auto_finds_beside_others_of_the_card(cards, tmp_path):
    first = _ran(tmp_path / "my runs", "--baseline", "auto")
    assert first.code == 6
    run = read_run(tmp_path / "my runs" / "run.json")
    for target in ("x/y", "x/z"):  # the card's name is taken, and so is that with rig and weights
        other = changed(run, lambda run, target=target: run["rig"].update(target=target))
        written(other, baseline.card_path(run, cards))
    before = {path.name: path.read_bytes() for path in cards.iterdir()}
    assert len(before) == 2
    assert main(_named(first.gate[0])) == 0
    assert {name: (cards / name).read_bytes() for name in before} == before
    again = _ran(tmp_path / "again", "--baseline", "auto")
    assert again.code == 0, again.said
    assert again.gate[0].startswith("GREEN against ")
    assert len(list(cards.iterdir())) == 3


def test_the_command_that_is_named_is_quoted_for_a_shell(tmp_path):
    to = tmp_path / "b l$(x).json"
    ran = _ran(tmp_path / "my runs", "--baseline", to)
    assert _named(ran.gate[0]) == ["accept", str(tmp_path / "my runs" / "run.json"), "--to", str(to)]


@pytest.mark.parametrize("content", ["{", "another card"])
def test_what_is_refused_is_not_called_red(content, tmp_path):
    path = tmp_path / "b.json"
    path.write_text(content, encoding="utf-8")
    if content == "another card":
        written(some_run(), path)
    ran = _ran(tmp_path / "r", "--baseline", path)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert "the gate" not in ran.said
    assert "RED" not in ran.said
    assert len(re.findall(r"^ERROR: --baseline", ran.said, re.MULTILINE)) == 1
