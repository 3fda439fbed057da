"""A claim is judged by a test in myths/ and refutes a liar in tests/; and the README's way to add one works as written."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType

import pytest
import torch

import benchmarks.calibration
import benchmarks.claims
from benchmarks.claims import CLAIMS
from benchmarks.verdicts import Claim

ROOT = Path(__file__).parents[1]


# Every claim ----------------------------------------------------------------------------------------------------------


def judged_in(source: str) -> set[str]:
    """The claims that tests of a module are marked with."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    marks = (call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "claim")
    return {str(ast.literal_eval(mark.args[0])) for mark in marks if mark.args}


def refuted_in(source: str) -> set[str]:
    """The strings in tests of a module that speak of REFUTED, and in what these tests use of their module."""
    own: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        own |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own[node.name] = node
    found: set[str] = set()
    for name, test in own.items():
        if not name.startswith("test_") or "REFUTED" not in {getattr(n, "attr", None) for n in ast.walk(test)}:
            continue
        seen, ahead = {name}, [test]
        while ahead:
            for node in ast.walk(ahead.pop()):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
                used = getattr(node, "id", None) or getattr(node, "arg", None)  # by name, or as a fixture
                if used in own and used not in seen:
                    seen.add(used)
                    ahead.append(own[used])
    return found


def test_every_claim_is_judged_in_myths_and_every_mark_has_its_claim() -> None:
    judged = set().union(*(judged_in(path.read_text(encoding="utf-8")) for path in (ROOT / "myths").glob("test_*.py")))
    assert judged == set(CLAIMS)


def test_every_claim_refutes_a_liar() -> None:
    met = set().union(*(refuted_in(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").glob("test_*.py")))
    assert [id for id in CLAIMS if id not in met] == []


def test_a_claim_without_a_liar_is_seen() -> None:
    source = """
KNOWN = ("a.known", "a.table")
def observed(): return "a.helped"
def test_held(): assert word("a.held") is Word.HOLDS
def test_lied(): assert word("a.lied", observed(), KNOWN) is Word.REFUTED
"""
    assert refuted_in(source) == {"a.lied", "a.helped", "a.known", "a.table"}
    assert judged_in('@pytest.mark.claim("a.marked")\ndef test_it(judge): judge("a.other")') == {"a.marked"}


# The README's example -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces() -> list[str]:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## How to add a myth")[1].split("\n## ")[0]
    found = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(found) == 3, "the claim, the myth and the liar"
    return found


@pytest.fixture(scope="module")
def conftest(request: pytest.FixtureRequest) -> ModuleType:
    module = request.config.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    assert isinstance(module, ModuleType)
    return module


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def with_claim(pieces: list[str], conftest: ModuleType, patch: pytest.MonkeyPatch) -> Claim:
    """The example's claim in the table, wherever the table is read."""
    made: Claim = eval(f"({pieces[0].strip()})[0]", vars(benchmarks.claims))
    table: Mapping[str, Claim] = MappingProxyType({**CLAIMS, made.id: made})
    for module in [m for m in (*sys.modules.values(), conftest) if vars(m).get("CLAIMS") is CLAIMS]:
        patch.setattr(module, "CLAIMS", table)
    return made


@pytest.fixture(scope="module")
def on_path(pieces: list[str], tmp_path_factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch) -> Path:
    """The example's two files in folders of their own."""
    root = tmp_path_factory.mktemp("example")
    for folder, text in (("myths", pieces[1]), ("tests", pieces[2])):
        (root / folder).mkdir()
        (root / folder / "test_answer_length.py").write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("myths.test_answer_length", root / "myths" / "test_answer_length.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, "myths.test_answer_length", module)
    spec.loader.exec_module(module)
    return root


@pytest.fixture(scope="module")
def said(with_claim: Claim, on_path: Path, conftest: ModuleType, patch: pytest.MonkeyPatch) -> str:
    """What pytest said of the myth and its liar, run in this process."""
    patch.setattr(benchmarks.calibration, "QUICK_S", {"cpu": 0.1})
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr("benchmarks.page.write_page", lambda runs, path: path)  # test_page.py draws
    patch.setenv("COLUMNS", "200")
    patch.delenv("PYTEST_XDIST_WORKER", raising=False)
    without = [f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "unraisableexception", "threadexception")]
    here = ("--rootdir", ROOT, "-c", ROOT / "pytest.ini", *without, "-v", on_path / "tests", on_path / "myths")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main([*map(str, here), "--budget=0.1", "--new-tokens=8", f"--report={on_path}"], [conftest])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), (
        said.getvalue()
    )  # a busy machine may end undecided
    return said.getvalue()


def test_the_readmes_liar_is_refuted(said: str, with_claim: Claim, on_path: Path) -> None:
    source = (on_path / "tests" / "test_answer_length.py").read_text(encoding="utf-8")
    (name,) = re.findall(r"^def (test_\w+)", source, re.MULTILINE)
    assert sum(f"::{name}[" in line and "PASSED" in line for line in said.splitlines()) == 2, said
    assert with_claim.id in refuted_in(source)


def test_the_readmes_myth_ends_in_a_verdict_on_the_card(said: str, with_claim: Claim, on_path: Path) -> None:
    (kept,) = json.loads((on_path / "run.json").read_text(encoding="utf-8"))["claims"]
    assert (kept["id"], kept["n"] > 0) == (with_claim.id, True)
    assert "== length ==" in said
    assert judged_in((on_path / "myths" / "test_answer_length.py").read_text(encoding="utf-8")) == {with_claim.id}
