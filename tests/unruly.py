"""Services for the tests of worker processes: what they do, right or wrong, is asked for. No torch here."""

from __future__ import annotations

import os
import time


class Unruly:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def double(self, x: int) -> tuple[int, int]:
        return self.rank, 2 * x

    def fail(self, who: int) -> None:
        if self.rank == who:
            raise ValueError("the slices don't fit\nat all")
        time.sleep(60)

    def ends_early(self) -> None:
        raise EOFError("Ran out of input")

    def die(self, who: int) -> None:
        if self.rank == who:
            os._exit(3)
        time.sleep(60)

    def hang(self) -> None:
        time.sleep(60)


def stillborn(rank: int) -> Unruly:
    raise RuntimeError("no such device")
