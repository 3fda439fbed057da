"""The client against servers that pretend, lie, break and attack."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving.answers import (
    Answer,
    Ask,
    Frames,
    FrameTooLarge,
    Outcome,
    failures,
    most_at_once,
    percentile,
    read_piece,
)
from benchmarks.serving.client import HIDDEN, Client, Endpoint
from benchmarks.serving.servers import ServerError
from tests.fakeserver import fake

KEY = "sk-secret-7f3a"


def asked(url: str) -> Answer:
    """One answer, after the client and the server have agreed."""

    async def run() -> Answer:
        async with Client(Endpoint.of(url)) as client:
            await client.agree()
            return await client.send(Ask("Hello there", 6), time.perf_counter())

    return asyncio.run(run())


def unagreed(url: str, *, answer_s: float = 0.3, key: str | None = None) -> Answer:
    """One answer of a server with which no agreement would come about."""

    async def run() -> Answer:
        async with Client(Endpoint.of(url, key), "pretend", answer_s) as client:
            return await client.send(Ask("Hello", 6), time.perf_counter())

    return asyncio.run(run())


def refusal(url: str, model: str | None = None) -> str:
    async def run() -> None:
        async with Client(Endpoint.of(url), model) as client:
            await client.agree(first_s=1.0)

    with pytest.raises(ServerError) as caught:
        asyncio.run(run())
    return str(caught.value)


# Frames ---------------------------------------------------------------------------------------------------------------


EVENTS = ['{"a": "é€𝄞"}', "[DONE]", "x", ""]


@given(
    st.lists(st.sampled_from(EVENTS), max_size=5),
    st.lists(st.integers(1, 7), max_size=40),
    st.sampled_from(["\n", "\r\n"]),
)
def test_frames_are_the_same_however_the_bytes_are_split(events: list[str], cuts: list[int], end: str) -> None:
    stream = "".join(f": a comment{end}data: {e}{end}{end}" for e in events).encode()
    frames, got = Frames(), []
    while stream:
        n = cuts.pop() if cuts else len(stream)
        got += frames.feed(stream[:n])
        stream = stream[n:]
    assert got == events


def test_a_frame_without_an_end_is_not_kept_for_ever() -> None:
    frames = Frames()
    frames.feed(b"data: " + b"x" * (1 << 19))
    with pytest.raises(FrameTooLarge):
        frames.feed(b"x" * (1 << 19))


@pytest.mark.parametrize(
    "data", ["", "nonsense", "[1]", "[" * 100_000, "null", '{"error": {"message": "out of memory"}}']
)
def test_what_is_no_frame_of_a_stream_is_an_error_and_no_content(data: str) -> None:
    piece = read_piece(data)
    assert piece.error
    assert not piece.text


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"text": "a"}, "a"),
        ({"delta": {"role": "assistant", "content": ""}}, ""),
        ({"delta": {"role": "assistant"}}, ""),
        ({"delta": {"content": "b"}}, "b"),
        ({"delta": {"reasoning_content": "c"}}, "c"),
        ({"delta": {"tool_calls": [{"name": "d"}]}}, '[{"name": "d"}]'),
        ({"text": 7, "delta": "no"}, ""),
    ],
)
def test_content_is_what_the_model_said(choice: dict[str, Any], text: str) -> None:
    assert read_piece(json.dumps({"choices": [choice]})).text == (text if "delta" not in choice or text else "")


@pytest.mark.parametrize("count", [-1, 1.5, True, "7", None, 10**12])
def test_a_count_that_is_none_stays_unknown(count: object) -> None:
    piece = read_piece(json.dumps({"choices": [], "usage": {"completion_tokens": count, "prompt_tokens": 3}}))
    assert piece.usage == {"prompt_tokens": 3}


@pytest.mark.parametrize(
    "told", [{"tokens": 7}, {"tokens": ["a"], "top_logprobs": 7}, {"content": [{"token": "a", "top_logprobs": 7}]}]
)
def test_logprobs_of_no_form_are_none(told: dict[str, Any]) -> None:
    piece = read_piece(json.dumps({"choices": [{"text": "a", "logprobs": told}]}))
    assert piece.text == "a" and not any(map(dict, piece.top_logprobs))


def test_logprobs_of_either_form_are_read_and_odd_ones_left_out() -> None:
    odd = {"b": float("nan"), "c": 10**400, "d": "x", "e": True}
    flat = {"tokens": ["a"], "top_logprobs": [{"a": -0.5, **odd}]}
    chat = {
        "content": [{"token": "a", "top_logprobs": [{"token": t, "logprob": v} for t, v in {"a": -0.5, **odd}.items()]}]
    }
    for told in (flat, chat):
        piece = read_piece(json.dumps({"choices": [{"text": "a", "logprobs": told}]}))
        assert piece.tokens == ("a",)
        assert piece.top_logprobs[0]["a"] == -0.5
        assert set(piece.top_logprobs[0]) <= {"a", "e"}
    assert (
        read_piece(json.dumps({"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "top_logprobs": []}}]})).tokens
        == ()
    )


# One answer -----------------------------------------------------------------------------------------------------------


def test_ttft_ends_at_the_first_content_and_not_at_the_role() -> None:
    with fake(chat_only=True, role_first=True, prefill_s=0.1) as server:
        answer = asked(server.url)
    assert answer.ok
    assert 0.1 <= answer.ttft_s < 2
    assert (answer.output_tokens, len(answer.text_s)) == (6, 6)
    assert answer.tpot_s == pytest.approx((answer.text_s[-1] - answer.text_s[0]) / 5)


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_frames_split_or_merged_on_the_wire_give_the_same_answer(size: int) -> None:
    with fake() as server:
        whole = asked(server.url)
    with fake(frames=lambda s: [s[i : i + size] for i in range(0, len(s), size)]) as server:
        split = asked(server.url)
    assert (split.text, split.output_tokens, split.outcome) == (whole.text, 6, Outcome.OK)


def test_two_tokens_in_one_frame_count_as_the_server_counts() -> None:
    with fake(frames=lambda s: [s], text=lambda p, i, r: " a b") as server:
        answer = asked(server.url)
    assert answer.output_tokens == 6


def test_counts_that_a_server_does_not_tell_stay_unknown() -> None:
    with fake(usage=False) as server:
        answer = asked(server.url)
    assert answer.ok
    assert answer.output_tokens is answer.tpot_s is None
    assert answer.shortfall == "the server tells no token counts"


def test_an_answer_that_ended_early_is_seen_by_its_length() -> None:
    with fake(eos_after=3) as server:
        assert asked(server.url).shortfall == "3 tokens instead of 6"


def test_a_server_that_knows_other_fields_is_asked_in_its_own_way() -> None:
    with fake(strict=("ignore_eos", "repetition_penalty", "stream_options")) as server:
        assert asked(server.url).ok
        assert server.asked[0]["ignore_eos"] is True
        assert "ignore_eos" not in server.asked[-1]
        assert json.loads(server.asked[-1]["generation_config"])["do_sample"] is False
    assert all(body["temperature"] == 0 for body in server.asked)


def test_a_stream_without_done_is_whole_when_it_gave_a_reason_to_stop() -> None:
    with fake(done=False) as server:
        assert asked(server.url).ok


# Failures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("habits", "outcome", "said"),
    [
        ({"status": 429, "headers": {"Retry-After": "7"}}, Outcome.REFUSED, "429, retry after 7 s"),
        ({"status": 503}, Outcome.REFUSED, "503"),
        ({"status": 500, "body": b"\x1b[31mboom\x00"}, Outcome.ERROR, "500: ?[31mboom?"),
        ({"hangs_after": 2}, Outcome.TIMEOUT, "no end within 0.3 s"),
        ({"hangs_after": 0}, Outcome.TIMEOUT, "no end within 0.3 s"),
        ({"dies_after": 2}, Outcome.TRUNCATED, "ended within the answer"),
        ({"flood": True}, Outcome.TOO_LARGE, "bytes"),
        ({"text": lambda p, i, r: ""}, Outcome.ERROR, "without content"),
        ({"status": 302, "headers": {"Location": "http://elsewhere.example/v1"}}, Outcome.ERROR, "not followed"),
    ],
)
def test_a_failure_is_an_outcome_of_its_own_and_never_a_fast_answer(
    habits: dict[str, Any], outcome: Outcome, said: str
) -> None:
    with fake(**habits) as server:
        answer = unagreed(server.url, answer_s=0.3 if "hangs_after" in habits else 3.0)
    assert answer.outcome is outcome
    assert said in answer.detail
    assert failures([answer])
    assert answer.shortfall
    if outcome is Outcome.REFUSED and "headers" in habits:
        assert answer.retry_after_s == 7


def test_a_server_that_is_not_there_is_one_line() -> None:
    said = refusal("http://127.0.0.1:9")
    assert "names no model" in said
    assert "\n" not in said


def test_a_redirect_takes_the_key_nowhere() -> None:
    with fake() as elsewhere, fake(status=307, headers={"Location": elsewhere.url}) as server:
        unagreed(server.url, key=KEY)
    assert server.seen_headers[-1]["authorization"] == f"Bearer {KEY}"
    assert not elsewhere.seen_headers


def test_the_key_is_in_no_message_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with fake(status=500, body=f"your key {KEY} is bad".encode()) as server:
        answer = unagreed(server.url, key=KEY)
        endpoint = Endpoint.of(server.url, KEY)
    assert f"your key {HIDDEN} is bad" in answer.detail
    assert KEY not in repr(answer) + repr(endpoint) + caplog.text


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with fake() as server:
        assert asked(server.url).ok


def test_several_models_want_a_choice_and_none_wants_a_name() -> None:
    with fake(models=("a", "b\x1b[1m")) as server:
        said = refusal(server.url)
        assert "choose with --endpoint-model: a, b?[1m" in said
    with fake(models=()) as server:
        assert "--endpoint-model" in refusal(server.url)


def test_a_server_that_answers_nothing_of_ours_is_one_line() -> None:
    with fake(status=418, body=b"teapot") as server:
        assert "answers neither completions nor chat: error 418: teapot" in refusal(server.url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "no address"),
        ("ftp://host/v1", "no address"),
        ("http://", "no address"),
        ("http://host:notaport", "no address"),
        ("http://user:pass@host/v1", "--endpoint-key-env"),
        ("http://host/v1?key=1", "without ?"),
        ("http://host\x1b/v1", "no address"),
        ("https://a..b/v1", "no address"),
        (f"https://{'x' * 64}.org/v1", "no address"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, said: str) -> None:
    with pytest.raises(ServerError, match=said.replace("?", r"\?")):
        Endpoint.of(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://host/v1?key=SECRET",
        "http://host:notaport/v1?key=SECRET",
        "http://host/SECRET/v1#x",
        "ftp://host/v1?u=http://SECRET",
        "http://user:SECRET@[::1/v1",
        "http://user:SE/SECRET@host/v1",
        "host?key=SECRET",
    ],
)
def test_a_refused_address_echoes_no_secret(url: str) -> None:
    with pytest.raises(ServerError) as refused:
        Endpoint.of(url)
    assert "SE" not in str(refused.value)


def test_a_key_travels_only_where_nobody_reads_it() -> None:
    with pytest.raises(ServerError, match="https"):
        Endpoint.of("http://example.org/v1", KEY)
    assert Endpoint.of("https://example.org", KEY).base == "https://example.org/v1"
    for bad in ("", "two words", "new\nline"):
        with pytest.raises(ServerError, match="key"):
            Endpoint.of("https://example.org", bad)


# Many answers ---------------------------------------------------------------------------------------------------------


def answer(first_s: float, last_s: float) -> Answer:
    return Answer(Ask("p", 2), Outcome.OK, 0.0, 0.0, last_s, (first_s, last_s), "a b", output_tokens=2)


def test_how_many_ran_at_once_is_counted_from_their_content() -> None:
    assert most_at_once([answer(0, 2), answer(1, 3), answer(2, 4)]) == 2
    assert most_at_once([answer(0, 1), answer(1, 2)]) == 1
    assert most_at_once([]) == 0


@given(st.lists(st.floats(0, 9), min_size=1, max_size=30), st.floats(0.01, 1))
def test_a_percentile_is_a_value_that_was_measured(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values) - 1e-9


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
