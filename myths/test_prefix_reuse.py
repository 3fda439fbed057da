"""Belief: "Once the system prompt is cached, the request is basically free."

A cached prefix saves the prefill of its tokens, and so the time to the first token. The answer is still written one token
at a time, and costs what it cost before. And the prefix must match token by token from the very first: one word changed
early, or a timestamp on top, and nothing after it can be reused.
"""

from __future__ import annotations

import pytest

from benchmarks import prefix, workloads
from benchmarks.phases import Prompt, StoredPrefix


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


def test_prefix_row(suffix_number, session, target, stored, requests, sampled, benchmark):
    cells = prefix.rows(
        target, stored, requests[suffix_number], session.clock, session.rig.reference, sampled, str(suffix_number)
    )
    for cell in cells:
        session.ledger.cell(cell)
        if cell.phase == "row":
            benchmark.extra_info[cell.id] = dict(cell.figures)


@pytest.mark.claim("prefix.prefill_1484")
def test_a_cached_prefix_makes_prefill_several_times_faster(session, target, stored, tokenizer, system_prompt, judge):
    first_token = prefix.hit(tokenizer, system_prompt, session.options.all_suffixes[0], 1)
    found = session.compare_in_turn(prefix.both_ways(target, stored, first_token), prefix.prefill_ratio)
    judge(found.observed["prefix.prefill_1484"])


@pytest.mark.claim("prefix.not_free")
def test_the_cached_request_still_costs_most_of_the_full_one(session, target, stored, requests, judge):
    found = session.compare_in_turn(prefix.both_ways(target, stored, requests[0]), prefix.request_ratio)
    judge(found.observed["prefix.not_free"])


@pytest.mark.claim("prefix.prefill_device_bound")
def test_a_long_enough_prefix_is_worth_caching_on_any_card(session, target, system_prompt, requests, judge):
    judge(prefix.when_device_bound(session, target, system_prompt, requests[0]))


@pytest.mark.claim("prefix.decode_unchanged")
def test_decode_takes_the_same_time_after_either_prefill(session, target, stored, tokenizer, system_prompt, judge):
    short = prefix.hit(tokenizer, system_prompt, session.options.all_suffixes[0], prefix.PAIR_LEN)
    found = session.compare_in_turn(prefix.both_ways(target, stored, short), prefix.decode_ratio)
    judge(found.observed["prefix.decode_unchanged"])


@pytest.mark.claim("prefix.same_answer")
def test_the_answer_is_the_same(target, stored, requests, judge):
    judge(prefix.same_answer(target, stored, requests))


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
