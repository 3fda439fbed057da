"""An OpenAI-compatible server that pretends, on a loopback port within this process: it behaves as its Habits say."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Habits:
    """What the server does. Seconds are real, so they are small; `write` sends an answer's frames over the wire."""

    seats: int = 64
    prefill_s: float = 0.0
    step_s: float = 0.002
    eos_after: int | None = None
    chat_only: bool = False
    strict: tuple[str, ...] = ()
    usage: bool = True
    models: tuple[str, ...] = ("pretend",)
    status: int = 200
    refuse_above: int | None = None
    longest: int | None = None
    hoards: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    metrics: Callable[[Fake], str] | None = None
    text: Callable[[str, int, int], str] = lambda prompt, i, running: f" w{hash((prompt, i)) % 997}"
    frames: Callable[[bytes], list[bytes]] = lambda stream: [stream]
    role_first: bool = False
    hangs_after: int | None = None
    dies_after: int | None = None
    flood: bool = False
    done: bool = True


class Fake:
    """The server while it runs; counts what it was asked and how many ran at once."""

    def __init__(self, habits: Habits) -> None:
        self.habits = habits
        self.port = 0
        self.asked: list[dict[str, Any]] = []
        self.seen_headers: list[dict[str, str]] = []
        self.running = self.most = self.prompt_tokens = 0
        self.loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._server = self.loop.run_until_complete(asyncio.start_server(self._client, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self._seats = asyncio.Semaphore(self.habits.seats)
        self._ready.set()
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0.01))
        self._server.close()
        self.loop.close()

    def __enter__(self) -> Fake:
        self._thread.start()
        assert self._ready.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *rest = head.decode().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (r.partition(":") for r in rest if r)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.seen_headers.append(headers)
                await self._serve(line.split()[1], json.loads(body) if body else {}, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _plain(self, writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str]) -> None:
        extra = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body)
        await writer.drain()

    async def _serve(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        habits = self.habits
        if path == "/metrics":
            known = habits.metrics is not None
            text = habits.metrics(self) if habits.metrics else ""
            return await self._plain(writer, 200 if known else 404, text.encode(), {})
        if path == "/v1/models":
            listed = {"data": [{"id": name, "max_model_len": 512} for name in habits.models]}
            return await self._plain(writer, 200, json.dumps(listed).encode(), {})
        self.asked.append(body)
        if habits.status != 200 or (habits.refuse_above is not None and self.running >= habits.refuse_above):
            return await self._plain(
                writer, habits.status if habits.status != 200 else 429, habits.body, habits.headers
            )
        chat = path.endswith("chat/completions")
        if habits.chat_only and not chat:
            return await self._plain(writer, 404, b"no such path", {})
        if unknown := set(body) & set(habits.strict):
            return await self._plain(writer, 422, f"Unexpected fields: {unknown}".encode(), {})
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        if habits.longest is not None and len(prompt.split()) > habits.longest:
            return await self._plain(writer, 400, b"too long", {})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        async with self._seats:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                frames = self._frames(prompt, body["max_tokens"], chat)
                if habits.hoards:
                    whole = b"".join([stream async for stream in frames])
                    writer.write(f"{len(whole):x}\r\n".encode() + whole + b"\r\n")
                async for stream in frames:
                    for part in habits.frames(stream):
                        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                        await writer.drain()
                        await asyncio.sleep(0)
            finally:
                self.running -= 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _frames(self, prompt: str, n: int, chat: bool) -> AsyncIterator[bytes]:
        habits, running = self.habits, self.running

        def frame(choice: dict[str, Any] | None, **more: Any) -> bytes:
            return b"data: " + json.dumps({"choices": [choice] if choice else [], **more}).encode() + b"\n\n"

        def content(text: str) -> dict[str, Any]:
            return {"delta": {"content": text}} if chat else {"text": text}

        if habits.role_first:
            yield frame({"delta": {"role": "assistant", "content": ""}})
        words = len(prompt.split())
        self.prompt_tokens += words
        await asyncio.sleep(habits.prefill_s)
        n = min(n, habits.eos_after or n)
        for i in range(n):
            if habits.hangs_after == i:
                await asyncio.sleep(30)
            if habits.dies_after == i:
                raise ConnectionError
            while habits.flood:
                yield b"data: " + b"x" * (1 << 18)
            yield frame(content(habits.text(prompt, i, running)))
            await asyncio.sleep(habits.step_s)
        usage = {"prompt_tokens": words, "completion_tokens": n} if habits.usage else None
        yield frame(content("") | {"finish_reason": "length"})
        if usage:
            yield frame(None, usage=usage)
        if habits.done:
            yield b"data: [DONE]\n\n"


@contextmanager
def fake(**habits: Any) -> Iterator[Fake]:
    with Fake(Habits(**habits)) as running:
        yield running
