"""More GPUs, on two CPU processes: the same tokens, the shares of memory, what is refused, and that workers end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from benchmarks import parallel, workloads
from benchmarks.claims import CLAIMS
from benchmarks.estimates import Estimate
from benchmarks.parallel import pipeline, team
from benchmarks.parallel.pipeline import Flight, idle_share
from benchmarks.parallel.ranks import PIPELINE, TENSOR_PARALLEL, WHOLE, WIDE, WIDE_TENSOR_PARALLEL
from benchmarks.parallel.team import WIDE_SHAPES, Team, group_size, lacking, shape_bytes, widest
from benchmarks.parallel.tensor_parallel import Shares, StepCost, StepTrace, refusal
from benchmarks.parallel.workers import Workers, WorkersFailed
from benchmarks.rigs import Loader, RigError, choose
from benchmarks.runs import Run
from benchmarks.timing import Rounds
from benchmarks.traces import Event
from benchmarks.verdicts import Word
from tests import lying_ranks
from tests.pretend import verdict
from tests.unruly import Unruly, stillborn

ROUNDS = 10


def word(claim_id: str, observed: Estimate | dict[str, Estimate]) -> Word:
    return verdict(claim_id, observed).word


# Two processes and the embedded target --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    rig = choose(rig="nimbus", target=None, draft=None, weights="trained", dtype="float32", device="cpu")
    with pytest.MonkeyPatch.context() as patch, Team(rig, Loader(rig), 2) as pair:
        patch.setattr(team, "join", lying_ranks.join)
        small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
        patch.setattr(team, "WIDE_SHAPES", (WIDE_SHAPES[0] | small | {"vocab_size": 512},))
        yield pair


@pytest.fixture(scope="module")
def one_row() -> workloads.Workload:
    return workloads.Workload("one row", (tuple(range(3, 40)),), 4)


PROMPTS = (tuple(range(5, 42)), tuple(range(600, 580, -1)))


def matches(pair: Team, name: str) -> list[Any]:
    found: list[Any] = pair.need(name).call("same_tokens", name, PROMPTS, 8)[0]
    return found


def test_each_process_holds_its_slices_and_what_stays_whole(pair: Team) -> None:
    pair.need(TENSOR_PARALLEL)
    assert pair.shares is not None and pair.shares.replicated_bytes["model.norm.weight"] == 256 * 4
    seen = parallel.memory_shows(pair.shares, pair.held_bytes[TENSOR_PARALLEL])["parallel.tp_memory"]
    assert word("parallel.tp_memory", seen) is Word.HOLDS
    assert "replicated: input_layernorm, norm, post_attention_layernorm" in seen.note
    both_whole = [2 * held for held in pair.held_bytes[TENSOR_PARALLEL]]
    assert (
        word("parallel.tp_memory", parallel.memory_shows(pair.shares, both_whole)["parallel.tp_memory"]) is Word.REFUTED
    )


def test_random_weights_reach_every_process_through_a_folder_that_goes_with_them(
    pair: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = replace(pair.rig, weights="random")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Team(rig, Loader(rig), 2) as at_random:
        at_random.need(TENSOR_PARALLEL)
        assert at_random.shares is not None
        seen = parallel.memory_shows(at_random.shares, at_random.held_bytes[TENSOR_PARALLEL])["parallel.tp_memory"]
        assert word("parallel.tp_memory", seen) is Word.HOLDS, seen
        assert list(tmp_path.rglob("model.safetensors"))
        at_random.need().close()
        assert not list(tmp_path.iterdir()), "also where the parent is killed, and can't do it"


def test_one_greedy_slice_among_honest_ones_is_seen() -> None:
    seen = parallel.memory_shows(Shares(1000, {"model.norm.weight": 20}), [1020, 1020, 1070])
    assert word("parallel.tp_memory", seen["parallel.tp_memory"]) is Word.REFUTED


def test_a_split_step_waits_for_all_twice_a_layer_and_once_for_the_embedding(pair: Team, one_row: Any) -> None:
    workers = pair.need(TENSOR_PARALLEL, PIPELINE, WIDE)
    one_round = parallel.beside(workers, WHOLE, TENSOR_PARALLEL, one_row)()
    assert {step.all_reduces for step in one_round.split_step} == {2 * 6 + 1} and one_round.one_step.all_reduces == 0
    assert one_round.one.output_len == one_round.split.output_len == 4 and one_round.split.clock_advanced
    assert parallel.beside(workers, WHOLE, PIPELINE, one_row)().split.clock_advanced
    assert parallel.beside(workers, WIDE, WIDE_TENSOR_PARALLEL, one_row)().split_step[1].all_reduces == 2 * 4 + 1
    shown = parallel.tensor_parallel_shows([one_round], [one_round], 2, 6)
    assert shown["parallel.tp_pays_for_sync"]["all-reduces per layer"].value == pytest.approx(13 / 6)
    assert (
        word("parallel.tp_pays_for_sync", shown["parallel.tp_pays_for_sync"]) is Word.INCONCLUSIVE
    )  # a CPU: no device time


def test_prefills_in_flight_are_seen_by_every_stage(pair: Team) -> None:
    flown = parallel.fly(pair.need(PIPELINE), PROMPTS[:1] * 4, (1, 4))
    assert list(flown) == [1, 4] and all(0 < f.busy_s < f.wall_s for stages in flown.values() for f in stages)
    assert [len(stages) for stages in flown.values()] == [2, 2]


def test_replicas_serve_alone_and_together(pair: Team, one_row: Any) -> None:
    workers = pair.need(WHOLE)
    assert len(workers.call("serve", one_row, False, ranks=[0])) == 1
    assert len(workers.call("serve", one_row, True)) == 2


def test_each_replica_says_why_it_cannot_record_a_step(pair: Team, one_row: Any) -> None:
    reasons = pair.record_step(one_row)
    assert len(reasons) == 2 and all("no CUDA on this machine" in str(reason) for reason in reasons)


def test_split_models_say_what_the_whole_one_says_until_they_lie(pair: Team) -> None:
    honest = {name: matches(pair, name) for name in (TENSOR_PARALLEL, PIPELINE)}
    shown = parallel.same_tokens_show(*honest.values())["parallel.same_tokens"]
    assert word("parallel.same_tokens", shown) is Word.HOLDS, verdict("parallel.same_tokens", shown).line
    assert [match.furthest.distance for match in honest[PIPELINE]] == [0, 0]
    for name, lie in ((TENSOR_PARALLEL, "deaf"), (PIPELINE, "rounds"), (PIPELINE, "lost")):
        pair.need(name).call("lie", name, lie)
        shown = parallel.same_tokens_show(*(honest | {name: matches(pair, name)}).values())["parallel.same_tokens"]
        assert word("parallel.same_tokens", shown) is Word.REFUTED, lie


def test_after_a_failure_the_next_one_in_need_gets_new_workers_at_the_same_port(
    pair: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    with Team(pair.rig, Loader(pair.rig), 2) as again:
        old = again.need()
        with pytest.raises(WorkersFailed, match="worker 0 of 2: KeyError: 'no such model'"):
            old.call("trace_step", "no such model", None, ranks=[0])
        assert not old.alive and all(map(gone, old.pids))
        assert again.need().alive and again.need() is not old


# Workers end ----------------------------------------------------------------------------------------------------------


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_workers_answer_by_rank_and_end_with_their_context() -> None:
    with Workers(2, Unruly, 60) as workers:
        assert workers.call("double", 4) == [(0, 8), (1, 8)]
        assert workers.call("double", 5, ranks=[1]) == [(1, 10)]
        assert not any(map(gone, workers.pids))
    assert all(map(gone, workers.pids))
    with pytest.raises(WorkersFailed, match="ended already"):
        workers.call("double", 4)


@pytest.mark.parametrize(
    ("method", "args", "timeout_s", "said"),
    [
        ("fail", (1,), 20, r"worker 1 of 2: ValueError: the slices don't fit at all"),
        ("ends_early", (), 20, r"worker \d of 2: EOFError: Ran out of input"),
        ("die", (0,), 20, r"worker 0 of 2 died \(exit code 3\)"),
        ("hang", (), 0.2, r"worker 0, 1 of 2 took longer than 0.2 s \(hang\)"),
    ],
)
def test_one_that_raises_dies_or_hangs_ends_them_all(method: str, args: Any, timeout_s: float, said: str) -> None:
    start = time.monotonic()
    with Workers(2, Unruly, 60) as workers, pytest.raises(WorkersFailed, match=said):
        workers.call(method, *args, timeout_s=timeout_s)
    assert all(map(gone, workers.pids)) and time.monotonic() - start < 10


def test_one_that_does_not_start_ends_them_all() -> None:
    with pytest.raises(WorkersFailed, match=r"worker \d of 2: RuntimeError: no such device"):
        Workers(2, stillborn, 60)


def test_ctrl_c_ends_them_all() -> None:
    main = threading.main_thread().ident
    assert main is not None
    with Workers(2, Unruly, 60) as workers:
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            workers.call("hang")
    assert all(map(gone, workers.pids))


KILLED = """
import importlib.util, pathlib, sys, time, types
# The package without its own module, which would import torch here and in each worker: workers.py needs none.
package = sys.modules["benchmarks.parallel"] = types.ModuleType("benchmarks.parallel")
package.__path__ = importlib.util.find_spec("benchmarks").submodule_search_locations[0] + "/parallel",
from benchmarks.parallel.workers import Workers
from tests.unruly import Unruly
if __name__ == "__main__":
    # Kept: without it they would end anyway.
    workers = Workers(2, Unruly, 60, leftover=pathlib.Path(sys.argv[1]))
    print(*workers.pids, flush=True)
    time.sleep(60)
"""


def test_they_end_by_themselves_when_the_parent_is_killed_and_leave_nothing_behind(tmp_path: Path) -> None:
    script, leftover = tmp_path / "killed.py", tmp_path / "leftover"
    leftover.mkdir()
    (leftover / "model.safetensors").write_text("3 GB of them")
    script.write_text(KILLED)
    root = str(Path(__file__).parents[1])
    command = [sys.executable, str(script), str(leftover)]
    parent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": root}, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(map(gone, pids)) and leftover.exists()
        parent.kill()
    deadline = time.monotonic() + 10
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(map(gone, pids)) and not leftover.exists()


# Refusals -------------------------------------------------------------------------------------------------------------


def shape(heads: int, kv_heads: int, kind: str = "qwen2") -> Any:
    return AutoConfig.for_model(kind, hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)


@pytest.mark.parametrize(
    ("config", "world_size", "said"),
    [
        (shape(12, 2), 2, None),
        (shape(12, 2), 4, "2 KV heads can't be split over 4 GPUs: pass --world-size 2"),
        (shape(12, 2), 3, "2 KV heads can't be split over 3 GPUs: pass --world-size 2"),
        (shape(12, 12), 8, "12 attention heads can't be split over 8 GPUs: pass --world-size 6"),
        (shape(9, 3), 2, "9 attention heads can't be split over 2 GPUs: choose another --target"),
        (AutoConfig.for_model("gpt2"), 2, "gpt2 has no tensor-parallel plan in transformers: choose another --target"),
        (AutoConfig.for_model("mixtral"), 2, "the tensor-parallel plan of mixtral splits by"),
    ],
)
def test_what_cannot_be_split_is_refused_before_anything_loads(config: Any, world_size: int, said: str | None) -> None:
    reason = refusal(config, world_size)
    assert reason == said or (said is not None and reason is not None and reason.startswith(said))


def test_layers_that_cannot_be_laid_out_are_refused_before_anything_loads() -> None:
    few = AutoConfig.for_model("qwen2", num_hidden_layers=3)
    assert pipeline.refusal(few, 3) is None
    assert pipeline.refusal(few, 4) == "3 layers are too few for 4 stages: pass --world-size 3 or less"
    assert "no pipeline plan" in str(pipeline.refusal(AutoConfig.for_model("gpt2"), 2))
    assert set(lacking(AutoConfig.for_model("gpt2"), None, ["T4", "T4"])) == {"tensor_plan", "pipeline_plan"}


@given(st.integers(1, 64), st.integers(1, 8), st.integers(2, 8))
def test_the_remedy_of_a_refusal_is_not_refused(per_kv_head: int, kv_heads: int, world_size: int) -> None:
    config = shape(per_kv_head * kv_heads, kv_heads)
    if (reason := refusal(config, world_size)) and "--world-size" in reason:
        assert refusal(config, int(reason.split()[-1])) is None


def test_the_number_of_gpus_is_all_up_to_eight_or_what_was_asked() -> None:
    assert [group_size(None, n) for n in (0, 1, 2, 8, 16)] == [0, 1, 2, 8, 8]
    assert group_size(2, 4) == 2
    for asked in (1, 5, 0, -1):
        with pytest.raises(RigError, match=rf"--world-size {asked}: torch sees 4 GPUs .* give 2 to 4$"):
            group_size(asked, 4)
    with pytest.raises(RigError, match=r"torch sees 1 GPU here .*; leave it out$"):
        group_size(2, 1)


def test_one_gpu_and_gpus_of_different_kinds_are_named() -> None:
    assert lacking(shape(12, 2), None, ["T4"]) == {"gpus2": "one GPU: parallelism needs two or more"}
    assert lacking(shape(12, 2), None, ["T4", "T4"]) == {}
    assert "different kinds (L4, T4)" in lacking(shape(12, 2), None, ["T4", "L4"])["gpus2"]
    assert lacking(shape(12, 2), 2, ["T4", "T4", "L4"]) == {}
    assert set(lacking(shape(12, 2), None, ["T4"] * 4)) == {"tensor_plan"}


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert lacking(shape(12, 2), None, ["T4", "T4"])["gpus2"].startswith(f"port {port} is taken: unset MASTER_PORT")
    assert lacking(shape(12, 2), None, ["T4", "T4"]) == {}


@pytest.mark.parametrize("named", ["", "abc", "22.5", "99999", "-1", "1" * 50, "\u00b2\u00b2", "1\x1b[2J"])
def test_a_port_that_is_none_is_one_line(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", named)
    with pytest.raises(RigError, match=r"^MASTER_PORT '.{0,24}' is no port from 1 to 65535: unset it") as error:
        lacking(shape(12, 2), None, ["T4", "T4"])
    assert str(error.value).isprintable()
    assert lacking(shape(12, 2), None, ["T4"])["gpus2"].startswith("one GPU"), "nobody meets anywhere"


def test_the_wide_shape_is_the_widest_that_fits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "WIDE_SHAPES", WIDE_SHAPES)  # which the workers' fixture changes
    widths = [widest(gib << 30, 2)["hidden_size"] for gib in (140, 40, 10)]
    assert widths == [16384, 8192, 4096]
    with pytest.raises(RigError, match="no room"):
        widest(1 << 30, 2)
    assert shape_bytes(WIDE_SHAPES[2], 2) / 4 == pytest.approx(218e6 * 2, rel=0.4)  # an 8B's layer has 218 M weights


# Each claim and its liar ----------------------------------------------------------------------------------------------


def run(tpot_s: float, batch_size: int = 1, n: int = 16) -> Run:
    return Run(batch_size, 37, tuple(tpot_s * (i + 1) for i in range(n)))


def step(compute_s: float, *collectives_s: float, all_reduces: int = 57) -> StepTrace:
    return StepTrace(compute_s, collectives_s, all_reduces)


def rounds_of(tpot_s: float, compute_s: float, sync_s: float = 0.0, all_reduces: int = 57) -> list[parallel.Beside]:
    """A GPU of 20 ms a token and 3 ms of work beside a pair of them; one of the pair is waited for now and then."""
    late = (sync_s, sync_s + 0.004)
    return [
        parallel.Beside(
            run(0.020),
            run(tpot_s),
            step(0.003, all_reduces=0),
            (
                step(compute_s, late[i % 2], all_reduces=all_reduces),
                step(compute_s, late[1 - i % 2], all_reduces=all_reduces),
            ),
        )
        for i in range(ROUNDS)
    ]


HONEST_PAIR = rounds_of(0.022, 0.0018, 0.0004)


def test_a_pair_that_pays_for_its_exchange_upholds_both() -> None:
    for id, observed in parallel.tensor_parallel_shows(HONEST_PAIR, HONEST_PAIR, 2, 28).items():
        assert word(id, observed) is Word.HOLDS, verdict(id, observed).line
    shown = parallel.tensor_parallel_shows(HONEST_PAIR, HONEST_PAIR, 2, 28)["parallel.tp_pays_for_sync"]
    assert shown["share of the step"].value == pytest.approx(0.4 / 2.2)  # not the wait for the late one


LINEAR = rounds_of(0.009, 0.0013, 0.0001)
TP_LIARS: list[tuple[str, list[parallel.Beside], list[parallel.Beside]]] = [
    ("parallel.tp_not_linear", LINEAR, HONEST_PAIR),
    ("parallel.tp_not_linear", HONEST_PAIR, LINEAR),
    ("parallel.tp_pays_for_sync", rounds_of(0.022, 0.0018, 0.00001), HONEST_PAIR),
    ("parallel.tp_pays_for_sync", rounds_of(0.022, 0.0018, 0.0004, all_reduces=28), HONEST_PAIR),
    ("parallel.tp_pays_for_sync", rounds_of(0.022, 0.0018, 0.0004, all_reduces=83), HONEST_PAIR),
]


@pytest.mark.parametrize(("claim_id", "target", "wide"), TP_LIARS)
def test_a_pair_that_does_not_pay_is_refuted(claim_id: str, target: Any, wide: Any) -> None:
    assert word(claim_id, parallel.tensor_parallel_shows(target, wide, 2, 28)[claim_id]) is Word.REFUTED


def flights(idle_at_one: float, idle_at_most: float) -> list[dict[int, tuple[Flight, ...]]]:
    shares = {1: idle_at_one, 2: idle_share(2, 2), 8: idle_at_most}
    return [{n: (Flight(1 - share, 1.0), Flight(1 - share, 1.0)) for n, share in shares.items()}] * ROUNDS


STAGES = rounds_of(0.021, 0.0015)
PP_LIARS: list[tuple[list[parallel.Beside], Any]] = [
    (rounds_of(0.011, 0.0015), flights(0.5, 0.12)),  # a request gets faster
    (rounds_of(0.021, 0.0008), flights(0.5, 0.12)),  # work is gone
    (STAGES, flights(0.1, 0.04)),  # stages work while they have nothing to work on
    (STAGES, flights(0.5, 0.45)),  # more in flight help nothing
]


def test_stages_that_wait_for_each_other_uphold_it() -> None:
    observed = parallel.pipeline_shows(STAGES, flights(0.5, 0.12), 2)["parallel.pp_same_latency"]
    assert word("parallel.pp_same_latency", observed) is Word.HOLDS


@pytest.mark.parametrize(("rounds", "flown"), PP_LIARS)
def test_a_pipeline_that_lies_is_refuted(rounds: Any, flown: Any) -> None:
    observed = parallel.pipeline_shows(rounds, flown, 2)["parallel.pp_same_latency"]
    assert word("parallel.pp_same_latency", observed) is Word.REFUTED


def replicas(together_s: float = 0.021, unbatched_s: float = 0.020) -> Rounds[list[Run]]:
    one = {
        "alone": [run(0.020, 16)],
        "together": [run(0.020, 16), run(together_s, 16)],
        "unbatched": [run(unbatched_s)] * 2,
    }
    return Rounds({name: [runs] * ROUNDS for name, runs in one.items()})


def test_replicas_that_leave_each_other_alone_uphold_both() -> None:
    for id, observed in parallel.replicas_show(replicas()).items():
        assert word(id, observed) is Word.HOLDS, id


@pytest.mark.parametrize(
    ("claim_id", "rounds"),
    [
        ("parallel.replicas_scale", replicas(together_s=0.030)),  # they share what they shouldn't
        ("parallel.idle_replica_is_idle", replicas(unbatched_s=0.002)),  # batching gains nothing
    ],
)
def test_replicas_that_do_not_are_refuted(claim_id: str, rounds: Rounds[list[Run]]) -> None:
    assert word(claim_id, parallel.replicas_show(rounds)[claim_id]) is Word.REFUTED


def test_every_claim_of_the_station_has_met_its_liar_here() -> None:
    met = {id for id, _, _ in TP_LIARS} | {"parallel.pp_same_latency", "parallel.replicas_scale", "parallel.tp_memory"}
    met |= {"parallel.idle_replica_is_idle", "parallel.same_tokens"}
    assert met == {id for id, claim in CLAIMS.items() if claim.station == "parallel"}


def test_failed_workers_leave_their_claims_inconclusive() -> None:
    ids = [id for id, claim in CLAIMS.items() if claim.station == "parallel"]
    for id, observed in parallel.failed(WorkersFailed("worker 1 of 2 died (exit code -9)"), *ids).items():
        assert "worker 1 of 2 died" in verdict(id, observed).line and word(id, observed) is Word.INCONCLUSIVE


# Pure parts -----------------------------------------------------------------------------------------------------------


def test_an_exchange_costs_what_it_took_the_last_to_arrive() -> None:
    cost = StepCost.of([step(0.002, 0.010, 0.001), step(0.003, 0.001, 0.009)])
    assert isinstance(cost, StepCost) and (cost.compute_s, cost.sync_s) == (0.003, 0.002)
    assert "different numbers of collectives (1, 2)" in str(StepCost.of([step(1, 1), step(1, 1, 1)]))
    assert StepCost.of([StepTrace(None, (), 3, "no GPU")]) == "no GPU"


def test_a_trace_is_split_into_work_and_exchange() -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        Event("c10d::allreduce_", 0, 5, id=1),
        Event("gemv", 10, 30, on_device=True),
        Event("gemv", 20, 40, on_device=True),
        Event(nccl, 40, 47, on_device=True),
    ]
    assert StepTrace.of(events) == StepTrace(30e-9, (7e-9,), 1)


@given(st.integers(2, 8), st.integers(1, 64))
def test_more_in_flight_leave_less_idle_and_more_stages_more(stages: int, in_flight: int) -> None:
    assert idle_share(stages, 1) == pytest.approx((stages - 1) / stages)
    assert 0 < idle_share(stages, in_flight + 1) < idle_share(stages, in_flight) < idle_share(stages + 1, in_flight) < 1


def test_cells_say_what_was_measured_and_on_how_many_gpus() -> None:
    workload = workloads.Workload("one row", ((1, 2, 3),), 16)
    one, split = parallel.beside_cells("tensor_target", TENSOR_PARALLEL, 2, workload, "fp16", HONEST_PAIR, 5.0)
    assert (one.id, one.engine, one.workload["gpus"]) == ("parallel.tensor_target_one", "eager", 1)
    assert (split.engine, split.workload["gpus"], split.bytes) == (TENSOR_PARALLEL, 2, {"weights_per_gpu": 5.0})
    assert split.figures["sync_device_s"] == 0.0004 and split.figures["decode_device_s"] == pytest.approx(0.0022)
    flown = parallel.flight_cells(512, "fp16", flights(0.5, 0.12), 2)
    assert [c.workload["name"] for c in flown] == ["1 prefill", "2 prefills", "8 prefills"]
    assert [c.figures["idle_share"] for c in flown] == pytest.approx([0.5, 1 / 3, 0.12])
    made = parallel.replica_cells(replicas(), workload, workload, "fp16", "graph")
    assert [c.workload["gpus"] for c in made] == [1, 2, 2] and {c.engine for c in made} == {"replicas, graph"}
