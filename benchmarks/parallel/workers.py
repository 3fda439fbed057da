"""Worker processes: started together, called together, and ended together, whatever happens.

Each worker holds a service, an object made in its own process, and runs the methods that the parent names; arguments and
results are plain data and go through a pipe. There is no torch here: what the workers do is the service's business.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

GRACE_S = 2.0
"""How long a worker may take to end by itself before it is killed. It has nothing to save."""


class WorkersFailed(Exception):
    """A worker raised, died or took too long, and all of them have been ended. The message is one line."""


class Workers:
    """`world_size` processes, each with the service that `make(rank)` gives. Ends all of them on leaving the context.

    `make` is pickled, so it is a module's function or a partial of one. Workers are daemons, ignore Ctrl-C (the parent
    hears it and ends them) and end by themselves when the parent is gone. As they end by themselves they remove
    `leftover`, a folder that nobody else reads. `preload` names modules to import once, in the process that all workers
    are forked from: none that may touch a GPU when imported, which a fork can't share; of several Workers in a process
    the first one's counts. Raises WorkersFailed when one can't start.
    """

    def __init__(
        self,
        world_size: int,
        make: Callable[[int], object],
        timeout_s: float,
        preload: Sequence[str] = (),
        leftover: Path | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self.timeout_s = timeout_s
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_work, args=(make, rank, there, leftover), name=f"inference-myths-{rank}", daemon=True
                )
                process.start()
                there.close()
                self._pipes.append(here)
                self._processes.append(process)
            self._answers(range(world_size), timeout_s, "starting")
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    @property
    def alive(self) -> bool:
        """Whether they can be called."""
        return bool(self._pipes)

    def call(
        self, method: str, *args: object, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """What the service's `method` returns on each of `ranks` (all of them), which run it at the same time.

        Raises WorkersFailed when one of them raises, dies or takes longer than `timeout_s`; the others would wait for it
        for ever, so all are killed first. Ctrl-C kills them too.
        """
        if not self._pipes:
            raise WorkersFailed("the workers have ended already")
        ranks = range(len(self._pipes)) if ranks is None else ranks
        try:
            for rank in ranks:
                try:
                    self._pipes[rank].send((method, args))
                except OSError:
                    raise WorkersFailed(self._death(rank)) from None
            return self._answers(ranks, timeout_s or self.timeout_s, method)
        except BaseException:
            self.kill()
            raise

    def _answers(self, ranks: Sequence[int], timeout_s: float, doing: str) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        while waiting := [rank for rank in ranks if rank not in answers]:
            ready = wait([self._pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkersFailed(
                    f"worker {', '.join(map(str, waiting))} of {len(self._pipes)} took longer than {timeout_s:g} s ({doing})"
                )
            for rank in waiting:
                if self._pipes[rank] not in ready:
                    continue
                try:
                    succeeded, answer = self._pipes[rank].recv()
                except (EOFError, OSError):
                    raise WorkersFailed(self._death(rank)) from None
                if not succeeded:
                    raise WorkersFailed(f"worker {rank} of {len(self._pipes)}: {answer}")
                answers[rank] = answer
        return [answers[rank] for rank in ranks]

    def _death(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(GRACE_S)
        return f"worker {rank} of {len(self._pipes)} died (exit code {process.exitcode})"

    def close(self) -> None:
        """Let the workers end; those that don't within GRACE_S are killed."""
        for pipe in self._pipes:
            pipe.close()  # which a waiting worker reads as the end
        self._pipes = []
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if kind is None else self.kill()


def _work(make: Callable[[int], object], rank: int, pipe: Connection, leftover: Path | None) -> None:
    """The life of a worker. It ends without Python's clean-up, in which a communicator may wait for peers that are gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(leftover,), daemon=True).start()
    try:
        service = make(rank)
        pipe.send((True, None))
        while True:
            try:
                method, args = pipe.recv()
            except EOFError:
                _end(leftover, 0)
            pipe.send((True, getattr(service, method)(*args)))
    except BaseException as error:
        traceback.print_exc()  # the place, for whoever reads the log; the parent gets one line
        said = " ".join(str(error).split()) or "no message"
        pipe.send((False, f"{type(error).__name__}: {said[:400]}"))
        os._exit(1)


def _end_with_parent(leftover: Path | None) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    _end(leftover, 1)


def _end(leftover: Path | None, code: int) -> NoReturn:
    if leftover is not None:
        shutil.rmtree(leftover, ignore_errors=True)  # the other workers do so at the same time
    os._exit(code)
