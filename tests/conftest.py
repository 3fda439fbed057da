"""What all tests of the harness share."""

from __future__ import annotations

import gc
import importlib

import pytest
from hypothesis import settings

# The first example of a property may import a library, and this machine may be busy: no deadline says anything here.
settings.register_profile("harness", deadline=None, max_examples=50)
settings.load_profile("harness")


def pytest_collection_finish() -> None:
    """Before the first test of a process that runs any: the one that only hands tests out needs no torch."""
    import torch

    # With a thread on every core each operation of a tiny model waits for whichever core something else keeps busy.
    torch.set_num_threads(1)
    # Every measurement collects garbage first. The libraries' own objects stay for good: without them a collection
    # takes a millisecond instead of a tenth of a second.
    importlib.import_module("transformers")
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def libraries_set_aside() -> None:
    """The same for what the modules before this one imported: the first model that is loaded brings half of them."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
