"""The client: one asyncio session over HTTP that streams answers and stamps every piece as it arrives.

Speaks to any OpenAI-compatible server, completions or chat. Nothing that a server sends is trusted: responses are bounded
in bytes and seconds, redirects are not followed, TLS is verified, proxies of the environment are not used, and the key
appears in no message. Needs the extra `serving` (aiohttp).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import quote, urlsplit

import aiohttp

from benchmarks.serving.answers import NO_JSON, Answer, Ask, Frames, FrameTooLarge, Outcome, read_piece
from benchmarks.serving.servers import ServerError
from benchmarks.tables import plain

MOST_BYTES = 32 << 20
"""Of one response. An answer of 256 tokens with five alternatives each is some hundred kibibytes."""

ANSWER_S = 60.0
"""How long one answer may take. What our loads ask for takes seconds."""

FIRST_ANSWER_S = 180.0
"""The same for the first ones: servers load models and compile kernels then (a vLLM on two CPU cores took 19 s)."""

LAST_BYTES_S = 0.2
"""How long to wait for the end of a stream whose last frame has come."""

KEEP_S = 3.0
"""How long an idle connection is kept: less than servers do (uvicorn: 5 s), so that none is closed under a request."""

HIDDEN = "[key]"
SHORTEST_HIDDEN = 6
"""Characters of a key that give it away; fewer may be any word's beginning."""


class _Secret(str):
    """A header's value that no traceback shows."""

    def __repr__(self) -> str:
        return HIDDEN


DIALECTS: tuple[Mapping[str, object], ...] = (
    # vLLM, SGLang and others: the length is fixed, and no penalty of the checkpoint's own changes what is greedy.
    {"ignore_eos": True, "repetition_penalty": 1.0, "stream_options": {"include_usage": True}},
    # transformers serve: no token has the id -1, so nothing ends an answer early.
    {"generation_config": json.dumps({"do_sample": False, "eos_token_id": -1, "repetition_penalty": 1.0})},
    {"stream_options": {"include_usage": True}},
    {},
)
"""Fields beside the common ones, from the fullest: the first set that a server accepts is used. Where a server ends
answers early all the same, the lengths tell."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server is: `base` ends in /v1. The key is in no repr."""

    base: str
    key: str | None = field(default=None, repr=False)

    @staticmethod
    def of(url: str, key: str | None = None) -> Endpoint:
        """Raises ServerError for what is no address of a server."""
        if "@" in url:
            raise ServerError("--endpoint holds a user or password: put a key into a variable, --endpoint-key-env VAR")
        host_only = re.match("([^:/?#]*://)?[^/?#]*", url)
        shown = plain(host_only.group() if host_only else "", 120)  # what follows may be a secret
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
            (host or "").encode("idna")  # what a resolver is asked for: it raises on a label that is empty or too long
        except ValueError:
            raise ServerError(f"--endpoint {shown} is no address; give one such as http://127.0.0.1:8000/v1") from None
        if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
            raise ServerError(f"--endpoint {shown} is no address; give one such as http://127.0.0.1:8000/v1")
        if parts.query or parts.fragment:
            raise ServerError(f"--endpoint {shown}: give the address alone, without ? and #")
        if key is not None and parts.scheme == "http" and host not in ("127.0.0.1", "::1", "localhost"):
            raise ServerError(f"--endpoint {shown}: a key would travel readable over http; give an https address")
        if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
            raise ServerError("the key is empty or holds blanks or odd characters: check the variable's value")
        path = parts.path.rstrip("/")
        path = path if path.endswith("/v1") else f"{path}/v1"
        return Endpoint(f"{parts.scheme}://{parts.netloc}{path}", key)

    @property
    def root(self) -> str:
        """Where /metrics is."""
        return self.base.removesuffix("/v1")

    def hide(self, text: object, longest: int = 200) -> str:
        """A text of the server's, for a person: plain, and without the key or, at a cut end, the beginning of it.

        What a server tells is cut here, since a cut key is no longer found; the beginning of one where a body's reading ended
        is hidden too.
        """
        said = str(text)[: 8 * longest]
        if self.key:
            # It is the same one with blanks, control characters or JSON's backslashes within, and as a URL writes it.
            for key in (self.key, quote(self.key, safe="")):
                said = re.sub(r"(?:[^!-~]|\\)*".join(map(re.escape, key)), HIDDEN, said)
            cut = [n for n in range(SHORTEST_HIDDEN, len(self.key)) if said.endswith(self.key[:n])]
            said = said[: -cut[-1]] + HIDDEN if cut else said
        return plain(said, longest)


@dataclass(frozen=True)
class Dialect:
    """How a server is asked: which API, and the fields beside the common ones."""

    chat: bool
    fields: Mapping[str, object]


class Client:
    """Sends asks to one model of one endpoint. Use as an async context manager, `agree` first."""

    def __init__(self, endpoint: Endpoint, model: str | None = None, answer_s: float | None = None) -> None:
        self.endpoint = endpoint
        self.model = model
        self.answer_s = answer_s or ANSWER_S
        self.dialect = Dialect(False, {})
        self.max_len: int | None = None
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        headers = {"User-Agent": "inference-myths", "Accept-Encoding": "identity"}
        if self.endpoint.key:
            headers["Authorization"] = _Secret(f"Bearer {self.endpoint.key}")
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, connect=10),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._http is not None
        await self._http.close()

    async def agree(self, first_s: float | None = None) -> None:
        """Find the model, the API and the fields that this server takes, by short asks of up to `first_s` each.

        Raises ServerError when there are several models to choose from, or no way of asking works.
        """
        await self._choose_model()
        refusals: list[Answer] = []
        for chat in (False, True):
            for fields in DIALECTS:
                self.dialect = Dialect(chat, fields)
                answer = await self.send(Ask("Hello", 2), time.perf_counter(), first_s or FIRST_ANSWER_S)
                if answer.ok:
                    return
                refusals.append(answer)
                if answer.outcome is not Outcome.ERROR or answer.detail.startswith("404"):
                    break  # the fields aren't what it minds
        said = plain(" | ".join(dict.fromkeys(f"{a.outcome} {a.detail}" for a in refusals)), 300)
        if all(a.outcome is Outcome.REFUSED for a in refusals):
            raise ServerError(f"{self.shown} has no room for a question, try again later: {said}")
        raise ServerError(f"{self.shown} answers neither completions nor chat: {said}")

    @property
    def shown(self) -> str:
        """The address, for a person."""
        return self.endpoint.hide(self.endpoint.base)

    async def _choose_model(self) -> None:
        """The model that the user named, else the only one; and its longest conversation, where the server tells."""
        status, text = await self.get(f"{self.endpoint.base}/models")
        try:
            listed = {str(entry["id"]): entry for entry in json.loads(text)["data"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            listed = {}
        if self.model is None:
            if len(listed) > 1:
                names = ", ".join(self.endpoint.hide(name, 60) for name in list(listed)[:8])
                raise ServerError(f"{self.shown} serves {len(listed)} models: choose with --endpoint-model: {names}")
            if not listed:
                said = f"{status or 'no answer'}: {self.endpoint.hide(text)}"
                remedy = "give --endpoint-model, or check the address" if status else "check the address"
                raise ServerError(f"{self.shown}/models names no model ({said}): {remedy}")
            self.model = next(iter(listed))
        told = listed.get(self.model, {}).get("max_model_len")
        self.max_len = told if type(told) is int and told > 0 else None

    async def get(self, url: str, limit_s: float = 10.0) -> tuple[int, str]:
        """Status and text of a small resource; status 0 with the reason when there was no answer."""
        assert self._http is not None
        try:
            async with asyncio.timeout(limit_s), self._http.get(url, allow_redirects=False) as response:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MOST_BYTES:
                        return 0, f"more than {MOST_BYTES:,} bytes"
                return response.status, body.decode("utf-8", "replace")
        except TimeoutError:
            return 0, f"no answer within {limit_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return 0, self.endpoint.hide(_words(error))

    def _body(self, ask: Ask) -> dict[str, object]:
        body: dict[str, object] = {"model": self.model, "max_tokens": ask.output_len, "temperature": 0, "stream": True}
        if self.dialect.chat:
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            body["prompt"] = ask.prompt
        if ask.logprobs:
            body |= (
                {"logprobs": True, "top_logprobs": ask.logprobs} if self.dialect.chat else {"logprobs": ask.logprobs}
            )
        return body | dict(self.dialect.fields)

    async def send(self, ask: Ask, due_s: float, limit_s: float | None = None) -> Answer:
        """One request, streamed. Never raises for what a server or a network does: that is the answer's outcome."""
        assert self._http is not None
        limit_s = limit_s or self.answer_s
        path = "chat/completions" if self.dialect.chat else "completions"
        body = json.dumps(self._body(ask)).encode()
        reading = _Reading(ask, due_s, time.perf_counter())
        try:
            async with (
                asyncio.timeout(limit_s),
                self._http.post(
                    f"{self.endpoint.base}/{path}",
                    data=body,
                    headers={"Content-Type": "application/json", "Accept": "text/event-stream"},
                    allow_redirects=False,
                ) as response,
            ):
                if response.status == 200:
                    await reading.stream(response)
                else:
                    await reading.refusal(response)
        except TimeoutError:
            reading.ends(Outcome.TIMEOUT, f"no end within {limit_s:g} s")
        except FrameTooLarge as error:
            reading.ends(Outcome.TOO_LARGE, str(error))
        except aiohttp.ClientPayloadError:
            reading.ends(Outcome.TRUNCATED, "the connection ended within the answer")
        except (aiohttp.ClientError, OSError) as error:
            began = bool(reading.text_s)
            reading.ends(Outcome.TRUNCATED if began else Outcome.ERROR, _words(error))
        return reading.answer(self.endpoint)


class _Reading:
    """An answer while it is being read."""

    def __init__(self, ask: Ask, due_s: float, submit_s: float) -> None:
        self.ask, self.due_s, self.submit_s = ask, due_s, submit_s
        self.text_s: list[float] = []
        self._text: list[str] = []
        self._tokens: list[str] = []
        self._tops: list[Mapping[str, float]] = []
        self._usage: dict[str, int] = {}
        self._outcome, self._detail = Outcome.TRUNCATED, "the stream ended before the answer did"
        self._retry_after_s: float | None = None
        self._ended = False

    def ends(self, outcome: Outcome, detail: str = "") -> None:
        self._outcome, self._detail = outcome, detail

    async def stream(self, response: aiohttp.ClientResponse) -> None:
        """Reads to the end of the stream: counts may come after the end of the answer. Raises FrameTooLarge."""
        frames, n_bytes = Frames(), 0
        async for chunk in response.content.iter_any():
            now_s = time.perf_counter()
            n_bytes += len(chunk)
            if n_bytes > MOST_BYTES:
                self.ends(Outcome.TOO_LARGE, f"more than {MOST_BYTES:,} bytes")
                return
            if self._take(frames.feed(chunk), now_s):
                with contextlib.suppress(TimeoutError):  # to the very end, so that the connection can serve again
                    async with asyncio.timeout(LAST_BYTES_S):
                        await response.content.read(1024)
                return
        if self._take(frames.rest(), time.perf_counter()) and self._detail == NO_JSON:
            self.ends(Outcome.TRUNCATED, "the stream ended within a frame")

    def _take(self, events: list[str], now_s: float) -> bool:
        """Whether the stream is over for us: its last frame was read, or an error."""
        for data in events:
            if data.strip() == "[DONE]":
                if not self._ended:
                    self.ends(Outcome.TRUNCATED, "the server said it was done and gave no reason to stop")
                return True
            piece = read_piece(data)
            if piece.error:
                self.ends(Outcome.ERROR, piece.error)
                return True
            self._usage |= piece.usage
            if piece.text:
                self.text_s.append(now_s)
                self._text.append(piece.text)
            self._tokens += piece.tokens
            self._tops += piece.top_logprobs
            if piece.finish:
                self._ended = True
                self.ends(Outcome.OK)
        return False

    async def refusal(self, response: aiohttp.ClientResponse) -> None:
        """Why a server didn't answer, from the first of what it says."""
        if 300 <= response.status < 400:
            where = response.headers.get("Location", "nowhere")
            self.ends(Outcome.ERROR, f"{response.status}, a redirect, which is not followed, to {where}")
            return
        said = (await response.content.read(2000)).decode("utf-8", "replace")
        self._retry_after_s = _seconds(response.headers.get("Retry-After"))
        wait = f", retry after {self._retry_after_s:g} s" if self._retry_after_s is not None else ""
        kind = Outcome.REFUSED if response.status in (429, 503) else Outcome.ERROR
        self.ends(kind, f"{response.status}{wait}: {said}")

    def answer(self, endpoint: Endpoint) -> Answer:
        if self._outcome is Outcome.OK and not self.text_s:
            self.ends(Outcome.ERROR, "an answer without content")
        return Answer(
            self.ask,
            self._outcome,
            self.due_s,
            self.submit_s,
            time.perf_counter(),
            tuple(self.text_s),
            "".join(self._text),
            tokens=tuple(self._tokens),
            top_logprobs=tuple(self._tops),
            retry_after_s=self._retry_after_s,
            detail=endpoint.hide(self._detail),
            **self._usage,
        )


def _words(error: Exception) -> str:
    """Why there was no connection or it broke, with the remedy where there is one."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"certificate not trusted: name the file of who signed it in SSL_CERT_FILE: {error.certificate_error}"
    return f"{type(error).__name__}: {error}"


def _seconds(text: str | None) -> float | None:
    """A Retry-After in seconds; its other form, a date, is not read."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
