"""Options, marks, session fixtures and the terminal card: pytest's side of the suite. What is measured and how claims are
judged stands in benchmarks/."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import workloads
from benchmarks.claims import CLAIMS
from benchmarks.estimates import unusable
from benchmarks.ledger import NotWritten
from benchmarks.rigs import DTYPES, RIGS, WEIGHTS, RigError
from benchmarks.serving import NotServed
from benchmarks.serving.servers import SERVE, Plan, ServerError
from benchmarks.session import ENGINES, NotCaptured
from benchmarks.tables import plain
from benchmarks.timing import quiet
from benchmarks.verdicts import Claim, Verdict, Word

if TYPE_CHECKING:
    from benchmarks.phases import EagerEngine
    from benchmarks.roofline import Roofline
    from benchmarks.rows import PlannedRow
    from benchmarks.session import Observed, Session

pytest_plugins = ["pytester", "gate_plugin"]

MARKS = {
    "gpu": "every myth; with `-m gpu` CUDA is required",
    "timing": "the verdict rests on a clock",
    "trained": "needs trained weights",
    "claim(id)": "the claim of benchmarks/claims.py that this test judges",
    "browser": "looks at the page in Chromium; `make test` leaves it to `make test-browser`",
}
SESSION = pytest.StashKey["Session"]()
PAGE = pytest.StashKey[str]()
"""Where the page of the run is, or why there is none."""


# Options --------------------------------------------------------------------------------------------------------------


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise pytest.UsageError(
            f"--batch-sizes {text}: sizes are whole numbers from 1, such as 1,2,4,8,16,32"
        ) from None


def _number(option: str, kind: type[int] | type[float], such_as: object) -> Callable[[str], int | float]:
    """Reads an option's number; what is none ends in one line, where argparse has four."""

    def _read(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            whole = "whole " if kind is int else ""
            raise pytest.UsageError(f"{option} {text}: give a {whole}number, such as {such_as}") from None

    return _read


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("inference-myths", "inference-myths: which models are judged, and how")
    add = group.addoption
    add(
        "--rig",
        metavar="NAME",
        help=f"known target and draft: {', '.join(RIGS)} (default: qwen2.5 with CUDA, else nimbus)",
    )
    add("--target", metavar="ID_OR_DIR", help="your own causal language model instead of a rig")
    add("--draft", metavar="ID_OR_DIR", help="the draft for your --target; it must share the target's tokenizer")
    add(
        "--weights",
        default="trained",
        metavar="KIND",
        help=f"{' or '.join(WEIGHTS)}: random needs no download (default: trained)",
    )
    add(
        "--dtype",
        default="auto",
        metavar="DTYPE",
        help=f"{', '.join(DTYPES)} (default: float16 with CUDA, else float32)",
    )
    add(
        "--prefix-len",
        type=_number("--prefix-len", int, workloads.PREFIX_LEN),
        default=workloads.PREFIX_LEN,
        metavar="TOKENS",
        help="shared system prompt (default: %(default)s)",
    )
    add(
        "--new-tokens",
        type=_number("--new-tokens", int, workloads.NEW_TOKENS),
        default=workloads.NEW_TOKENS,
        metavar="TOKENS",
        help="output length (default: %(default)s)",
    )
    add(
        "--batch-sizes",
        type=_whole_numbers,
        default=workloads.BATCH_SIZES,
        metavar="N,N",
        help=f"rows of the batching table (default: {','.join(map(str, workloads.BATCH_SIZES))})",
    )
    add(
        "--suffix",
        action="append",
        default=[],
        metavar="TEXT",
        help="one more question after the shared prefix; may be repeated",
    )
    add(
        "--quant-prompt",
        default=workloads.QUANT_PROMPT,
        metavar="TEXT",
        help="question put to every precision (default: %(default)r)",
    )
    add(
        "--engine",
        default="both",
        metavar="NAME",
        help=f"{', '.join(ENGINES)}: on what decode is judged (default: %(default)s; graphs need CUDA)",
    )
    add(
        "--world-size",
        type=_number("--world-size", int, 2),
        metavar="GPUS",
        help="GPUs over which a model is split or copied (default: all, up to 8)",
    )
    add("--endpoint", metavar="URL", help="an OpenAI-compatible server to be judged, such as http://127.0.0.1:8000/v1")
    add("--endpoint-model", metavar="NAME", help="the model to ask there (default: its only one)")
    add("--endpoint-key-env", metavar="VAR", help="the environment variable that holds the key for it")
    add("--serve", metavar="NAME", help=f"start a server here and judge it: {' or '.join(SERVE)}")
    add(
        "--report",
        type=Path,
        default=Path("reports"),
        metavar="DIR",
        help="folder for run.json, card.md and index.html (default: %(default)s)",
    )
    add(
        "--budget",
        type=_number("--budget", float, 10),
        metavar="SECONDS",
        help="seconds of rounds that a claim may take before it is INCONCLUSIVE (default: 10 with CUDA, else 15, and ten "
        "rounds at least)",
    )


def _new_session(config: pytest.Config) -> Session:
    """The session that the options ask for, not yet open. Raises UsageError, so that a wrong option is one line and exit
    code 4."""
    from benchmarks.session import Options, Session

    option = config.getoption
    try:
        return Session(
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
                engine=option("--engine"),
                world_size=option("--world-size"),
                report=option("--report"),
                budget_s=option("--budget"),
                served=_plan(config),
            ),
            "cuda" if _has_cuda() else "cpu",
        )
    except (RigError, ServerError) as error:
        raise pytest.UsageError(plain(error, 500)) from None


def _open_session(config: pytest.Config, items: list[pytest.Item]) -> Session:
    """The session of this run. Raises UsageError, so that a missing model too is one line."""
    session = _new_session(config)
    try:
        myths = [item for item in items if "session" in getattr(item, "fixturenames", ())]
        session.open(
            models=not session.options.at_endpoint or any("server_name" not in myth.fixturenames for myth in myths)
        )
    except RigError as error:
        raise pytest.UsageError(plain(error, 500)) from None
    return session


def _plan(config: pytest.Config) -> Plan | None:
    """The server that the options ask for. Raises ServerError."""
    option = config.getoption
    device = "cuda" if _has_cuda() else "cpu"
    dtype = option("--dtype")
    return Plan.of(
        endpoint=option("--endpoint"),
        model=option("--endpoint-model"),
        key_env=option("--endpoint-key-env"),
        serve=option("--serve"),
        environ=os.environ,
        root=config.rootpath,
        device=device,
        dtype={"cuda": "float16", "cpu": "float32"}[device] if dtype == "auto" else dtype,
    )


def _server_names(config: pytest.Config) -> tuple[str, ...]:
    """The servers on which claims are judged; "server" where there is none."""
    try:
        plan = _plan(config)
    except ServerError:
        plan = None  # refused when the session opens
    return plan.names if plan else ("server",)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# Which tests run ------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if config.getoption("help"):
        return
    if (file := config.getoption("benchmark_json", None)) and (file.is_dir() or not file.parent.is_dir()):
        raise pytest.UsageError(f"--benchmark-json {plain(file, 200)}: give a file in a folder that exists")
    if _requires_gpu(config.getoption("markexpr", "")) and not _has_cuda():
        raise pytest.UsageError(
            "-m gpu needs CUDA and torch sees none here: run `pytest myths` for the embedded pair or your --target"
        )
    if _is_spread(config) and _may_run_myths(config):
        raise pytest.UsageError("myths measure time and can't share the machine with each other: run them without -n")


def _is_spread(config: pytest.Config) -> bool:
    """Whether pytest-xdist was asked for several processes. Asked here, since its workers could only crash."""
    return any(config.getoption(option, None) for option in ("numprocesses", "tx"))


def _may_run_myths(config: pytest.Config) -> bool:
    """Whether an argument is the folder of the myths, in it, or around it."""
    myths = config.rootpath / "myths"
    paths = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return any(path.is_relative_to(myths) or myths.is_relative_to(path) for path in paths)


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
            compiled.evaluate(partial(_has_mark, {**dict(zip(others, has, strict=True)), "gpu": gpu}))
            for has in itertools.product((False, True), repeat=len(others))
        )

    return selects(True) and not selects(False)


def _has_mark(marks: dict[str, bool], name: str, /, **_: object) -> bool:
    return marks.get(name, False)


def _claim_of(item: pytest.Item) -> Claim | None:
    mark = item.get_closest_marker("claim")
    if mark is None:
        return None
    if mark.args[0] not in CLAIMS:
        raise pytest.UsageError(f"{item.nodeid}: no claim {mark.args[0]!r} in benchmarks/claims.py")
    return CLAIMS[mark.args[0]]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks follow from the claim's table, so that no test can carry the wrong one."""
    if claim := _claim_of(item):
        for mark, holds in {"gpu": True, "timing": claim.timing, "trained": "trained" in claim.needs}.items():
            if holds:
                item.add_marker(mark)
        if claim.timing and "served" not in claim.needs:  # a server's floors are measured where it is opened
            item.fixturenames.insert(0, "noise_floors")  # before the fixtures that compare sides
    elif "session" in getattr(item, "fixturenames", ()):
        item.add_marker("gpu")
        item.add_marker("timing")  # a row of a table: it is a figure, and figures here are times
        for name in filter(_plans_rows, tuple(item.fixturenames)):
            item.fixturenames.insert(0, name)  # before whatever may fail, since it says what is missing then


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The rows of the tables: sizes and suffixes are the user's, lengths the device's."""
    if "session" not in metafunc.fixturenames:
        return
    if "batch_size" in metafunc.fixturenames:
        metafunc.parametrize("batch_size", metafunc.config.getoption("--batch-sizes"))
    if "suffix_number" in metafunc.fixturenames:
        questions = len(workloads.SUFFIXES) + len(metafunc.config.getoption("--suffix"))
        metafunc.parametrize("suffix_number", range(questions))
    chosen = any(mark.args[0] == "engine_name" for mark in metafunc.definition.iter_markers("parametrize"))
    if "engine_name" in metafunc.fixturenames and not chosen:
        names = ENGINES.get(metafunc.config.getoption("--engine"), ("eager",))  # an unknown one is refused later
        metafunc.parametrize("engine_name", names, scope="module")
    if "server_name" in metafunc.fixturenames:
        metafunc.parametrize("server_name", _server_names(metafunc.config), scope="module")
    if "length" in metafunc.fixturenames:
        from benchmarks.attention import lengths

        metafunc.parametrize("length", lengths("cuda" if _has_cuda() else "cpu"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Open the suite's session once it is known that myths will run: before that nothing of theirs is worth loading."""
    if session.config.getoption("collectonly") or not any(
        "session" in getattr(i, "fixturenames", ()) for i in session.items
    ):
        return
    import gate_plugin

    suite = _open_session(session.config, session.items)
    session.config.stash[SESSION] = suite
    gate_plugin.arm(session, suite)


def _engine_of(item: pytest.Item) -> str:
    """The engine that a test is about: the one it is parametrised with, else the eager one."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    return str(params.get("server_name") or params.get("engine_name", "eager"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """A claim that can't be judged here is skipped with its reason before anything is loaded for it."""
    claim, engine = _claim_of(item), _engine_of(item)
    suite = item.config.stash.get(SESSION, None)
    reason = None
    if claim and suite:
        reason = suite.setting(engine).why_not(claim)
    elif suite and engine != "eager":
        need = "served" if "server_name" in getattr(item, "fixturenames", ()) else "engine"
        reason = suite.setting(engine).lacks.get(need)
    if reason:
        _not_judged(item, reason)
        said = f"{claim.id}: {reason}" if claim else reason
        item.add_marker(pytest.mark.skip(reason=said))  # unlike skip(), says where the test stands
    with _or_exit(), _in_one_line(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _or_exit(), _in_one_line(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Around the gate too, which adds to the report between two tests."""
    with _or_exit():
        return (yield)


def _not_judged(item: pytest.Item, reason: str) -> None:
    """Record the claim of a test, if it has one, as not judged."""
    claim, suite = _claim_of(item), item.config.stash.get(SESSION, None)
    if claim and suite:
        verdict = suite.skip(claim, reason, _engine_of(item))
        item.user_properties.append(("verdict", verdict.line))


def _plans_rows(fixture_name: str) -> bool:
    """Whether a fixture lists the rows that its test measures (PlannedRow): what is kept as missing where it can't."""
    return fixture_name.startswith("planned_")


def _keep_missing(item: pytest.Item, reason: str) -> None:
    """Record the rows that a test was to measure, if it names any, as missing."""
    found: dict[str, Any] = getattr(item, "funcargs", {})
    planned: list[PlannedRow] = [row for name in found if _plans_rows(name) for row in found[name]]
    for row in planned:
        item.config.stash[SESSION].ledger.cell(row.missing(reason))


@contextmanager
def _or_exit() -> Iterator[None]:
    """What all stations stand on ends the run in one line: a model that is no good, a report that can't be written."""
    try:
        yield
    except (RigError, NotWritten) as error:
        pytest.exit(plain(error, 500), returncode=pytest.ExitCode.USAGE_ERROR)


@contextmanager
def _in_one_line(item: pytest.Item) -> Iterator[None]:
    """What a fixture or a test may lack is said in one line, its rows and its claim are recorded, and the rest goes on: without
    a graph engine or a server what rests on it isn't judged; what is out of memory is measured and decides nothing."""
    if SESSION not in item.config.stash:
        yield  # no myth, but a test of what myths stand on: what escapes there is a failure
        return
    try:
        yield
        return
    except (NotCaptured, NotServed) as error:
        _keep_missing(item, str(error))
        _not_judged(item, str(error))
        pytest.skip(str(error))
    except (RuntimeError, MemoryError) as error:
        from benchmarks.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        clear_frames(error.__traceback__)  # pytest keeps a fixture's error, which would keep what was allocated so far
    said = reason = "out of memory"
    _keep_missing(item, reason)
    if claim := _claim_of(item):
        said = _verdict(item, claim, {bound.what: unusable(reason) for bound in claim.bounds}).line
    raise pytest.fail.Exception(said, pytrace=False) from None


def _verdict(item: pytest.Item, claim: Claim, observed: Observed) -> Verdict:
    """The verdict on a test's claim, recorded."""
    verdict = item.config.stash[SESSION].judge(claim.id, observed, _engine_of(item))
    item.user_properties.append(("verdict", verdict.line))
    return verdict


# What the myths use ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Session:
    return request.config.stash[SESSION]


@pytest.fixture(scope="session")
def tokenizer(session: Session) -> workloads.Tokenizer:
    return session.loader.tokenizer()


@pytest.fixture(scope="session")
def target(session: Session) -> EagerEngine:
    """The target in the reference precision."""
    return session.load("target")


@pytest.fixture(scope="session")
def draft(session: Session) -> EagerEngine:
    return session.load("draft")


@pytest.fixture(scope="session")
def int8(session: Session, target: EagerEngine) -> EagerEngine:
    return session.load("target", "int8")


@pytest.fixture(scope="session")
def nf4(session: Session, target: EagerEngine) -> EagerEngine:
    return session.load("target", "nf4")


@pytest.fixture(scope="session")
def roofline(session: Session) -> Roofline | None:
    """What this card's memory and arithmetic could do, measured once. None on the CPU: its rates swing with its neighbours, so
    that a share of them may come out above 100 %."""
    if session.device != "cuda":
        return None
    import torch

    from benchmarks import roofline

    measured = roofline.measure(session.device, getattr(torch, session.rig.dtype))
    session.ledger.note("roofline", measured.record)
    return measured


@pytest.fixture(scope="session")
def noise_floors(session: Session, target: EagerEngine, tokenizer: workloads.Tokenizer) -> None:
    """What equal things differ by on this machine: from an earlier calibration of it, else from a quick one. Every test
    whose claim rests on a clock stands on this."""
    from benchmarks import calibration

    session.set_floors(session.known_floors() or calibration.quick(session, target, tokenizer))


@pytest.fixture
def judge(request: pytest.FixtureRequest, session: Session) -> Callable[[Observed], None]:
    """Judges the claim that the test is marked with: returns when it HOLDS, else ends the test in one line."""
    claim = _claim_of(request.node)
    if claim is None:
        raise pytest.UsageError(f"{request.node.nodeid} judges nothing: mark it with @pytest.mark.claim(id)")

    def _judge(observed: Observed) -> None:
        verdict = _verdict(request.node, claim, observed)
        if verdict.word is not Word.HOLDS:
            pytest.fail(verdict.line, pytrace=False)

    return _judge


@pytest.fixture
def sampled(benchmark: Any) -> Callable[[Callable[[], Any], Callable[[], object]], list[Any]]:
    """Calls a measurement under pytest-benchmark's clock, after a warm-up, and gives back what it returned.

    Twice unless told, since a row is there to be read: what a verdict rests on has rounds of its own, as many as it needs.
    Claims and cells are made of what is returned, never of `benchmark.stats`, which is None when benchmarks are disabled
    (the call is then made once).
    """

    def _sampled(call: Callable[[], Any], warm_up: Callable[[], object], rounds: int = 2) -> list[Any]:
        warm_up()
        samples: list[Any] = []
        with quiet():  # once for all rounds, or pytest-benchmark's figures would be those of the garbage collector
            benchmark.pedantic(lambda: samples.append(call()), rounds=rounds, iterations=1)
        return samples

    return _sampled


# What a person sees ---------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Ctrl-C may leave a frame without a line number (seen with Python 3.11 between two tests), and on such a frame pytest's
    own account of the interruption fails, and with it the card: take it out."""
    traceback: Any = excinfo.tb
    while traceback.tb_next is not None:
        if traceback.tb_next.tb_lineno is None:
            traceback.tb_next = traceback.tb_next.tb_next
        else:
            traceback = traceback.tb_next


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Verdicts in their own words, in verbose output and in the summary."""
    said = str(dict(getattr(report, "user_properties", ())).get("verdict", ""))  # a module's report has none
    if report.passed and report.when == "call" and said.startswith(Word.HOLDS):
        return "passed", ".", Word.HOLDS
    if report.failed and report.when != "teardown":  # in setup too: a fixture may run out of memory
        for word in (Word.REFUTED, Word.INCONCLUSIVE):
            if said.startswith(word):
                return "failed", word[0], word
    if report.skipped and said.startswith(Word.NOT_JUDGED):
        return "skipped", "s", Word.NOT_JUDGED
    return None


@pytest.hookimpl(trylast=True)  # below the table of pytest-benchmark: the verdicts are what a reader should end on
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    suite = config.stash.get(SESSION, None)
    if suite is None or not (suite.ledger.run["cells"] or suite.ledger.run["claims"]):
        return
    from benchmarks.report import card_lines

    terminalreporter.section("the card")
    for line in card_lines(suite.ledger.run, width=min(100, terminalreporter._tw.fullwidth)):
        terminalreporter.write_line(line)
    if PAGE in config.stash:
        terminalreporter.write_line(config.stash[PAGE])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """The report stands before pytest-benchmark writes its own files, which may fail."""
    suite = session.config.stash.get(SESSION, None)
    if suite is not None:
        try:
            _write_report(session, suite)
        except OSError as error:
            session.config.stash[PAGE] = f"no page: {plain(error, 300)}"
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    return (yield)


def _write_report(session: pytest.Session, suite: Session) -> None:
    """The machine as it is now, card.md and index.html. Raises OSError."""
    from benchmarks.report import write_card

    whole = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not session.shouldfail
    try:
        if suite.ledger.begun and not whole:
            suite.ledger.note("source", "a run that was cut short: some of its tests may not have run")
    finally:
        suite.close()
    if suite.ledger.begun:
        write_card(suite.ledger.run, suite.ledger.folder)
        _write_page(session.config, suite.ledger.run, suite.ledger.folder / "index.html")


def _write_page(config: pytest.Config, run: dict[str, object], path: Path) -> None:
    """The page is drawn from what run.json keeps already: whatever goes wrong with it is said, and the run stands."""
    try:
        from benchmarks.page import write_page

        config.stash[PAGE] = f"page: {plain(write_page([run], path), 200)}"
    except Exception as error:
        config.stash[PAGE] = f"no page: {plain(f'{type(error).__name__}: {error}', 300)}"


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Asked when files are saved, and, for --benchmark-compare, before anything is collected: both must tell the same."""
    suite = config.stash.get(SESSION, None) or _new_session(config)
    machine_info["gpu"] = suite.machine["name"] if suite.device == "cuda" else None
    machine_info["driver"] = suite.machine["driver"]
    machine_info["torch"] = suite.machine["versions"].get("torch")
    machine_info["rig"] = suite.rig.record
