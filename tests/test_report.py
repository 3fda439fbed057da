"""The card of a run: complete, within its width, and harmless whatever the run contains."""

from __future__ import annotations

import copy
import json
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from benchmarks.claims import CLAIMS
from benchmarks.estimates import Estimate, counted, unusable
from benchmarks.ledger import Cell, Ledger, verdict_record
from benchmarks.report import card_lines, card_markdown, write_card
from benchmarks.run_file import RunFileError, read_run
from benchmarks.tables import plain
from benchmarks.verdicts import Setting, judge, not_judged

T4 = Path(__file__).parents[1] / "benchmarks" / "cards" / "tesla-t4.json"

MACHINE = {
    "device": "cuda",
    "name": "NVIDIA H200",
    "memory_bytes": 150_000_000_000,
    "capability": [9, 0],
    "driver": "570.1",
    "cuda": "13.0",
    "throttle_reasons": ["hardware thermal slowdown"],
    "power_limit_w": 700.0,
    "power_limit_default_w": 700.0,
    "temperature_c": 50,
    "temperature_slowdown_c": 90,
    "mig": False,
    "mig_profile": None,
    "neighbours": [{"pid": 77, "memory_bytes": 2**31}],
    "clocks_mhz": {"sm": 1980, "memory": 3201, "max_sm": 1980},
    "cpu": {"model": "Some CPU", "cores": 16, "cores_total": 16, "load_1m": 0.4},
    "versions": {"python": "3.11.7", "torch": "2.11.0+cu130", "transformers": "5.24.0"},
    "unavailable": {},
}
RIG = {"name": "qwen2.5", "weights": "random", "target": "Qwen/Qwen2.5-1.5B", "draft": None, "dtype": "float16"}


def _cell(id, phase, workload, engine="eager", precision="fp16", **known):
    """A cell with a reason for each time that it lacks."""
    unavailable = dict.fromkeys(("wall_s", "device_s"), "not timed") | known.pop("unavailable", {})
    return Cell(id, id.split(".")[0], phase, workload, engine, precision, unavailable=unavailable, **known)


def _cells():
    cells = []
    for n in (1, 16):
        cells.append(
            Cell(
                f"batching.{n}",
                "batching",
                "row",
                {"name": "equal rows", "batch_size": n, "prompt_len": 37, "output_len": 48},
                "eager",
                "fp16",
                wall_s=(0.9, 0.91),
                bytes={"peak": 3 * 2**30},
                figures={
                    "ttft_s": 0.0219,
                    "tpot_s": 0.0187,
                    "e2e_s": 0.9,
                    "wall_per_request_s": 0.9 / n,
                    "output_tokens_per_s": 53.2 * n,
                    "prefill_device_s": 0.0037,
                    "prefill_host_bound": 0.83,
                    "decode_device_s": 0.0031,
                    "decode_host_bound": 0.8342,
                },
                kernels={"prefill": ["cudnn"], "decode": ["efficient"], "allowed": ["cudnn", "flash"]},
                unavailable={"device_s": "of a request only its phases have one"},
            )
        )
        cells.append(_cell(f"batching.{n}.prefill", "prefill", {}, wall_s=(0.0219,)))
    gone = dict.fromkeys(("wall_s", "device_s", "figures"), "out of memory")
    cells.append(_cell("batching.32", "row", {"batch_size": 32}, unavailable=gone))
    for side, ttft_s, x in (("full", 0.0221, {}), ("cached", 0.0204, {"prefill_speedup": 1.083})):
        figures = {"ttft_s": ttft_s, "decode_s": 0.88, "e2e_s": 0.9, "tpot_s": 0.0187, **x}
        workload = {"name": f"{side}: How do I reset my password?", "batch_size": 1, "output_len": 48}
        cells.append(_cell(f"prefix.0.{side}", "row", workload, figures=figures))
    figures = {"queue_s": 0.25, "goodput_per_s": 12.5, "kv_bytes": 2.0**30, "hit_rate": 0.5, "requests": 16.0}
    cells.append(_cell("juggling.a", "row", {"name": "sixteen arrivals"}, "vllm", figures=figures))
    return cells


def _verdicts():
    ratio = lambda value, low, high: Estimate(value, low, high, 18, {"a": (1.0,), "b": (1.0,)})  # noqa: E731
    seen = {
        "batching.throughput": ratio(15.2, 14.9, 15.5),
        "batching.latency": ratio(1.31, 1.28, 1.35),
        "batching.nobody_gets_sixteenth": ratio(0.95, 0.93, 0.97),
        "prefix.prefill_1484": ratio(0.93, 0.91, 0.95),
        "prefix.prefill_device_bound": unusable("no prefix length keeps the card busy"),
        "attention.sdpa_memory": {
            "growth per doubling": counted(3.9),
            "naive over SDPA at 4,096": counted(129.0),
        },
    }
    verdicts = [judge(CLAIMS[name], observed) for name, observed in seen.items()]
    here = Setting({"trained": "random weights: quality and acceptance would mean nothing"})
    for name in ("speculation.not_free_speed", "speculation.predictable"):
        verdicts.append(not_judged(CLAIMS[name], here.why_not(CLAIMS[name]) or "", here))
    return verdicts


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run with every kind of verdict, as a Ledger writes it."""
    ledger = Ledger(tmp_path_factory.mktemp("run"), MACHINE, RIG, "eager")
    for cell in _cells():
        ledger.cell(cell)
    for verdict in _verdicts():
        ledger.verdict(verdict, "eager")
    ledger.note("machine_after", MACHINE)
    return read_run(ledger.path)


@pytest.fixture
def run(written):
    """The written run, to be changed as a test likes."""
    return copy.deepcopy(written)


def _text(run, width=100):
    return "\n".join(card_lines(run, width))


# What a card says -----------------------------------------------------------------------------------------------------


def test_every_verdict_is_there_with_what_was_observed_and_required(run):
    text = _text(run)
    assert re.search(r"^HOLDS +throughput +15\.2x \[14\.9, 15\.5\] +>= 10x +14\.7x$", text, re.M)
    assert re.search(r"^REFUTED +prefill_1484 +0\.93x \[0\.91, 0\.95\] +>= 3x +6\.9x, 11\.3x$", text, re.M)
    assert re.search(r"^INCONCLUSIVE +nobody_gets_sixteenth +0\.95x \[0\.93, 0\.97\]", text, re.M)
    assert "the interval straddles the limit" in text
    assert "no prefix length keeps the card busy" in text
    assert text.splitlines()[-1] == "1 HOLDS, 3 REFUTED, 2 INCONCLUSIVE, 2 NOT JUDGED"


def test_each_part_of_a_compound_claim_shows_its_own_verdict(run):
    text = _text(run)
    assert re.search(r"^REFUTED +sdpa_memory +all of:", text, re.M)
    assert re.search(r"^refuted +- growth per doubling +3\.9x +<= 2\.5x$", text, re.M)
    assert re.search(r"^holds +- naive over SDPA at 4,096 +129x +>= 50x$", text, re.M)


def test_claims_that_share_a_reason_for_not_being_judged_share_a_line(run):
    (line,) = [line for line in card_lines(run) if line.startswith("NOT JUDGED")]
    assert line.endswith("random weights: quality and acceptance would mean nothing: not_free_speed, predictable")


def test_the_head_names_machine_rig_software_and_what_to_beware_of(run):
    head = _text(run).split("\n\n")[0]
    for words in ("NVIDIA H200", "9.0", "139.7 GiB", "570.1", "RANDOM WEIGHTS", "float16", "eager", "torch 2.11.0"):
        assert words in head
    assert "the card is shared" in head
    assert "hardware thermal slowdown" in head


def test_trained_weights_are_not_called_random(run):
    run["rig"]["weights"] = "trained"
    assert "RANDOM" not in _text(run)


def test_the_batching_table_has_the_articles_columns_and_the_cards_own_time(run):
    text = _text(run)
    row = next(line for line in text.splitlines() if re.match(r"16 +\d", line))
    assert row.split() == ["16", "21.9", "18.7", "900", "56.2", "851", "3.00", "3.70", "83%", "3.10", "83.4%"]
    ran = "attention that ran: prefill cudnn, decode efficient; the flags allow cudnn, flash (batch 1, 16)"
    assert ran in text.replace("\n  ", " ")
    assert "not measured: out of memory (batch 32)" in text


@pytest.mark.parametrize(
    ("wall_s", "throughput"),
    [
        ((0.900, 0.901), "851"),  # two rounds within 0.1 %: three digits
        ((0.80, 1.00), "850"),  # within 22 %: two
        ((0.9,), "850"),  # nobody knows
        (None, "851.2"),  # published figures: as they are
    ],
)
def test_a_row_shows_no_more_digits_than_its_rounds_carry(run, wall_s, throughput):
    for cell in run["cells"]:
        if cell["id"] == "batching.16":
            cell["wall_s"] = wall_s
    row = next(line for line in card_lines(run) if re.match(r"16 +\d", line))
    assert row.split()[5] == throughput


def test_figures_that_no_clock_gave_keep_their_digits(run):
    (cell,) = (c for c in run["cells"] if c["id"] == "batching.16")
    cell["wall_s"], cell["bytes"] = [0.5, 1.5], {"peak": 3.14 * 2**30}
    assert " 3.14 " in next(line for line in card_lines(run) if re.match(r"16 +\d", line))


def test_every_column_has_a_name_that_says_what_it_is(run):
    figures = {"e2e_s": 0.3, "c": 0.415, "predicted_speed": 1.614}
    run["cells"] = [_cell("speculation.with_draft", "row", {}, figures=figures).record]
    table = " ".join(_text(run).split("== Speculative")[1].split())
    assert "draft step" in table
    assert "1.61x" in table
    assert " c " not in table


def test_the_t4_column_is_explained_where_it_has_figures(run):
    assert "measured once on one Tesla T4" in _text(run)
    for claim in run["claims"]:
        claim["t4"] = None
    assert "Tesla T4" not in _text(run)


def test_a_phase_that_its_row_tells_of_gets_no_table_of_its_own(run):
    assert "[prefill" not in _text(run)


def test_a_full_and_a_cached_prefill_stand_in_one_row(run):
    line = next(line for line in card_lines(run) if line.startswith("How do I reset"))
    assert line.split()[-7:] == ["22.1", "20.4", "1.08x", "880", "880", "900", "900"]


def test_notes_of_a_full_and_a_cached_prefill_say_whose_they_are(run):
    cells = {cell["id"]: cell for cell in run["cells"]}
    for side, regime in (("full", "compute-bound"), ("cached", "overhead-bound")):
        cells[f"prefix.0.{side}"]["note"] = f"prefill {regime}, decode memory-bound"
    told = "full: prefill compute-bound, decode memory-bound; cached: prefill overhead-bound, decode memory-bound"
    assert f"note: {told}" in " ".join(_text(run, 200).split())
    cells["prefix.0.full"]["note"] = cells["prefix.0.cached"]["note"]
    assert "note: prefill overhead-bound, decode memory-bound" in " ".join(_text(run, 200).split())


def test_a_turning_point_that_was_not_seen_is_a_note_and_no_table(run):
    point = {**run["cells"][0], "phase": "curve", "id": "batching.curve.1", "figures": {"tpot_s": 0.02}, "kernels": {}}
    turned = {**point, "phase": "turning_point", "id": "batching.curve", "figures": {}, "bytes": {}, "wall_s": None}
    turned["unavailable"] = {"no_longer_cheap_at_users": "the budget was over"}
    run["cells"] += [point, turned]
    text = _text(run)
    assert "[turning point" not in text
    assert "no longer cheap at users: the budget was over" in " ".join(text.split())
    turned["figures"] = {"no_longer_cheap_at_users": 8}
    assert "[turning point" in _text(run)


def test_a_large_share_is_written_in_digits(run):
    run["noise_floor"] = {"decode_wall": 1.4, "prefill_wall": 0.034, "request_wall": 23.456}
    run["cells"][0]["figures"]["decode_host_bound"] = 12.34
    text = _text(run)
    assert "decode wall 140%" in text
    assert "prefill wall 3.4%" in text
    assert "request wall 2,346%" in text
    assert "1,234%" in text
    assert "e+0" not in text


def test_each_precision_shows_its_memory_over_the_one_that_is_not_quantized(run):
    for precision, held in (("fp16", 3.0e9), ("int8", 1.77e9)):
        held_by = {"bytes": {"storages": held}}
        cell = _cell(f"quant.{precision}", "row", {"name": "rows"}, precision=precision, **held_by)
        run["cells"].append(cell.record)
    assert next(line for line in card_lines(run) if line.startswith("int8 ")).split() == ["int8", "1.65", "0.59x"]


def test_a_math_fallback_is_told(run):
    kernels = {"attention": ["math"], "math_fallback": True, "proof": ["softmax"], "longest": [{"name": "gemm"}]}
    run["cells"] = [_cell("a.b", "verify", {}, wall_s=(0.1,), kernels=kernels).record]
    text = _text(run)
    assert "attention that ran: math (math fallback: SDPA built the whole score matrix)" in text
    assert "gemm" not in text
    head = " ".join(text.split("\n\n")[0].split())
    assert "finding SDPA fell back to its math kernel, which builds the whole score matrix, in a.b" in head


def test_a_fallback_is_a_finding_once_for_each_phase_and_none_without_one(run):
    assert "finding" not in _text(run)
    for n in range(9):
        row = {"prefill": ["math"], "decode": ["cudnn"], "allowed": ["math"]}
        run["cells"].append(_cell(f"x.{n}", "row", {}, kernels=row).record)
        phase = {"attention": ["math"], "math_fallback": True}
        run["cells"].append(_cell(f"x.{n}.prefill", "prefill", {}, kernels=phase).record)
    head = " ".join(_text(run).split("\n\n")[0].split())
    assert head.endswith("in x.0.prefill, x.1.prefill, x.2.prefill, x.3.prefill, x.4.prefill, x.5.prefill and 3 more")


def test_a_station_that_nobody_has_heard_of_appears_with_units(run):
    text = _text(run)
    assert "== juggling" in text
    words = ("queue", "goodput/s", "KV", "memory", "hit", "rate", "requests", "ms", "GiB", "50%", "sixteen arrivals")
    for word in words:
        assert word in text[text.index("== juggling") :]


def test_what_was_not_measured_is_a_dash_and_never_a_zero(run):
    row = next(line for line in card_lines(run) if re.match(r"32 +-", line))
    assert set(row.split()[1:]) == {"-"}


def test_a_run_without_claims_says_that_nothing_was_judged(run):
    run["claims"] = []
    assert _text(run).endswith("nothing was judged")


def test_an_incomplete_machine_record_costs_only_the_remarks(run):
    del run["machine"]["throttle_reasons"]
    text = _text(run)
    assert "the machine's record is not whole" in text
    assert "15.2x [14.9, 15.5]" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_no_line_is_wider_than_the_page_and_no_figure_is_cut(run, width):
    lines = card_lines(run, width)
    assert max(map(len, lines)) <= width
    for figure in ("[14.9, 15.5]", ">= 10x", "14.7x", "851", "83.4%"):
        assert any(figure in line for line in lines), figure


def test_the_markdown_card_has_the_same_content(run):
    page = MarkdownIt("commonmark").enable("table").render(card_markdown(run))
    shown = re.sub(r"<[^>]+>", " ", page)
    for words in ("15.2x [14.9, 15.5]", "REFUTED", "851", "RANDOM WEIGHTS", "1 HOLDS, 3 REFUTED", "out of memory"):
        assert words in shown
    assert page.count("<table>") == 6  # verdicts of three stations, three tables of figures


def test_the_card_is_written_beside_the_run(run, tmp_path):
    path = write_card(run, tmp_path)
    assert path == tmp_path / "card.md"
    assert path.read_text(encoding="utf-8") == card_markdown(run)
    assert not list(tmp_path.glob("*.new"))


# Two engines ----------------------------------------------------------------------------------------------------------

NO_GRAPHS = "no CUDA on this machine, and graphs are CUDA's"


def _also_by_graph(run, **by_id):
    """The run with each claim once more, as a graph engine found it: `by_id` has what is different, else NOT JUDGED."""
    skipped = {"verdict": "NOT JUDGED", "observed": None, "interval": None, "parts": [], "reason": NO_GRAPHS}
    run["engine"] = "eager and graph"
    for claim in list(run["claims"]):
        name = claim["id"].split(".")[1]
        run["claims"].append(copy.deepcopy(claim) | {"engine": "graph"} | by_id.get(name, skipped))


def test_both_engines_of_a_claim_stand_under_its_name(run, tmp_path):
    _also_by_graph(run, prefill_1484={"verdict": "HOLDS", "observed": 4.2, "interval": [4.1, 4.3]}, sdpa_memory={})
    next(c for c in run["claims"] if c["id"] == "prefix.prefill_1484")["disagreement"] = "the host waits for itself"
    path = tmp_path / "two.json"
    path.write_text(json.dumps(run), encoding="utf-8")
    text = _text(read_run(path))
    assert "eager and graph engines" in " ".join(text.split())
    told = text[text.index("prefill_1484") :].split("\n")[:5]
    assert told[0].split() == ["prefill_1484", ">=", "3x", "6.9x,", "11.3x"]
    assert told[1].split() == CLAIMS["prefix.prefill_1484"].statement.split()
    assert told[2].strip() == "(the engines differ: the host waits for itself)"
    assert told[3].split() == ["REFUTED", "eager", "engine", "0.93x", "[0.91,", "0.95]"]
    assert told[4].split() == ["HOLDS", "graph", "engine", "4.2x", "[4.1,", "4.3]"]
    assert text.count("prefill_1484") == 1
    assert text.count("- growth per doubling") == 2
    assert re.search(r"^HOLDS +throughput +15\.2x", text, re.M)  # by one engine: as ever
    assert f"NOT JUDGED graph engine, {NO_GRAPHS}: throughput, latency" in " ".join(text.split())
    assert text.splitlines()[-2:] == [
        "eager engine: 1 HOLDS, 3 REFUTED, 2 INCONCLUSIVE, 2 NOT JUDGED",
        "graph engine: 1 HOLDS, 1 REFUTED, 0 INCONCLUSIVE, 6 NOT JUDGED",
    ]


def test_a_cpu_has_no_graph_engine_to_name(run):
    _also_by_graph(run)
    assert "eager and graph engines" in " ".join(_text(run).split())
    run["machine"]["device"] = "cpu"
    assert "eager engine (graphs need CUDA)" in " ".join(_text(run).split())
    run["claims"][-1]["verdict"] = "HOLDS"
    assert "eager and graph engines" in " ".join(_text(run).split())


def test_engines_that_agree_have_no_difference_to_explain(run):
    _also_by_graph(run, prefill_1484={"disagreement": "none, really"})
    assert "engines differ" not in _text(run)


def test_an_engine_that_judged_nothing_is_one_line(run):
    _also_by_graph(run)
    text = _text(run)
    assert text.count(NO_GRAPHS) == 1
    assert f"NOT JUDGED  graph engine, 8 claims: {NO_GRAPHS}" in text
    assert "graph engine, 8 claims" in card_markdown(run)
    assert "eager engine " not in text.split("\n\n", 1)[1]


def test_a_claim_that_no_engine_judged_for_the_same_reason_is_named_once(run):
    random = {"reason": "random weights: quality and acceptance would mean nothing"}
    _also_by_graph(run, not_free_speed=random, predictable=random, throughput={})
    (line,) = [line for line in card_lines(run) if re.match("NOT JUDGED +random", line)]
    assert line.endswith(": not_free_speed, predictable")


def test_rows_of_another_engine_are_further_rows_of_the_same_table(run):
    for cell in list(run["cells"]):
        if cell["station"] in ("batching", "prefix"):
            again = copy.deepcopy(cell) | {"engine": "graph"}
            again["kernels"] = {"decode": ["flash"]} if cell["id"] == "batching.1" else again["kernels"]
            run["cells"].append(again)
    text = _text(run)
    found = re.findall(r"^(1|16|32) +(eager|graph) ", text, re.M)
    assert found[:6] == [
        ("1", "eager"),
        ("16", "eager"),
        ("32", "eager"),
        ("1", "graph"),
        ("16", "graph"),
        ("32", "graph"),
    ]
    assert len(re.findall(r"^How do I reset my", text, re.M)) == 2 * len(re.findall("suffix +engine", text))
    assert "[prefill" not in text
    flat = " ".join(text.split())
    assert "attention that ran: decode flash (batch 1 by graph)" in flat
    assert "the flags allow cudnn, flash (batch 1, 16 by eager; batch 16 by graph)" in flat
    assert "not measured: out of memory (batch 32 by eager; batch 32 by graph)" in flat


# Hostile text ---------------------------------------------------------------------------------------------------------

NASTY = [
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m",
    "a\u202egpj.exe",
    "zero\u200bwidth\u2066",
    "two\r\nlines\x0b\x85\u2028end",
    "\ud800 lone",
    "<script>alert(1)</script>",
    "[click](http://evil.example)",
    "![x](http://evil.example/a.png)",
    "| a | b |",
    "`code` **bold** _it_ ~~no~~ $x$",
    "https://evil.example www.evil.example me@evil.example @someone",
    "&lt;b&gt; &#27;",
    "\\| \\",
    "# head",
    "漢字" * 300,
    "e" + "\u0301" * 50,
    "x" * 5000,
]
MARKS = "\x1b\x9b|`<>[]()!*_\\\n\r&@$ a:/.w#-+1=~"
nasty = st.one_of(st.sampled_from(NASTY), st.text(max_size=80), st.text(alphabet=MARKS, max_size=40))


def _harmless(text):
    return all(unicodedata.category(c)[0] != "C" and c not in "\u2028\u2029" for c in text)


@settings(deadline=None, max_examples=80)
@given(nasty, st.integers(4, 100))
def test_plain_text_is_one_harmless_line_of_the_length_asked_for(text, longest):
    said = plain(text, longest)
    assert _harmless(said)
    assert len(said) <= longest
    assert plain(said, longest) == said
    said.encode("utf-8")


@settings(deadline=None, max_examples=50)
@given(st.text(alphabet=st.characters(codec="ascii", categories=["L", "N", "P", "S"]), max_size=60))
def test_ordinary_text_stays_as_it_is(text):
    assert plain(text) == text


def _poisoned(value, text, names=frozenset({"verdict", "station", "weights", "device", "schema_version"})):
    """The run with `text` in place of every free text, keys of cells' figures too."""
    if isinstance(value, dict):
        return {k: v if k in names else _poisoned(v, text) for k, v in value.items()} | (
            {text: 1.5} if value and all(isinstance(v, float) for v in value.values()) else {}
        )
    if isinstance(value, list):
        return [_poisoned(v, text) for v in value]
    return text if isinstance(value, str) else value


def _sample():
    claims = [verdict_record(verdict, "eager") for verdict in _verdicts()]
    cells = [cell.record for cell in _cells()]
    run = {"schema_version": 1, "suite_version": "0.1.0", "started_at": "2026-11-30T10:00:00+00:00"}
    run |= {"machine": MACHINE, "rig": RIG, "engine": "eager", "noise_floor": {}, "cells": cells, "claims": claims}
    return json.loads(json.dumps(run))


@settings(deadline=None, max_examples=25)
@given(nasty, st.integers(40, 120))
def test_no_text_of_a_run_reaches_the_terminal_raw_or_breaks_the_width(text, width):
    for line in card_lines(_poisoned(_sample(), text), width):
        assert _harmless(line)
        shown = [c for c in line if unicodedata.category(c) not in ("Mn", "Me")]
        assert sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in shown) <= width, line


@settings(deadline=None, max_examples=25)
@given(nasty)
def test_no_text_of_a_run_becomes_markup(text):
    clean, dirty = (card_markdown(_poisoned(_sample(), t)) for t in ("word", text))
    allowed = {"h1", "h2", "p", "ul", "li", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    page = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(dirty)
    assert {tag for tag in re.findall(r"</?([a-z0-9]+)", page)} <= allowed
    assert _harmless(dirty.replace("\n", ""))
    # What GitHub finds by itself: addresses of the web and of mail, mentions.
    assert "@" not in dirty
    assert not re.search(r"(https?|ftp|mailto|xmpp):\S|www\.", dirty, re.I)
    for table in (clean, dirty):  # a pipe in a text must not add a column
        for line in table.splitlines():
            if line.startswith("|") and "claim" in line and "observed" in line:
                assert len(re.findall(r"(?<!\\)\|", line)) == 6
    columns = [len(re.findall(r"<t[dh]", row)) for row in re.findall(r"<tr>.*?</tr>", page, re.S)]
    plain_page = MarkdownIt("commonmark").enable("table").render(clean)
    assert columns[:8] == [len(re.findall(r"<t[dh]", row)) for row in re.findall(r"<tr>.*?</tr>", plain_page, re.S)][:8]


# Files that are no run ------------------------------------------------------------------------------------------------


def _refused(tmp_path, content):
    path = tmp_path / "run.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RunFileError) as caught:
        read_run(path)
    said = str(caught.value)
    assert "\n" not in said
    assert _harmless(said)
    assert len(said) < 400
    return said


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "not whole JSON"),
        ('{"schema_version": 1, "cel', "not whole JSON"),
        (b"\xff\xfe{}", "not whole JSON"),
        ("[" * 200_000, "nested too deeply"),
        ("[]", "no schema_version"),
        ("{}", "no schema_version"),
        ("null", "no schema_version"),
        ('{"schema_version": 2}', "newer suite"),
        ('{"schema_version": 99999999999999999999999999}', "newer suite"),
        ('{"schema_version": 0}', "schema_version is 0"),
        ('{"schema_version": true}', "schema_version is true"),
        ('{"schema_version": 1.0}', "schema_version is 1.0"),
        ('{"schema_version": "\\u001b[2J"}', "schema_version is"),
        ('{"schema_version": NaN}', "NaN is no number"),
        ('{"schema_version": 1}', "the run has no suite_version"),
        ('{"schema_version": 1, "x": 1e999}', "too large"),
        ('{"schema_version": 1, "x": 1.7e308}', "too large or too small to be a figure, 1.7e+308"),
        ('{"schema_version": 1, "x": -1e-320}', "too large or too small"),
        ('{"schema_version": 1, "x": ' + "9" * 400 + "}", "64 bits"),
        ('{"schema_version": 1, "x": ' + "9" * 5000 + "}", "not whole JSON"),
        ('{"schema_version": 1, "x": ' + "[" * 50 + "1" + "]" * 50 + "}", "nested too deeply"),
        ('{"schema_version": 1, "x": [' + "0," * 30_000 + "0]}", "entries"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path, content, why):
    assert why in _refused(tmp_path, content)


def test_a_file_of_more_than_64_mib_is_refused_unread(tmp_path):
    path = tmp_path / "run.json"
    with path.open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(RunFileError, match="larger than 64 MiB"):
        read_run(path)


@pytest.mark.parametrize("name", ["absent.json", "."])
def test_what_cannot_be_opened_is_refused(tmp_path, name):
    with pytest.raises(RunFileError, match="can't be read"):
        read_run(tmp_path / name)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("machine",), None),
        (("machine", "versions"), []),
        (("machine", "name"), 3),
        (("rig", "draft"), 1),
        (("rig",), []),
        (("started_at",), 5),
        (("claims",), {}),
        (("claims", 0), None),
        (("claims", 0, "verdict"), "MAYBE"),
        (("claims", 0, "verdict"), []),
        (("claims", 0, "observed"), "14.7"),
        (("claims", 0, "observed"), True),
        (("claims", 0, "interval"), [1]),
        (("claims", 0, "interval"), ["a", "b"]),
        (("claims", 0, "parts"), [3]),
        (("claims", 0, "parts"), [{}]),
        (("cells", 0, "figures"), {"ttft_s": "fast"}),
        (("cells", 0, "figures"), {str(n): 1 for n in range(300)}),
        (("cells", 0, "wall_s"), [None, "x"]),
        (("cells", 0, "workload"), {"name": {}}),
        (("cells", 0, "kernels"), []),
        (("cells", 0, "unavailable"), {"x": 3}),
        (("noise_floor",), {"decode_wall": "small"}),
        (("machine_after",), 3),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_name(tmp_path, run, place, value):
    broken = copy.deepcopy(run)
    inner = broken
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert str(place[-1]) in _refused(tmp_path, json.dumps(broken))


@pytest.mark.parametrize("kind", ["claims", "cells"])
def test_what_stands_twice_is_refused(tmp_path, run, kind):
    path = tmp_path / "run.json"
    run[kind].append({**run[kind][2], "engine": "another"})
    path.write_text(json.dumps(run), encoding="utf-8")
    read_run(path)
    run[kind].append(dict(run[kind][2]))
    said = _refused(tmp_path, json.dumps(run))
    assert f"{kind}[2] and {kind}[{len(run[kind]) - 1}] are both {run[kind][2]['id']} of engine" in said


def test_every_field_is_checked_or_not_used(tmp_path, run):
    """Whatever single value is replaced by something odd, a card comes out or one line does."""
    path = tmp_path / "odd.json"
    places = []

    def walk(value, place):
        places.append(place)
        inside = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
        for key, inner in inside.items():
            walk(inner, (*place, key))

    run["cells"] = run["cells"][:1]
    kept = ("batching.throughput", "attention.sdpa_memory")
    run["claims"] = [claim for claim in run["claims"] if claim["id"] in kept]
    walk(run, ())
    drawn = 0
    for number, place in enumerate(places[1:]):
        broken = copy.deepcopy(run)
        inner = broken
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = (None, -1, 1e300, "\x1b", [], {}, [[]], {"a": None}, True)[number % 9]
        path.write_text(json.dumps(broken), encoding="utf-8")
        try:
            lines = card_lines(read_run(path))
        except RunFileError:
            continue
        drawn += 1
        assert all(_harmless(line) and len(line) <= 100 for line in lines)
        card_markdown(broken)
    assert drawn > 20


# The T4 ---------------------------------------------------------------------------------------------------------------


def test_the_t4_card_has_the_published_figures():
    text = _text(read_run(T4))
    for figures in (
        "1       45.0  37.8         1.82",
        "16     109.0  39.8         1.98",
        "387.7    3.08",
        "fp16         2.88",
        "nf4          1.18",
        "alone       1.86   24.7",
    ):
        assert figures in text
    assert "Tesla T4, compute capability 7.5, 14.6 GiB" in text


def test_the_t4s_claims_are_this_suites_and_follow_from_its_tables():
    run = read_run(T4)
    claims = {claim["id"]: claim for claim in run["claims"]}
    assert set(claims) <= set(CLAIMS)
    figures = {cell["id"]: cell["figures"] | cell["bytes"] for cell in run["cells"]}
    one, sixteen = figures["batching.1"], figures["batching.16"]
    for claim, name in (("throughput", "output_tokens_per_s"), ("latency", "e2e_s"), ("tpot", "tpot_s")):
        assert claims[f"batching.{claim}"]["observed"] == pytest.approx(sixteen[name] / one[name], rel=0.005)
    short, long = figures["attention.512"], figures["attention.4096"]
    growth = long["naive_bytes"] / short["naive_bytes"]
    assert claims["attention.naive_memory"]["observed"] ** 3 == pytest.approx(growth, rel=0.01)
    ratio = figures["quant.nf4"]["loaded"] / figures["quant.fp16"]["loaded"]
    assert claims["quant.nf4_memory"]["observed"] == pytest.approx(ratio, abs=0.005)


def test_a_published_figure_claims_no_interval():
    for claim in read_run(T4)["claims"]:
        assert claim["interval"] is None
        assert claim["reason"]
