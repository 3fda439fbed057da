"""The page: whole in itself, true to the verdicts of whatever run it shows, and harmless whatever the run contains."""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import page as page_module
from benchmarks.claims import CLAIMS
from benchmarks.finding import badge, finding
from benchmarks.page import page, write_page
from benchmarks.page.plots import plots_of
from benchmarks.page.stations import STATIONS, answer
from benchmarks.run_file import read_run
from benchmarks.series import Point, Speculated, article, crossing, limits_of, series_of, slope, strips
from benchmarks.verdicts import Word

CARDS = Path(__file__).parents[1] / "benchmarks" / "cards"
VOID = {"meta", "br", "hr", "img", "input", "link", "col", "path", "use", "rect"}


class Page(HTMLParser):
    """What a page consists of; refuses tags that don't nest."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.ids, self.attributes, self.text = Counter(), [], [], []
        self.open = []
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        for name, value in attrs:
            self.attributes.append((tag, name, value or ""))
            if name == "id":
                self.ids.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text.append(data)

    @property
    def said(self):
        return " ".join(" ".join(self.text).split())


def _card(name):
    return read_run(CARDS / f"{name}.json")


@pytest.fixture(scope="module")
def h200():
    return read_run(
        Path(__file__).parent / "runs" / "h200-eager.json"
    )  # a run of one engine, whatever card is accepted


@pytest.fixture(scope="module")
def t4():
    return _card("tesla-t4")


@pytest.fixture(scope="module")
def text(h200, t4):
    return page([_small(run, "batching", "prefix", "quant") for run in (h200, t4)])


@pytest.fixture(scope="module")
def parsed(text):
    return Page(text)


def _small(run, *stations):
    """A run cut down to some stations, which is drawn in no time."""
    small = copy.deepcopy(dict(run))
    for key in ("cells", "claims"):
        small[key] = [entry for entry in small[key] if entry["station"] in stations]
    return small


# The page as a file ---------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_but_itself(text, parsed):
    assert "script" not in parsed.tags
    outside = [
        (tag, value)
        for tag, name, value in parsed.attributes
        if name in ("src", "href", "xlink:href", "data", "action", "poster", "srcset")
        and not value.startswith(("#", "data:text/csv;base64,"))
    ]
    assert outside == []
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert "@import" not in text
    policy = dict((name, value) for tag, name, value in parsed.attributes if tag == "meta" and "default-src" in value)
    assert policy["content"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert len(text.encode()) <= 3 * 2**20


def test_every_reference_finds_its_one_target(text, parsed):
    assert [id for id, n in Counter(parsed.ids).items() if n > 1] == []
    named = re.findall(r"url\(#([^)]+)\)", text)
    named += [value[1:] for _, name, value in parsed.attributes if name == "href" and value.startswith("#")]
    named += [value for _, name, value in parsed.attributes if name == "aria-labelledby"]
    assert set(named) <= set(parsed.ids)
    assert len(named) > 20


def test_plots_and_tables_say_what_they_are(text, parsed):
    labels = [value for tag, name, value in parsed.attributes if tag == "svg" and name == "aria-label"]
    assert len(labels) == parsed.tags["svg"] == parsed.tags["figcaption"] >= 7
    assert any("NVIDIA H200: 24.9 ms at 1" in label and "Tesla T4 (article): 45 ms at 1" in label for label in labels)
    assert parsed.tags["caption"] == parsed.tags["table"] >= 5
    assert "var(--c0)" in text
    assert "#010203" not in text


def test_the_same_runs_give_the_same_page(t4):
    small = _small(t4, "speculation")
    assert page([small]) == page([small])


def test_a_page_is_written_whole_or_not_at_all(t4, tmp_path, monkeypatch):
    path = tmp_path / "deep" / "index.html"
    assert write_page([_small(t4, "quant")], path) == path
    before = path.read_text(encoding="utf-8")

    def broken(runs):
        raise ValueError("no ink")

    monkeypatch.setattr(page_module, "page", broken)
    with pytest.raises(ValueError, match="no ink"):
        write_page([t4], path)
    assert path.read_text(encoding="utf-8") == before
    assert [file.name for file in path.parent.iterdir()] == ["index.html"]


def test_a_giant_run_stays_a_page(t4):
    giant = _small(t4, "batching")
    row = giant["cells"][0]
    giant["cells"] = [
        {**row, "id": f"batching.{n}", "workload": {**row["workload"], "batch_size": n}, "wall_s": [1.0] * 50}
        for n in range(1, 300)
    ]
    made = page([giant])
    assert len(made.encode()) <= 3 * 2**20
    assert "more rows are in run.json" in made


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_text_and_lines_stand_out_from_the_paper(scheme):
    """WCAG: 4.5 for text, 3 for the lines of a plot."""
    css = (CARDS.parent / "page" / "templates" / "page.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", blocks[("light", "dark", "print").index(scheme)]))

    def luminance(colour):
        digits = colour[1:] if len(colour) == 7 else "".join(c * 2 for c in colour[1:])
        parts = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a, b):
        low, high = sorted((luminance(colours[a]), luminance(colours[b])))
        return (high + 0.05) / (low + 0.05)

    for words in ("ink", "soft", "link", "holds", "refuted", "inconclusive", "not-judged"):
        assert min(contrast(words, "paper"), contrast(words, "panel")) >= 4.5, words
    for line in ("c0", "c1", "c2", "c3", "c4", "c5"):
        assert contrast(line, "paper") >= 3, line


# Words follow figures and verdicts ------------------------------------------------------------------------------------


def test_the_finding_of_a_card_that_waits_for_its_host(h200):
    assert finding(series_of([h200])) == (
        "The card was idle for 91 % of the time that one chat's tokens took; 16 chats at once gave 15.9x the tokens per second "
        "of one; a cached prefix of 1,484 tokens made prefill only 0.824x as fast; with the same software, a bigger card would "
        "write one chat's tokens at most 1.1x as fast."
    )


def test_the_finding_says_nothing_of_what_was_not_measured(t4):
    assert finding(series_of([t4])) == (
        "16 chats at once gave 14.7x the tokens per second of one; a cached prefix of 1,484 tokens made prefill 6.9x as fast."
    )
    cpu = copy.deepcopy(dict(t4))
    cpu["machine"]["device"] = "cpu"
    cpu["claims"] = [
        {**claim, "verdict": "NOT JUDGED", "observed": None, "parts": [], "reason": "no CUDA on this machine"}
        for claim in cpu["claims"]
    ]
    assert finding(series_of([cpu])) == (
        "No card here, the CPU did all the work; 16 chats at once gave about 14.7x the tokens per second of one, from "
        "unpaired rows."
    )
    cpu["cells"] = []
    assert (
        finding(series_of([cpu])) == f"0 of {len(cpu['claims'])} claims could be judged here: no CUDA on this machine."
    )
    cpu["claims"] = []
    assert finding(series_of([cpu])) == "Nothing was judged."


def test_a_busy_card_is_not_excused(h200):
    busy = copy.deepcopy(dict(h200))
    for cell in busy["cells"]:
        if cell["id"] == "batching.1.decode":
            cell["host_bound"] = 0.04
    assert "the card itself is what one chat waits for" in finding(series_of([busy]))
    assert "bigger" not in finding(series_of([busy]))


@pytest.mark.parametrize("idle", [5.0, -0.2, 1.01])
def test_what_is_no_share_is_no_finding(h200, idle):
    odd = copy.deepcopy(dict(h200))
    for cell in odd["cells"]:
        if cell["id"] == "batching.1.decode":
            cell["host_bound"] = idle
    assert "idle" not in finding(series_of([odd]))
    assert "bigger" not in finding(series_of([odd]))


def test_rows_that_say_nothing_about_each_other_make_no_finding(t4):
    cpu = {**t4, "machine": {**t4["machine"], "device": "cpu"}, "claims": [], "noise_floor": {"decode_wall": 0.45}}
    assert "what 16 chats at once gain can't be told" in finding(series_of([cpu]))
    assert "noise floor is 45%" in finding(series_of([cpu]))
    assert "tokens per second of one" not in finding(series_of([cpu]))
    fell = copy.deepcopy({**cpu, "noise_floor": {"decode_wall": 0.1}})
    assert "about 14.7x" in finding(series_of([fell]))
    last = next(cell for cell in fell["cells"] if cell["id"] == "batching.16")
    last["figures"]["tpot_s"] /= 2
    assert "a token came faster in a larger batch" in finding(series_of([fell]))


def _two_engines(run):
    """The run with a second engine that takes a fifth of the time a token and refutes what the first one held."""
    both = copy.deepcopy(dict(run))
    for cell in [c for c in both["cells"] if c["station"] == "batching"]:
        faster = copy.deepcopy(cell) | {"engine": "graph"}
        faster["figures"] = {k: v / 5 if k in ("tpot_s", "e2e_s") else v for k, v in faster["figures"].items()}
        if faster["phase"] == "decode":
            faster["host_bound"] = 0.02
        both["cells"].append(faster)
    for claim in [c for c in both["claims"] if c["station"] == "batching"]:
        both["claims"].append(copy.deepcopy(claim) | {"engine": "graph", "verdict": "REFUTED"})
    both["claims"].append(
        copy.deepcopy(both["claims"][0]) | {"engine": "idle", "verdict": "NOT JUDGED", "reason": "no such"}
    )
    return both


def test_how_much_faster_an_engine_is_comes_from_paired_rounds_where_there_are_any(h200):
    both = _two_engines(_small(h200, "batching"))
    paired = copy.deepcopy(both["claims"][0]) | {"id": "bigger_gpu.software_first", "station": "bigger_gpu"}
    paired["parts"] = [paired["parts"][0] | {"raw": {"graph speed-up": [3.0, 4.0, 9.0] * 2}}]
    both["claims"].append(paired)
    assert "the graph engine wrote them 4x as fast" in finding(series_of([both]))


def test_engines_of_one_run_stand_side_by_side(h200):
    both = _two_engines(_small(h200, "batching"))
    assert [one.label for one in series_of([both])] == ["NVIDIA H200, eager", "NVIDIA H200, graph"]
    assert "the graph engine wrote them 5x as fast, idle 2 %" in finding(series_of([both]))
    said = Page(page([both])).said
    assert "verdicts differ" in said
    assert "engine idle no such" in said
    assert said.count("NVIDIA H200, graph") > 7


def test_runs_are_columns_and_differing_verdicts_are_marked(h200, t4, text, parsed):
    assert "All verdicts side by side" in parsed.said
    refuted = re.search(r'<tr class="differs">.*?</tr>', text, re.DOTALL).group()
    assert "prefill 1484" in refuted
    assert [word for word in Word if word in refuted] == [Word.HOLDS, Word.REFUTED]
    assert text.count('<tr class="differs">') == 1
    assert "side by side" not in Page(page([_small(t4, "quant")])).said


def test_runs_of_one_machine_are_told_apart(h200):
    later = {**h200, "started_at": "2026-12-01T08:00:00+00:00"}
    assert [one.label for one in series_of([h200, later])] == ["NVIDIA H200, 2026-11-30", "NVIDIA H200, 2026-12-01"]
    assert len({one.label for one in series_of([h200, h200, later])}) == 3
    same = _small(h200, "speculation")
    text = page([same, same])
    assert all(f">NVIDIA H200 #{place}</h2>" in text for place in (1, 2))


def _called(run, name, verdict):
    return {
        **run,
        "machine": {**run["machine"], "name": name},
        "claims": [{**claim, "verdict": verdict, "parts": []} for claim in run["claims"]],
    }


@pytest.mark.parametrize("names", [("A", "A, eager"), ("A", "A", "A #2"), ("A, eager #1", "A", "A, eager")])
def test_no_verdict_of_one_run_lands_in_anothers_column(h200, names):
    words = (Word.HOLDS, Word.REFUTED, Word.INCONCLUSIVE)
    runs = [_called(_small(h200, "batching"), *of) for of in zip(names, words, strict=False)]
    two = runs[names.index("A")]
    two["claims"] = [*two["claims"], *({**claim, "engine": "graph"} for claim in two["claims"])]
    own = series_of(runs)
    assert len({one.label for one in own}) == len(own) == len(names) + 1
    assert len({one.run_label for one in own}) == len(names)
    for view in page_module._claims("batching", own):
        columns = [view.by_label[one.label].badge.word for one in own if one.label in view.by_label]
        assert columns == [one.claims[view.key]["verdict"] for one in own if view.key in one.claims]
        assert len(view.judged) == len(columns)


def test_long_names_of_machines_and_engines_stay_rows_of_their_own(h200):
    run = _small(h200, "prefix")
    run["machine"] = {**run["machine"], "name": "a machine of a very long name indeed, 40"}
    run["rig"] = {**run["rig"], "name": "a rig of a rather long name"}
    runs = [run, {**run, "rig": {**run["rig"], "name": "a rig of a rather long namf"}}]
    (table, *_) = page_module._tables("prefix", series_of(runs))
    assert len({row[:2] for row in table.rows}) == len(table.rows)
    assert len({row[1] for row in table.rows}) == 2


def test_the_article_is_beside_every_run_once(h200, t4):
    assert series_of([t4])[0].is_article
    assert article() == t4
    (plot,) = plots_of("speculation", [*series_of([h200]), *series_of([t4])])
    assert "Tesla T4 (article): 0.71x" in plot.words
    assert Page(page([_small(t4, "speculation")])).said.count("Tesla T4 (article)") >= 1


def test_a_smaller_model_is_not_compared_by_height(h200):
    note = "Compare the shapes, not the heights"
    small = _small(h200, "quant")
    assert note not in page([small])
    small["rig"] = {**small["rig"], "target": "nimbus/target"}
    assert note in page([small])


def test_a_question_is_only_about_claims_that_exist():
    for name, station in STATIONS.items():
        assert station.instinct and station.question and station.try_ and station.why
        assert station.answers
        assert all(CLAIMS[id].station == name for id in station.answers)


@pytest.mark.parametrize("id", [id for station in STATIONS.values() for id in station.answers])
def test_words_follow_the_verdict(id):
    said = STATIONS[id.split(".")[0]].answers[id]
    claim = {
        "id": id,
        "statement": CLAIMS[id].statement,
        "observed": 0.25,
        "unit": "x",
        "required": ">= 7x",
        "reason": "why not",
    }
    told = {word: answer(said, {**claim, "verdict": word}) for word in Word}
    assert len(set(told.values())) == 4
    assert not any("{" in text for text in told.values())
    for word in (Word.INCONCLUSIVE, Word.NOT_JUDGED):
        assert told[word].startswith("Not ")
        assert "why not" in told[word]
        assert CLAIMS[id].statement in told[word]
    assert "0.25x" not in told[Word.NOT_JUDGED]


def test_a_run_that_judged_nothing_says_so_at_every_station(t4):
    nothing = _small(t4, "batching", "prefix")
    nothing["cells"] = []
    for claim in nothing["claims"]:
        claim |= {"verdict": "NOT JUDGED", "observed": None, "interval": None, "parts": [], "reason": "a broken fan"}
    said = Page(page([nothing])).said
    assert said.count("Nothing that this question is about could be judged here") == 2
    assert "a broken fan" in said
    assert "What was measured" not in said
    nothing["claims"] = []
    assert "Nothing was judged." in Page(page([nothing])).said


def test_a_station_without_words_has_its_figures_and_verdicts(t4):
    other = _small(t4, "batching")
    for entry in (*other["cells"], *other["claims"]):
        entry["station"] = "juggling"
    said = Page(page([other])).said
    assert "Juggling" in said
    assert "batch 16 gives many times the tokens per second of batch 1" in said


def test_the_badge_is_one_line(h200):
    assert badge(h200).startswith("NVIDIA H200: 25 hold, 1 refuted, 1 not judged. The card was idle for 91 %")
    assert "\n" not in badge(h200)


# Untrusted text -------------------------------------------------------------------------------------------------------

HOSTILE = (
    "</text></svg></style><script>alert(1)</script><img src=x onerror=alert(1)>{{7*7}}"
    "$\\frac{1}{0}$\x1b[31m\u202e&lt;--><!--]]>\"'"
)


def test_no_text_of_a_run_becomes_markup(h200):
    run = _small(h200, "batching", "speculation")
    tags = set(Page(page([run])).tags)

    def spoilt(value, key=""):
        if isinstance(value, dict):
            return {k: spoilt(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [spoilt(v, key) for v in value]
        kept = (
            "id",
            "station",
            "phase",
            "verdict",
            "engine",
            "device",
            "precision",
            "unit",
            "started_at",
            "suite_version",
        )
        return f"{value}{HOSTILE}" if isinstance(value, str) and key not in kept else value

    hostile = spoilt(json.loads(json.dumps(run)))
    for cell in hostile["cells"]:
        cell["figures"][HOSTILE], cell["bytes"][HOSTILE], cell["unavailable"][HOSTILE] = 1.0, 2.0, HOSTILE
    for claim in hostile["claims"]:
        claim["unit"] = HOSTILE
        for part in claim["parts"]:
            part["raw"] = {f"{name}{HOSTILE}": samples for name, samples in part["raw"].items()}
    hostile["claims"].append({**hostile["claims"][0], "id": HOSTILE, "station": HOSTILE, "engine": HOSTILE})
    hostile["cells"].append(
        {**hostile["cells"][0], "id": HOSTILE, "station": HOSTILE, "engine": HOSTILE, "precision": HOSTILE}
    )
    text = page([hostile])
    made = Page(text)
    assert set(made.tags) <= tags
    assert "script" not in made.tags and "img" not in made.tags
    assert not [name for _, name, _ in made.attributes if name.startswith("on")]
    assert "{{7*7}}" in made.said
    assert "\x1b" not in text and "\u202e" not in text
    assert "alert(1)" in made.said  # shown, as text
    assert "<!--" not in text


@settings(max_examples=4)
@given(name=st.text(max_size=40), unit=st.text(max_size=8), figure=st.floats(allow_nan=False, width=64))
def test_odd_names_and_figures_still_give_a_page(name, unit, figure):
    run = _small(article(), "speculation")
    run["machine"]["name"] = name
    for cell in run["cells"]:
        cell["figures"] = dict.fromkeys(cell["figures"], figure)
    for claim in run["claims"]:
        claim |= {"unit": unit, "observed": figure, "interval": [figure, figure]}
    Page(page([run]))


# Values drawn from a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("required", "unit", "limits"),
    [
        (">= 3x", "x", (3.0, None)),
        ("<= 15%", "%", (None, 0.15)),
        ("> 0.5x to 0.65x", "x", (0.5, 0.65)),
        ("0.95x to 1.05x", "x", (0.95, 1.05)),
        ("= 1x", "x", (1.0, 1.0)),
        ("< 5%", "%", (None, 0.05)),
        ("> 0% and < 100%", "%", (0.0, 1.0)),
        ("> 0.0001 nats", "nats", (0.0001, None)),
        (">= 1,000 tok/s", "tok/s", (1000.0, None)),
        ("as the author pleases", "x", (None, None)),
    ],
)
def test_limits_are_read_off_the_condition(required, unit, limits):
    assert limits_of(required, unit) == limits


def test_every_claim_of_the_table_has_limits_that_can_be_drawn():
    for claim in CLAIMS.values():
        for bound in claim.bounds:
            low, high = limits_of(bound.required, bound.unit)
            wanted = (bound.at_least, bound.above), (bound.at_most, bound.below)
            for limit, known in zip((low, high), wanted, strict=True):
                expected = next((value for value in known if value is not None), None)
                assert limit == (None if expected is None else pytest.approx(expected, rel=1e-3)), claim.id


def test_samples_are_shown_only_where_their_middle_is_the_observed_figure(h200):
    claim = next(c for c in h200["claims"] if c["id"] == "batching.throughput")
    (strip,) = strips(claim)
    assert len(strip.samples) == 10
    assert strip.middle == pytest.approx(15.9, abs=0.1)
    lying = copy.deepcopy(claim)
    lying["parts"][0]["observed"] = 12.0
    assert strips(lying) == []
    endless = copy.deepcopy(claim)
    sides = list(endless["parts"][0]["raw"].values())
    most = max(range(10), key=lambda n: sides[0][n] / sides[1][n])  # so that the middle stays
    sides[0][most], sides[1][most] = 1e299, 1e-299
    assert strips(endless) == [], "a round without a finite ratio has no place on an axis"
    counted = next(c for c in h200["claims"] if c["id"] == "quant.int8_memory")
    assert strips(counted) == []


def test_a_cached_prefix_pays_from_where_the_curves_cross():
    cached = [Point(x, 0.03) for x in (512, 1024, 2048, 4096)]
    full = [Point(x, y) for x, y in ((512, 0.02), (1024, 0.015), (2048, 0.06), (4096, 0.12))]
    at = crossing(full, cached)
    assert at == pytest.approx(2**10.5)
    assert crossing(cached, full) is None
    assert crossing([Point(512, 1.0), Point(1024, 2.0)], cached) is None


def test_a_slope_is_the_exponent_of_the_last_doubling():
    assert slope([Point(x, 3e-9 * x**2) for x in (512, 1024, 2048)]) == pytest.approx(2)
    assert slope([Point(512, 1.0)]) is None
    assert slope([Point(512, 1e290), Point(1024, 1e-290)]) == pytest.approx(-580 * math.log2(10)), "whose quotient is 0"
    assert slope([Point(512, 0.0), Point(1024, 1.0)]) is None


@given(alpha=st.floats(0.01, 0.99), gamma=st.integers(1, 10), c=st.floats(0.01, 2))
def test_the_drawn_line_is_the_theorem_in_counted_terms(alpha, gamma, c):
    """arXiv:2211.17192, theorem 3.8: the tokens a check over its cost."""
    tokens = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    accepted_share = (tokens - 1) / gamma
    predicted = Speculated(1.0, None, None, accepted_share, gamma, c).predicted(accepted_share)
    assert predicted is not None and math.isclose(predicted, tokens / (gamma * c + 1))


def test_the_prefix_curve_the_floors_and_the_modules_are_drawn_where_a_run_has_them(h200):
    run = _small(h200, "batching", "prefix", "quant")
    row = next(cell for cell in run["cells"] if cell["id"] == "prefix.0.full")
    for length, full_s, cached_s in ((256, 0.02, 0.03), (4096, 0.032, 0.03), (16384, 0.149, 0.031)):
        asked = {"prompt_len": length, "batch_size": 1}
        point = {"phase": "curve", "workload": asked, "figures": {"full_s": full_s, "cached_s": cached_s}}
        run["cells"].append({**row, "id": f"prefix.curve.{length}", **point})
    for batch_size, rate in ((1, 50.0), (64, 2900.0), (1024, 9000.0)):
        point = {"phase": "curve", "workload": {"batch_size": batch_size}, "figures": {"output_tokens_per_s": rate}}
        run["cells"].append({**row, "id": f"batching.curve.{batch_size}", "station": "batching", **point})
    for id, figures in (
        ("prefix.curve", {"caching_wins_2x_from_tokens": 8192.0}),
        ("batching.curve", {"no_longer_cheap_at_users": 512.0}),
    ):
        station = id.partition(".")[0]
        run["cells"].append({**row, "id": id, "station": station, "phase": "turning_point", "figures": figures})
    for cell in run["cells"]:
        if cell["id"] == "batching.1.decode":
            cell["figures"] = {"wall_share_of_floor": 0.025}
    quant = next(cell for cell in run["cells"] if cell["id"] == "quant.nf4")
    kinds = {"nf4": 7e8, "Embedding": 4.7e8}
    run["cells"].append({**quant, "id": "quant.modules.nf4", "phase": "modules", "bytes": kinds, "figures": {}})
    words = {
        plot.name: plot.words for name in ("batching", "prefix", "quant") for plot in plots_of(name, series_of([run]))
    }
    assert "a cached prefix is the faster one from" in words["prefix-curve"]
    assert "half the wait is gone from 8,192 tokens on" in words["prefix-curve"]
    assert "from 512 chats on, one more brings less than half" in words["batching-curve"]
    assert "NVIDIA H200, decode, batch 1: 2.5%" in words["floors"]
    assert "NVIDIA H200, nf4: nf4 0.652 GiB, Embedding 0.438 GiB" in words["quant-memory"]
    assert "floors" not in {plot.name for plot in plots_of("batching", series_of([h200]))}
