"""One session of the suite: its options, its rig, what is lacking here, and the rounds that settle claims.

The pytest side (conftest.py) and the command line both stand on this; there is no pytest in it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from benchmarks import machine, preflight, rigs, workloads
from benchmarks.calibration import Calibration, Floor
from benchmarks.claims import CLAIMS
from benchmarks.estimates import FULL_LOOK, Estimate
from benchmarks.ledger import Ledger
from benchmarks.rigs import Loader, Rig, RigError, first_line
from benchmarks.tables import plain
from benchmarks.timing import Clock, Rounds, interleave
from benchmarks.verdicts import Claim, Setting, Verdict, Word, judge, not_judged

if TYPE_CHECKING:
    from benchmarks.graphs import GraphEngine
    from benchmarks.memory import Device
    from benchmarks.phases import EagerEngine, Engine, Request
    from benchmarks.runs import Run
    from benchmarks.serving.servers import Plan

T = TypeVar("T")
Observed = Estimate | Mapping[str, Estimate]

ENGINES = {"eager": ("eager",), "graph": ("graph",), "both": ("eager", "graph")}
"""What `--engine` allows: the engines on which claims about decode are judged. All other claims are of the eager one."""

CACHE_STEP = 256
"""A graph engine's static cache is a multiple of this long, so that workloads of about the same length share one."""

PROBE_LEN = 64
"""Tokens of its own prompts' text that a model reads when it is loaded; a prefix is no shorter."""

BUDGET_S = {"cuda": 10.0, "cpu": 15.0}
"""Seconds of rounds a claim may take where none are given; FULL_LOOK rounds are made however long they take, since fewer decide
only what is plain: on a T4 ten rounds of requests take 13 to 28 s. A budget that is given is kept."""


@dataclass(frozen=True)
class Options:
    """What the user may choose. Raises RigError for values out of range, listing what is allowed."""

    rig: str | None = None
    target: str | None = None
    draft: str | None = None
    weights: str = "trained"
    dtype: str = "auto"
    prefix_len: int = workloads.PREFIX_LEN
    new_tokens: int = workloads.NEW_TOKENS
    batch_sizes: tuple[int, ...] = workloads.BATCH_SIZES
    suffixes: tuple[str, ...] = ()
    quant_prompt: str = workloads.QUANT_PROMPT
    engine: str = "both"
    world_size: int | None = None
    report: Path = Path("reports")
    budget_s: float | None = None
    served: Plan | None = None

    def __post_init__(self) -> None:
        if self.prefix_len < PROBE_LEN:
            raise RigError(
                f"--prefix-len {self.prefix_len} is too short to tell a prefix from its suffix; give {PROBE_LEN} or more"
            )
        if self.new_tokens < 8:
            raise RigError(f"--new-tokens {self.new_tokens} leaves no decode to measure; give 8 or more")
        largest = workloads.LARGEST_BATCH
        given = ",".join(map(str, self.batch_sizes))
        if not self.batch_sizes or not 1 <= min(self.batch_sizes) <= max(self.batch_sizes) <= largest:
            allowed = f"whole numbers from 1 to {largest}, such as 1,2,4,8,16,32"
            raise RigError(f"--batch-sizes {given or '(none)'}: sizes are {allowed}")
        if len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise RigError(f"--batch-sizes {given}: a size stands there twice; give each once")
        if self.engine not in ENGINES:
            raise RigError(f"--engine {self.engine}: choose {', '.join(ENGINES)}")
        if self.budget_s is not None and not 0 < self.budget_s < float("inf"):
            raise RigError(f"--budget {self.budget_s} is not a number of seconds above 0")
        for text in (*self.suffixes, self.quant_prompt, self.target or "", self.draft or "", str(self.report)):
            if not text.replace("\n", "").isprintable():
                raise RigError(f"an option holds control characters or bytes that are no text: {text[:40]!r}")
        for option, name in (("--rig", self.rig), ("--target", self.target), ("--draft", self.draft)):
            if name is not None and not name.strip():
                raise RigError(f"{option} is empty; give a name or leave it out")
        if not self.quant_prompt.strip():
            raise RigError("--quant-prompt is empty; give a question")
        if any(not suffix.strip() for suffix in self.suffixes):
            raise RigError("--suffix is empty; give a question")
        asked = [" ".join(suffix.split()) for suffix in self.all_suffixes]
        if twice := next((suffix for suffix in asked if asked.count(suffix) > 1), None):
            raise RigError(f"--suffix {twice[:40]!r} is asked already; give another question")

    @property
    def at_endpoint(self) -> bool:
        """Whether a server is asked that this suite didn't start."""
        return self.served is not None and self.served.endpoint is not None

    @property
    def all_suffixes(self) -> tuple[str, ...]:
        """The article's two questions and the user's own."""
        return workloads.SUFFIXES + self.suffixes


class NotCaptured(Exception):
    """There is no graph engine of this model and these shapes here; the message is one line that says why."""


class Session:
    """What all stations of one run share. Making one loads no model; `open` checks what can be known before loading."""

    def __init__(self, options: Options, device: Device) -> None:
        from benchmarks.phases import clock_for

        self.options = options
        self.device: Device = device
        if device == "cpu":
            _leave_a_core()
        self.rig: Rig = rigs.choose(
            rig=options.rig,
            target=options.target,
            draft=options.draft,
            weights=options.weights,
            dtype=options.dtype,
            device=device,
        )
        self.loader = Loader(self.rig)
        self.clock: Clock = clock_for(device)
        self.budget_s = options.budget_s if options.budget_s is not None else BUDGET_S[device]
        self.least_rounds = FULL_LOOK if options.budget_s is None else 1
        self.load_bytes: dict[str, int] = {}
        self._graphs: dict[tuple[object, ...], GraphEngine | NotCaptured] = {}
        self._floors: Mapping[str, float] = {}
        self._no_floors: Mapping[str, str] = {}
        self.machine = machine.record(device)
        self._sensors = machine.Sensors(machine.Card.of("cuda")) if device == "cuda" else None
        self._lacks = self._lacking()
        self.ledger = Ledger(options.report, self.machine, self.rig.record, " and ".join(self.engine_names))

    def open(self, models: bool = True) -> None:
        """Find every model's files and see that the workload fits; without `models` none is needed, as where all that runs is
        asked of an endpoint. Raises RigError with one line.
        """
        _check_writable(self.options.report)
        if models:
            self._check_models()
        if self._sensors is not None:
            self._sensors.__enter__()

    def _check_models(self) -> None:
        """Find every model's files, and see that engine, dtype and workload fit. Raises RigError."""
        if self.options.engine == "graph":
            from benchmarks.graphs import lacking as no_graphs

            if reason := no_graphs(self.device):
                raise RigError(f"--engine graph: {reason}; leave it out or give eager")
        dtype = self.rig.dtype
        if self.device == "cuda" and dtype == "bfloat16":
            capability = machine.Card.of("cuda").capability
            if not machine.supports_bfloat16(capability):
                raise RigError(
                    f"--dtype bfloat16: this card ({capability[0]}.{capability[1]}) only emulates it; choose float16 or float32"
                )
        self.loader.check()
        tokenizer = self.loader.tokenizer()
        suffix_len = max(len(workloads.question_ids(tokenizer, q)) for q in self.options.all_suffixes)
        shared_prefix_len = self.options.prefix_len + suffix_len + self.options.new_tokens
        quant_len = len(workloads.question_ids(tokenizer, self.options.quant_prompt)) + workloads.ANSWER_LEN
        long_prompt_len = workloads.LONG_PROMPT_LEN[self.device] + 1
        self.loader.check_len(long_prompt_len, "give a --target with more positions")
        self.loader.check_len(quant_len, "shorten --quant-prompt")
        self.loader.check_len(shared_prefix_len, "lower --prefix-len or --new-tokens, or shorten --suffix")
        if self.device == "cuda" or self.options.world_size is not None:
            from benchmarks.parallel.team import gpu_names, lacking

            self._lacks |= lacking(self.loader.config(self.rig.target), self.options.world_size, gpu_names())
        from benchmarks.memory import kv_cache_bytes

        try:
            kv_cache_bytes(self.loader.config(self.rig.target), 1, 1)
        except ValueError as error:
            self._lacks["kv_bytes"] = str(error)

    def close(self) -> None:
        """Record the machine as it is afterwards."""
        try:
            if self.ledger.begun:
                self.ledger.note("machine_after", machine.record(self.device))
        finally:
            if self._sensors is not None:
                self._sensors.__exit__(None, None, None)

    @property
    def remarks(self) -> list[str]:
        """What a reader of the card must know about this machine today."""
        after: Any = self.ledger.run.get("machine_after")
        return preflight.warnings(self.machine, after)

    @property
    def capability(self) -> tuple[int, int] | None:
        """The card's compute capability, None on CPU."""
        return machine.Card.of("cuda").capability if self.device == "cuda" else None

    @property
    def engine_names(self) -> tuple[str, ...]:
        """The engines on which claims about decode are judged."""
        return ENGINES[self.options.engine]

    def setting(self, engine: str = "eager") -> Setting:
        """Where claims are judged under an engine. Metrics of another engine than the eager one bear its name."""
        prefix = "" if engine == "eager" else f"{engine}."
        floors = {m.removeprefix(prefix): f for m, f in self._floors.items() if m.startswith(prefix)}
        no_floors = {m.removeprefix(prefix): why for m, why in self._no_floors.items() if m.startswith(prefix)}
        lacks = dict(self._lacks)
        if engine == "graph":
            from benchmarks.graphs import lacking

            if reason := lacking(self.device):
                lacks["engine"] = reason
        served = self.options.served
        elsewhere = self.options.at_endpoint and served is not None and engine in served.names
        return Setting(lacks, floors, engine if elsewhere else f"{self.description}, {engine}", no_floors)

    @property
    def description(self) -> str:
        """Card and rig in a few words."""
        weights = " random weights" if self.rig.weights == "random" else ""
        return f"{self.machine['name']}, {self.rig.name}{weights} {self.rig.reference}"

    def _lacking(self) -> dict[str, str]:
        lacks = {}
        if self.options.served is None:
            lacks["served"] = "no server: give --endpoint URL, or let --serve vllm or --serve transformers start one"
        if self.device != "cuda":
            lacks["cuda"] = "no CUDA on this machine"
        if self.rig.weights == "random":
            lacks["trained"] = "random weights: quality and acceptance would mean nothing"
        if self.rig.name != "qwen2.5":
            lacks["article_sizes"] = "the limits are those of Qwen2.5-1.5B; this is another model"
        if self.rig.draft is None:
            lacks["draft"] = f"rig {self.rig.name} has no draft model; give --target and --draft"
        return lacks

    # Models ----------------------------------------------------------------------------------------------------------

    def load(self, role: str, precision: str | None = None) -> EagerEngine:
        """The "target" or "draft" behind the eager engine; `precision` None (the rig's dtype), "int8" or "nf4".

        Raises RigError when it can't be had, keeps no KV cache, or its logits are not numbers. Bytes before and after
        loading are kept, by role and precision, in `load_bytes`.
        """
        import torch
        from transformers.utils import logging

        from benchmarks.memory import is_out_of_memory, resident_bytes
        from benchmarks.phases import EagerEngine, Prompt

        logging.disable_progress_bar()
        source = self.rig.target if role == "target" else self.rig.draft
        if source is None:
            raise RigError(f"rig {self.rig.name} has no {role} model; give --target and --draft")
        before = resident_bytes(self.device)
        engine = EagerEngine(self.loader.model(source, precision))
        after = resident_bytes(self.device)
        if after is not None:
            self.load_bytes[f"{role} {precision or self.rig.reference}"] = after - (before or 0)
        probe = Prompt.of([workloads.prefix_ids(self.loader.tokenizer(), PROBE_LEN)], self.device)
        try:
            state = engine.prefill(probe)
            copy.deepcopy(state.cache).get_seq_length()  # stored prefixes are copied and asked for their length
        except Exception as error:  # what models without a KV cache raise has no class in common
            if precision is not None or is_out_of_memory(error):  # the cache of a quantized model is the reference's
                raise
            said = f"{source.label} keeps no KV cache as attention does ({first_line(error)})"
            raise RigError(f"{said}: give another --{role}") from error
        if not torch.isfinite(state.logits).all():
            raise RigError(
                f"{source.label} in {precision or self.rig.dtype} gives logits that are not numbers: "
                f"choose another --dtype, or a --{role} whose weights are numbers"
            )
        return engine

    def engine(
        self,
        name: str,
        eager: EagerEngine,
        batch_size: int,
        cache_len: int,
        side: int = 0,
        step_lens: tuple[int, ...] = (1,),
    ) -> Engine[Any]:
        """The eager engine itself, or a graph engine of the same model: see `graph`."""
        return eager if name == "eager" else self.graph(eager, batch_size, cache_len, side, step_lens)

    def graph(
        self, eager: EagerEngine, batch_size: int, cache_len: int, side: int = 0, step_lens: tuple[int, ...] = (1,)
    ) -> GraphEngine:
        """A graph engine of the model behind `eager` for up to `cache_len` positions, captured once and kept.

        A graph engine has room for one batch, so requests that are served in turn need one each: `side` tells them
        apart. Raises NotCaptured with the reason when there is none.
        """
        from benchmarks.graphs import CannotCapture, capture

        held_len = -(-cache_len // CACHE_STEP) * CACHE_STEP
        key = (id(eager.model), batch_size, held_len, side, step_lens)
        if key not in self._graphs:
            made = capture(eager.model, batch_size, held_len, step_lens)
            self._graphs[key] = NotCaptured(str(made)) if isinstance(made, CannotCapture) else made
        found = self._graphs[key]
        if isinstance(found, NotCaptured):
            raise found
        return found

    # Rounds and verdicts ---------------------------------------------------------------------------------------------

    def set_floors(self, calibration: Calibration) -> None:
        """The noise floors that verdicts respect from now on; run.json has them from its next entry on."""
        self._floors = {**self._floors, **calibration.noise_floor}
        known = {"noise_floor": self._floors, "calibration": calibration.record, "unavailable": {}}
        self.ledger.run |= known

    def add_floors(self, engine: str, found: Mapping[str, Floor | str]) -> None:
        """The noise floors of another engine than the suite's own, measured within this run. Where a metric has none, its
        claims are not decided and say the reason."""
        named = {f"{engine}.{metric}": floor for metric, floor in found.items()}
        self._floors = {**self._floors, **{m: floor.floor for m, floor in named.items() if isinstance(floor, Floor)}}
        self._no_floors = {**self._no_floors, **{m: why for m, why in named.items() if isinstance(why, str)}}
        self.ledger.run |= {"noise_floor": self._floors}

    def compare(
        self,
        sides: Mapping[str, Callable[[], T]],
        observe: Callable[[Rounds[T]], Mapping[str, Observed]],
        engine: str = "eager",
        min_rounds: int | None = None,
        disturbance: Callable[[], str | None] | None = None,
    ) -> Compared[T]:
        """Measure sides in turn until every claim that `observe` speaks of is settled, or the budget ends, though not before
        `min_rounds` (`least_rounds` where none are given). `disturbance` says of the round before why it is measured again,
        where that isn't the card's to tell.

        `observe` gives for each claim id what the rounds so far show under `engine`. Claims that can't be judged here
        don't hold up the others.
        """
        setting = self.setting(engine)

        def settled(rounds: Rounds[T]) -> bool:
            return all(
                judge(CLAIMS[i], seen, setting).word is not Word.INCONCLUSIVE or setting.unknown_floor(CLAIMS[i])
                for i, seen in observe(rounds).items()
            )

        rounds = interleave(
            sides,
            settled,
            self.budget_s,
            disturbance=disturbance or self.disturbance,
            min_rounds=self.least_rounds if min_rounds is None else min_rounds,
        )
        observed = {i: _noted(seen, rounds.note) for i, seen in observe(rounds).items()}
        return Compared(rounds, observed)

    def compare_in_turn(
        self, requests: Mapping[str, Request], observe: Callable[..., Mapping[str, Observed]], engine: str = "eager"
    ) -> Compared[dict[str, Run]]:
        """As `compare`, of requests that are served step by step in turn; `observe` takes each request's runs by name."""
        from benchmarks.phases import in_turn

        def seen(rounds: Rounds[dict[str, Run]]) -> Mapping[str, Observed]:
            return observe(**{name: [runs[name] for runs in rounds["all"]] for name in requests})

        return self.compare({"all": in_turn(requests, self.clock)}, seen, engine)

    def disturbance(self) -> str | None:
        """Why the round just measured can't be trusted, None when it can or nobody can tell."""
        return self._sensors.disturbance() if self._sensors is not None else None

    def judge(self, claim_id: str, observed: Observed, engine: str = "eager") -> Verdict:
        """The verdict, recorded."""
        verdict = judge(CLAIMS[claim_id], observed, self.setting(engine))
        self.ledger.verdict(verdict, engine)
        return verdict

    def skip(self, claim: Claim, reason: str, engine: str = "eager") -> Verdict:
        """A claim that isn't judged, recorded with its reason."""
        verdict = not_judged(claim, reason, self.setting(engine))
        self.ledger.verdict(verdict, engine)
        return verdict

    def known_floors(self) -> Calibration | None:
        """The calibration of the run before, from the report folder, None unless it was of this machine and rig."""
        before = self.ledger.previous_path if self.ledger.begun else self.ledger.path
        try:
            run = json.loads(before.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None  # no run before, or none that can be read: this run measures its own
        return Calibration.of_run(run, self.machine, self.rig.record)


def _check_writable(folder: Path) -> None:
    """Raises RigError when a report can't be written to a folder; the folder itself is made with the first figure."""
    nearest = folder
    try:
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        with TemporaryDirectory(dir=nearest):  # permissions alone don't tell: /proc has them and takes no folder
            pass
    except OSError:
        said = f"{plain(nearest, 120)} is not a folder that can be written to; name another"
        raise RigError(f"--report {plain(folder, 120)}: {said}") from None


def _leave_a_core() -> None:
    """Compute on all cores but one.

    With a thread on every core, each operation waits at its barrier for whichever core something else is using: seen
    here on 2 cores with one busy neighbour, 48 tokens of the embedded target took 7 times as long with two threads as
    with one.
    """
    import torch

    torch.set_num_threads(max(1, (machine.usable_cores() or 1) - 1))


@dataclass(frozen=True)
class Compared(Generic[T]):
    """Rounds, and what they show for each claim."""

    rounds: Rounds[T]
    observed: Mapping[str, Observed]


def _noted(observed: Observed, note: str) -> Observed:
    if not note:
        return observed
    if isinstance(observed, Estimate):
        return observed.noted(note)
    return {what: estimate.noted(note) for what, estimate in observed.items()}
