"""The page in a real browser: headless Chromium, where the machine has one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from benchmarks.page import page
from benchmarks.report import read_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CARDS = Path(__file__).parents[1] / "benchmarks" / "cards"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")

LOOK = """
const text = [...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect()).filter(r => r.width);
const beyond = [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, pre, .unseen, .skip, svg'))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 120));
const first = document.querySelector('details');
const hidden = first.querySelector('.answer').checkVisibility();
first.querySelector('summary').click();
const keyed = [...document.querySelectorAll('summary, a[href], [tabindex]')].filter(e => e.tabIndex < 0).length;
const look = {beyond, scrolls: document.documentElement.scrollWidth > innerWidth, hidden,
  opened: first.querySelector('.answer').checkVisibility(), unreachable: keyed,
  paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
  smallest: Math.min(...text.map(r => r.height)), plots: document.querySelectorAll('figure svg').length,
  coloured: getComputedStyle(document.querySelector('figure svg path[style*="--c0"]')).stroke};
axe.run({resultTypes: ['violations']}).then(found => {
  look.violations = found.violations.map(v => [v.id, v.impact, v.nodes.map(n => n.html.slice(0, 120)).slice(0, 3)]);
  const pre = document.createElement('pre'); pre.id = 'look'; pre.textContent = JSON.stringify(look);
  document.body.replaceChildren(pre);
});
"""
"""Looks at the page and leaves what it saw as the only thing in it."""


def _chromium(*words):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


@pytest.fixture(scope="module")
def made():
    return page([read_run(CARDS / f"{name}.json") for name in ("nvidia-h200", "tesla-t4")])


def _looked(made, folder, *words):
    axe = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8").replace("</script", "<\\/script")
    open_to_scripts = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", made)
    path = folder / "looked.html"
    path.write_text(
        open_to_scripts.replace("</body>", f"<script>{axe}</script><script>{LOOK}</script></body>"), encoding="utf-8"
    )
    dumped = _chromium("--virtual-time-budget=30000", "--dump-dom", *words, path.as_uri())
    said = re.search(r'<pre id="look">(.*?)</pre>', dumped, re.DOTALL)
    assert said, dumped[-500:]
    return json.loads(html.unescape(said.group(1)))


@pytest.mark.parametrize(
    ("width", "words", "paper"),
    [(500, (), "rgb(255, 255, 255)"), (1280, ("--blink-settings=preferredColorScheme=0",), "rgb(21, 24, 29)")],
    ids=["narrow and light", "wide and dark"],
)
def test_the_page_fits_is_reached_by_keyboard_and_accessible(width, words, paper, made, tmp_path):
    seen = _looked(made, tmp_path, f"--window-size={width},900", *words)
    assert seen["violations"] == []
    assert seen["beyond"] == []
    assert not seen["scrolls"]
    assert (seen["hidden"], seen["opened"]) == (False, True)
    assert seen["unreachable"] == 0
    assert seen["paper"] == paper
    assert seen["ink"] != paper
    assert seen["plots"] >= 12
    assert seen["smallest"] >= 6
    assert seen["coloured"].startswith("rgb")


def test_the_page_fits_a_phone(made, tmp_path):
    """Headless Chromium has no window narrower than 500: a frame of 400 stands in for the phone."""
    probe = """
    <script>addEventListener('message', e => { const pre = document.createElement('pre'); pre.id = 'look';
      pre.textContent = JSON.stringify(e.data); document.body.append(pre); });</script>
    """
    inner = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", made)
    tell = "<script>parent.postMessage([innerWidth, document.documentElement.scrollWidth], '*')</script>"
    frame = f'<iframe width="400" height="800" style="border:0" srcdoc="{html.escape(inner + tell)}"></iframe>'
    outer = f"<body>{probe}{frame}</body>"
    path = tmp_path / "phone.html"
    path.write_text(outer, encoding="utf-8")
    dumped = _chromium("--virtual-time-budget=10000", "--dump-dom", path.as_uri())
    width, scroll_width = json.loads(re.search(r'<pre id="look">(.*?)</pre>', dumped).group(1))
    assert width == 400
    assert scroll_width <= 400


def test_the_policy_stops_a_script_that_slipped_through(made, tmp_path):
    path = tmp_path / "slipped.html"
    path.write_text(made.replace("</body>", "<script>document.title = 'owned'</script></body>"), encoding="utf-8")
    assert "<title>owned" not in _chromium("--dump-dom", path.as_uri())


def test_the_page_prints_with_its_answers_open(made, tmp_path):
    path, printed = tmp_path / "index.html", tmp_path / "page.pdf"
    path.write_text(made, encoding="utf-8")
    _chromium("--no-pdf-header-footer", f"--print-to-pdf={printed}", path.as_uri())
    assert printed.read_bytes().startswith(b"%PDF")
    closed = tmp_path / "closed.html"
    closed.write_text(re.sub(r"details::details-content \{[^}]*\}", "", made), encoding="utf-8")
    _chromium("--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'closed.pdf'}", closed.as_uri())
    assert printed.stat().st_size > (tmp_path / "closed.pdf").stat().st_size
