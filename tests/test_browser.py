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
from benchmarks.run_file import read_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CARDS = Path(__file__).parents[1] / "benchmarks" / "cards"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
]
POLICY = r'<meta http-equiv="Content-Security-Policy"[^>]*>'

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
axe.run({resultTypes: ['violations'], ...RULES}).then(found => {
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
def runs():
    return [read_run(CARDS / f"{name}.json") for name in ("nvidia-h200", "tesla-t4")]


@pytest.fixture(scope="module")
def made(runs):
    return page(runs)


def _looked(made, rules, folder, *words):
    axe = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8").replace("</script", "<\\/script")
    look = f"<script>{axe}</script><script>const RULES = {json.dumps(rules)};{LOOK}</script></body>"
    path = folder / "looked.html"
    path.write_text(re.sub(POLICY, "", made).replace("</body>", look), encoding="utf-8")
    dumped = _chromium("--virtual-time-budget=30000", "--dump-dom", *words, path.as_uri())
    said = re.search(r'<pre id="look">(.*?)</pre>', dumped, re.DOTALL)
    assert said, dumped[-500:]
    return json.loads(html.unescape(said.group(1)))


@pytest.mark.parametrize(
    ("width", "words", "rules", "paper"),
    [
        (500, (), {}, "rgb(255, 255, 255)"),
        # the same elements in other colours: of axe's rules only one can say anything else
        (1280, ("--blink-settings=preferredColorScheme=0",), {"runOnly": ["color-contrast"]}, "rgb(21, 24, 29)"),
    ],
    ids=["narrow and light", "wide and dark"],
)
def test_the_page_fits_is_reached_by_keyboard_and_accessible(width, words, rules, paper, made, tmp_path):
    seen = _looked(made, rules, tmp_path, f"--window-size={width},900", *words)
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


def test_the_page_fits_a_phone_and_its_policy_stops_a_script_that_slipped_through(made, tmp_path):
    """Headless Chromium has no window narrower than 500: a frame of 400 stands in for the phone. The same script is put
    into two frames, of which only the one without the policy may hear it run."""
    heard = """
    <script>const heard = []; addEventListener('message', e => { heard.push(e.data);
      document.getElementById('look').textContent = JSON.stringify(heard); });</script><pre id="look">[]</pre>
    """
    tell = "<script>parent.postMessage([NAME, innerWidth, document.documentElement.scrollWidth], '*')</script></body>"
    frames = [
        f'<iframe width="400" height="800" style="border:0" srcdoc="{html.escape(inner)}"></iframe>'
        for inner in (
            made.replace("</body>", tell.replace("NAME", "'with policy'")),
            re.sub(POLICY, "", made).replace("</body>", tell.replace("NAME", "'without'")),
        )
    ]
    path = tmp_path / "phone.html"
    path.write_text(f"<body>{heard}{''.join(frames)}</body>", encoding="utf-8")
    dumped = _chromium("--virtual-time-budget=10000", "--dump-dom", path.as_uri())
    ((name, width, scroll_width),) = json.loads(re.search(r'<pre id="look">(.*?)</pre>', dumped).group(1))
    assert (name, width) == ("without", 400)
    assert scroll_width <= 400


def test_the_page_prints_with_its_answers_open(runs, tmp_path):
    batching = {key: [entry for entry in runs[0][key] if entry["station"] == "batching"] for key in ("cells", "claims")}
    made = page([{**runs[0], **batching}])
    sizes = []
    for name, printed in {"open": made, "closed": re.sub(r"details::details-content \{[^}]*\}", "", made)}.items():
        path, pdf = tmp_path / f"{name}.html", tmp_path / f"{name}.pdf"
        path.write_text(printed, encoding="utf-8")
        _chromium("--no-pdf-header-footer", f"--print-to-pdf={pdf}", path.as_uri())
        assert pdf.read_bytes().startswith(b"%PDF")
        sizes.append(pdf.stat().st_size)
    assert sizes[0] > sizes[1]
