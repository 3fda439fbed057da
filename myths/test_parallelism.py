"""Belief: "Add GPUs and latency drops in a straight line."

GPUs can be added in three ways, and each does another job. Tensor parallel splits every matrix: a token gets faster, by
less than the number of GPUs, since each layer waits twice for all of them. A pipeline splits the layers: a bigger model
fits, no request gets faster, and stages idle unless enough requests are in flight. Replicas copy the model: more users,
each served as before. And a replica that doesn't batch leaves most of its GPU unused, however many there are.

Everything here runs in worker processes, one a GPU, which end with the module.
"""

from __future__ import annotations

import pytest

from benchmarks import parallel, prefix, workloads
from benchmarks.parallel import failed
from benchmarks.parallel.ranks import PIPELINE, TENSOR_PARALLEL, WHOLE, WIDE, WIDE_TENSOR_PARALLEL
from benchmarks.parallel.team import Team, gpu_names, group_size
from benchmarks.parallel.workers import WorkersFailed
from benchmarks.rigs import RigError
from benchmarks.session import NotCaptured


@pytest.fixture(scope="module")
def team(session):
    world_size = group_size(session.options.world_size, len(gpu_names()))
    with Team(session.rig, session.loader, world_size) as team:
        yield team


@pytest.fixture(scope="module")
def request_of_one(session, tokenizer):
    """A single user's request: the article's short prompt, and a third of its new tokens, since every token is a sample."""
    return workloads.equal_rows(tokenizer, 1, session.options.new_tokens // 3)


@pytest.fixture(scope="module")
def split_matrices(session, team, request_of_one):
    """One GPU and all of them in turn, at the rig's shape and at a wide one."""
    claims = ("parallel.tp_not_linear", "parallel.tp_pays_for_sync")
    n_layers = session.loader.config(session.rig.target).num_hidden_layers
    try:
        workers = team.need(WHOLE, TENSOR_PARALLEL, WIDE)
        compared = session.compare(
            {
                "target": parallel.beside(workers, WHOLE, TENSOR_PARALLEL, request_of_one),
                "wide": parallel.beside(workers, WIDE, WIDE_TENSOR_PARALLEL, request_of_one),
            },
            lambda rounds: parallel.tensor_parallel_shows(rounds["target"], rounds["wide"], team.world_size, n_layers),
        )
    except (WorkersFailed, RigError) as error:
        return failed(error, *claims)
    held, asked = float(max(team.held_bytes[TENSOR_PARALLEL])), (team.world_size, request_of_one, session.rig.reference)
    for name, bytes in (("target", held), ("wide", None)):
        rounds = compared.rounds[name]
        for cell in parallel.beside_cells(f"tensor_{name}", TENSOR_PARALLEL, *asked, rounds, bytes):
            session.ledger.cell(cell)
    return compared.observed


@pytest.mark.claim("parallel.tp_not_linear")
def test_a_token_is_not_n_times_faster_over_n_gpus(split_matrices, judge):
    judge(split_matrices["parallel.tp_not_linear"])


@pytest.mark.claim("parallel.tp_pays_for_sync")
def test_every_layer_waits_twice_for_all_gpus(split_matrices, judge):
    judge(split_matrices["parallel.tp_pays_for_sync"])


@pytest.mark.claim("parallel.tp_memory")
def test_each_gpu_holds_its_slices_and_what_stays_whole(team, judge):
    try:
        team.need(WHOLE, TENSOR_PARALLEL)
        seen = parallel.memory_shows(team.shares, team.held_bytes[TENSOR_PARALLEL])
    except WorkersFailed as error:
        seen = failed(error, "parallel.tp_memory")
    judge(seen["parallel.tp_memory"])


@pytest.mark.claim("parallel.same_tokens")
def test_a_split_model_says_what_the_whole_one_says(session, team, tokenizer, judge):
    prompts = workloads.equal_rows(tokenizer, 4, 1).prompts
    output_len = session.options.new_tokens // 3
    try:
        workers = team.need(TENSOR_PARALLEL, PIPELINE)
        matches = [workers.call("same_tokens", name, prompts, output_len)[0] for name in (TENSOR_PARALLEL, PIPELINE)]
        seen = parallel.same_tokens_show(*matches)
    except WorkersFailed as error:
        seen = failed(error, "parallel.same_tokens")
    judge(seen["parallel.same_tokens"])


@pytest.fixture(scope="module")
def replicas(engine_name, session, team, tokenizer):
    """One replica with 16 requests alone, all of them with 16 each, and all with one each."""
    claims = ("parallel.replicas_scale", "parallel.idle_replica_is_idle")
    recorded = engine_name == "graph"
    # Replays take so little that few of them would judge the prefill, and with it how the hosts share their cores.
    output_len = 4 * session.options.new_tokens if recorded else session.options.new_tokens // 3
    one, sixteen = (workloads.equal_rows(tokenizer, rows, output_len) for rows in (1, 16))
    try:
        workers = team.need(WHOLE)
        for asked in (one, sixteen) if recorded else ():
            if reason := next(filter(None, team.record_step(asked)), None):
                raise NotCaptured(reason)
        compared = session.compare(
            {
                "alone": lambda: workers.call("serve", sixteen, False, recorded, ranks=[0]),
                "together": lambda: workers.call("serve", sixteen, True, recorded),
                "unbatched": lambda: workers.call("serve", one, True, recorded),
            },
            parallel.replicas_show,
            engine_name,
        )
    except WorkersFailed as error:
        return failed(error, *claims)
    for cell in parallel.replica_cells(compared.rounds, one, sixteen, session.rig.reference, engine_name):
        session.ledger.cell(cell)
    return compared.observed


@pytest.mark.claim("parallel.replicas_scale")
def test_n_replicas_give_n_times_the_tokens_and_the_same_wait(replicas, judge):
    judge(replicas["parallel.replicas_scale"])


@pytest.mark.claim("parallel.idle_replica_is_idle")
def test_one_replica_that_batches_beats_n_that_do_not(replicas, judge):
    judge(replicas["parallel.idle_replica_is_idle"])


@pytest.fixture(scope="module")
def split_layers(session, team, target, tokenizer, request_of_one):
    """One GPU and the pipeline in turn, and prefills in flight that are long enough to keep a stage's GPU busy."""
    numbers = parallel.in_flight(team.world_size)
    try:
        length = prefix.device_bound_len(
            target, session.clock, workloads.prefix_ids(tokenizer, session.options.prefix_len)
        )
        if length is None:
            raise WorkersFailed("no prompt that fits keeps a stage's GPU busy, so its idle share would be the host's")
        prompts = workloads.equal_rows(tokenizer, max(numbers), 1, length).prompts
        workers = team.need(WHOLE, PIPELINE)
        compared = session.compare(
            {
                "request": parallel.beside(workers, WHOLE, PIPELINE, request_of_one),
                "flights": lambda: parallel.fly(workers, prompts, numbers),
            },
            lambda rounds: parallel.pipeline_shows(rounds["request"], rounds["flights"], team.world_size),
        )
    except WorkersFailed as error:
        return failed(error, "parallel.pp_same_latency")
    held, precision = float(max(team.held_bytes[PIPELINE])), session.rig.reference
    asked = (team.world_size, request_of_one, precision)
    cells = parallel.beside_cells(PIPELINE, PIPELINE, *asked, compared.rounds["request"], held)
    cells += parallel.flight_cells(length, precision, compared.rounds["flights"], team.world_size)
    for cell in cells:
        session.ledger.cell(cell)
    return compared.observed


@pytest.mark.claim("parallel.pp_same_latency")
def test_a_pipeline_does_not_shorten_a_request_and_its_stages_idle(split_layers, judge):
    judge(split_layers["parallel.pp_same_latency"])
