"""What this machine is, and whether its figures can be believed today: the card, its clocks, its neighbours, the CPU.

`record` is taken before and after a run, preflight.py says in words what a reader must know of it, and `Sensors` watches
single rounds. Everything the driver knows comes through NVML (nvidia-ml-py); what could not be read is None, and
`unavailable` says why. torch is imported only where a real card is asked for, so that report and gate can read records.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

BFLOAT16_CAPABILITY = (8, 0)

PACKAGES = ("torch", "transformers", "bitsandbytes", "tokenizers", "accelerate", "pytest-benchmark", "nvidia-ml-py")
"""Distributions whose version can move a figure, or decide whether it could be had."""

SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""NVML's reasons for lowered clocks that lie outside the work itself: heat, or a supply that cannot keep up. They pass,
so a round that met one is worth measuring again."""

POWER_CAPS = {0x04: "software power cap", 0x200: "board limit"}
"""Reasons that come from the work: the card lowers its clocks to stay within its rated power, as a 70 W T4 does through
every long prefill. Measuring such a round again meets the same cap, and a card's users meet it too: it is said, and no
round is thrown away for it. A limit set lower than the card's own is a remark of its own (see preflight.py)."""

SETTINGS = {
    0x01: "gpu idle",
    0x02: "applications clocks setting",
    0x10: "sync boost",
    0x100: "display clock setting",
    0x400: "reliability limit",
}
"""Reasons that are no throttling: nothing to do, clocks that somebody chose, and the top of the voltage range."""

REASONS = {**SLOWDOWNS, **POWER_CAPS, **SETTINGS}


def _installed_nvml() -> Any | None:
    """The NVML binding, or None where nvidia-ml-py is not installed. Importing it touches no driver."""
    try:
        return importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None


NVML = _installed_nvml()


# --- what a card can do -------------------------------------------------------------------------------------------


def supports_bfloat16(capability: tuple[int, int]) -> bool:
    """Whether the card computes in bfloat16: compute capability 8.0 and up.

    By capability, since `torch.cuda.is_bf16_supported()` also counts emulation and so says yes on a T4.
    """
    return capability >= BFLOAT16_CAPABILITY


@dataclass(frozen=True)
class Card:
    """One CUDA device as torch describes it.

    `uuid` (with or without its "GPU-" or "MIG-") and `pci` ("00000000:0f:00.0") find the same card in NVML, whose order
    ignores CUDA_VISIBLE_DEVICES. `cuda` is the CUDA version that torch was built with, `gpus` how many cards it sees.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    uuid: str | None = None
    pci: str | None = None
    cuda: str | None = None
    gpus: int = 1

    @classmethod
    def of(cls, device: str) -> Card:
        """The card behind "cuda" or "cuda:N". Makes this process's CUDA context, so that NVML lists the process.

        Raises RuntimeError when torch sees no such card.
        """
        import torch

        found = torch.device(device)
        cards = torch.cuda.device_count()
        index = found.index or 0
        if index >= cards:
            raise RuntimeError(f"no card {device!r}: torch {torch.__version__} sees {cards}; on a CPU use device 'cpu'")
        torch.zeros(1, device=found)
        torch.cuda.synchronize(found)
        properties: Any = torch.cuda.get_device_properties(found)
        return cls(
            name=properties.name,
            capability=(properties.major, properties.minor),
            memory_bytes=properties.total_memory,
            uuid=str(properties.uuid),
            pci=f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0",
            cuda=torch.version.cuda,
            gpus=cards,
        )


# --- NVML ---------------------------------------------------------------------------------------------------------


class Sensors:
    """The card's sensors for the length of a with-block. Where they can't be had, `blind` says why and they read None.

    `nvml` is the module pynvml or whatever has its functions and its NVMLError; None stands for "not installed".
    """

    def __init__(self, card: Card, nvml: Any | None = NVML) -> None:
        self.card = card
        self.nvml = nvml
        self.blind: str | None = "the sensors are not open"
        self.is_slice = False
        self._handle: Any = None  # the physical card's: clocks, power and heat belong to it, not to a slice
        self._started = False
        self._read_reasons: Callable[[Any], int] | None = None

    def __enter__(self) -> Self:
        if self.nvml is None:
            self.blind = "nvidia-ml-py is not installed"
            return self
        try:
            self.nvml.nvmlInit()
            self._started = True
            self._find(self.nvml)
            self.blind = None
        except self.nvml.NVMLError as error:
            self.blind = f"NVML: {error}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.blind = "the sensors are not open"
        if self.nvml is not None and self._started:
            self._started = False
            # A driver that went away under us leaves nothing to close, and a run is not lost for it.
            with contextlib.suppress(self.nvml.NVMLError):
                self.nvml.nvmlShutdown()

    def _find(self, nvml: Any) -> None:
        """The card's handle by UUID, as a whole card or as a MIG slice, else by its place on the PCI bus."""
        searches: list[Callable[[], Any]] = []
        if self.card.uuid is not None:
            bare = self.card.uuid.removeprefix("GPU-").removeprefix("MIG-")
            searches.append(lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}"))
            searches.append(lambda: self._around_slice(nvml, f"MIG-{bare}"))
        if self.card.pci is not None:
            searches.append(lambda: nvml.nvmlDeviceGetHandleByPciBusId(self.card.pci))
        failure = nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)
        for search in searches:
            try:
                self._handle = search()
                return
            except nvml.NVMLError as error:
                failure = error
        raise failure

    def _around_slice(self, nvml: Any, uuid: str) -> Any:
        whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(uuid))
        self.is_slice = True
        return whole

    def ask(self, query: Callable[[Any, Any], T]) -> tuple[T | None, str | None]:
        """(answer, None), or (None, why there is none) of one query that gets NVML and the card's handle."""
        if self.blind is not None or self.nvml is None:
            return None, self.blind
        try:
            return query(self.nvml, self._handle), None
        except self.nvml.NVMLError as error:
            return None, f"NVML: {error}"

    def throttle_reasons(self) -> tuple[tuple[str, ...] | None, str | None]:
        """(the reasons for the present clocks in words, None), or (None, why they can't be told). One NVML query."""
        mask, why = self.ask(self._reasons)
        return (None, why) if mask is None else (reasons_in(mask), None)

    def _reasons(self, nvml: Any, handle: Any) -> int:
        if self._read_reasons is None:
            try:
                mask = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
                self._read_reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons
                return mask
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    raise
                self._read_reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons  # the name in older drivers
        return int(self._read_reasons(handle))

    def disturbance(self) -> str | None:
        """Why the card's clocks are held down right now by heat or supply, or None; None too where nothing can be read.

        Cheap enough to ask after every round. Power caps are no disturbance (see POWER_CAPS).
        """
        reasons, _ = self.throttle_reasons()
        return ", ".join(r for r in reasons or () if r in SLOWDOWNS.values()) or None


def reasons_in(mask: int) -> tuple[str, ...]:
    """NVML's bit mask of clock reasons in words; a bit without a name keeps its number."""
    bits = [1 << n for n in range(mask.bit_length()) if mask >> n & 1]
    return tuple(REASONS.get(bit, f"reason {bit:#x}") for bit in bits)


# --- the record ---------------------------------------------------------------------------------------------------


class _Notes:
    """Values on their way into a record, and the reason of each None among them by its dotted field name."""

    def __init__(self) -> None:
        self.unavailable: dict[str, str] = {}

    def keep(self, field: str, answer: tuple[T | None, str | None]) -> T | None:
        value, why = answer
        if value is None:
            self.unavailable[field] = why or "no reason was given"
        return value


def record(device: str = "cuda:0", *, nvml: Any | None = NVML, card: Card | None = None) -> dict[str, object]:
    """This machine as run.json's `machine` section: JSON values only; every None has its reason in `unavailable`.

    `device` is "cpu", "cuda" or "cuda:N". `card` describes it where torch shall not be asked. `neighbours` are compute
    processes on the card beside this one and its children. On "cpu", `name` and `memory_bytes` are the host's and the
    fields that only a card has are None. Raises ValueError for another device, RuntimeError when the card isn't there.
    """
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"the device is 'cpu', 'cuda' or 'cuda:N', not {device!r}")
    notes = _Notes()
    cpu = _cpu(notes)
    fields = _of_card(card or Card.of(device), nvml, notes) if kind == "cuda" else _of_host(cpu, notes)
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        versions[package] = notes.keep(f"versions.{package}", _version(package))
    return {
        "device": kind,
        **fields,
        "cpu": cpu,
        "versions": versions,
        "os": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "unavailable": dict(sorted(notes.unavailable.items())),
    }


CLOCKS = ("sm", "memory", "max_sm")
CARD_FIELDS = (
    "capability",
    "driver",
    "cuda",
    *(f"clocks_mhz.{clock}" for clock in CLOCKS),
    "throttle_reasons",
    "power_w",
    "power_limit_w",
    "power_limit_default_w",
    "temperature_c",
    "temperature_slowdown_c",
    "mig",
    "mig_profile",
    "neighbours",
)
"""Fields that only a card has, and that are None on a CPU."""


def _of_host(cpu: Mapping[str, object], notes: _Notes) -> dict[str, object]:
    why = "no card: measured on the CPU"
    notes.unavailable |= {field: why for field in CARD_FIELDS}
    if cpu["model"] is None:
        notes.unavailable["name"] = notes.unavailable["cpu.model"]
    fields: dict[str, object] = {
        "name": cpu["model"],
        "gpus": 0,
        "memory_bytes": notes.keep("memory_bytes", _host_memory()),
    }
    fields |= {field: None for field in CARD_FIELDS if "." not in field}
    return fields | {"clocks_mhz": dict.fromkeys(CLOCKS)}


def _of_card(card: Card, nvml: Any | None, notes: _Notes) -> dict[str, object]:
    with Sensors(card, nvml) as sensors:

        def read(field: str, query: Callable[[Any, Any], T]) -> T | None:
            return notes.keep(field, sensors.ask(query))

        def positive(field: str, query: Callable[[Any, Any], int]) -> int | None:
            """A reading of something that no working card has none of: a 0 is a missing answer, not a measurement."""
            value, why = sensors.ask(query)
            return notes.keep(field, (None, "NVML reports 0") if value is not None and value <= 0 else (value, why))

        def watts(field: str, query: Callable[[Any, Any], int]) -> float | None:
            milliwatts = positive(field, query)
            return None if milliwatts is None else milliwatts / 1000

        reasons = notes.keep("throttle_reasons", sensors.throttle_reasons())
        mig = read("mig", lambda n, h: sensors.is_slice or _mig_enabled(n, h))
        profile = card.name.partition(" MIG ")[2] or None
        no_profile = "the card is not cut into slices" if mig is False else "the card's name carries none"
        processes, unlisted = sensors.ask(lambda n, h: n.nvmlDeviceGetComputeRunningProcesses(h))
        neighbours = notes.keep(
            "neighbours", (None, unlisted) if processes is None else neighbours_in(_held_bytes(processes), os.getpid())
        )
        if any(neighbour["memory_bytes"] is None for neighbour in neighbours or ()):
            notes.unavailable["neighbours.memory_bytes"] = "NVML doesn't say how much this process holds"
        return {
            "name": card.name,
            "gpus": card.gpus,
            "capability": list(card.capability),
            "memory_bytes": card.memory_bytes,
            "driver": read("driver", lambda n, h: n.nvmlSystemGetDriverVersion()),
            "cuda": notes.keep("cuda", (card.cuda, "torch names no CUDA version")),
            "clocks_mhz": {
                "sm": positive("clocks_mhz.sm", lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),
                "memory": positive("clocks_mhz.memory", lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM)),
                "max_sm": positive("clocks_mhz.max_sm", lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM)),
            },
            "throttle_reasons": None if reasons is None else list(reasons),
            "power_w": watts("power_w", lambda n, h: n.nvmlDeviceGetPowerUsage(h)),
            "power_limit_w": watts("power_limit_w", lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h)),
            "power_limit_default_w": watts(
                "power_limit_default_w", lambda n, h: n.nvmlDeviceGetPowerManagementDefaultLimit(h)
            ),
            "temperature_c": positive(
                "temperature_c", lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)
            ),
            "temperature_slowdown_c": positive(
                "temperature_slowdown_c",
                lambda n, h: n.nvmlDeviceGetTemperatureThreshold(h, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            ),
            "mig": mig,
            "mig_profile": notes.keep("mig_profile", (profile, no_profile)),
            "neighbours": neighbours,
        }


def _mig_enabled(nvml: Any, handle: Any) -> bool:
    """Whether the card is cut into slices; a card that knows no such mode is not."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            return False
        raise
    return bool(current)


def _held_bytes(processes: list[Any]) -> dict[int, int | None]:
    """Bytes on the card by process id; None where NVML does not say (some drivers, and containers)."""
    return {int(process.pid): process.usedGpuMemory for process in processes}


def neighbours_in(
    held_bytes: Mapping[int, int | None], own_pid: int
) -> tuple[list[dict[str, int | None]] | None, str | None]:
    """(the processes on the card beside `own_pid` and its descendants, None), or (None, why they can't be told).

    This process holds a context when it asks. Where the list lacks it, the ids are another namespace's (a container's
    host), and no one can say which of them is this process.
    """
    if own_pid not in held_bytes:
        n = len(held_bytes)
        listed = (
            f"{n} compute process{'es' * (n > 1)} but not this one" if n else "no compute process, not even this one"
        )
        return None, f"NVML lists {listed}: its process ids are not this container's"
    others = sorted(pid for pid in held_bytes if own_pid not in _ancestry(pid))
    return [{"pid": pid, "memory_bytes": held_bytes[pid]} for pid in others], None


def _ancestry(pid: int) -> Iterator[int]:
    """`pid`, its parent, its parent's parent, ... as far as this namespace shows them."""
    while pid > 0:
        yield pid
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        pid = int(stat.rpartition(")")[2].split()[1])  # after "(name)", which may hold blanks: state, parent


def _version(package: str) -> tuple[str | None, str | None]:
    try:
        return importlib.metadata.version(package), None
    except importlib.metadata.PackageNotFoundError:
        return None, "not installed"


def _cpu(notes: _Notes) -> dict[str, object]:
    """`cores` are those this process may use, `cores_total` the machine's, over which its load is counted."""
    total, cores = os.cpu_count(), usable_cores()
    return {
        "model": notes.keep("cpu.model", (_cpu_model(), "the system doesn't name its CPU")),
        "cores": notes.keep("cpu.cores", (cores, "the system doesn't say")),
        "cores_total": notes.keep("cpu.cores_total", (total, "the system doesn't say")),
        "load_1m": notes.keep("cpu.load_1m", _load()),
    }


def usable_cores() -> int | None:
    """The CPU cores that this process may use, None where the system doesn't say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or None


def _load() -> tuple[float | None, str | None]:
    if not hasattr(os, "getloadavg"):
        return None, "this system has no load average"
    try:
        return round(os.getloadavg()[0], 2), None
    except OSError as error:
        return None, f"the load average can't be read: {error}"


def _host_memory() -> tuple[int | None, str | None]:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None, "this system doesn't tell its memory by sysconf"
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
