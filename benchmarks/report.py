"""The card: what a run found, as text for a terminal and as Markdown. Reads the run as run.json keeps it; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def card_lines(run: Mapping[str, Any], width: int = 100) -> list[str]:
    return [f"{c['verdict']:<13}{c['id']:<32}{c['observed']} {c['interval']} {c['required']}"[:width] for c in run["claims"]]
