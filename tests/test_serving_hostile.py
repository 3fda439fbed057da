"""The client against bytes on the wire that a server should not send: secrets, endless answers, redirects, certificates."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import benchmarks.serving.client
from benchmarks.serving.answers import Answer, Ask, Frames, Outcome, read_piece
from benchmarks.serving.client import HIDDEN, Client, Dialect, Endpoint
from benchmarks.serving.servers import ServerError
from tests.fakeserver import fake

KEY = "sk-secret-7f3a-99"

Reply = Callable[[str, dict[str, Any]], bytes]
"""What a server says to a path and a body."""


def plainly(status: int, body: bytes, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}Connection: close\r\n\r\n".encode() + body


def frame(choice: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
END = frame({"text": "", "finish_reason": "length"}) + b"data: [DONE]\n\n"
MODELS = plainly(200, b'{"data": [{"id": "m"}]}')


@asynccontextmanager
async def saying(reply: bytes | Reply | None, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server on this machine that says one thing, or nothing for None; its address."""

    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b"{}"
        if reply is None:
            await reader.read()  # until the client has had enough
        else:
            writer.write(reply if isinstance(reply, bytes) else reply(head.split()[1], json.loads(body)))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        await asyncio.gather(*filter(None, served), return_exceptions=True)


def client_of(
    reply: bytes | Reply | None,
    use: Callable[[Client], Awaitable[Any]],
    *,
    tls: ssl.SSLContext | None = None,
    model: str | None = None,
) -> Any:
    """What a client with a key gets from a server that says this."""

    async def run() -> Any:
        async with saying(reply, tls) as url, Client(Endpoint.of(url, KEY), model, 3.0) as client:
            return await use(client)

    return asyncio.run(run())


def answer_to(reply: bytes | Reply) -> Answer:
    answer: Answer = client_of(reply, lambda client: client.send(Ask("Hi", 2), time.perf_counter()))
    return answer


def refusal(reply: bytes | Reply, **given: Any) -> str:
    with pytest.raises(ServerError) as caught:
        client_of(reply, lambda client: client.agree(1.0), **given)
    return str(caught.value)


# The key --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        plainly(500, b"x" * 128 + KEY.encode()),
        plainly(500, b" " * 1585 + KEY.encode()),
        plainly(500, b"\0".join([b"key ", *(bytes([c]) for c in KEY.encode())])),
        plainly(302, b"", f"Location: http://127.0.0.1:1/?{'q' * 70}={KEY}\r\n"),
        STREAM + frame({}, error={"message": " " * 285 + KEY}),
    ],
    ids=["after filler", "cut by us", "split", "in a redirect", "in a stream"],
)
def test_no_part_of_the_key_comes_back_out_of_what_a_server_says(reply: bytes) -> None:
    answer = answer_to(reply)
    assert not answer.ok
    assert KEY[:6] not in answer.detail.replace("?", "")
    assert HIDDEN in answer.detail


@pytest.mark.parametrize("n", range(6, len(KEY) + 1))
def test_the_beginning_of_a_key_at_a_cut_end_is_hidden(n: int) -> None:
    endpoint = Endpoint.of("https://host", KEY)
    assert endpoint.hide(f"said {KEY[:n]}") == f"said {HIDDEN}"
    assert KEY[:6] not in endpoint.hide(" " * (8 * 60 - n) + KEY, 60)
    assert Endpoint.of("https://host", "secretsecret-1").hide("secretsecret") == HIDDEN


def test_a_key_shorter_than_what_gives_one_away_is_hidden_whole() -> None:
    assert Endpoint.of("https://host", "abc").hide("abc ab abcd") == f"{HIDDEN} ab {HIDDEN}d"
    odd = Endpoint.of("https://host", "sk/live+01")
    assert odd.hide(r'{"error": "sk\/live+01"} ?key=sk%2Flive%2B01') == f'{{"error": "{HIDDEN}"}} ?key={HIDDEN}'


def test_no_traceback_with_its_variables_shows_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async def raises(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", raises)
    with pytest.raises(RuntimeError) as caught:
        answer_to(MODELS)
    shown = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "headers = " in shown
    assert KEY not in shown


# Streams --------------------------------------------------------------------------------------------------------------


def test_a_stream_that_ends_within_a_frame_is_truncated() -> None:
    begun = STREAM + frame({"text": " a"})
    for cut in (b'data: {"cho', END[:-3], b'data: {"cho\n'):
        assert answer_to(begun + cut).outcome is Outcome.TRUNCATED
    assert answer_to(begun + b"data: nonsense\n\n" + END).outcome is Outcome.ERROR
    assert answer_to(begun + END.rstrip(b"\n")).outcome is Outcome.OK


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_server_broke_off_is_a_failure(reason: str) -> None:
    answer = answer_to(STREAM + frame({"text": " a"}) + frame({"text": "", "finish_reason": reason}))
    assert answer.outcome is Outcome.ERROR
    assert f"finish_reason {reason}" in answer.detail


def test_a_byte_order_mark_costs_no_first_token() -> None:
    stream = b"\xef\xbb\xbf" + frame({"text": " a"}) + frame({"text": " b"})
    frames = Frames()
    events = [event for i in range(len(stream)) for event in frames.feed(stream[i : i + 1])]
    assert [read_piece(event).text for event in events] == [" a", " b"]


def test_a_stream_of_small_frames_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.serving.client, "MOST_BYTES", 10_000)
    answer = answer_to(STREAM + frame({"text": " a"}) * 1000 + END)
    assert answer.outcome is Outcome.TOO_LARGE
    assert "more than 10,000 bytes" in answer.detail


@pytest.mark.parametrize("chat", [False, True])
def test_logprobs_are_asked_for_when_they_are_wanted(chat: bool) -> None:
    async def run(url: str) -> None:
        async with Client(Endpoint.of(url), "pretend") as client:
            client.dialect = Dialect(chat, {})
            for wanted in (0, 5):
                await client.send(Ask("Hi", 2, wanted), time.perf_counter())

    with fake() as server:
        asyncio.run(run(server.url))
    without, asked = server.asked
    assert not {"logprobs", "top_logprobs"} & set(without)
    assert (asked["logprobs"], asked.get("top_logprobs")) == ((True, 5) if chat else (5, None))


# Small resources ------------------------------------------------------------------------------------------------------


def test_a_small_resource_is_bounded_in_bytes_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def get(client: Client) -> tuple[int, str]:
        async with asyncio.timeout(2):
            return await client.get(client.endpoint.base, 0.1)

    monkeypatch.setattr(benchmarks.serving.client, "MOST_BYTES", 10_000)
    assert client_of(plainly(200, b"x" * 10_000), get) == (200, "x" * 10_000)
    assert client_of(plainly(200, b"x" * 10_001), get) == (0, "more than 10,000 bytes")
    assert client_of(None, get) == (0, "no answer within 0.1 s")


def test_a_redirected_list_of_models_takes_the_key_nowhere() -> None:
    with fake() as elsewhere:
        said = refusal(plainly(307, b"", f"Location: {elsewhere.url}/models\r\n"))
    assert "names no model (307" in said
    assert not elsewhere.seen_headers


# Agreeing -------------------------------------------------------------------------------------------------------------


def test_a_number_in_a_refusal_is_not_read_as_its_status() -> None:
    def reply(path: str, body: dict[str, Any]) -> bytes:
        if path.endswith("/models"):
            return MODELS
        if "ignore_eos" in body:
            return plainly(422, b"unknown fields; request id 5404ab")
        return STREAM + frame({"text": " a"}) + END

    async def agreed(client: Client) -> Dialect:
        await client.agree(1.0)
        return client.dialect

    dialect = client_of(reply, agreed)
    assert not dialect.chat
    assert "generation_config" in dialect.fields


def test_a_path_that_is_missing_is_asked_for_once() -> None:
    async def agreed(url: str) -> None:
        async with Client(Endpoint.of(url)) as client:
            await client.agree(1.0)

    with fake(chat_only=True) as server:
        asyncio.run(agreed(server.url))
    assert ["messages" in body for body in server.asked] == [False, True]


def test_a_server_that_is_busy_when_first_asked_is_called_busy() -> None:
    def reply(path: str, body: dict[str, Any]) -> bytes:
        return MODELS if path.endswith("/models") else plainly(429, b"slow down", "Retry-After: 2\r\n")

    said = refusal(reply)
    assert "has no room for a question, try again later: refused 429, retry after 2 s: slow down" in said


@pytest.mark.parametrize("model", [None, "m"])
def test_a_certificate_that_nobody_vouches_for_gets_no_key_and_is_named(model: str | None) -> None:
    seen: list[str] = []

    def reply(path: str, body: dict[str, Any]) -> bytes:
        seen.append(path)
        return MODELS

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(Path(__file__).with_name("self_signed.pem"))
    said = refusal(reply, tls=tls, model=model)
    assert "certificate not trusted: name the file of who signed it in SSL_CERT_FILE" in said
    assert "self-signed" in said
    assert "--endpoint-model" not in said
    assert not seen
