"""Which server answers, and the servers that the suite starts itself: real processes on the loopback interface, ended with
all their children, their logs kept in the report folder."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import usable_cores
from benchmarks.rigs import random_model
from benchmarks.tables import plain

if TYPE_CHECKING:
    from benchmarks.serving.client import Endpoint
    from benchmarks.session import Session

SERVE = ("vllm", "transformers")
READY_S = 300.0
"""How long a server may take until it answers. A vLLM on two cores of a busy machine took 83 s, two at once twice that."""

STOP_S = 10.0

SEATS = 16
"""Sequences that a server of ours runs at once at most, where it can be told: as many as the claims' concurrency."""

CHUNK = 256
"""Prompt tokens that a server of ours reads in one step, beside which running answers go on."""

KV_TOKENS = 6144
"""Tokens of KV cache of a server of ours: one conversation of a rig's 4,096 positions and half another."""

PAGE = 256
"""Tokens of a page of `transformers serve`, its own default: so 24 short chats fill its KV cache."""

MAX_LEN = 4096
"""Positions of one conversation, the smallest rig's."""


class ServerError(Exception):
    """A server can't be had; the message is one line that names the remedy."""


@dataclass(frozen=True)
class Launch:
    """A server to start: its name on the card, its command line, and what is known of it from that.

    `seats` None: nobody told it. `kv_tokens` None: its metrics say. `command` takes the model's folder and the port.
    """

    name: str
    command: Callable[[Path, int], Sequence[str]]
    seats: int | None = None
    kv_tokens: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    accepts: str | None = None


@dataclass(frozen=True)
class Plan:
    """What the options ask for: an endpoint, or servers to start.

    `names` are the engines that claims are judged on. `whole` names for an engine the same server without chunked
    prefill, `alone` the same without batching.
    """

    names: tuple[str, ...]
    launches: tuple[Launch, ...] = ()
    endpoint: Endpoint | None = None
    model: str | None = None
    whole: Mapping[str, str] = field(default_factory=dict)
    alone: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        *,
        endpoint: str | None,
        model: str | None,
        key_env: str | None,
        serve: str | None,
        environ: Mapping[str, str],
        root: Path,
        device: str,
        dtype: str,
    ) -> Plan | None:
        """None when no server was asked for. Raises ServerError for contradictions and for what isn't installed."""
        options = {"--endpoint": endpoint, "--endpoint-model": model, "--endpoint-key-env": key_env, "--serve": serve}
        if empty := [option for option, value in options.items() if value is not None and not value.strip()]:
            raise ServerError(f"{empty[0]} is empty: give it a value or leave it out (is a variable unset?)")
        if endpoint and serve:
            raise ServerError("--endpoint and --serve contradict each other: one names a server, the other starts one")
        if not endpoint and (model or key_env):
            given = "--endpoint-model" if model else "--endpoint-key-env"
            raise ServerError(f"{given} goes with --endpoint URL")
        if not endpoint and not serve:
            return None
        if serve and serve not in SERVE:
            raise ServerError(f"--serve {plain(serve, 40)}: choose {' or '.join(SERVE)}")
        if importlib.util.find_spec("aiohttp") is None:
            raise ServerError("asking a server needs the extra `serving`: pip install -e '.[serving]'")
        if endpoint:
            return _endpoint(endpoint, model, key_env, environ)
        return _vllm(root, device, dtype) if serve == "vllm" else _transformers(device, dtype)


def _endpoint(url: str, model: str | None, key_env: str | None, environ: Mapping[str, str]) -> Plan:
    from benchmarks.serving.client import Endpoint

    if key_env and key_env not in environ:
        # Not echoed: it may be the key itself.
        raise ServerError("--endpoint-key-env names no variable of the environment: give its name, and export it first")
    where = Endpoint.of(url, environ[key_env] if key_env else None)
    return Plan((f"endpoint {plain(where.root.split('//')[1], 60)}",), (), where, model)


def _vllm(root: Path, device: str, dtype: str) -> Plan:
    own = root / ".venv-vllm" / "bin" / "vllm"
    program = str(own) if own.is_file() else shutil.which("vllm")
    if program is None:
        raise ServerError("--serve vllm: there is no vllm here; `make myths-serving` installs one into .venv-vllm")

    def command(chunked: bool) -> Callable[[Path, int], Sequence[str]]:
        block = 32 if device == "cpu" else 16
        given: dict[str, object] = {
            "--served-model-name": "served",
            "--host": "127.0.0.1",
            "--dtype": dtype,
            "--max-model-len": MAX_LEN,
            "--max-num-seqs": SEATS,
            "--block-size": block,
            "--num-gpu-blocks-override": KV_TOKENS // block,
            "--max-num-batched-tokens": CHUNK if chunked else MAX_LEN,
        }
        if device != "cpu":
            given["--gpu-memory-utilization"] = 0.4  # two servers stand on one card
        flags = ["--enable-prefix-caching", "--enable-chunked-prefill" if chunked else "--no-enable-chunked-prefill"]
        if device == "cpu":
            flags.append("--enforce-eager")  # compiling takes longer than the suite
        words = [*(str(w) for pair in given.items() for w in pair), *flags]
        return lambda folder, port: [program, "serve", str(folder), "--port", str(port), *words]

    environ = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return Plan(
        ("vLLM",),
        (
            Launch("vLLM", command(True), SEATS, None, environ, "served"),
            Launch("vLLM whole prefill", command(False), SEATS, None, environ, "served"),
        ),
        whole={"vLLM": "vLLM whole prefill"},
    )


def _transformers(device: str, dtype: str) -> Plan:
    if missing := [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]:
        raise ServerError(f"--serve transformers needs {', '.join(missing)}: pip install -e '.[serving]'")

    def command(*words: object) -> Callable[[Path, int], Sequence[str]]:
        cli = "from transformers.cli.transformers import main; main()"
        common = ["--host", "127.0.0.1", "--device", "cuda:0" if device == "cuda" else "cpu", "--dtype", dtype]
        return lambda folder, port: [
            *(sys.executable, "-c", cli, "serve", str(folder), "--port", str(port)),
            *(*common, *map(str, words)),
        ]

    def batching(chunk: int, kv_tokens: int) -> Callable[[Path, int], Sequence[str]]:
        return command(
            *("--continuous-batching", "--cb-block-size", PAGE, "--cb-num-blocks", kv_tokens // PAGE),
            *("--cb-max-batch-tokens", chunk),
        )

    # It lets a prompt in only where all that is read at once has pages and a margin besides: whole prompts need more.
    alone, together, whole = "transformers", "transformers continuous", "transformers whole prefill"
    return Plan(
        (alone, together),
        (
            Launch(alone, command(), 1),
            Launch(together, batching(CHUNK, KV_TOKENS), None, KV_TOKENS),
            Launch(whole, batching(MAX_LEN, 4 * KV_TOKENS), None, 4 * KV_TOKENS),
        ),
        whole={together: whole},
        alone={together: alone},
    )


# Processes ------------------------------------------------------------------------------------------------------------


_QUIET = dict.fromkeys(
    ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_UPDATE_CHECK", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"), "1"
)
"""A server of ours asks nobody outside for anything."""

_ENDS_WITH_US = (
    (
        sys.executable,
        "-c",
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])",
    )
    if sys.platform == "linux"
    else ()
)
"""Asks the kernel to end a server (SIGTERM, 15) when the suite dies without ending it (PR_SET_PDEATHSIG, 1)."""


class Process:
    """A server as a process group of its own. `stop` ends it and every child, however often it is called."""

    def __init__(self, launch: Launch, folder: Path, log: Path) -> None:
        self.launch = launch
        self.log = log
        self.port = _free_port()
        self.model = launch.accepts or str(folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        # As many threads as cores, less one: the suite asks from one, and a thread that waits for it delays all others.
        threads = str(max(1, (usable_cores() or 1) - 1))
        environ = {**os.environ, **_QUIET, "OMP_NUM_THREADS": threads, **launch.environ}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*_ENDS_WITH_US, *launch.command(folder, self.port)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def gone(self) -> str | None:
        """How the process ended, None while it runs."""
        code = self._process.poll()
        return None if code is None else f"it ended with code {code}"

    def wait(self, ready_s: float = READY_S) -> None:
        """Until it lists its models. Raises ServerError, with the end of its log, when it ends first or takes too long."""
        until = time.monotonic() + ready_s
        while time.monotonic() < until:
            if gone := self.gone:
                raise ServerError(f"{self.launch.name} didn't start: {gone}: {self._last_words()}; see {self.log}")
            if _answers(f"{self.url}/v1/models"):
                return
            time.sleep(0.2)  # a starting server is asked five times a second, no more
        raise ServerError(f"{self.launch.name} wasn't ready within {ready_s:.0f} s; see {self.log}")

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        telling = [line for line in lines if "Error" in line or "error" in line]
        return plain((telling or lines or ["it said nothing"])[-1], 200)

    def stop(self) -> None:
        """Ask the whole group to end, and make it after STOP_S."""
        for sign, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, 2.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)
            until = time.monotonic() + patience_s
            while time.monotonic() < until:
                self._process.poll()  # a leader that nobody waited for keeps its group alive
                if not _group_lives(self._process.pid):
                    return
                time.sleep(0.05)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _free_port() -> int:
    """A loopback port that is free now. Another process may take it before the server does, which then ends and says so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


class Fleet:
    """The servers of a plan, all started together and all ended together."""

    def __init__(self, plan: Plan, folder: Path, logs: Path) -> None:
        self.processes: dict[str, Process] = {}
        try:
            for launch in plan.launches:
                name = "".join(c if c.isalnum() else "-" for c in launch.name.lower())
                self.processes[launch.name] = Process(launch, folder, logs / f"server-{name}.log")
            for process in self.processes.values():
                process.wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for process in self.processes.values():
            process.stop()


# The model ------------------------------------------------------------------------------------------------------------


def model_folder(session: Session, scratch: Path) -> Path:
    """A folder with the session's target as servers load it: the rig's own where it is one, else made in `scratch`.

    Made where the weights are random or stand in a GGUF file. The tokenizer of random weights is nimbus', filled up so
    that every token of the model has a text: a server streams text, and a token without any would be no token to a client.
    """
    source, loader = session.rig.target, session.loader
    if session.rig.weights == "trained" and source.gguf is None:
        return loader.folder(source)
    folder = scratch / "target"
    if session.rig.weights == "random":
        import torch

        model = random_model(loader.config(source), getattr(torch, session.rig.dtype), session.rig.device)
    else:
        model = loader.model(source)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer: Any = loader.tokenizer()
    _fill(tokenizer, model.config.vocab_size)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}), encoding="utf-8")
    return folder


def _fill(tokenizer: Any, vocab_size: int) -> None:
    """Give every id that the tokenizer doesn't know a word of its own: run together they would look like one."""
    from tokenizers import AddedToken

    missing = vocab_size - len(tokenizer)
    tokenizer.add_tokens([AddedToken(f" <t{i}>", normalized=False) for i in range(missing)])
