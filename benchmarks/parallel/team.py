"""The workers that share a model: whether they can on these GPUs, and what each of them holds."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from benchmarks.memory import free_bytes
from benchmarks.parallel import pipeline, tensor_parallel
from benchmarks.parallel.ranks import WHOLE, WIDE, Group, join
from benchmarks.parallel.tensor_parallel import Shares
from benchmarks.parallel.workers import Workers, WorkersFailed
from benchmarks.rigs import Loader, Rig, RigError
from benchmarks.workloads import Workload

MOST_GPUS = 8
"""One host's worth: beyond it the network between hosts would be the subject."""

START_S = 180.0
CALL_S = 60.0
"""The longest that starting or loading, and one measurement, may take. Each takes seconds; a hang ends here."""

_CPU_PRELOADED = ("torch", "transformers", "torch.distributed.tensor", "transformers.models.qwen2.modeling_qwen2")
"""What CPU workers share instead of importing it side by side: 7 s of CPU each. On a machine with a GPU any of these may
ask for it, and a forked process could not use it any more."""


# Refusals, before anything loads --------------------------------------------------------------------------------------


def group_size(asked: int | None, n_gpus: int) -> int:
    """How many GPUs are used: those asked for, else all up to MOST_GPUS. Raises RigError for more than there are."""
    if asked is None:
        return min(n_gpus, MOST_GPUS)
    most = min(n_gpus, MOST_GPUS)
    if not 2 <= asked <= most:
        here = f"torch sees {n_gpus} GPU{'s' * (n_gpus != 1)} here and at most {MOST_GPUS} are used"
        raise RigError(f"--world-size {asked}: {here}; leave it out" + (f" or give 2 to {most}" if most >= 2 else ""))
    return asked


def gpu_names() -> list[str]:
    """One a GPU of this machine, in CUDA's order."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def lacking(config: Any, asked: int | None, gpus: Sequence[str]) -> dict[str, str]:
    """What this station lacks on a machine with these GPUs (their names), by need. Raises RigError as `group_size`
    and for a MASTER_PORT that is no port."""
    size = group_size(asked, len(gpus))
    lacks = {}
    if size < 2:
        lacks["gpus2"] = "one GPU: parallelism needs two or more"
    elif len(kinds := sorted(set(gpus[:size]))) > 1:
        lacks["gpus2"] = f"GPUs of different kinds ({', '.join(kinds)}): choose equal ones by CUDA_VISIBLE_DEVICES"
    elif taken := _taken_port():
        lacks["gpus2"] = f"port {taken} is taken: unset MASTER_PORT, and a free one is found"
    for plan, refusal in (("tensor_plan", tensor_parallel.refusal), ("pipeline_plan", pipeline.refusal)):
        if reason := refusal(config, max(size, 2)):
            lacks[plan] = reason
    return lacks


def _taken_port() -> int | None:
    """The port that the user named for workers to meet at, where somebody listens on it already."""
    if (port := _port()) == 0:
        return None
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return port
    return None


def _port() -> int:
    """The one that the user named; 0 is a free one, as the system finds it. Raises RigError for what is no port."""
    named = os.environ.get("MASTER_PORT", "0")
    if not (named.isascii() and named.isdigit() and len(named) <= 5 and int(named) < 2**16):
        raise RigError(f"MASTER_PORT {named[:20]!r} is no port from 1 to 65535: unset it, and a free one is found")
    return int(named)


# The wide shape -------------------------------------------------------------------------------------------------------


def _layers_of(hidden_size: int, intermediate_size: int, n_heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 32768,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 4,
        "num_attention_heads": n_heads,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


WIDE_SHAPES = tuple(_layers_of(*sizes) for sizes in ((16384, 53248, 128), (8192, 28672, 64), (4096, 14336, 32)))
"""Four layers as wide as those of Llama 3.1's 405B, 70B and 8B. At 405B's width a layer's weights take an H200 1.5 ms to
read and a host 0.6 ms to launch: there a step can only get shorter by reading less."""


def shape_bytes(shape: Mapping[str, Any], dtype_bytes: int) -> int:
    """Bytes of a shape's matrices: attention 2 h h + 2 h (KV heads * head size), MLP 3 h i, embedding and head."""
    hidden, kv = shape["hidden_size"], shape["num_key_value_heads"] / shape["num_attention_heads"]
    layer = hidden * (2 * hidden * (1 + kv) + 3 * shape["intermediate_size"])
    return int(dtype_bytes * (shape["num_hidden_layers"] * layer + 2 * shape["vocab_size"] * hidden))


def widest(free_bytes: int, dtype_bytes: int) -> dict[str, Any]:
    """The widest shape that one GPU holds twice: whole, and for the slices to be views of. Raises RigError for none."""
    for shape in WIDE_SHAPES:
        if 2.5 * shape_bytes(shape, dtype_bytes) < free_bytes:  # half a copy to spare, for what building it takes
            return shape
    raise RigError("the GPU has no room for a wide shape beside the target")


# The team -------------------------------------------------------------------------------------------------------------


class Team:
    """The workers of one rig, started when first needed, with the models that were asked for.

    Used as a context. When a call failed all workers have been ended; whoever needs them next gets a new set, so that
    one claim's failure leaves the others to be judged.
    """

    def __init__(self, rig: Rig, loader: Loader, world_size: int) -> None:
        self.rig, self.world_size = rig, world_size
        self.shares: Shares | None = None
        self.held_bytes: dict[str, list[int]] = {}
        self._loader = loader
        self._workers: Workers | None = None
        self._store: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="inference-myths-")
        self._saved = False

    def need(self, *names: str) -> Workers:
        """The workers, holding these models (WHOLE, TENSOR_PARALLEL, PIPELINE, WIDE). Raises WorkersFailed."""
        if self._workers is None or not self._workers.alive:
            self.held_bytes = {}
            self._workers = self._start()
        for name in names:
            if name not in self.held_bytes:
                self.held_bytes[name] = self._hold(self._workers, name)
        return self._workers

    def record_step(self, asked: Workload) -> list[str | None]:
        """Record the whole model's decode step in every worker, for requests like this one: why not, one entry a worker.

        Raises WorkersFailed.
        """
        found: list[str | None] = self.need(WHOLE).call(
            "record_step", asked.batch_size, asked.total_len, timeout_s=START_S
        )
        return found

    def _start(self) -> Workers:
        from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

        self._store = None  # that of workers that failed would keep a named port taken
        try:
            # The parent's store chooses the port, so no other process can take it in between.
            self._store = TCPStore("127.0.0.1", _port(), is_master=True, wait_for_workers=False)
        except DistNetworkError as error:
            raise WorkersFailed(f"port {_port()} is taken: unset MASTER_PORT, and a free one is found") from error
        group = Group(self.rig, self.world_size, self._store.port)
        preload, folder = _CPU_PRELOADED if self.rig.device == "cpu" else (), Path(self._folder.name)
        workers = Workers(self.world_size, partial(join, group), START_S, preload, leftover=folder)
        workers.timeout_s = CALL_S
        return workers

    def _hold(self, workers: Workers, name: str) -> list[int]:
        if name == WHOLE:
            self.shares = workers.call("hold_whole", timeout_s=START_S)[0]
            return []
        if name == WIDE:
            workers.call("hold_wide", self._wide(), timeout_s=START_S)
            return []
        self.need(WHOLE)
        held: list[int] = workers.call("hold_split", name, self._weights(workers), timeout_s=START_S)
        return held

    def _wide(self) -> dict[str, Any]:
        free = free_bytes("cuda" if self.rig.device == "cuda" else "cpu")
        return widest(free or 0, getattr(torch, self.rig.dtype).itemsize)

    def _weights(self, workers: Workers) -> Path:
        """A folder that transformers loads parts from: the rig's own, or one with the random weights written to it."""
        source = self.rig.target
        if self.rig.weights == "trained" and source.gguf is None:
            return self._loader.folder(source)
        folder = Path(self._folder.name)
        if not self._saved:
            workers.call("save", folder, ranks=[0], timeout_s=START_S)
            self._saved = True
        return folder

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        self._store = None
        self._folder.cleanup()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
