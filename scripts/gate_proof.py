"""Proof of the gate on this machine: a baseline, planted regressions that must be red, equal runs that must not be.

    python scripts/gate_proof.py --equal 20                # everything
    python scripts/gate_proof.py --only prefill --only equal.3
    python scripts/gate_proof.py --table --into docs/gate.md    # only make the table of what was done so far

Every run is a real one of the suite in a process of its own. Results are kept in FOLDER/results.json as they come, so
that an interrupted proof goes on where it stopped; the table goes to FOLDER/table.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from plants import PLANTS  # noqa: E402

from benchmarks.ledger import write_json  # noqa: E402

LONGEST_S = 1800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--equal", type=int, default=20, metavar="N", help="equal runs (default: %(default)s)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a plant, or equal.N; may be repeated"
    )
    parser.add_argument("--folder", type=Path, default=Path("reports/gate-proof"), help="default: %(default)s")
    parser.add_argument("--tests", default="myths", metavar="PATHS", help="what is run, such as myths/test_batching.py")
    parser.add_argument("--arguments", default="", metavar="TEXT", help="for pytest, such as '-m gpu --weights random'")
    parser.add_argument("--table", action="store_true", help="print the table and run nothing")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the table between the page's proof marks")
    chosen = parser.parse_args()
    kept = chosen.folder / "results.json"
    results = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    words = [*shlex.split(chosen.tests), *shlex.split(chosen.arguments)]
    if not chosen.table:
        _prove(chosen, words, results, kept)
    table = _table(results)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    (chosen.folder / "table.md").write_text(table, encoding="utf-8")
    print(table)
    if chosen.into is not None:
        before, _, rest = chosen.into.read_text(encoding="utf-8").partition("<!-- proof -->\n")
        _, end, after = rest.partition("<!-- end of proof -->")
        if not end:
            sys.exit(f"{chosen.into} has no proof marks")
        chosen.into.write_text(f"{before}<!-- proof -->\n{table}{end}{after}", encoding="utf-8")
    return 0 if all(r["right"] for r in results.values()) else 1


def _prove(chosen: argparse.Namespace, words: list[str], results: dict[str, dict], kept: Path) -> None:
    baseline = chosen.folder / "baseline.json"
    if not baseline.exists():
        code, took, run = _run(words, "auto", chosen.folder / "baseline")
        print(f"baseline run: exit code {code}, {took:.0f} s", flush=True)
        accept = [sys.executable, "-m", "benchmarks", "accept", str(run), "--to", str(baseline)]
        subprocess.run(accept, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for name in [*_plants(), *(f"equal.{n}" for n in range(1, chosen.equal + 1))]:
        if name in results or (chosen.only and name not in chosen.only):
            continue
        planted = ["-p", "plants", "--plant", name] if name in PLANTS else []
        code, took, run = _run([*words, *planted], str(baseline), chosen.folder / name)
        results[name] = _result(name, code, took, run)
        write_json(kept, results)
        print(f"{name}: {'as it must be' if results[name]['right'] else 'WRONG'}, {took:.0f} s", flush=True)


def _plants() -> list[str]:
    import torch

    return [name for name, plant in PLANTS.items() if torch.cuda.is_available() or not plant.cuda]


def _run(words: list[str], baseline: str, folder: Path) -> tuple[int, float, Path]:
    """Exit code, seconds and run.json of one run of the suite; what it printed stands beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        *words,
        "--baseline",
        baseline,
        "--report",
        str(folder),
        "-p",
        "no:cacheprovider",
    ]
    found_in = os.pathsep.join(filter(None, [str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]))
    start = time.monotonic()
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": found_in},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=LONGEST_S,
        )
    return done.returncode, time.monotonic() - start, folder / "run.json"


def _result(name: str, code: int, took: float, run: Path) -> dict:
    """What the gate said of a run, and whether that is what it must say: of a plant red, by the right name."""
    said = json.loads(run.read_text(encoding="utf-8")).get("gate") or {"word": "none", "findings": []}
    red = [f for f in said["findings"] if f["outcome"] in ("worse", "changed", "missing", "new")]
    undecided = [f for f in said["findings"] if f["outcome"] == "INCONCLUSIVE"]
    if name in PLANTS:
        named = [f for f in red if f["id"] in PLANTS[name].caught_by]
        right = code == 1 and bool(named)
    else:
        named = red
        right = code == 0 and said["word"] == "GREEN"
    return {
        "code": code,
        "word": said["word"],
        "seconds": round(took),
        "right": right,
        "red": len(red),
        "undecided": len(undecided),
        "named": [f"{f['id']} {f['metric']}: {f['said']}" for f in (named or red)[:3]],
    }


def _table(results: dict[str, dict]) -> str:
    rows = [
        "| run | exit | gate | red | INCONCLUSIVE | s | as it must be | named |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = [*PLANTS, *results]  # plants first, equal runs as they came
    for name, r in sorted(results.items(), key=lambda result: order.index(result[0])):
        what = PLANTS[name].what if name in PLANTS else f"equal run {name.partition('.')[2]}"
        named = r["named"][0].split(" (")[0].replace("|", "\\|")[:120] if r["named"] else ""
        right = "yes" if r["right"] else "**no**"
        rows.append(
            f"| {what} | {r['code']} | {r['word']} | {r['red']} | {r['undecided']} | {r['seconds']} | {right} | {named} |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
