"""The decision map: advice that differs where machines differ, and promises no more than was measured or is possible."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.diagnose import Targets, amdahl, diagnose, diagnosis_lines
from benchmarks.diagnose.evidence import Kind
from benchmarks.diagnose.fixes import Metric, Reach, Stage
from benchmarks.diagnose.smaller_models import drafted_speed

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "benchmarks" / "cards"
T4 = json.loads((CARDS / "tesla-t4.json").read_text(encoding="utf-8"))
X2 = json.loads((CARDS / "nvidia-h200-x2.json").read_text(encoding="utf-8"))

few = settings(max_examples=25, deadline=None)


def _cell(id, *, phase="row", engine="eager", precision="fp16", wall_s=None, device_s=None, bytes=None, **parts):
    workload = {"batch_size": parts.pop("batch_size", 1), "prompt_len": parts.pop("prompt_len", 37), "output_len": 48}
    return {
        "id": id,
        "station": id.split(".")[0],
        "phase": phase,
        "workload": workload | ({"gpus": parts.pop("gpus")} if "gpus" in parts else {}),
        "engine": engine,
        "precision": precision,
        "wall_s": wall_s,
        "device_s": device_s,
        "host_bound": None,
        "bytes": bytes or {},
        "figures": parts,
        "kernels": {},
        "unavailable": {},
        "note": "",
    }


def _claim(id, observed, interval=None, engine="eager", reason="", parts=()):
    return {
        "id": id,
        "engine": engine,
        "verdict": "HOLDS",
        "observed": observed,
        "interval": interval,
        "unit": "x",
        "reason": reason,
        "parts": list(parts),
    }


def _part(what, observed, interval, raw=None):
    return {"what": what, "observed": observed, "interval": interval, "unit": "x", "raw": raw or {}}


def _row(batch_size, tpot_s, ttft_s=0.03, engine="eager", **figures):
    e2e_s = ttft_s + 47 * tpot_s
    rate = batch_size * 48 / e2e_s
    timed = {"ttft_s": ttft_s, "tpot_s": tpot_s, "e2e_s": e2e_s, "output_tokens_per_s": rate}
    return _cell(f"batching.{batch_size}", engine=engine, batch_size=batch_size, **timed, **figures)


def _run(cells, claims=(), device="cuda", memory_bytes=16e9, weights="trained", **more):
    return {
        "machine": {"device": device, "name": "a card", "memory_bytes": memory_bytes},
        "rig": {"weights": weights},
        "cells": cells,
        "claims": list(claims),
        **more,
    }


def _host_bound(*more, **options):
    """Stock decode of an idle card: 20 ms a token at any batch, the card working 2 ms of it."""
    rows = [_row(n, 0.02, decode_device_s=0.002, prefill_device_s=0.004) for n in (1, 4, 16)]
    return _run([*rows, *more], **options)


def _names(diagnosis):
    return [fix.name for fix in diagnosis.fixes]


def _fix(diagnosis, word):
    return next(fix for fix in diagnosis.fixes if word in fix.name)


def test_a_slow_first_request_is_told_apart_from_slow_tokens():
    def said(first_tpot_s):
        path = diagnose(_run([_row(1, 0.02, first_tpot_s=first_tpot_s)])).path
        return next(step.evidence for step in path if step.question == "TPOT high?")

    assert "the first request of its lengths waited 127 ms" in said(0.127)
    assert "first request" not in said(0.021)


# Three machines, three answers ----------------------------------------------------------------------------------------


def test_an_idle_card_is_told_to_stop_waiting_before_anything_else():
    told = diagnose(_host_bound())
    first = told.fixes[0]
    assert "CUDA graphs" in first.name
    assert first.gain.text == "at most 10x"
    assert first.stage is Stage.STOP_WAITING
    assert "2 ms of a step's 20 ms" in first.basis
    assert "--engine both" in first.command
    assert "less once it doesn't" in _fix(told, "16 chats").basis
    assert not told.bigger_gpu.buy
    assert "a card twice as fast would make a decode step at most 1.05x as fast" in told.bigger_gpu.reason


def test_the_t4_is_told_to_batch_and_to_cache_its_prefix_and_not_to_draft():
    told = diagnose(T4)
    assert _names(told)[:2] == ["serve 16 chats in a batch", "prefix caching"]
    assert _fix(told, "16 chats").gain.text == "14.7x"
    assert _fix(told, "prefix caching").gain.text == "6.9x", "the smaller of the two suffixes, not the larger"
    assert _fix(told, "nf4").metric is Metric.CHATS
    assert not any("speculative" in name for name in _names(told))
    tpot = told.path[1]
    assert "a draft is no gain (0.71x, from unpaired rows)" in tpot.evidence
    assert any("card or the host" in note.what for note in told.untold), "no device time was published"


def test_a_laptop_is_told_nothing_about_cards():
    rows = [_row(n, 0.0065 * (1 + n / 8), ttft_s=0.013 * n) for n in (1, 2, 4, 8, 16)]
    cells = [
        *rows,
        _row(32, 0.06, ttft_s=0.5),
        _cell("prefix.0.full", prompt_len=1497, ttft_s=0.67, e2e_s=1.36, prefix_len=1484),
        _cell("prefix.0.cached", prompt_len=13, ttft_s=0.04, e2e_s=0.75, prefix_len=1484),
        _cell(
            "speculation.with_draft",
            engine="transformers generate",
            speed_over_alone=1.5,
            c=0.22,
            drafted=48,
            target_forwards=10,
            mean_acceptance_length=4.8,
        ),
    ]
    told = diagnose(_run(cells, device="cpu"))
    assert _names(told) == ["prefix caching", "serve 16 chats in a batch", "speculative decoding"]
    text = "\n".join(diagnosis_lines(told)[:-8])
    assert "GPU" not in text
    assert "graph" not in text
    assert "-m gpu" not in text
    assert "from batch" in _fix(told, "16 chats").basis, "it says where a further user stops being cheap"
    assert "the formula gives 2.3" in _fix(told, "speculative").basis


def test_the_kept_h200_run_is_told_to_take_the_host_out_of_decode():
    told = diagnose(json.loads((CARDS / "nvidia-h200.json").read_text(encoding="utf-8")))
    assert told.fixes[0].stage is Stage.STOP_WAITING
    assert told.fixes[0].metric is Metric.TPOT
    assert not told.bigger_gpu.buy
    assert _names(told) != _names(diagnose(T4))


# No promise above the cap ---------------------------------------------------------------------------------------------


def test_a_measured_graph_engine_is_promised_as_measured():
    told = diagnose(_host_bound(_row(1, 0.0012, engine="graph", decode_device_s=0.0011)))
    fix = _fix(told, "CUDA graphs")
    assert fix.gain.kind is Kind.MEASURED
    assert fix.gain.value == pytest.approx(0.02 / 0.0012)
    assert fix.cap == pytest.approx(0.02 / 0.0011)


def test_an_engine_that_claims_to_beat_the_roofline_is_held_below_it():
    liar = _row(1, 0.0001, engine="graph", decode_device_s=0.0001)
    quant = _cell("quant.fp16", bytes={"loaded": 3e9}, ttft_s=0.03, tpot_s=0.02)
    told = diagnose(_host_bound(liar, quant, roofline={"bandwidth_bytes_per_s": 3e12}))
    assert _fix(told, "CUDA graphs").gain.value == pytest.approx(0.02 / 0.001), "3 GB at 3 TB/s take 1 ms"


def test_the_graph_engines_interval_comes_from_the_claims_own_samples():
    raw = {"graph speed-up": [15.0, 15.5, 16.0, 16.5, 17.0] * 2}
    claim = _claim("bigger_gpu.software_first", 8.0, [7.0, 9.0], parts=[_part("x", 8.0, [7.0, 9.0], raw)])
    graph = _row(1, 0.00125, engine="graph", decode_device_s=0.0011)
    gain = _fix(diagnose(_host_bound(graph, claims=[claim])), "CUDA graphs").gain
    assert gain.value == 16.0
    assert gain.low == 15.0
    assert gain.high == 17.0


def test_a_target_that_the_other_engines_own_row_meets_needs_no_bigger_gpu():
    raw = {"graph speed-up": [9.0, 10.0, 11.0] * 4}  # the host had a better minute when both were measured in turn
    claim = _claim("bigger_gpu.software_first", 5.0, [4.0, 6.0], parts=[_part("x", 5.0, [4.0, 6.0], raw)])
    graph = _row(1, 0.001, engine="graph", decode_device_s=0.0009)
    told = diagnose(_host_bound(graph, claims=[claim]), Targets(tpot_s=0.0012))
    fix = _fix(told, "CUDA graphs")
    assert (fix.gain.value, fix.gain.low, fix.gain.high) == (pytest.approx(20.0), 9.0, pytest.approx(20.0))
    assert "10x in rounds of both in turn" in fix.basis
    assert not told.bigger_gpu.buy


def test_without_a_graph_engine_the_host_can_save_no_more_than_its_own_time():
    cells = [_row(1, 0.02, decode_device_s=0.002, decode_floor_s=0.004)]
    assert _fix(diagnose(_run(cells)), "CUDA graphs").gain.value == pytest.approx(5), "the larger of both bounds"


def test_an_engine_that_could_not_be_captured_is_recommended_with_the_reason():
    claim = _claim("batching.tpot", None, engine="graph", reason="cannot capture: a layer of experts")
    assert "a layer of experts" in _fix(diagnose(_host_bound(claims=[claim])), "CUDA graphs").basis


@pytest.mark.parametrize(("claimed", "promised"), [(15.0, "15x [14, 15.9]"), (400.0, "16x")])
def test_sixteen_chats_never_give_more_than_sixteen_times(claimed, promised):
    claim = _claim("batching.throughput", claimed, [claimed - 1, claimed + 0.9])
    fix = _fix(diagnose(_host_bound(claims=[claim])), "16 chats")
    assert fix.gain.text.startswith(promised.split(" [")[0])
    assert fix.gain.value <= 16
    assert fix.gain.high <= 16


def test_batching_is_held_below_what_its_steps_take_at_least():
    rows = [_row(1, 0.02), _row(16, 0.0202, decode_floor_s=0.04)]
    fix = _fix(diagnose(_run(rows)), "16 chats")
    assert fix.gain.value == pytest.approx(16 * 48 / (47 * 0.04) / (48 / (0.03 + 47 * 0.02)))


def test_a_larger_batch_of_the_decode_curve_counts_too():
    rows = [_row(1, 0.02), _row(16, 0.02)]
    curve = [
        _cell(f"batching.curve.{n}", phase="curve", batch_size=n, tpot_s=0.02, output_tokens_per_s=n / 0.02)
        for n in (1, 64)
    ]
    fix = _fix(diagnose(_run([*rows, *curve])), "64 chats")
    assert fix.gain.value == pytest.approx(64)
    assert "decode alone" in fix.basis
    for point in curve:
        point["figures"] |= {"tpot_s": 0.08, "output_tokens_per_s": point["workload"]["batch_size"] / 0.08}
    assert "serve 16 chats in a batch" in _names(diagnose(_run([*rows, *curve]))), (
        "a curve of a slow minute is no promise"
    )


def test_a_cached_prefix_saves_no_more_than_the_least_time_of_what_is_left():
    cells = [
        _cell("prefix.0.full", prompt_len=1500, ttft_s=0.5, prefix_len=1484),
        _cell("prefix.0.cached", prompt_len=16, ttft_s=0.001, prefill_device_s=0.02, prefix_len=1484),
    ]
    claim = _claim("prefix.prefill_1484", 1e6, [1e5, 1e7])
    assert _fix(diagnose(_run(cells, [claim])), "prefix").gain.value == pytest.approx(0.5 / 0.02)
    del cells[1]["figures"]["prefill_device_s"]
    assert _fix(diagnose(_run(cells, [claim])), "prefix").gain.value == pytest.approx(1500 / 16)


def test_what_may_be_no_gain_is_no_fix():
    cells = [
        _cell("prefix.0.full", prompt_len=1500, ttft_s=0.024, prefix_len=1484),
        _cell("prefix.0.cached", prompt_len=16, ttft_s=0.02, prefix_len=1484),
    ]
    straddling = _claim("prefix.prefill_1484", 1.2, [0.8, 1.7])
    told = diagnose(_run(cells, [straddling]))
    assert not told.fixes
    assert "gains nothing (1.2x [0.8, 1.7])" in told.path[0].evidence
    longer = _claim("prefix.prefill_device_bound", 4.2, [2.1, 8.4], reason="at 16384 tokens")
    told = diagnose(_run(cells, [straddling, longer]))
    assert _fix(told, "long prefixes").metric is Metric.LONG_TTFT
    assert "at 16384 tokens" in _fix(told, "long prefixes").basis
    assert "nothing avoidable in this run, but the TTFT of longer prompts" in told.path[0].answer


def test_the_range_of_two_rounds_that_straddles_one_is_no_gain():
    rows = [
        _cell("quant.fp16", tpot_s=0.0296, ttft_s=0.03, bytes={"loaded": 3e9}),
        _cell("quant.fp16.decode", phase="decode", wall_s=[0.0347, 0.0245]),
        _cell("quant.nf4", precision="nf4", tpot_s=0.0279, ttft_s=0.03, bytes={"loaded": 1.2e9}),
        _cell("quant.nf4.decode", phase="decode", precision="nf4", wall_s=[0.0275, 0.0284]),
    ]
    assert not [fix for fix in diagnose(_run(rows)).fixes if fix.metric is Metric.TPOT]
    rows[3]["wall_s"], rows[2]["figures"]["tpot_s"] = [0.0145, 0.015], 0.0148
    assert _fix(diagnose(_run(rows)), "nf4").gain.text == "2x [1.63, 2.39]"


# Drafts ---------------------------------------------------------------------------------------------------------------


def test_the_formula_is_the_papers():
    alpha, gamma, c = 0.8, 5, 0.05
    tokens = (1 - alpha ** (gamma + 1)) / (1 - alpha)  # theorem 3.8 of arXiv:2211.17192
    assert drafted_speed(tokens, gamma, c) == pytest.approx(tokens / (gamma * c + 1))
    assert drafted_speed(tokens, gamma, c) == pytest.approx(2.951, abs=1e-3)
    assert drafted_speed(1, gamma, 0) == 1, "a free draft that is never right costs nothing"


def _draft(**figures):
    known = {"c": 0.1, "drafted": 50, "target_forwards": 10, "mean_acceptance_length": 4.0, "speed_over_alone": 2.0}
    return _cell("speculation.with_draft", engine="transformers generate", **(known | figures))


def test_a_check_yields_the_most_that_a_draft_can_gain():
    assert _fix(diagnose(_run([_row(1, 0.02), _draft(speed_over_alone=50.0)])), "speculative").gain.value == 4.0


def test_a_draft_as_dear_as_its_target_pays_at_no_acceptance():
    for weights in ("trained", "random"):
        told = diagnose(_run([_row(1, 0.02), _draft(c=1.05)], weights=weights))
        assert not any("speculative" in name for name in _names(told))
        assert "even a draft that is always right gives 0.96x" in told.path[1].evidence


def test_random_weights_say_nothing_about_a_draft():
    told = diagnose(_run([_row(1, 0.02, decode_device_s=0.002), _draft()], weights="random"))
    note = next(note for note in told.untold if "draft" in note.what)
    assert "random weights" in note.why
    assert "random" not in note.command


# Targets --------------------------------------------------------------------------------------------------------------


def test_met_targets_lead_nowhere():
    told = diagnose(T4, Targets(ttft_s=0.5, tpot_s=0.04, throughput_per_s=20, chats=20, context_len=1024))
    assert not any(step.lit for step in told.path)
    assert (told.fixes, told.untold) == ((), ())
    assert told.bigger_gpu.reason == "every target is met: there is nothing to buy"
    assert not told.bigger_gpu.buy


def test_only_what_is_asked_is_walked():
    told = diagnose(T4, Targets(ttft_s=0.1))
    assert [step.question for step in told.path] == ["TTFT high?"]
    assert "4.71x better is needed" in told.path[0].answer
    assert [(fix.name, fix.reaches) for fix in told.fixes] == [("prefix caching", Reach.ENOUGH)]
    assert not told.bigger_gpu.buy


def test_only_a_whole_interval_is_surely_enough():
    claim = _claim("batching.throughput", 15.0, [14.0, 15.5])
    rate = 48 / (0.03 + 47 * 0.02)
    for needed, reach in ((13.5, Reach.ENOUGH), (14.5, Reach.MAYBE), (15.2, Reach.SHORT)):
        told = diagnose(_host_bound(claims=[claim]), Targets(throughput_per_s=needed * rate))
        assert _fix(told, "16 chats").reaches is reach
    assert _fix(diagnose(_host_bound(), Targets(tpot_s=0.003)), "CUDA graphs").reaches is Reach.MAYBE


def test_hardware_is_the_answer_where_no_software_is():
    memory_bound = [_row(1, 0.01, decode_device_s=0.0099, decode_floor_s=0.0095)]
    told = diagnose(_run(memory_bound), Targets(tpot_s=0.005))
    assert told.bigger_gpu.buy
    assert "a card at least 2" in told.bigger_gpu.reason
    assert diagnose(_run(memory_bound), Targets(tpot_s=0.011)).bigger_gpu.buy is False


def test_fixes_that_are_enough_together_come_before_hardware():
    graph = [_row(n, 0.005, engine="graph", decode_device_s=0.0049) for n in (1, 4)]
    run = _run([*(_row(n, 0.02, decode_device_s=0.0049) for n in (1, 4)), *graph])
    told = diagnose(run, Targets(throughput_per_s=600))
    assert [fix.reaches for fix in told.fixes] == [Reach.SHORT, Reach.SHORT], "3.7x and 4x, where 12x are needed"
    assert not told.bigger_gpu.buy
    assert "try them first" in told.bigger_gpu.reason


def test_no_card_is_bought_for_a_wait_that_is_the_hosts():
    graph = _row(1, 0.019, engine="graph", decode_device_s=0.002)  # a graph engine that hardly helps
    told = diagnose(_host_bound(graph), Targets(tpot_s=0.001))
    assert not told.bigger_gpu.buy
    assert "the host has to get faster" in told.bigger_gpu.reason


def test_nothing_is_bought_before_the_software_is_measured():
    told = diagnose(_host_bound(), Targets(tpot_s=0.001))
    assert not told.bigger_gpu.buy
    assert "isn't measured" in told.bigger_gpu.reason
    told = diagnose(T4, Targets(throughput_per_s=50_000))
    assert not told.bigger_gpu.buy
    assert "a further user still adds" in told.bigger_gpu.reason
    assert any("larger batches" in note.what for note in told.untold)


def _with_memory(memory_bytes):
    weights = [
        _cell(f"quant.{name}", precision=name, bytes={"loaded": count}, tpot_s=0.02, ttft_s=0.03)
        for name, count in (("fp16", 3e9), ("nf4", 1e9))
    ]
    chats = _cell("quant.chats.nf4", phase="chats", precision="nf4", prompt_len=2048, bytes={"chat": 2048 * 30e3})
    return _run([*weights, chats], memory_bytes=memory_bytes)


def test_chats_are_counted_in_bytes():
    chat = 1000 * 30e3
    told = diagnose(_with_memory(3e9 + 100.5 * chat), Targets(chats=100, context_len=1000))
    assert "met" in told.path[0].answer
    told = diagnose(_with_memory(3e9 + 100.5 * chat), Targets(chats=120, context_len=1000))
    assert "100 fit" in told.path[0].answer
    fix = _fix(told, "nf4")
    assert fix.gain.value == pytest.approx(1 + 2e9 / (100.5 * chat))
    assert fix.reaches is Reach.ENOUGH
    assert not told.bigger_gpu.buy
    told = diagnose(_with_memory(3e9 + 100.5 * chat), Targets(chats=1000, context_len=1000))
    assert told.bigger_gpu.buy
    assert "28.9 GiB" in told.bigger_gpu.reason, "1 GB of nf4 weights and 1,000 chats of 30 MB"


def test_an_upper_bound_shows_that_chats_fit_and_never_that_they_do_not():
    few = diagnose(T4, Targets(chats=20, context_len=1024))
    many = diagnose(T4, Targets(chats=60, context_len=4096))
    assert "met" in few.path[0].answer
    assert "can't be told" in many.path[0].answer
    assert any("how many chats fit" in note.what for note in many.untold)
    assert not many.bigger_gpu.buy


def test_a_cpu_says_that_chats_are_counted_on_a_gpu_and_answers_the_rest():
    quant = _cell("quant.fp32", precision="fp32", bytes={"storages": 2e7}, tpot_s=0.02, ttft_s=0.03)
    run = _run([_row(1, 0.02, ttft_s=4.0), quant], device="cpu")
    assert "counted on a GPU only" in diagnose(run).path[-1].evidence
    chats = diagnose(run, Targets(chats=4))
    assert any("-m gpu" in note.command and "GPU only" in note.why for note in chats.untold)
    assert not chats.bigger_gpu.buy
    assert "takes a run on a GPU to tell" in chats.bigger_gpu.reason
    both = diagnose(run, Targets(chats=4, ttft_s=0.3)).bigger_gpu
    assert both.reason == diagnose(run, Targets(ttft_s=0.3)).bigger_gpu.reason
    assert "13.3x better" in both.reason


def test_a_batch_whose_rows_ran_one_after_another_is_not_promised_as_paired():
    rows = [_row(1, 0.02), _row(16, 0.022)]
    for row in rows:
        row["wall_s"] = [row["figures"]["e2e_s"], 1.01 * row["figures"]["e2e_s"]]
    fix = _fix(diagnose(_run(rows), Targets(throughput_per_s=100)), "16 chats")
    assert re.fullmatch(r"14\.\dx, from unpaired rows", fix.gain.text)
    assert fix.reaches is Reach.MAYBE
    paired = _run(rows, [_claim("batching.throughput", 14.5, [14.1, 14.8])])
    fix = _fix(diagnose(paired, Targets(throughput_per_s=100)), "16 chats")
    assert fix.gain.text == "14.5x [14.1, 14.8]"
    assert fix.reaches is Reach.ENOUGH


@pytest.mark.parametrize(
    ("larger_s", "floor", "why"), [(0.022, 0.21, "noise floor is 21%"), (0.013, 0.1, "a token came faster")]
)
def test_a_batch_whose_rows_say_nothing_about_each_other_is_not_offered(larger_s, floor, why):
    run = _run([_row(1, 0.02), _row(16, larger_s)], noise_floor={"decode_wall": floor})
    told = diagnose(run)
    assert "16 chats" not in " ".join(_names(told))
    assert "can't be told" in told.path[2].answer
    assert any(why in note.why for note in told.untold)
    bought = diagnose(run, Targets(throughput_per_s=1e4)).bigger_gpu
    assert not bought.buy, "what isn't known may be enough"


def test_a_batch_that_breaks_another_target_is_not_offered():
    rows = [_row(1, 0.01), _row(8, 0.012), _row(64, 0.04)]
    told = diagnose(_run(rows), Targets(tpot_s=0.02, throughput_per_s=2000))
    assert "serve 8 chats in a batch" in _names(told)
    assert "serve 64 chats in a batch" in _names(diagnose(_run(rows), Targets(throughput_per_s=2000)))
    assert "serve 8 chats in a batch" in _names(diagnose(_run(rows), Targets(chats=30, throughput_per_s=2000)))


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "fast"])
@pytest.mark.parametrize("name", ["ttft_s", "tpot_s", "throughput_per_s", "chats", "context_len"])
def test_a_target_is_a_positive_finite_number(name, value):
    with pytest.raises(ValueError, match=name):
        Targets(**{name: value})


def test_amdahl():
    assert amdahl(0.1, 2) == pytest.approx(1 / 0.95)
    assert amdahl(1, 2) == pytest.approx(2)
    assert amdahl(0.5, math.inf) == pytest.approx(2)


# A server, and more cards ---------------------------------------------------------------------------------------------


def _two_gpus(**options):
    cells = [
        _cell("parallel.tensor_target_one", ttft_s=0.03, tpot_s=0.02, gpus=1),
        _cell("parallel.tensor_target_split", engine="tensor parallel", ttft_s=0.03, tpot_s=0.013, gpus=2),
        _cell("parallel.replica_alone", engine="replicas", output_tokens_per_s=700, gpus=1, batch_size=16),
        _cell("parallel.replicas_together", engine="replicas", output_tokens_per_s=1360, gpus=2, batch_size=16),
    ]
    scale = _part("tokens per second", 0.97, [0.95, 0.98])
    return _host_bound(*cells, claims=[_claim("parallel.replicas_scale", 0.97, [0.95, 0.98], parts=[scale])], **options)


def test_more_cards_come_last_and_with_their_measured_gain():
    told = diagnose(_two_gpus())
    assert _names(told)[-2:] == ["replicas", "tensor parallel"]
    assert _fix(told, "replicas").gain.text == "1.94x [1.9, 1.96]"
    assert _fix(told, "tensor").gain.value == pytest.approx(0.02 / 0.013)
    assert "once one replica is tuned" in _fix(told, "replicas").basis


def test_a_run_of_more_cards_alone_says_what_it_measured_and_what_is_missing_to_promise_it():
    told = diagnose(X2)
    assert not told.fixes
    assert [step.answer for step in told.path] == ["can't be told from this run"] * 4
    ttft, tpot, throughput, memory = (step.evidence for step in told.path)
    assert all("the run has no batching table" in said for said in (ttft, tpot, throughput)), "its rows do have a TTFT"
    assert "tensor parallel gave 0.511x [0.352, 0.568] in TPOT (26.4 ms to 51.8 ms a token on 2 GPUs" in tpot
    assert "1.05x in the cards' own time; all-reduces take 12% of the cards' time" in tpot
    assert "replicas gave 1.73x [1.33, 1.95] (619 to 896 tok/s at the median on 2 GPUs" in throughput
    assert "a user's token takes 1.14x [1.03, 1.52] as long" in throughput
    assert memory.startswith("the run lacks the bytes of the weights; "), "those of the memory are in the run"
    assert "1.66 GiB of weights on each of 2 GPUs: a request takes 1.08x [1.02, 1.23] as long" in memory
    assert "the GPUs idle 51% of the time with 1 prefill in flight, 12% with 8" in memory
    both = "pytest myths/test_batching.py myths/test_parallelism.py -m gpu --weights random"
    notes = {note.what: note for note in told.untold}
    assert notes["TTFT, TPOT, throughput"].command == both, "else the next run would lack the one or the other"
    assert "after one tuned replica" in notes["which of tensor parallel, a pipeline and replicas to add"].why
    assert "test_batching.py myths/test_parallelism.py" in notes["what fits into memory"].command
    assert "at most 1.06x as fast, an infinitely fast one 1.13x, since this one works 11%" in told.bigger_gpu.reason
    for targets in (Targets(tpot_s=0.01), Targets(throughput_per_s=1e4)):
        told = diagnose(X2, targets)
        assert not told.fixes
        assert any("tensor parallel, a pipeline and replicas" in note.what for note in told.untold)


def test_a_token_time_of_another_station_tunes_no_replica():
    run = _two_gpus()
    run["cells"] = [cell for cell in run["cells"] if cell["station"] == "parallel"]
    run["cells"].append(_cell("quant.fp16", bytes={"loaded": 3e9}, ttft_s=0.03, tpot_s=0.02))
    told = diagnose(run, Targets(tpot_s=0.015))
    assert not told.fixes
    assert "tensor parallel gave 1.54x" in told.path[0].evidence
    assert any("after one tuned replica" in note.why for note in told.untold)


def test_a_run_of_one_card_is_not_sent_to_more():
    assert not any("parallel" in note.command for note in diagnose(_run([])).untold)


def test_with_a_batching_table_the_same_figures_are_fixes_and_what_gains_nothing_is_said():
    run = _host_bound()
    told = diagnose(run | {"cells": run["cells"] + X2["cells"], "claims": X2["claims"]})
    assert _names(told)[-1] == "replicas"
    fix = _fix(told, "replicas")
    assert fix.gain.text == "1.73x [1.33, 1.95]"
    assert "token takes 1.14x" in fix.basis
    assert fix.command == "pytest myths/test_batching.py myths/test_parallelism.py -m gpu"
    assert "tensor parallel" not in _names(told)
    assert "tensor parallel gave 0.511x" in told.path[1].evidence


def test_splitting_weights_for_memory_says_what_it_costs():
    run = _host_bound(_cell("quant.fp16", bytes={"loaded": 3e9}, ttft_s=0.03, tpot_s=0.02))
    run |= {"cells": run["cells"] + X2["cells"], "claims": X2["claims"]}
    told = diagnose(run, Targets(chats=1e5, tpot_s=1e-3))
    fixes = {fix.name: fix.basis for fix in told.fixes if fix.metric is Metric.CHATS}
    assert not fixes, "without the bytes of a token nothing says how many chats fit"
    run["cells"].append(_cell("quant.chats.nf4", phase="chats", bytes={"chat": 1e8}, prompt_len=2048))
    told = diagnose(run, Targets(chats=1e5, tpot_s=1e-3))
    fixes = {fix.name: fix.basis for fix in told.fixes if fix.metric is Metric.CHATS}
    assert "a request takes 1.08x [1.02, 1.23] as long" in fixes["pipeline parallel"]
    assert "26.4 ms to 51.8 ms a token on 2 GPUs" in fixes["tensor parallel"]


def test_replicas_are_judged_on_the_graph_engine_where_that_was_measured():
    run = _two_gpus()
    for id, rate, gpus in (("replica_alone", 9000, 1), ("replicas_together", 14_000, 2)):
        figures = {"output_tokens_per_s": rate, "gpus": gpus, "batch_size": 16}
        run["cells"].append(_cell(f"parallel.{id}", engine="replicas, graph", **figures))
    scale = _part("tokens per second", 0.78, [0.77, 0.79])
    run["claims"].append(_claim("parallel.replicas_scale", 0.78, [0.77, 0.79], engine="graph", parts=[scale]))
    fix = _fix(diagnose(run), "replicas")
    assert fix.gain.text == "1.56x [1.54, 1.58]"
    assert "9,000 to 14,000 tok/s at the median on 2 GPUs, engine graph" in fix.basis


def test_more_cards_are_not_named_where_one_tuned_replica_is_enough():
    run, targets = _two_gpus(), Targets(throughput_per_s=500)
    assert "replicas" in _names(diagnose(run, targets)), "rows that ran one after another are not sure to be enough"
    run["claims"].append(_claim("batching.throughput", 15.9, [15.7, 16.0]))
    assert "replicas" not in _names(diagnose(run, targets))
    assert "replicas" in _names(diagnose(_two_gpus(), Targets(throughput_per_s=50_000)))


def test_what_a_server_showed_is_used():
    parts = [
        _part("mean wait, static over continuous", 9.0, [8.0, 10.0]),
        _part("throughput, continuous over static", 1.6, [1.4, 1.8]),
    ]
    claims = [_claim("serving.continuous_beats_static", 9.0, [8.0, 10.0], engine="a server", parts=parts)]
    told = diagnose(_host_bound(claims=claims))
    assert _fix(told, "seats").gain.text == "1.6x [1.4, 1.8]"
    assert not any("continuous" in note.what for note in told.untold)
    assert any("continuous" in note.what for note in diagnose(_host_bound()).untold)


def test_a_servers_own_rows_stand_in_for_a_batching_table():
    users = [
        _cell(f"serving.users_{n}", phase="users", engine="a server", ttft_s=0.1, tpot_s=t, output_tokens_per_s=n / t)
        for n, t in ((1, 0.03), (16, 0.05))
    ]
    told = diagnose(_run(users, device="cpu"))
    assert _fix(told, "16 chats").gain.value == pytest.approx(16 * 0.03 / 0.05)
    assert "CPU" not in told.bigger_gpu.reason, "the machine that answers may be another one"
    assert not diagnose(_run(users), Targets(tpot_s=0.04, ttft_s=0.2)).fixes


def test_a_further_user_is_cheap_again_where_a_larger_batch_says_so():
    rates = {1: 100, 2: 120, 4: 380, 8: 700, 16: 900}
    rows = [_cell(f"batching.{n}", batch_size=n, output_tokens_per_s=rate) for n, rate in rates.items()]
    assert "from batch 16 on" in _fix(diagnose(_run(rows)), "16 chats").basis


# Any plausible run ----------------------------------------------------------------------------------------------------

share = st.floats(0.05, 1.0)
factor = st.floats(1.0, 8.0)


@st.composite
def plausible_runs(draw):
    """Runs whose times obey their machine: no step under its floor, no wall under its device time."""
    weights_bytes, memory_bytes = draw(st.floats(1e8, 2e10)), draw(st.floats(2.5e10, 2e11))
    bandwidth = draw(st.floats(1e10, 5e12))
    floor_s = weights_bytes / bandwidth
    cells = []
    for engine in ("eager", "graph")[: draw(st.integers(1, 2))]:
        for n in (1, 2, 16):
            device_s = floor_s * draw(factor)
            figures = {"decode_device_s": device_s} if draw(st.booleans()) else {}
            cells.append(_row(n, device_s * draw(factor), ttft_s=draw(st.floats(1e-3, 1.0)), engine=engine, **figures))
    full_s = draw(st.floats(0.01, 1.0))
    cached = {"ttft_s": full_s * draw(share)}
    if draw(st.booleans()):
        cached["prefill_device_s"] = cached["ttft_s"] * draw(share)
    cells += [
        _cell("prefix.0.full", prompt_len=1500, ttft_s=full_s, e2e_s=2 * full_s, prefix_len=1484),
        _cell("prefix.0.cached", prompt_len=16, e2e_s=2 * full_s, prefix_len=1484, **cached),
        _cell("quant.fp16", bytes={"loaded": weights_bytes}, ttft_s=0.1, tpot_s=floor_s * draw(factor)),
        _cell(
            "quant.nf4",
            precision="nf4",
            bytes={"loaded": weights_bytes * draw(st.floats(0.25, 0.9))},
            ttft_s=0.1,
            tpot_s=floor_s * draw(factor),
        ),
        _draft(speed_over_alone=draw(st.floats(0.2, 9)), c=draw(st.floats(0.01, 1.2))),
    ]
    claims = []
    for id in ("batching.throughput", "prefix.prefill_1484", "quant.not_always_faster", "speculation.not_free_speed"):
        if draw(st.booleans()):
            value = draw(st.floats(0.1, 300))
            claims.append(_claim(id, value, draw(st.sampled_from([None, [value * 0.9, value * 1.2]]))))
    more = {"roofline": {"bandwidth_bytes_per_s": bandwidth}} if draw(st.booleans()) else {}
    return _run(cells, claims, memory_bytes=memory_bytes, **more)


def _possible(run, fix):
    """The most that a fix could give, from the run's figures alone."""
    cells = {(cell["id"], cell["engine"]): cell for cell in run["cells"]}
    figures = {key: cell["figures"] for key, cell in cells.items()}
    base = figures["batching.1", "eager"]
    bandwidth = run.get("roofline", {}).get("bandwidth_bytes_per_s")
    held = {name: cells[f"quant.{name}", "eager"]["bytes"]["loaded"] for name in ("fp16", "nf4")}
    if "chats" in fix.name:
        return float(re.search(r"\d+", fix.name).group())
    if fix.name == "prefix caching":
        cached = figures["prefix.0.cached", "eager"]
        full_s = figures["prefix.0.full", "eager"]["ttft_s"]
        return full_s / cached["prefill_device_s"] if "prefill_device_s" in cached else 1500 / 16
    if fix.name == "speculative decoding":
        return figures["speculation.with_draft", "transformers generate"]["mean_acceptance_length"]
    if fix.metric is Metric.CHATS:
        return run["machine"]["memory_bytes"] / (run["machine"]["memory_bytes"] - held["fp16"])
    if "nf4" in fix.name:
        return figures["quant.fp16", "eager"]["tpot_s"] / (held["nf4"] / bandwidth) if bandwidth else math.inf
    if fix.gain.kind is Kind.AT_MOST:
        return base["tpot_s"] / (base.get("decode_device_s") or held["fp16"] / bandwidth)
    devices = [figures["batching.1", engine].get("decode_device_s", math.inf) for engine in ("eager", "graph")]
    return base["tpot_s"] / (held["fp16"] / bandwidth if bandwidth else min(devices))


@few
@given(plausible_runs())
def test_no_gain_exceeds_what_is_possible_and_the_larger_comes_first(run):
    told = diagnose(run)
    for fix in told.fixes:
        most = _possible(run, fix)
        ends = [end for end in (fix.gain.value, fix.gain.low, fix.gain.high) if end is not None]
        assert max(ends) <= most * (1 + 1e-9) or most == 0, (fix, most)
        assert fix.cap is None or max(ends) <= fix.cap
        assert fix.gain.value >= 1.05
    assert list(told.fixes) == sorted(told.fixes, key=lambda fix: (fix.stage, -fix.gain.value))
    for stage in Stage:
        gains = [fix.gain.value for fix in told.fixes if fix.stage is stage]
        assert gains == sorted(gains, reverse=True)
    assert told.bigger_gpu.at_most is None or 1 <= told.bigger_gpu.at_most <= 2


@few
@given(plausible_runs(), st.floats(1.0, 20.0))
def test_a_met_target_buys_nothing_and_a_bought_card_was_out_of_reach(run, times_better):
    base = next(cell["figures"] for cell in run["cells"] if cell["id"] == "batching.1")
    met = diagnose(run, Targets(tpot_s=base["tpot_s"], throughput_per_s=base["output_tokens_per_s"]))
    assert not met.fixes
    assert not met.bigger_gpu.buy
    assert "nothing to buy" in met.bigger_gpu.reason
    hard = diagnose(run, Targets(tpot_s=base["tpot_s"] / times_better))
    if hard.bigger_gpu.buy:
        assert all(fix.reaches is Reach.SHORT for fix in hard.fixes if fix.metric is Metric.TPOT)


# Hostile runs ---------------------------------------------------------------------------------------------------------

EVIL = "\x1b[2J<script>alert(1)</script>`` ` \u202e| [x](http://e) &amp; {{7*7}}\n# h\x9b31m"
odd_numbers = st.sampled_from([None, True, 0, -1.0, 1e-320, 1e299, -1e299, 3, math.nan, math.inf, 2**62])


def _leaves(value, path=()):
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(below, (*path, key))
    else:
        yield path, value


LEAVES = [
    (card, [leaf for leaf in _leaves(card) if leaf[0][0] in ("cells", "machine", "rig", "roofline", "claims")])
    for card in (T4, X2)
]
STRUCTURE = {"id", "station", "phase", "verdict", "device"}


@few
@given(st.data())
def test_no_text_and_no_number_of_a_run_gets_through(data):
    card, leaves = data.draw(st.sampled_from(LEAVES))
    run = copy.deepcopy(card)
    for path, value in data.draw(st.lists(st.sampled_from(leaves), min_size=5, max_size=60)):
        if path[-1] in STRUCTURE:
            continue
        node = run
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = EVIL if isinstance(value, str) else data.draw(odd_numbers)
    told = diagnose(
        run, data.draw(st.sampled_from([Targets(), Targets(1e-3, 1e-3, 1e4, 100, 1e5), Targets(chats=1e15)]))
    )
    for width in (40, 100):
        lines = diagnosis_lines(told, width)
        assert max(map(len, lines)) <= width
        assert not any(unicodedata.category(c)[0] == "C" or c == "`" for line in lines for c in line)
    assert not any(math.isnan(fix.gain.value) for fix in told.fixes)


def test_reasons_and_engines_of_a_run_are_plain_text():
    graph = _row(1, 0.0012, engine=f"other{EVIL}", decode_device_s=0.0011)
    longer = _claim("prefix.prefill_device_bound", 4.2, [2.1, 8.4], reason=EVIL)
    cells = [
        _cell("prefix.0.full", prompt_len=1500, ttft_s=0.024),
        _cell("prefix.0.cached", prompt_len=16, ttft_s=0.024),
    ]
    told = diagnose(_host_bound(graph, *cells, claims=[longer]))
    texts = [text for fix in told.fixes for text in (fix.name, fix.basis, fix.command)]
    assert any("other" in text for text in texts)
    assert any("script" in text for text in texts)
    assert not any(unicodedata.category(c)[0] == "C" for text in texts for c in text)


def test_a_run_with_nothing_in_it_says_what_would_tell():
    told = diagnose(_run([], memory_bytes=None))
    assert told.fixes == ()
    assert [step.answer for step in told.path] == ["can't be told from this run"] * 4
    assert all(note.command.startswith("pytest ") for note in told.untold)
    assert [note.what for note in told.untold] == ["TTFT, TPOT, throughput", "what fits into memory"]


def test_of_two_engines_each_keeps_its_own_claim():
    claims = [
        _claim("batching.throughput", 15.0, [14.0, 15.5]),
        _claim("batching.throughput", 9.0, [8, 10], engine="graph"),
    ]
    graph = [_row(n, 0.0012, engine="graph") for n in (1, 16)]
    for told in (claims, claims[::-1]):
        assert _fix(diagnose(_host_bound(claims=told)), "16 chats").gain.value == 15.0
        fix = _fix(diagnose(_host_bound(*graph, claims=told)), "16 chats")
        assert fix.gain.value == 9.0, "what a batch gains once the first fix is in place"
        assert "on engine graph" in fix.basis


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_path_and_the_fixes(capsys):
    assert main(["diagnose", str(CARDS / "tesla-t4.json"), "--ttft-target-ms", "100"]) == 0
    out = capsys.readouterr().out
    assert "-> TTFT high?" in out
    assert "prefix caching: TTFT 6.9x, enough for the target" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("wrong", ["0", "-5", "nan", "inf", "1e999", "fast\x1b[2J", ""])
@pytest.mark.parametrize("option", ["--ttft-target-ms", "--chats"])
def test_a_wrong_target_is_one_line_and_exit_code_2(option, wrong, capsys):
    assert main(["diagnose", str(CARDS / "tesla-t4.json"), f"{option}={wrong}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"{option} must be a positive number" in err
    assert "\x1b" not in err


def test_the_documented_output_is_what_is_printed(capsys):
    page = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    words = re.search(r"\$ python -m benchmarks (diagnose .*)", page).group(1).split()
    words[1] = str(ROOT / words[1])
    main(words)
    assert f"<!-- printed -->\n```text\n{capsys.readouterr().out}```" in page


def test_a_file_that_is_no_run_is_one_line_and_exit_code_2(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text('{"schema_version": 1, "cells": NaN}', encoding="utf-8")
    assert main(["diagnose", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_diagnosing_imports_no_torch():
    code = "import sys; import benchmarks.diagnose; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0
