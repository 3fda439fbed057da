"""python -m benchmarks, as a user meets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.__main__ import main

ROOT = Path(__file__).parents[1]
T4 = ROOT / "benchmarks" / "cards" / "tesla-t4.json"


def _called(*words, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "benchmarks", *map(str, words)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def called(capsys):
    """Calls main in this process: the door itself is the business of a few tests only."""

    def _called_here(*words):
        try:
            code = main(list(map(str, words)))
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    return _called_here


def test_the_card_of_a_run_is_printed():
    done = _called("report", T4, "--card")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Tesla T4" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("NOT JUDGED")


def test_the_card_follows_the_width_of_the_terminal(called, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    done = called("report", T4, "--card")
    assert max(map(len, done.stdout.splitlines())) <= 72


def test_markdown_is_printed_on_request(called):
    done = called("report", T4, "--markdown")
    assert done.returncode == 0
    assert done.stdout.startswith("# inference-myths")


def test_a_terminal_without_utf8_gets_its_card_too(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(T4.read_text(encoding="utf-8").replace("Tesla T4", "Tesla \u6f22 T4"), encoding="utf-8")
    done = _called("report", path, "--card", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Tesla \\u6f22 T4" in done.stdout


def test_a_reader_who_leaves_early_is_no_error():
    script = f"{sys.executable} -m benchmarks report --card {T4} | head -n 1"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_a_torn_file_is_one_line_and_exit_code_2(tmp_path, called):
    path = tmp_path / "\x1b[2Jrun.json"
    path.write_bytes(T4.read_bytes()[:5000])
    done = called("report", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "not whole JSON" in done.stderr
    assert "\x1b" not in done.stderr


def test_the_page_of_several_runs_is_written_and_their_cards_printed(tmp_path, called):
    done = called("report", T4, T4, "--page", tmp_path / "new" / "index.html")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("page: ")
    assert done.stdout.count("inference-myths 0") == 2
    assert (tmp_path / "new" / "index.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, called):
    done = called("report", T4, "--page", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_no_command_lists_the_commands(called):
    done = _called()
    assert done.returncode == 2
    assert "COMMAND" in done.stderr
    assert "Traceback" not in done.stderr
    assert "report" in called("--help").stdout


def test_printing_a_card_imports_no_torch():
    code = "import sys; from benchmarks.__main__ import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    words = [sys.executable, "-c", code, "report", T4, "--card"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
