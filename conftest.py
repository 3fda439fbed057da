"""Options, marks, session fixtures and the terminal card: pytest's side of the suite. What is measured and how claims are
judged stands in benchmarks/."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import workloads
from benchmarks.claims import CLAIMS, Claim, Word
from benchmarks.rigs import DTYPES, RIGS, WEIGHTS, RigError

if TYPE_CHECKING:
    from benchmarks.phases import EagerEngine
    from benchmarks.session import Observed, Session

pytest_plugins = ["pytester"]

MARKS = {
    "gpu": "every myth; with `-m gpu` CUDA is required",
    "timing": "the verdict rests on a clock",
    "trained": "needs trained weights",
    "claim(id)": "the claim of benchmarks/claims.py that this test judges",
}
SESSION = pytest.StashKey["Session"]()


# Options --------------------------------------------------------------------------------------------------------------


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("inference-myths", "inference-myths: which models are judged, and how")
    add = group.addoption
    add("--rig", metavar="NAME", help=f"known target and draft: {', '.join(RIGS)} (default: qwen2.5 with CUDA, else nimbus)")
    add("--target", metavar="ID_OR_DIR", help="your own causal language model instead of a rig")
    add("--draft", metavar="ID_OR_DIR", help="the draft for your --target; it must share the target's tokenizer")
    add("--weights", default="trained", metavar="KIND", help=f"{' or '.join(WEIGHTS)}: random needs no download (default: trained)")
    add("--dtype", default="auto", metavar="DTYPE", help=f"{', '.join(DTYPES)} (default: float16 with CUDA, else float32)")
    add("--prefix-len", type=int, default=workloads.PREFIX_LEN, metavar="TOKENS", help="shared system prompt (default: %(default)s)")
    add("--new-tokens", type=int, default=workloads.NEW_TOKENS, metavar="TOKENS", help="output length (default: %(default)s)")
    add(
        "--batch-sizes",
        type=_whole_numbers,
        default=workloads.BATCH_SIZES,
        metavar="N,N",
        help=f"rows of the batching table (default: {','.join(map(str, workloads.BATCH_SIZES))})",
    )
    add("--suffix", action="append", default=[], metavar="TEXT", help="one more question after the shared prefix; may be repeated")
    add("--quant-prompt", default=workloads.QUANT_PROMPT, metavar="TEXT", help="question put to every precision (default: %(default)r)")
    add("--report", type=Path, default=Path("reports"), metavar="DIR", help="folder for run.json and card.md (default: %(default)s)")
    add("--budget", type=float, metavar="SECONDS", help="rounds a claim may take before it is INCONCLUSIVE (default: 60 with CUDA, else 15)")


def _open_session(config: pytest.Config) -> Session:
    """The session of this run. Raises UsageError, so that a wrong option or a missing model is one line and exit code 4."""
    from benchmarks.session import Options, Session

    option = config.getoption
    try:
        session = Session(
            Options(
                rig=option("--rig"),
                target=option("--target"),
                draft=option("--draft"),
                weights=option("--weights"),
                dtype=option("--dtype"),
                prefix_len=option("--prefix-len"),
                new_tokens=option("--new-tokens"),
                batch_sizes=option("--batch-sizes"),
                suffixes=tuple(option("--suffix")),
                quant_prompt=option("--quant-prompt"),
                report=option("--report"),
                budget_s=option("--budget"),
            ),
            "cuda" if _has_cuda() else "cpu",
        )
        session.open()
    except RigError as error:
        raise pytest.UsageError(str(error)) from None
    return session


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# Which tests run ------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if _requires_gpu(config.getoption("markexpr", "")) and not _has_cuda():
        raise pytest.UsageError("-m gpu needs CUDA and torch sees none here: run `pytest myths` for the embedded pair")


def _requires_gpu(expression: str) -> bool:
    """Whether a mark expression selects nothing that isn't marked gpu, but something that is."""
    from _pytest.mark.expression import Expression

    if not expression:
        return False
    try:
        compiled = Expression.compile(expression)
    except SyntaxError:
        return False  # pytest itself reports it
    others = [name.split("(")[0] for name in MARKS if name != "gpu"]

    def selects(gpu: bool) -> bool:
        return any(
            compiled.evaluate(lambda name, /, **_: dict(zip(others, has, strict=True), gpu=gpu).get(name, False))
            for has in itertools.product((False, True), repeat=len(others))
        )

    return selects(True) and not selects(False)


def _claim_of(item: pytest.Item) -> Claim | None:
    mark = item.get_closest_marker("claim")
    return CLAIMS[mark.args[0]] if mark else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks follow from the claim's table, so that no test can carry the wrong one."""
    if claim := _claim_of(item):
        for mark, holds in {"gpu": True, "timing": claim.timing, "trained": "trained" in claim.needs}.items():
            if holds:
                item.add_marker(mark)
    elif "session" in getattr(item, "fixturenames", ()):
        item.add_marker("gpu")
        item.add_marker("timing")  # a row of a table: it is a figure, and figures here are times


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "batch_size" in metafunc.fixturenames:
        metafunc.parametrize("batch_size", metafunc.config.getoption("--batch-sizes"))
    if "suffix_number" in metafunc.fixturenames:
        questions = len(workloads.SUFFIXES) + len(metafunc.config.getoption("--suffix"))
        metafunc.parametrize("suffix_number", range(questions))
    if "length" in metafunc.fixturenames:
        from benchmarks.attention import lengths

        metafunc.parametrize("length", lengths("cuda" if _has_cuda() else "cpu"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Open the suite's session once it is known that myths will run: before that nothing of theirs is worth loading."""
    if session.config.getoption("collectonly") or not any("session" in getattr(i, "fixturenames", ()) for i in session.items):
        return
    if session.config.getoption("numprocesses", None) or hasattr(session.config, "workerinput"):
        raise pytest.UsageError("myths measure time and can't share the machine with each other: run them without -n")
    session.config.stash[SESSION] = _open_session(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A claim that can't be judged here is skipped with its reason before anything is loaded for it."""
    claim = _claim_of(item)
    suite = item.config.stash.get(SESSION, None)
    if claim and suite and (reason := suite.setting.why_not(claim)):
        suite.skip(claim, reason)
        pytest.skip(f"{Word.NOT_JUDGED} {claim.id}: {reason}")


# What the myths use ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Session:
    return request.config.stash[SESSION]


@pytest.fixture(scope="session")
def tokenizer(session: Session) -> workloads.Tokenizer:
    return session.loader.tokenizer()


def _load(session: Session, role: str, precision: str | None = None) -> EagerEngine:
    """One model of the rig behind the eager engine. Whatever is wrong with it ends the run: all stations stand on it."""
    try:
        return session.load(role, precision)
    except RigError as error:
        pytest.exit(f"{error}", returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture(scope="session")
def target(session: Session) -> EagerEngine:
    """The target in the reference precision."""
    return _load(session, "target")


@pytest.fixture(scope="session")
def draft(session: Session) -> EagerEngine:
    return _load(session, "draft")


@pytest.fixture(scope="session")
def int8(session: Session, target: EagerEngine) -> EagerEngine:
    return _load(session, "target", "int8")


@pytest.fixture(scope="session")
def nf4(session: Session, target: EagerEngine) -> EagerEngine:
    return _load(session, "target", "nf4")


@pytest.fixture
def judge(request: pytest.FixtureRequest, session: Session) -> Callable[[Observed], None]:
    """Judges the claim that the test is marked with: returns when it HOLDS, else ends the test in one line."""
    claim = _claim_of(request.node)
    if claim is None:
        raise pytest.UsageError(f"{request.node.nodeid} judges nothing: mark it with @pytest.mark.claim(id)")

    def _judge(observed: Observed) -> None:
        verdict = session.judge(claim.id, observed)
        request.node.user_properties.append(("verdict", verdict.line))
        if verdict.word is not Word.HOLDS:
            pytest.fail(verdict.line, pytrace=False)

    return _judge


@pytest.fixture
def sampled(benchmark: Any) -> Callable[[Callable[[], Any]], list[Any]]:
    """Calls a measurement three times under pytest-benchmark's clock, after one warm-up, and gives back what it returned.

    Claims and cells are made of what is returned, never of `benchmark.stats`, which is None when benchmarks are disabled
    (the call is then made once).
    """

    def _sampled(call: Callable[[], Any]) -> list[Any]:
        call()
        samples: list[Any] = []
        benchmark.pedantic(lambda: samples.append(call()), rounds=3, iterations=1)
        return samples

    return _sampled


# What a person sees ---------------------------------------------------------------------------------------------------


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """INCONCLUSIVE and REFUTED in their own words, in verbose output too."""
    if report.when == "call" and report.failed:
        word = str(report.longrepr).split(" ", 1)[0]
        if word in (Word.REFUTED, Word.INCONCLUSIVE):
            return "failed", word[0], word
    return None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    suite = config.stash.get(SESSION, None)
    if suite is None or not suite.ledger.begun:
        return
    from benchmarks.report import card_lines

    terminalreporter.section("the card")
    for line in card_lines(suite.ledger.run, width=min(100, terminalreporter._tw.fullwidth)):
        terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    suite = session.config.stash.get(SESSION, None)
    if suite is not None:
        suite.close()


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    suite = config.stash.get(SESSION, None)
    if suite is not None:
        versions = suite.machine["versions"]
        machine_info["gpu"] = suite.machine["name"] if suite.device == "cuda" else None
        machine_info["driver"] = suite.machine["driver"]
        machine_info["torch"] = versions.get("torch")
        machine_info["rig"] = suite.rig.record

