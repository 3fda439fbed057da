"""The machine record, its remarks and the throttle watch, against faked drivers: no GPU and no torch needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import machine
from benchmarks.machine import Card, Sensors, neighbours_in, record, supports_bfloat16
from benchmarks.preflight import warnings
from benchmarks.timing import interleave

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST = 3, 4, 6, 12, 13, 15
IDLE, POWER_CAP, HW_SLOWDOWN, SW_THERMAL, POWER_BRAKE = 0x01, 0x04, 0x08, 0x20, 0x80
EVENT_REASONS = "nvmlDeviceGetCurrentClocksEventReasons"

H200 = Card("NVIDIA H200", (9, 0), 150_754_820_096, uuid="aaaa-0001", pci="00000000:0f:00.0", cuda="13.0")
T4 = Card("Tesla T4", (7, 5), 15_828_320_256, uuid="bbbb-0002", pci="00000000:00:04.0", cuda="13.0")
SLICE = Card("NVIDIA H200 MIG 1g.18gb", (9, 0), 18_000_000_000, uuid="cccc-0003")


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass
class Driver:
    """A pynvml with one card in it. `failing` maps the name of a function to the error it raises."""

    uuid: str = "GPU-aaaa-0001"
    pci: str = "00000000:0f:00.0"
    clocks: tuple[int, int, int] = (1980, 3201, 1980)
    reasons: int = 0
    milliwatts: tuple[int, int, int] = (120_000, 700_000, 700_000)
    celsius: tuple[int, int] = (40, 87)
    mig: bool = False
    others: Mapping[int, int | None] = field(default_factory=dict)
    lists_us: bool = True
    failing: Mapping[str, int] = field(default_factory=dict)
    open: int = 0
    calls: list[str] = field(default_factory=list)

    NVMLError = NVMLError
    NVML_ERROR_NOT_FOUND = NOT_FOUND
    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED
    NVML_ERROR_FUNCTION_NOT_FOUND = FUNCTION_NOT_FOUND
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            self.calls.append(name)
            if name in self.failing:
                return lambda *_: self._fail(self.failing[name])
            if name not in ("nvmlInit", "nvmlShutdown") and not self.open:
                return lambda *_: self._fail(1)  # uninitialized
        return object.__getattribute__(self, name)

    def _fail(self, value: int) -> None:
        raise NVMLError(value)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise NVMLError(NOT_FOUND)
        return "slice" if uuid.startswith("MIG-") else "card"

    def nvmlDeviceGetHandleByPciBusId(self, pci: str) -> str:
        if pci != self.pci:
            raise NVMLError(NOT_FOUND)
        return "card"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        assert handle == "slice"
        return "card"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.03"

    def nvmlDeviceGetClockInfo(self, handle: str, which: int) -> int:
        assert handle == "card"
        return self.clocks[which - 1]

    def nvmlDeviceGetMaxClockInfo(self, handle: str, which: int) -> int:
        assert (handle, which) == ("card", self.NVML_CLOCK_SM)
        return self.clocks[2]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        assert handle == "card"
        return self.reasons

    nvmlDeviceGetCurrentClocksThrottleReasons = nvmlDeviceGetCurrentClocksEventReasons

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self.milliwatts[0]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return self.milliwatts[1]

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: str) -> int:
        return self.milliwatts[2]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return self.celsius[0]

    def nvmlDeviceGetTemperatureThreshold(self, handle: str, threshold: int) -> int:
        return self.celsius[1]

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [int(self.mig), int(self.mig)]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        ours = {os.getpid(): 2**30} if self.lists_us else {}
        return [SimpleNamespace(pid=p, usedGpuMemory=held) for p, held in {**ours, **self.others}.items()]


QUERIES = sorted(name for name in vars(Driver) if name.startswith("nvml") and name != "nvmlShutdown")


def nulls(value: object, path: str = "") -> Iterator[str]:
    """Dotted names of all None fields; the elements of a list share the list's name."""
    if value is None:
        yield path
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from nulls(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for inner in value:
            yield from nulls(inner, path)


def check_reasons(one: dict[str, Any]) -> None:
    """A reason for every None, and no reason for anything else."""
    reasons = one["unavailable"]
    assert set(nulls(one)) == set(reasons)
    assert all(reasons.values())
    assert json.loads(json.dumps(one, allow_nan=False)) == one


def rec(driver: Driver | None, card: Card = H200) -> dict[str, Any]:
    return record("cuda:0", nvml=driver, card=card)


def test_a_card_is_recorded_in_full() -> None:
    driver = Driver()
    one = rec(driver)
    check_reasons(one)
    assert set(one["unavailable"]) <= {"mig_profile", *(f"versions.{p}" for p in machine.PACKAGES)}
    assert (one["device"], one["name"], one["capability"]) == ("cuda", "NVIDIA H200", [9, 0])
    assert one["memory_bytes"] == 150_754_820_096
    assert (one["driver"], one["cuda"]) == ("580.159.03", "13.0")
    assert one["clocks_mhz"] == {"sm": 1980, "memory": 3201, "max_sm": 1980}
    assert (one["power_w"], one["power_limit_w"], one["power_limit_default_w"]) == (120.0, 700.0, 700.0)
    assert (one["temperature_c"], one["temperature_slowdown_c"]) == (40, 87)
    assert (one["mig"], one["neighbours"], one["throttle_reasons"]) == (False, [], [])
    assert driver.open == 0, "the driver's library was left open"


def test_a_quiet_card_gets_no_remark() -> None:
    quiet = idle_host(rec(Driver(reasons=IDLE, clocks=(345, 3201, 1980))))
    assert warnings(quiet, quiet) == []


def idle_host(one: dict[str, Any], load: float = 0.0) -> dict[str, Any]:
    return {**one, "cpu": {**one["cpu"], "load_1m": load, "cores_total": 2}}


def test_a_card_that_knows_no_slices_is_whole_and_its_profile_says_so() -> None:
    t4 = Driver(uuid="GPU-bbbb-0002", failing={"nvmlDeviceGetMigMode": NOT_SUPPORTED})
    one = rec(t4, T4)
    check_reasons(one)
    assert one["mig"] is False
    assert one["capability"] == [7, 5]


def test_mig_mode_that_may_not_be_read_is_unknown_rather_than_off() -> None:
    one = rec(Driver(failing={"nvmlDeviceGetMigMode": NO_PERMISSION}))
    assert one["mig"] is None
    assert "error 4" in one["unavailable"]["mig"]


def test_a_card_without_clocks_has_null_clocks_with_the_reason() -> None:
    one = rec(Driver(failing={"nvmlDeviceGetClockInfo": NOT_SUPPORTED, "nvmlDeviceGetMaxClockInfo": NOT_SUPPORTED}))
    check_reasons(one)
    assert one["clocks_mhz"] == {"sm": None, "memory": None, "max_sm": None}
    assert one["unavailable"]["clocks_mhz.sm"] == "NVML: error 3"
    assert warnings(idle_host(one)) == []


def test_a_zero_is_a_missing_answer_and_no_measurement() -> None:
    one = rec(Driver(clocks=(0, 0, 1980), milliwatts=(0, 0, 0)))
    check_reasons(one)
    assert one["clocks_mhz"] == {"sm": None, "memory": None, "max_sm": 1980}
    assert one["power_w"] is None
    assert one["unavailable"]["power_w"] == "NVML reports 0"


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        (None, "nvidia-ml-py is not installed"),
        (Driver(failing={"nvmlInit": LIBRARY_NOT_FOUND}), "NVML: error 12"),
        (Driver(uuid="GPU-elsewhere", pci="00000000:99:00.0"), "NVML: error 6"),
    ],
    ids=["binding", "library", "card"],
)
def test_without_nvml_the_fields_are_null_with_the_reason_and_the_card_says_so(driver: Driver | None, why: str) -> None:
    one = rec(driver)
    check_reasons(one)
    for field_name in ("driver", "throttle_reasons", "power_w", "temperature_c", "mig", "neighbours"):
        assert one[field_name] is None
        assert one["unavailable"][field_name] == why
    assert one["name"] == "NVIDIA H200", "what torch knows needs no NVML"
    assert warnings(idle_host(one)) == [f"throttling and neighbours can't be seen ({why})"]
    assert driver is None or driver.open == 0


@settings(deadline=None, max_examples=30)
@given(
    failing=st.dictionaries(st.sampled_from(QUERIES), st.sampled_from([1, 3, 4, 6, 12, 13, 15, 999])),
    clocks=st.tuples(*[st.sampled_from([0, 345, 1980])] * 3),
    mask=st.integers(0, 2**12),
    others=st.dictionaries(st.just(2**22 + 1), st.sampled_from([None, 2**30])),
    lists_us=st.booleans(),
)
def test_nothing_is_null_without_a_reason_whatever_the_driver_refuses(
    failing: dict[str, int], clocks: tuple[int, int, int], mask: int, others: dict[int, int | None], lists_us: bool
) -> None:
    driver = Driver(failing=failing, clocks=clocks, reasons=mask, others=others, lists_us=lists_us)
    one = rec(driver)
    check_reasons(one)
    assert driver.open == 0
    for line in warnings(one, one):
        assert "\n" not in line
        assert "None" not in line


def test_one_refused_query_costs_one_field() -> None:
    one = rec(Driver(failing={"nvmlDeviceGetPowerUsage": NO_PERMISSION}))
    assert one["unavailable"]["power_w"] == "NVML: error 4"
    assert one["power_limit_w"] == 700.0
    assert one["temperature_c"] == 40


def test_errors_that_are_not_the_drivers_are_not_swallowed() -> None:
    class Broken(Driver):
        def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
            raise TypeError("a bug")

    broken = Broken()
    with pytest.raises(TypeError, match="a bug"):
        rec(broken)
    assert broken.open == 0


def test_a_bug_in_the_search_for_the_card_is_not_swallowed() -> None:
    class Broken(Driver):
        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
            raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        rec(Broken())


def test_the_card_is_found_by_uuid_whatever_its_index() -> None:
    driver = Driver()
    rec(driver, Card("NVIDIA H200", (9, 0), 1, uuid="GPU-aaaa-0001"))
    assert not [call for call in driver.calls if "ByIndex" in call or "ByPci" in call]


def test_the_card_is_found_on_its_bus_where_its_uuid_is_unknown() -> None:
    assert rec(Driver(uuid="GPU-hidden"))["driver"] == "580.159.03"


def test_a_card_that_cannot_be_told_apart_is_not_guessed() -> None:
    one = rec(Driver(), Card("A card", (9, 0), 1))
    assert one["driver"] is None
    assert one["unavailable"]["driver"] == "NVML: error 6"


def test_a_mig_slice_is_read_at_the_card_around_it_and_said() -> None:
    one = rec(Driver(uuid="MIG-cccc-0003", mig=True), SLICE)
    check_reasons(one)
    assert (one["mig"], one["mig_profile"]) == (True, "1g.18gb")
    assert one["clocks_mhz"]["sm"] == 1980
    assert warnings(idle_host(one)) == ["the card is a MIG slice (1g.18gb): its figures are not the whole card's"]


def test_a_slice_is_known_as_one_where_the_cards_mode_may_not_be_read() -> None:
    one = rec(Driver(uuid="MIG-cccc-0003", failing={"nvmlDeviceGetMigMode": NO_PERMISSION}), SLICE)
    assert (one["mig"], one["mig_profile"]) == (True, "1g.18gb")


def test_neighbours_are_named_with_what_they_hold() -> None:
    stranger = os.getppid()
    one = rec(Driver(others={stranger: 3 * 2**30}))
    assert one["neighbours"] == [{"pid": stranger, "memory_bytes": 3 * 2**30}]
    said = f"the card is shared: 1 other process holding 3.0 GiB (pid {stranger})"
    assert warnings(idle_host(one)) == [said]
    alone = idle_host(rec(Driver()))
    assert warnings(alone, one) == [said], "one that came during the run counts too"


def test_a_neighbour_of_another_namespace_counts_while_we_are_listed() -> None:
    one = rec(Driver(others={2**22 + 7: None}))
    check_reasons(one)
    assert one["neighbours"] == [{"pid": 2**22 + 7, "memory_bytes": None}]
    assert warnings(idle_host(one)) == [f"the card is shared: 1 other process (pid {2**22 + 7})"]


def test_a_neighbour_seen_once_needs_no_remark_that_neighbours_are_unknown() -> None:
    seen = idle_host(rec(Driver(others={os.getppid(): 2**30})))
    unknown = idle_host(rec(Driver(lists_us=False)))
    (line,) = warnings(seen, unknown)
    assert line.startswith("the card is shared: 1 other process")


def test_our_own_children_are_no_neighbours() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        own, _ = neighbours_in({os.getpid(): 1, child.pid: 2}, os.getpid())
        from_outside, _ = neighbours_in({os.getpid(): 1, child.pid: 2}, child.pid)
        child.communicate(b"\n")
    assert own == []
    assert from_outside == [{"pid": os.getpid(), "memory_bytes": 1}], "a parent is no child"


@pytest.mark.parametrize(
    ("others", "listed"), [({}, "no compute process, not even this one"), ({9: 1, 10: 1}, "2 compute processes")]
)
def test_in_a_container_neighbours_are_unknown_rather_than_none(others: dict[int, int], listed: str) -> None:
    one = rec(Driver(others=others, lists_us=False))
    check_reasons(one)
    assert one["neighbours"] is None
    assert listed in one["unavailable"]["neighbours"]
    (line,) = warnings(idle_host(one))
    assert line.startswith("whether others use the card is unknown (NVML lists ")


def test_the_table_of_reasons_is_the_drivers_own() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = {
        "GpuIdle": "gpu idle",
        "ApplicationsClocksSetting": "applications clocks setting",
        "SwPowerCap": "software power cap",
        "HwSlowdown": "hardware slowdown",
        "SyncBoost": "sync boost",
        "SwThermalSlowdown": "software thermal slowdown",
        "HwThermalSlowdown": "hardware thermal slowdown",
        "HwPowerBrakeSlowdown": "hardware power brake",
        "DisplayClockSetting": "display clock setting",
    }
    for name, words in names.items():
        assert machine.REASONS[getattr(pynvml, f"nvmlClocksEventReason{name}")] == words
    known = sum(machine.REASONS)
    assert pynvml.nvmlClocksEventReasonAll & ~known == 0
    constants = [name for name in vars(Driver) if name.startswith("NVML_")]
    assert {name: getattr(pynvml, name) for name in constants} == {name: getattr(Driver, name) for name in constants}
    assert all(hasattr(pynvml, name) for name in [*QUERIES, "nvmlShutdown"])


@given(st.sets(st.sampled_from([1 << n for n in range(14)])))
@settings(deadline=None, max_examples=30)
def test_every_bit_of_the_mask_is_said_once(bits: set[int]) -> None:
    words = machine.reasons_in(sum(bits))
    assert len(words) == len(set(words)) == len(bits)
    assert {machine.REASONS[bit] for bit in bits if bit in machine.REASONS} <= set(words)


def test_throttling_is_told_with_its_time() -> None:
    cool = idle_host(rec(Driver()))
    hot = idle_host(rec(Driver(reasons=SW_THERMAL | HW_SLOWDOWN)))
    assert warnings(cool, hot) == [
        "the card was throttled after the run: hardware slowdown",
        "the card was throttled after the run: software thermal slowdown",
    ]
    assert warnings(hot, hot)[0] == "the card was throttled before and after the run: hardware slowdown"


def test_idle_and_chosen_clocks_are_not_called_throttling() -> None:
    one = idle_host(rec(Driver(reasons=0x01 | 0x02 | 0x10 | 0x100)))
    assert len(one["throttle_reasons"]) == 4
    assert warnings(one, one) == []


def test_a_power_cap_is_said_as_what_it_is() -> None:
    one = idle_host(rec(Driver(reasons=POWER_CAP, clocks=(900, 5000, 1590))))
    assert warnings(one) == [
        "the card ran at its power limit before the run (software power cap): its clocks follow the load",
        "the SM clock was 900 of 1590 MHz before the run (software power cap)",
    ]


def test_low_clocks_are_said_of_a_working_card_only() -> None:
    locked = idle_host(rec(Driver(reasons=0x02, clocks=(1200, 3201, 1980))))
    assert warnings(locked) == ["the SM clock was 1200 of 1980 MHz before the run (applications clocks setting)"]
    asleep = idle_host(rec(Driver(reasons=IDLE, clocks=(1200, 3201, 1980))))
    assert warnings(asleep) == []


def test_a_lowered_power_limit_is_said() -> None:
    one = idle_host(rec(Driver(milliwatts=(100_000, 300_000, 700_000))))
    assert warnings(one) == ["the power limit is 300 W, the card's own is 700 W"]


def test_a_card_near_its_slowdown_temperature_is_said() -> None:
    cool, hot = idle_host(rec(Driver(celsius=(81, 87)))), idle_host(rec(Driver(celsius=(82, 87))))
    assert warnings(cool, hot) == ["the card was at 82 C after the run, and slows down at 87 C"]


def test_a_busy_machine_is_said_by_its_load_at_the_start() -> None:
    calm, busy = idle_host(rec(Driver()), load=0.9), idle_host(rec(Driver()), load=1.6)
    assert warnings(busy, calm) == ["the machine was busy when the run began: load 1.6 on 2 cores"]
    assert warnings(calm, busy) == [], "the load at the end is our own"


@pytest.mark.parametrize("bit", sorted(machine.SLOWDOWNS))
def test_a_slowdown_disturbs_a_round(bit: int) -> None:
    with Sensors(H200, Driver(reasons=bit | IDLE)) as sensors:
        assert sensors.disturbance() == machine.SLOWDOWNS[bit]


@pytest.mark.parametrize("bit", [0, *machine.POWER_CAPS, *machine.SETTINGS])
def test_what_the_work_or_a_person_sets_disturbs_no_round(bit: int) -> None:
    with Sensors(H200, Driver(reasons=bit)) as sensors:
        assert sensors.disturbance() is None


def test_the_watch_costs_one_query_a_round() -> None:
    driver = Driver(reasons=POWER_BRAKE)
    with Sensors(H200, driver) as sensors:
        sensors.disturbance()
        driver.calls.clear()
        assert [sensors.disturbance() for _ in range(3)] == ["hardware power brake"] * 3
        assert len(driver.calls) <= 3


def test_older_drivers_are_asked_by_the_older_name() -> None:
    driver = Driver(reasons=HW_SLOWDOWN, failing={EVENT_REASONS: FUNCTION_NOT_FOUND})
    with Sensors(H200, driver) as sensors:
        assert sensors.disturbance() == "hardware slowdown"
        assert sensors.disturbance() == "hardware slowdown"
    assert driver.calls.count(EVENT_REASONS) == 1


@pytest.mark.parametrize(
    "driver",
    [None, Driver(failing={"nvmlInit": LIBRARY_NOT_FOUND}), Driver(failing={EVENT_REASONS: GPU_IS_LOST})],
    ids=["binding", "library", "query"],
)
def test_a_blind_watch_sees_no_disturbance_and_raises_nothing(driver: Driver | None) -> None:
    with Sensors(H200, driver) as sensors:
        assert sensors.disturbance() is None
        reasons, why = sensors.throttle_reasons()
    assert reasons is None
    assert why


def test_a_watch_that_is_not_open_says_so() -> None:
    driver = Driver(reasons=HW_SLOWDOWN)
    closed = Sensors(H200, driver)
    assert closed.throttle_reasons() == (None, "the sensors are not open")
    with closed:
        assert closed.disturbance() == "hardware slowdown"
    assert closed.throttle_reasons() == (None, "the sensors are not open")
    assert driver.open == 0


def test_a_driver_that_goes_away_costs_no_run() -> None:
    with Sensors(H200, Driver(failing={"nvmlShutdown": GPU_IS_LOST})) as sensors:
        assert sensors.disturbance() is None


def test_rounds_under_a_throttled_clock_are_measured_again() -> None:
    driver = Driver()
    measured = iter(range(100))

    def side() -> float:
        n = next(measured)
        driver.reasons = SW_THERMAL if n == 3 else 0
        return float(n)

    with Sensors(H200, driver) as sensors:
        rounds = interleave({"a": side}, lambda _: False, 60.0, disturbance=sensors.disturbance, max_rounds=9)
    assert rounds.disturbed == {"software thermal slowdown": 1}
    assert 3.0 not in rounds["a"]
    assert len(rounds) == 9


@pytest.mark.parametrize(
    ("capability", "yes"),
    [((7, 0), False), ((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), True), ((12, 0), True)],
)
def test_bfloat16_is_decided_by_capability(capability: tuple[int, int], yes: bool) -> None:
    assert supports_bfloat16(capability) is yes


def test_this_machines_cpu_is_recorded_without_nvml() -> None:
    one = record("cpu", nvml=None)
    check_reasons(one)
    assert one["device"] == "cpu"
    assert one["name"] == one["cpu"]["model"]
    assert one["memory_bytes"] > 2**28
    assert one["cpu"]["cores"] >= 1
    assert one["capability"] is None
    assert one["unavailable"]["neighbours"] == "no card: measured on the CPU"
    assert one["versions"]["python"] == sys.version.split()[0]
    assert not [line for line in warnings(one, one) if "busy" not in line], "a CPU has no card to remark on"


def test_a_package_that_is_not_there_is_null_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("no-such-package-anywhere",))
    one = record("cpu")
    check_reasons(one)
    assert one["versions"]["no-such-package-anywhere"] is None
    assert one["unavailable"]["versions.no-such-package-anywhere"] == "not installed"


def test_a_system_that_tells_nothing_of_itself_is_null_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cpu_model", lambda: None)
    monkeypatch.delattr(os, "getloadavg")
    monkeypatch.setattr(os, "sysconf_names", {})
    one = record("cpu")
    check_reasons(one)
    assert (one["name"], one["memory_bytes"], one["cpu"]["load_1m"]) == (None, None, None)
    assert warnings(one) == []


def test_another_device_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="'cpu', 'cuda' or 'cuda:N', not 'mps'"):
        record("mps")


def test_reading_records_needs_no_torch() -> None:
    script = "import sys; from benchmarks import machine; machine.record('cpu'); sys.exit('torch' in sys.modules)"
    root = Path(machine.__file__).parents[1]
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, cwd=root)


def test_a_card_is_described_as_torch_and_nvml_both_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", a_torch_with_one_t4([]))
    assert (
        Card.of("cuda")
        == Card.of("cuda:0")
        == Card("Tesla T4", (7, 5), 15_828_320_256, uuid="bbbb-0002", pci="00000000:af:04.0", cuda="13.0")
    )


def test_a_card_has_our_context_before_its_processes_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setitem(sys.modules, "torch", a_torch_with_one_t4(done))
    Card.of("cuda:0")
    assert done == ["allocated on 0", "synchronised 0"]


def test_a_card_that_is_not_there_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", a_torch_with_one_t4([]))
    with pytest.raises(RuntimeError, match=r"no card 'cuda:1': torch 2\.13\.0 sees 1; on a CPU use device 'cpu'"):
        record("cuda:1", nvml=None)


def a_torch_with_one_t4(done: list[str]) -> SimpleNamespace:
    """Just the functions of torch that describe a card; `done` collects what was made to run on it."""
    t4 = SimpleNamespace(
        name="Tesla T4",
        major=7,
        minor=5,
        total_memory=15_828_320_256,
        uuid="bbbb-0002",
        pci_domain_id=0,
        pci_bus_id=0xAF,
        pci_device_id=4,
    )

    def device(name: str) -> SimpleNamespace:
        return SimpleNamespace(index=int(name.partition(":")[2]) if ":" in name else None)

    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda="13.0"),
        device=device,
        zeros=lambda n, device: done.append(f"allocated on {device.index}"),
        cuda=SimpleNamespace(
            device_count=lambda: 1,
            synchronize=lambda device: done.append(f"synchronised {device.index}"),
            get_device_properties=lambda device: t4,
        ),
    )
