"""Regressions planted from outside: `python -m pytest myths --baseline FILE -p plants --plant NAME`.

Each makes a real run worse in one way that the gate must catch and name; scripts/gate_proof.py runs them all. A plugin
rather than an option of the suite, so that nothing in the suite knows of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import pytest
import torch


@dataclass(frozen=True)
class Plant:
    """A regression: what it is, what the gate must call red (a claim or cell), and whether it needs a card."""

    what: str
    caught_by: tuple[str, ...]
    apply: Callable[[], None]
    cuda: bool = False


CYCLES_PER_S = 1.98e9
"""An H200's highest clock; a card at a lower one is kept busy a little longer."""


def _slower_prefill() -> None:
    """Every prefill costs a tenth more: of CPU time, or of the card's."""
    from benchmarks.phases import EagerEngine

    prefill = EagerEngine.prefill
    cycles: dict[object, int] = {}

    @wraps(prefill)
    def slow(self, prompt, cache=None):
        start = time.process_time()
        state = prefill(self, prompt, cache)
        end = time.process_time() + 0.10 * (time.process_time() - start)
        if self.device == "cuda":
            if cache is None:  # a cached one would change the cache when it is called again
                _keep_busy(cycles, (id(self), prompt.ids.shape), lambda: prefill(self, prompt), 0.10)
        else:
            while time.process_time() < end:
                pass
        return state

    EagerEngine.prefill = slow


def _slower_decode() -> None:
    """Every decode step keeps the card busy for 5 % of a step at batch 1 longer."""
    from benchmarks.phases import EagerEngine, Prompt

    step = EagerEngine.step
    cycles: dict[object, int] = {}

    @wraps(step)
    def slow(self, state, tokens=None):
        after = step(self, state, tokens)
        if id(self) not in cycles:
            apart = self.prefill(Prompt.of([tuple(range(1, 38))], self.device))
            step(self, apart)
        _keep_busy(cycles, id(self), lambda: step(self, apart), 0.05)
        return after

    EagerEngine.step = slow


def _keep_busy(cycles: dict[object, int], key: object, call: Callable[[], object], share: float) -> None:
    """Keep the card busy for a share of the device time of `call`, which is traced once for each key."""
    from benchmarks.traces import trace

    if key not in cycles:
        cycles[key] = int(share * CYCLES_PER_S * (trace(call, "cuda").device_s or 0.0))
    if cycles[key]:
        torch.cuda._sleep(cycles[key])


def _after_loading(change: Callable[[torch.nn.Module, str], None]) -> None:
    """Change each model after it was loaded; `change` is told "target" or "draft"."""
    from benchmarks.rigs import Loader

    load = Loader.model

    @wraps(load)
    def loaded(self, source, precision=None):
        model = load(self, source, precision)
        change(model, "draft" if source is self.rig.draft else "target")
        return model

    Loader.model = loaded


def _fatter() -> None:
    """A tenth more bytes stay resident with every model: a copy of a tenth of its weights, kept as a buffer."""

    def keep_more(model, role):
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        device = next(model.parameters()).device
        model.model.register_buffer("left_over", torch.zeros(held // 10, dtype=torch.uint8, device=device))

    _after_loading(keep_more)


def _worse_draft() -> None:
    """The draft's weights are off by half of their spread, so that it guesses worse."""

    def spoil(model, role):
        if role == "draft":
            seeded = torch.Generator().manual_seed(3)
            for weight in (parameter.data for parameter in model.parameters() if parameter.dim() == 2):
                weight.add_(0.5 * weight.float().std() * torch.randn(weight.shape, generator=seeded).to(weight))

    _after_loading(spoil)


def _wrong_token() -> None:
    """In a batch of unequal rows one row's third token is another."""
    from benchmarks.phases import EagerEngine

    step = EagerEngine.step

    @wraps(step)
    def wrong(self, state, tokens=None):
        after = step(self, state, tokens)
        if state.mask is not None:
            state.cache.steps = getattr(state.cache, "steps", 0) + 1
            if state.cache.steps == 2:
                after.logits[3] = -after.logits[3]
        return after

    EagerEngine.step = wrong


def _int8_as_reference() -> None:
    """Asked for int8, the loader gives the reference precision and says nothing."""
    from benchmarks.rigs import Loader

    load = Loader.model
    Loader.model = wraps(load)(
        lambda self, source, precision=None: load(self, source, None if precision == "int8" else precision)
    )


def _math_attention() -> None:
    """SDPA may use no fused kernel and builds the whole score matrix."""
    for switch in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{switch}_sdp")(False)


def _nothing() -> None:
    """What the plant does, it does while tests are collected."""


PLANTS = {
    "decode": Plant("decode 5 % slower by device time", ("batching.1.decode",), _slower_decode, cuda=True),
    "prefill": Plant("prefill 10 % slower", ("yardstick.prefill", "batching.1.prefill"), _slower_prefill),
    "memory": Plant("10 % more resident memory", ("quant.fp32", "quant.fp16"), _fatter),
    "draft": Plant("a draft whose acceptance fell", ("speculation.with_draft",), _worse_draft),
    "token": Plant("one wrong token in a batch row", ("batching.same_tokens",), _wrong_token),
    "renamed": Plant("a claim's test renamed so that pytest no longer finds it", ("prefix.same_answer",), _nothing),
    "skipped": Plant("a station skipped", ("attention.exact", "attention.kernel"), _nothing),
    "int8": Plant("int8 silently loaded in the reference precision", ("quant.int8",), _int8_as_reference),
    "math": Plant("SDPA falling to math", ("batching.1.prefill",), _math_attention),
}


# Hooks ----------------------------------------------------------------------------------------------------------------


def pytest_addoption(parser):
    parser.addoption("--plant", choices=sorted(PLANTS), required=True)


def pytest_configure(config):
    PLANTS[config.getoption("--plant")].apply()


def pytest_pycollect_makeitem(collector, name, obj):
    if collector.config.getoption("--plant") == "renamed" and name == "test_the_answer_is_the_same":
        return []  # what pytest makes of a function that is called check_the_answer_is_the_same
    return None


def pytest_collection_modifyitems(config, items):
    if config.getoption("--plant") == "skipped":
        for item in items:
            if item.path.name == "test_attention_memory.py":
                item.add_marker(pytest.mark.skip(reason="planted"))
