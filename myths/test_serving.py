"""Belief: "A serving engine is the model behind a port. What one request shows is what users get."

A server fills seats that get free, keeps prefixes that it has read, and lets those wait for whom there is no room. So
sixteen users get many times the tokens of one, a shared system prompt is read once, a queue shows in the time to the first
token and nowhere else, one long prompt can hold up everybody who is being answered, and the average of all that is nobody's
experience. Needs a server: --endpoint URL, or --serve vllm or --serve transformers to start one.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from benchmarks import serving
from benchmarks.estimates import FULL_LOOK
from benchmarks.serving import Broken, NotServed, measures, observed
from benchmarks.serving.servers import Fleet, ServerError, model_folder


@pytest.fixture(scope="module")
def fleet(session, tmp_path_factory):
    """The servers that the suite starts, all at once and ended together; none where the user named an endpoint."""
    plan = session.options.served
    scratch = tmp_path_factory.mktemp("served")
    try:
        running = Fleet(plan, model_folder(session, scratch) if plan.launches else scratch, session.options.report)
    except ServerError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    yield running
    running.stop()


@contextmanager
def _opened(session, fleet, name):
    """A server that is asked; what it counted is kept at the end."""
    server = serving.connect(session.options.served, fleet, name, session.rig.dtype)
    try:
        yield server.open()
        session.ledger.note("servers", {**session.ledger.run.get("servers", {}), name: server.record})
    except ServerError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(session, fleet, server_name):
    """The server under test, its noise measured. Where not even one user gets answers, every claim says so."""
    with _opened(session, fleet, server_name) as opened:
        session.add_floors(server_name, serving.noise(opened))
        yield opened


@pytest.fixture(scope="module")
def alone_server(session, fleet, server_name):
    """The same engine without batching. Raises NotServed where there is none."""
    with _opened(session, fleet, _sibling(session.options.served.alone, server_name)) as opened:
        yield opened


@pytest.fixture(scope="module")
def whole_server(session, fleet, server_name):
    """The same server without chunks. Raises NotServed where there is none."""
    with _opened(session, fleet, _sibling(session.options.served.whole, server_name)) as opened:
        yield opened


def _sibling(names, server_name):
    if server_name not in names:
        raise NotServed("there is no second server here, the same but for this switch")
    return names[server_name]


def _compared(session, server, sides, observe):
    """Rounds of loads take long: as many as an interval needs to be narrow are made whatever the budget."""
    return session.compare(sides, observe, server.name, FULL_LOOK, server.disturbance).observed


# Batching -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("users", [1, 4, 16])
def test_users_row(users, session, server, server_name):
    try:
        session.ledger.cell(measures.row(server, users))
    except Broken as error:
        pytest.fail(f"{users} users: {error}", pytrace=False)


@pytest.fixture(scope="module")
def one_and_sixteen(session, server):
    claims = ("serving.batching_throughput", "serving.batching_latency")
    sides = measures.batching_sides(server)
    return observed(claims, lambda: _compared(session, server, sides, measures.batching))


@pytest.mark.claim("serving.batching_throughput")
def test_sixteen_users_get_many_times_the_tokens_per_second(one_and_sixteen, server_name, judge):
    judge(one_and_sixteen["serving.batching_throughput"])


@pytest.mark.claim("serving.batching_latency")
def test_each_of_sixteen_users_waits_hardly_longer(one_and_sixteen, server_name, judge):
    judge(one_and_sixteen["serving.batching_latency"])


@pytest.mark.claim("serving.server_batches")
def test_the_same_engine_gives_more_when_it_batches(session, server, alone_server, server_name, judge):
    sides = {
        "together": measures.batching_sides(server)["sixteen"],
        "alone": measures.batching_sides(alone_server)["sixteen"],
    }
    claim = "serving.server_batches"
    judge(observed([claim], lambda: _compared(session, server, sides, measures.server_batches))[claim])


@pytest.mark.claim("serving.same_tokens")
def test_a_user_among_sixteen_gets_the_tokens_of_a_user_alone(session, server, server_name, judge):
    claim = "serving.same_tokens"
    judge(observed([claim], lambda: {claim: measures.same_tokens(server)})[claim])


# Prefixes -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prefixes(session, server):
    claims = ("serving.prefix_ttft", "serving.prefix_decode_unchanged", "serving.prefix_one_word")
    sides = measures.prefix_sides(server)
    return observed(claims, lambda: _compared(session, server, sides, measures.prefix))


@pytest.mark.claim("serving.prefix_ttft")
def test_a_shared_prefix_brings_the_first_token_sooner(prefixes, server_name, judge):
    judge(prefixes["serving.prefix_ttft"])


@pytest.mark.claim("serving.prefix_decode_unchanged")
def test_the_tokens_after_the_first_take_as_long(prefixes, server_name, judge):
    judge(prefixes["serving.prefix_decode_unchanged"])


@pytest.mark.claim("serving.prefix_one_word")
def test_one_changed_word_loses_the_hit(prefixes, server_name, judge):
    measures.needs_reuse(prefixes)
    judge(prefixes["serving.prefix_one_word"])


@pytest.mark.claim("serving.prefix_hits_counted")
def test_the_servers_counters_show_the_hits(server, server_name, judge):
    claim = "serving.prefix_hits_counted"
    judge(observed([claim], lambda: {claim: measures.prefix_hits(server)})[claim])


# Seats, queues and pages ----------------------------------------------------------------------------------------------


@pytest.mark.claim("serving.pages_fit_more")
def test_pages_let_more_short_chats_run_at_once(server, server_name, judge):
    claim = "serving.pages_fit_more"
    judge(observed([claim], lambda: {claim: measures.pages(server)})[claim])


@pytest.mark.claim("serving.queue_is_in_ttft")
def test_a_queue_shows_in_the_first_token_only(session, server, server_name, judge):
    claim = "serving.queue_is_in_ttft"

    def measure():
        cell = measures.queue_cell(server)
        session.ledger.cell(cell)
        found = _compared(session, server, measures.queue_sides(server), measures.queue)
        return {claim: measures.noted_queue(found[claim], cell)}

    judge(observed([claim], measure)[claim])


@pytest.mark.claim("serving.continuous_beats_static")
def test_seats_that_are_filled_at_once_beat_groups(session, server, server_name, judge):
    claim = "serving.continuous_beats_static"

    def measure():
        server.must_batch()
        sides = measures.static_sides(server, measures.mixed_work(server, session.budget_s))
        return _compared(session, server, sides, measures.continuous)

    judge(observed([claim], measure)[claim])


# Long prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.claim("serving.long_prompt_freezes")
def test_a_long_prompt_freezes_running_answers(session, server, server_name, judge):
    claim = "serving.long_prompt_freezes"

    def measure():
        server.must_batch()
        return _compared(session, server, measures.freeze_sides(server), measures.freezes)

    judge(observed([claim], measure)[claim])


@pytest.mark.claim("serving.chunks_shorten_freeze")
def test_chunks_shorten_that_freeze(session, server, whole_server, server_name, judge):
    claim = "serving.chunks_shorten_freeze"

    def measure():
        sides = {
            "whole": measures.freeze_sides(whole_server)["long"],
            "chunked": measures.freeze_sides(server)["long"],
        }
        return _compared(session, server, sides, measures.chunks)

    judge(observed([claim], measure)[claim])


# Load -----------------------------------------------------------------------------------------------------------------


@pytest.mark.claim("serving.average_hides")
def test_the_mean_is_nobodys_experience(session, server, server_name, judge):
    claim = "serving.average_hides"

    def measure():
        rate_per_s = measures.NEAR_SATURATION * measures.capacity_per_s(server)
        sides = measures.busy_sides(server, rate_per_s)
        return _compared(session, server, sides, lambda r: measures.average(r, rate_per_s))

    judge(observed([claim], measure)[claim])


def test_rate_sweep(session, server, server_name):
    try:
        for cell in measures.rate_cells(server, session.budget_s):
            session.ledger.cell(cell)
    except Broken as error:
        pytest.fail(f"no capacity to begin with: {error}", pytrace=False)
