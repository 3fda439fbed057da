"""Belief: "Once the system prompt is cached, the request is basically free."

A cached prefix saves the prefill of its tokens, and so the time to the first token. The answer is still written one token
at a time, and costs what it cost before. And the prefix must match token by token from the very first: one word changed
early, or a timestamp on top, and nothing after it can be reused.
"""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks import curves, prefix, workloads
from benchmarks.phases import Prompt, StoredPrefix
from benchmarks.rows import PlannedRow


@pytest.fixture(scope="module")
def system_prompt(session, tokenizer):
    return workloads.prefix_ids(tokenizer, session.options.prefix_len)


@pytest.fixture(scope="module")
def stored(target, system_prompt):
    return StoredPrefix(target, system_prompt)


@pytest.fixture(scope="module")
def requests(session, tokenizer, system_prompt):
    """Each suffix after the shared prefix: the article's two, and the user's own."""
    return [prefix.hit(tokenizer, system_prompt, q, session.options.new_tokens) for q in session.options.all_suffixes]


@pytest.fixture(scope="module")
def pair(engine_name, session, target, requests):
    """What serves the full and the cached request."""
    longest = max(request.full.total_len for request in requests)
    return tuple(session.engine(engine_name, target, 1, longest, side) for side in (0, 1))


@pytest.fixture
def planned_rows(suffix_number, engine_name, session, requests):
    asked = requests[suffix_number]
    return [
        PlannedRow(prefix.row_id(suffix_number, side), workload, engine_name, session.rig.reference)
        for side, workload in (("full", asked.full), ("cached", asked.suffix))
    ]


def test_prefix_row(planned_rows, suffix_number, session, pair, stored, requests, roofline, sampled, benchmark):
    cells = prefix.rows(
        pair,
        stored,
        requests[suffix_number],
        session.clock,
        session.rig.reference,
        sampled,
        str(suffix_number),
        roofline,
    )
    for cell in cells:
        session.ledger.cell(cell)
        if cell.phase == "row":
            benchmark.extra_info[cell.id] = dict(cell.figures)


def test_the_length_from_which_a_cached_prefix_halves_the_wait(session, target, system_prompt):
    curve = curves.prefix_curve(target, session.clock, system_prompt, curves.PREFIX_LIMITS[session.device])
    for cell in curves.curve_cells(curves.PREFIX, curve, target.name, session.rig.reference):
        session.ledger.cell(cell)


@pytest.fixture(scope="module")
def compared(session, target, stored, tokenizer, system_prompt):
    """What requests with a full and with a cached prefill show when they are served in turn, by engine."""

    @cache
    def _compared(engine_name):
        whole_len = session.options.new_tokens
        # Replays take so little that with a few of them the prefill would be most of the request.
        output_len = whole_len if engine_name == "graph" else min(prefix.PAIR_LEN[session.device], whole_len)
        asked = prefix.hit(tokenizer, system_prompt, session.options.all_suffixes[0], output_len)
        pair = tuple(session.engine(engine_name, target, 1, asked.full.total_len, side) for side in (0, 1))
        return session.compare_in_turn(prefix.both_ways(pair, stored, asked), prefix.ratios, engine_name).observed

    return _compared


@pytest.mark.claim("prefix.prefill_1484")
def test_a_cached_prefix_makes_prefill_several_times_faster(compared, judge):
    judge(compared("eager")["prefix.prefill_1484"])


@pytest.mark.claim("prefix.not_free")
def test_the_cached_request_still_costs_most_of_the_full_one(engine_name, compared, judge):
    judge(compared(engine_name)["prefix.not_free"])


@pytest.mark.claim("prefix.prefill_device_bound")
def test_a_long_enough_prefix_is_worth_caching_on_any_card(session, target, system_prompt, requests, judge):
    judge(prefix.when_device_bound(session, target, system_prompt, requests[0]))


@pytest.mark.claim("prefix.decode_unchanged")
def test_decode_takes_the_same_time_after_either_prefill(engine_name, compared, judge):
    judge(compared(engine_name)["prefix.decode_unchanged"])


@pytest.fixture(scope="module")
def told(target, requests):
    """The eager engine's answers after a full prefill."""
    return [prefix.Told.of(target, request) for request in requests]


@pytest.mark.claim("prefix.same_answer")
def test_the_answer_is_the_same(pair, stored, told, judge):
    judge(prefix.same_answer(pair[1], stored, told))


@pytest.mark.claim("prefix.one_word")
def test_one_changed_word_ends_the_match(session, tokenizer, judge):
    judge(prefix.one_word(tokenizer, session.options.prefix_len))


@pytest.mark.claim("prefix.timestamp_first")
def test_a_timestamp_belongs_at_the_end(tokenizer, judge):
    judge(prefix.timestamp(tokenizer))


@pytest.mark.claim("prefix.built_once")
def test_building_the_cache_costs_one_full_prefill(session, target, system_prompt, requests, judge):
    whole = Prompt.of(requests[0].full.prompts, target.device)
    sides = {
        "build": lambda: session.clock.time(lambda: StoredPrefix(target, system_prompt)),
        "full": lambda: session.clock.time(lambda: target.prefill(whole)),
    }
    found = session.compare(sides, lambda r: {"prefix.built_once": prefix.build_ratio(r["build"], r["full"])})
    judge(found.observed["prefix.built_once"])
