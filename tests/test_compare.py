"""Runs side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from benchmarks.__main__ import main
from benchmarks.compare import compare, lines, markdown
from benchmarks.run_file import read_run
from tests.gated import changed, entry, some_run, written

CARDS = Path(__file__).parents[1] / "benchmarks" / "cards"
RUN = some_run()
FASTER = changed(
    RUN, lambda run: (run["machine"].update(name="NVIDIA B200"), entry(run, "batching.1").update(wall_s=[0.7]))
)


def test_figures_stand_side_by_side_with_their_ratio_to_the_first():
    shown = "\n".join(lines(compare({"a.json": RUN, "b.json": FASTER, "c.json": RUN}), 120))
    assert "batching.1" in shown
    assert "700 ms (0.5x)" in shown
    assert "2.79 GiB (1x)" in shown


def test_each_column_says_what_it_is_of():
    first, second = compare({"a.json": RUN, "b.json": FASTER}).columns
    assert first.startswith("NVIDIA H200: a.json, qwen2.5, trained weights, float16, eager engine, torch 2.11.0+cu130")
    assert second.startswith("NVIDIA B200: b.json")


def test_two_runs_of_one_card_are_told_apart():
    shown = compare({"monday.json": RUN, "friday.json": RUN})
    assert shown.tables[0].columns[-2:] == ("NVIDIA H200 (monday)", "NVIDIA H200 (friday)")


def test_only_verdicts_that_differ_are_listed():
    refuted = changed(FASTER, lambda run: entry(run, "prefix.one_word").update(verdict="REFUTED"))
    table = compare({"a.json": RUN, "b.json": refuted}).tables[0]
    assert table.rows == (("prefix.one_word", "HOLDS 1%", "REFUTED 1%"),)
    assert "verdicts that differ" not in "\n".join(lines(compare({"a.json": RUN, "b.json": FASTER}), 100))


def test_claims_and_cells_of_two_engines_are_two():
    shown = "\n".join(lines(compare({"a.json": RUN, "b.json": FASTER}), 120))
    assert "batching.1.decode (eager)" in shown
    assert "batching.1.decode (graph)" in shown


@pytest.mark.parametrize("width", [40, 60, 100])
def test_no_line_is_wider_than_the_terminal_or_holds_an_escape(width):
    evil = changed(
        FASTER, lambda run: (run["machine"].update(name="\x1b[2J<b>" * 9), run["cells"][0].update(id="\x1b]0;x"))
    )
    comparison = compare({"a\x1b.json": RUN, "b.json": evil})
    for line in lines(comparison, width):
        assert line.isprintable()
        assert len(line) <= width
    for table in comparison.tables:
        assert all(text.isprintable() for row in table.rows for text in row)
    assert "<b>" not in MarkdownIt("gfm-like", {"linkify": False}).render(markdown(comparison))


@pytest.mark.parametrize("columns", [60, 100, 120])
def test_the_cards_of_the_suite_fit_the_terminal_and_no_word_is_lost(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    files = [CARDS / f"{name}.json" for name in ("tesla-t4", "nvidia-h200", "nvidia-h200-x2")]
    assert main(["compare", *map(str, files)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    comparison = compare({str(path): read_run(path) for path in files})
    words = " ".join(shown.split())
    assert all(text in words for text in (*comparison.remarks, *comparison.columns))


def test_the_published_card_is_a_column_that_anyone_can_name(capsys):
    files = [str(CARDS / name) for name in ("tesla-t4.json", "nvidia-h200.json")]
    assert main(["compare", *files]) == 0
    shown = capsys.readouterr().out
    assert "REFUTED" in shown
    assert "Tesla T4" in shown
    assert main(["compare", "--markdown", *files]) == 0
    assert "| cell | figure | Tesla T4 | NVIDIA H200 |" in capsys.readouterr().out


def test_one_file_is_no_comparison_and_a_broken_one_is_a_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["compare", str(CARDS / "tesla-t4.json")])
    capsys.readouterr()
    assert main(["compare", str(CARDS / "tesla-t4.json"), str(written([], tmp_path / "x.json"))]) == 2
    assert capsys.readouterr().err.count("\n") == 1
