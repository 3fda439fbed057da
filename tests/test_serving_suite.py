"""Serving as its users meet it: options, servers that pretend behind an address, servers of our own, and what is kept."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

import benchmarks.serving
import benchmarks.serving.client
import benchmarks.serving.loads
from benchmarks.rigs import NIMBUS, Loader, Rig, RigError, Source, choose
from benchmarks.serving import Broken, NotServed, Server, measures
from benchmarks.serving.answers import Ask
from benchmarks.serving.client import Client, Endpoint
from benchmarks.serving.servers import Fleet, Launch, Plan, Process, ServerError, model_folder
from benchmarks.verdicts import Word
from tests.fakeserver import Fake, fake
from tests.pretend import verdict
from tests.test_suite import MYTHS, ROOT, Ran, pytest_here

SERVING = MYTHS / "test_serving.py"


@pytest.fixture(scope="module", autouse=True)
def no_cuda() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(benchmarks.serving.client, "FIRST_ANSWER_S", 0.5)
        patch.setattr(benchmarks.serving.client, "ANSWER_S", 1.0)
        patch.setattr(benchmarks.serving, "FLOOR_S", 0.1)
        patch.setattr(
            benchmarks.serving.loads, "CLIENT_BUSY", 9.0
        )  # the server that pretends computes in this process too
        patch.setenv("COLUMNS", "200")
        patch.delenv("PYTEST_XDIST_WORKER", raising=False)
        yield


def asked(server: Fake, report: Path, tests: str, *options: str) -> Ran:
    return pytest_here(report, SERVING, "-v", "-k", tests, "--endpoint", server.url, "--budget", "0.2", *options)


@contextmanager
def opened(server: Fake, **known: Any) -> Iterator[Server]:
    one = Server("pretend", Client(Endpoint.of(server.url), answer_s=20.0), **known)
    try:
        yield one.open()
    finally:
        one.close()


# Options --------------------------------------------------------------------------------------------------------------


def plan(**given: Any) -> Plan | None:
    common = {"endpoint": None, "model": None, "key_env": None, "serve": None, "environ": {"A_KEY": "sk-1234"}}
    return Plan.of(**{**common, "root": ROOT / "nowhere", "device": "cpu", "dtype": "float32", **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"serve": "sglang"}, "--serve sglang: choose vllm or transformers"),
        ({"serve": "vllm", "endpoint": "http://127.0.0.1:9/v1"}, "contradict"),
        ({"model": "x"}, "--endpoint-model goes with --endpoint"),
        ({"key_env": "A_KEY"}, "--endpoint-key-env goes with --endpoint"),
        ({"endpoint": "https://h/v1", "key_env": "NO_SUCH"}, "names no variable of the environment"),
        ({"endpoint": "http://example.org/v1", "key_env": "A_KEY"}, "readable over http"),
        ({"endpoint": "nowhere"}, "no address; give one such as"),
    ],
)
def test_options_that_contradict_or_lack_something_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ServerError, match=said) as caught:
        plan(**given)
    assert "sk-1234" not in str(caught.value)


def test_a_wrong_option_is_one_line(tmp_path: Path) -> None:
    ran = pytest_here(tmp_path / "reports", SERVING, "-k", "sixteen_users_get", "--serve", "sglang")
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert "--serve sglang: choose vllm or transformers" in ran.error


def test_what_a_server_needs_and_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServerError, match="make myths-serving"):
        plan(serve="vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"pip install -e '.\[serving\]'"):
        plan(serve="transformers")
    assert plan() is None


def test_without_a_server_nothing_is_judged_and_nothing_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.serving, "connect", None)
    ran = pytest_here(tmp_path / "reports", SERVING)
    assert ran.code == pytest.ExitCode.OK
    assert {claim["verdict"] for claim in ran.run["claims"]} == {"NOT JUDGED"}
    assert len(ran.run["claims"]) == 14
    assert all("--endpoint URL" in claim["reason"] for claim in ran.run["claims"])
    assert ran.run["cells"] == []


# Through pytest's door ------------------------------------------------------------------------------------------------


def test_an_endpoint_is_judged_under_its_own_name_and_its_key_is_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret-99")
    names = "pages or users_row or counters or user_alone or one_changed_word"
    with fake(
        step_s=0.001, metrics=lambda f: f"vllm:prompt_tokens_total {f.prompt_tokens}\nvllm:num_requests_running 0"
    ) as server:
        ran = asked(server, tmp_path / "reports", names, "--endpoint-key-env", "MY_KEY")
    engine = f"endpoint 127.0.0.1:{server.port}"
    assert {entry["engine"] for key in ("cells", "claims") for entry in ran.run[key]} == {engine}
    cells = {cell["id"]: cell["figures"] for cell in ran.run["cells"]}
    assert cells["serving.users_16"]["output_tokens_per_s"] > cells["serving.users_1"]["output_tokens_per_s"]
    words = {claim["id"]: (claim["verdict"], claim["reason"]) for claim in ran.run["claims"]}
    assert words["serving.same_tokens"][0] == Word.HOLDS
    assert words["serving.prefix_hits_counted"][0] == Word.NOT_JUDGED
    assert "doesn't tell how many tokens its KV cache" in words["serving.pages_fit_more"][1]
    assert ran.run["servers"][engine]["metrics_before"] == {"running": 0}
    assert server.seen_headers[-1]["authorization"] == "Bearer sk-secret-99"
    kept = "".join(p.read_text() for p in ran.report.iterdir() if p.is_file())
    assert "sk-secret-99" not in kept + ran.said


def test_an_endpoint_alone_needs_no_models_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(self: Loader) -> None:
        raise RigError("the models are not here")

    monkeypatch.setattr(Loader, "check", none_here)
    with fake() as server:
        alone = asked(server, tmp_path / "alone", "users_row and 1", "--rig", "qwen2.5")
        beside = pytest_here(tmp_path / "beside", SERVING, MYTHS / "test_batching.py", "--endpoint", server.url)
    assert alone.code == pytest.ExitCode.OK, alone.out
    assert beside.code == pytest.ExitCode.USAGE_ERROR
    assert "the models are not here" in beside.error


@pytest.mark.parametrize(
    ("habits", "said"),
    [
        (
            {"refuse_above": 8, "headers": {"Retry-After": "2"}, "body": b"slow down"},
            "refused (429, retry after 2 s: slow down",
        ),
        ({"text": lambda p, i, r: " always the same"}, "cached or made up"),
        ({"eos_after": 7}, "7 tokens instead of"),
    ],
)
def test_a_bad_server_decides_nothing_and_is_named(habits: dict[str, Any], said: str) -> None:
    with fake(step_s=0.0005, **habits) as server, opened(server) as one, pytest.raises(Broken) as caught:
        one.closed(one.prompts.many(16), 16)
    assert said in str(caught.value)


def test_a_server_that_hangs_ends_the_run_in_one_line(tmp_path: Path) -> None:
    with fake(hangs_after=1) as server:
        ran = asked(server, tmp_path / "reports", "sixteen_users_get")
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert "answers neither completions nor chat: timeout" in ran.said


def test_a_server_that_dies_during_the_run_is_asked_once_and_not_again() -> None:
    with fake(step_s=0.0005) as server, opened(server) as one:
        one.closed(one.prompts.many(2, 4), 2)
        server.habits.dies_after = 1
        with pytest.raises(Broken, match="2 of 2 requests failed: 2 truncated"):
            one.closed(one.prompts.many(2, 4), 2)
        asked_so_far = len(server.asked)
        with pytest.raises(Broken, match="2 truncated"):
            one.closed(one.prompts.many(2, 4), 2)
        assert len(server.asked) == asked_so_far


def test_a_round_in_which_a_server_held_its_tokens_back_is_measured_again() -> None:
    with fake(step_s=0.002) as server, opened(server) as one:
        one.closed(one.prompts.many(2, 8), 2)
        assert one.disturbance() is None
        server.habits.hoards = True
        one.closed(one.prompts.many(2, 8), 2)
        assert one.disturbance() == "the server held its tokens back"
        assert one.disturbance() is None


def test_one_request_that_a_server_cannot_serve_leaves_the_others_to_be_asked() -> None:
    with fake(step_s=0.0005, longest=200) as server, opened(server) as one:
        with pytest.raises(Broken, match="1 of 1 requests failed"):
            one.closed([Ask(" ".join(["word"] * 400), 4)], 1)
        assert one.closed(one.prompts.many(2, 4), 2).problem is None


# What a server shows from outside -------------------------------------------------------------------------------------


def test_seats_are_found_from_outside() -> None:
    with fake(seats=5, step_s=0.002) as server, opened(server) as one:
        assert one.seats == 5
        assert server.most == 5


def metrics(server: Fake) -> str:
    hits = server.prompt_tokens if server.habits.seats else 0
    return f"vllm:prefix_cache_hits_total {hits}\nvllm:prefix_cache_queries_total {server.prompt_tokens}\n"


@pytest.mark.parametrize(("seats", "word"), [(64, Word.HOLDS), (1, Word.REFUTED)])
def test_pages_are_told_from_reservation(seats: int, word: Word) -> None:
    with fake(seats=seats, step_s=0.0005) as server, opened(server, kv_tokens=1024) as one:
        assert one.max_len == 512
        seen = measures.pages(one)
        for kv_tokens, said in ((100, "holds no conversation"), (512 * 100, "256 chats can't fill it")):
            one.kv_tokens = kv_tokens
            with pytest.raises(NotServed, match=said):
                measures.pages(one)
    assert verdict("serving.pages_fit_more", seen).word is word


def test_counters_that_count_every_prompt_as_a_hit_are_refuted() -> None:
    with fake(step_s=0.0, metrics=metrics) as server, opened(server) as one:
        lying = measures.prefix_hits(one)
    assert verdict("serving.prefix_hits_counted", lying).word is Word.REFUTED  # type: ignore[arg-type]


class Store:
    """A prefix cache that counts as vLLM's does: hits are words that begin a prompt seen before."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.hits = self.queries = 0

    def metrics(self, server: Fake) -> str:
        while len(self.seen) < len(server.asked):
            words = server.asked[len(self.seen)]["prompt"].split()
            self.hits += max((self._common(words, other) for other in self.seen), default=0)
            self.queries += len(words)
            self.seen.append(words)
        return f"vllm:prefix_cache_hits_total {self.hits}\nvllm:prefix_cache_queries_total {self.queries}\n"

    @staticmethod
    def _common(a: list[str], b: list[str]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_honest_counters_hold() -> None:
    store = Store()
    with fake(step_s=0.0, metrics=store.metrics) as server, opened(server) as one:
        seen = measures.prefix_hits(one)
    assert verdict("serving.prefix_hits_counted", seen).word is Word.HOLDS  # type: ignore[arg-type]


def word_of(prompt: str, i: int, running: int) -> str:
    return f" {hash((prompt, i)) % 997}"


@pytest.mark.parametrize(
    ("text", "dtype", "word", "said"),
    [
        (word_of, None, Word.HOLDS, "16 of 16"),
        (lambda p, i, r: word_of(p, i + 100 * (r > 4), 0), "float32", Word.REFUTED, "not a tie"),
        (lambda p, i, r: word_of(p, i + 100 * (r > 4), 0), "float16", Word.INCONCLUSIVE, "without logprobs"),
        (lambda p, i, r: word_of(p, i + 100 * (r > 4), 0), None, Word.INCONCLUSIVE, "without logprobs"),
        (lambda p, i, r: f" {p[:9]}", None, Word.INCONCLUSIVE, "vacuous"),
    ],
)
def test_the_same_tokens_are_told_from_a_crowds_own(text: Any, dtype: str | None, word: Word, said: str) -> None:
    with fake(step_s=0.002, text=text) as server, opened(server, dtype=dtype) as one:
        seen = verdict("serving.same_tokens", measures.same_tokens(one))
    assert seen.word is word
    assert said in seen.line


def test_the_queue_that_a_server_reports_stands_beside_the_ttft() -> None:
    counters = "vllm:request_queue_time_seconds_sum {:g}\nvllm:request_queue_time_seconds_count {}\n"
    with (
        fake(seats=2, step_s=0.002, metrics=lambda f: counters.format(0.004 * len(f.asked), len(f.asked))) as server,
        opened(server, seats=2) as one,
    ):
        figures = measures.queue_cell(one).figures
    assert figures["queue_s"] == pytest.approx(0.004)
    assert figures["mean_ttft_s"] >= 16 * 0.002 / 2  # two of four wait for a whole answer
    assert figures["ttft_less_queue_s"] == pytest.approx(figures["mean_ttft_s"] - 0.004)
    assert 0.002 <= figures["mean_tpot_s"] < figures["mean_ttft_s"]


def test_the_sweep_goes_into_cells() -> None:
    with fake(seats=4, step_s=0.0005) as server, opened(server, seats=4) as one:
        one.prompts.chars_per_token = 4
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measures, "SECONDS_A_STRETCH", 0.05)
            cells = measures.rate_cells(one, 0.0)
    assert [cell.id for cell in cells] == ["serving.rate_0"]
    assert cells[0].figures["good_share"] == 1
    assert cells[0].figures["failed"] == 0


# Processes ------------------------------------------------------------------------------------------------------------

SERVER = """
import http.server, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(f"child {child.pid} key {os.environ.get('MY_KEY')}", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def launch(program: str) -> Launch:
    return Launch("little", lambda folder, port: [sys.executable, "-c", program, str(port)])


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"


def test_a_server_of_ours_is_ended_with_its_children_and_its_log_kept(tmp_path: Path) -> None:
    fleet = Fleet(Plan(("little",), (launch(SERVER),)), tmp_path, tmp_path / "logs")
    process = fleet.processes["little"]
    said = process.log.read_text()
    child = int(said.split()[1])
    assert process.url.startswith("http://127.0.0.1:")
    assert lives(child)
    fleet.stop()
    fleet.stop()
    until = time.monotonic() + 5
    while lives(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not lives(child)
    assert process.gone
    assert process.log.name == "server-little.log"


def test_a_server_that_does_not_start_says_its_last_words(tmp_path: Path) -> None:
    broken = launch("import sys; print('loading'); sys.exit('ValueError: no such model \\x1b[1m')")
    with pytest.raises(ServerError, match=r"didn't start: it ended with code 1: ValueError: no such model \?\[1m; see"):
        Fleet(Plan(("little",), (broken,)), tmp_path, tmp_path)


def test_a_server_that_never_gets_ready_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    process = Process(launch("import time; time.sleep(60)"), tmp_path, tmp_path / "x.log")
    with pytest.raises(ServerError, match="wasn't ready within 0 s"):
        process.wait(0.3)
    process.stop()
    assert process.gone


def test_prompts_are_their_own_from_the_first_word_but_where_a_prefix_is_shared() -> None:
    prompts = benchmarks.serving.Prompts(4.0)
    starts = {ask.prompt.split()[0] for ask in (*prompts.many(3), prompts.long(100, 2), prompts.long(100, 2))}
    assert len(starts) == 5
    one, two, odd = (prompts.after_shared(2, changed).prompt for changed in (None, None, "odd"))
    assert one[:5000] == two[:5000] != odd[:5000]
    assert one != two
    assert one.split()[3:500] == odd.split()[3:500]
    assert len(prompts.long(100, 2).prompt) == pytest.approx(400, rel=0.3)


# The model that is served ---------------------------------------------------------------------------------------------


def test_random_weights_are_served_from_a_folder_in_which_every_token_has_a_text(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(NIMBUS / "target")
    config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size = 64, 64, 2, 2200
    config.num_attention_heads = config.num_key_value_heads = 1
    config.layer_types = config.layer_types[:2]
    config.save_pretrained(tmp_path / "own")
    AutoTokenizer.from_pretrained(NIMBUS / "target").save_pretrained(tmp_path / "own")
    rig = Rig("own", Source(str(tmp_path / "own")), None, "random", "float32", "cpu")
    folder = model_folder(SimpleNamespace(rig=rig, loader=Loader(rig)), tmp_path)  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 2200
    assert len(tokenizer.decode(range(2048, 2200)).split()) == 152
    assert (folder / "model.safetensors").is_file()


def test_trained_weights_in_a_folder_are_served_as_they_are(tmp_path: Path) -> None:
    rig = choose(rig="nimbus", target=None, draft=None, weights="trained", dtype="float32", device="cpu")
    folder = model_folder(SimpleNamespace(rig=rig, loader=Loader(rig)), tmp_path)  # type: ignore[arg-type]
    assert folder == NIMBUS / "target"
    assert not any(tmp_path.iterdir())
