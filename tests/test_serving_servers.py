"""What is said to start or reach a server, and what its counters are believed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nimbusdb import SYSTEM_TEXT
from benchmarks.serving import Server
from benchmarks.serving.client import Client, Endpoint
from benchmarks.serving.metrics import MOST_SERIES, Change, Snapshot
from benchmarks.serving.servers import CHUNK, MAX_LEN, Plan, ServerError
from tests.fakeserver import Fake, Habits


def plan(root: Path, device: str = "cpu", **given: str) -> Plan | None:
    common: dict[str, str | None] = dict.fromkeys(("endpoint", "model", "key_env", "serve"))
    return Plan.of(**{**common, **given}, environ={"A_KEY": "sk-1"}, root=root, device=device, dtype="float32")


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", ["", " "])
@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--endpoint", {"endpoint": ""}),
        ("--serve", {"serve": ""}),
        ("--endpoint-model", {"endpoint": "https://host/v1", "model": ""}),
        ("--endpoint-key-env", {"endpoint": "https://host/v1", "key_env": ""}),
    ],
)
def test_an_empty_option_is_no_option_left_out(tmp_path: Path, option: str, given: dict[str, str], empty: str) -> None:
    with pytest.raises(ServerError, match=f"{option} is empty"):
        plan(tmp_path, **{name: value or empty for name, value in given.items()})


def test_a_key_in_the_place_of_its_variable_is_not_echoed(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="names no variable") as caught:
        plan(tmp_path, endpoint="https://host/v1", key_env="sk-proj-5")
    assert "sk-" not in str(caught.value)


# Command lines --------------------------------------------------------------------------------------------------------


def commands(tmp_path: Path, serve: str, device: str) -> dict[str, Sequence[str]]:
    program = tmp_path / ".venv-vllm" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.touch()
    planned = plan(tmp_path, device, serve=serve)
    assert planned is not None
    return {launch.name: launch.command(tmp_path / "model", 4321) for launch in planned.launches}


def value(command: Sequence[str], flag: str) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("serve", "n"), [("vllm", 2), ("transformers", 3)])
def test_servers_of_ours_listen_on_this_machine_only(tmp_path: Path, serve: str, n: int, device: str) -> None:
    lines = commands(tmp_path, serve, device).values()
    assert len(lines) == n
    for line in lines:
        assert (value(line, "--host"), value(line, "--port")) == ("127.0.0.1", "4321")


def test_vllm_is_started_with_chunks_and_without(tmp_path: Path) -> None:
    lines = commands(tmp_path, "vllm", "cpu")
    chunked, whole = lines["vLLM"], lines["vLLM whole prefill"]
    assert int(value(chunked, "--max-num-batched-tokens")) == CHUNK
    assert int(value(whole, "--max-num-batched-tokens")) == MAX_LEN
    assert "--enable-chunked-prefill" in chunked and "--no-enable-chunked-prefill" not in chunked
    assert "--no-enable-chunked-prefill" in whole and "--enable-chunked-prefill" not in whole


def test_transformers_is_started_with_chunks_without_and_one_at_a_time(tmp_path: Path) -> None:
    lines = commands(tmp_path, "transformers", "cpu")
    assert int(value(lines["transformers continuous"], "--cb-max-batch-tokens")) == CHUNK
    assert int(value(lines["transformers whole prefill"], "--cb-max-batch-tokens")) == MAX_LEN
    batching = {name for name, line in lines.items() if "--continuous-batching" in line}
    assert batching == {"transformers continuous", "transformers whole prefill"}


# Counters -------------------------------------------------------------------------------------------------------------


def test_a_long_hostile_line_of_counters_costs_no_time() -> None:
    known = "vllm:cache_config_info"
    lines = [
        f"{name}{{{labels[:4000]}}} 1"
        for name in ("vllm:x", known)
        for labels in ("b" * 4000, ',a="' * 1000, 'a="' + "\\" * 4000, "} " * 2000, "," * 4000, f",{' ' * 4000}")
    ]
    begin_s = time.process_time()
    shot = Snapshot.of("\n".join(lines * 20))
    assert shot.kv_tokens is None
    assert time.process_time() - begin_s < 1.0  # quadratic: 0.1 s for one such line


def test_only_series_that_are_known_are_kept() -> None:
    shot = Snapshot.of('vllm:x{a="b"} 1\nvllm:num_requests_running{engine="0"} 2')
    assert set(shot.series) == {"vllm:num_requests_running"}
    assert len(
        Snapshot.of("vllm:num_requests_running 1\n" * (MOST_SERIES + 5)).series["vllm:num_requests_running"]
    ) == (MOST_SERIES)


@pytest.mark.parametrize("values", [("1e308", "1e308"), ("inf", "-inf"), ("nan", "1")])
def test_a_figure_that_is_no_number_is_unknown(values: tuple[str, str]) -> None:
    shot = Snapshot.of("\n".join(f'vllm:num_requests_running{{engine="{v}"}} {v}' for v in values))
    assert shot.figure("running") is None
    assert shot.record == {}


@pytest.mark.parametrize(
    ("blocks", "size"), [("²", "1"), ("1", "²"), ("٣", "1"), ("9" * 2000, "9" * 2000), ("-1", "1")]
)
def test_blocks_that_are_no_count_hold_unknown_tokens(blocks: str, size: str) -> None:
    assert Snapshot.of(f'vllm:cache_config_info{{num_gpu_blocks="{blocks}",block_size="{size}"}} 1').kv_tokens is None


def test_labels_are_told_apart_with_blanks_between_and_commas_within() -> None:
    line = 'vllm:cache_config_info{a="x,block_size=\\"7\\"", block_size="16" ,num_gpu_blocks="3"} 1'
    assert Snapshot.of(line).kv_tokens == 48


def changed(before: dict[str, float], after: dict[str, float]) -> Change:
    return Change(*(Snapshot.of("\n".join(f"vllm:{k} {v}" for k, v in told.items())) for told in (before, after)))


HITS, QUERIES = "prefix_cache_hits_total", "prefix_cache_queries_total"
QUEUE_S, QUEUED = "request_queue_time_seconds_sum", "request_queue_time_seconds_count"


def test_a_cache_that_had_more_than_it_was_asked_for_has_no_hit_share() -> None:
    assert changed({HITS: 0, QUERIES: 0}, {HITS: 100, QUERIES: 100}).hit_share == 1
    assert changed({HITS: 0, QUERIES: 0}, {HITS: 500, QUERIES: 100}).hit_share is None


def test_growth_beyond_all_numbers_is_unknown() -> None:
    leap = changed({QUEUE_S: -1.7e308, QUEUED: 1, HITS: -1.7e308}, {QUEUE_S: 1.7e308, QUEUED: 2, HITS: 1.7e308})
    assert leap.grown("queue_s") is leap.mean_queue_s is leap.grown("prefix_hits") is None
    assert changed({QUEUE_S: 0, QUEUED: 0}, {QUEUE_S: 1e300, QUEUED: 1e-300}).mean_queue_s is None


# A server's counts of tokens ------------------------------------------------------------------------------------------


class Counting(Fake):
    """Calls every prompt so many tokens long."""

    def __init__(self, prompt_tokens: int) -> None:
        super().__init__(Habits())
        self.told = prompt_tokens

    async def _frames(self, prompt: str, n: int, chat: bool) -> Any:
        async for frame in super()._frames(prompt, n, chat):
            yield frame.replace(
                f'"prompt_tokens": {len(prompt.split())}'.encode(), f'"prompt_tokens": {self.told}'.encode()
            )


@pytest.mark.parametrize(
    ("prompt_tokens", "believed"), [(1, False), (600, False), (800, True), (7000, True), (8000, True), (10**7, False)]
)
def test_counts_that_no_tokenizer_gives_make_no_prompts(prompt_tokens: int, believed: bool) -> None:
    with Counting(prompt_tokens) as server:
        one = Server("pretend", Client(Endpoint.of(server.url)))
        try:
            if believed:
                assert one.open().prompts.chars_per_token == len(SYSTEM_TEXT) / prompt_tokens
            else:
                with pytest.raises(
                    ServerError, match=f"counts {prompt_tokens:,} tokens in {len(SYSTEM_TEXT):,} characters"
                ):
                    one.open()
        finally:
            one.close()
