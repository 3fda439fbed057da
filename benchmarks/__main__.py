"""python -m benchmarks COMMAND: what the suite does outside of pytest."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import calibration, compare, diagnose
from benchmarks.cells_csv import cells_csv
from benchmarks.gate import accept
from benchmarks.report import card_lines, card_markdown
from benchmarks.run_file import RunFileError, read_run
from benchmarks.tables import plain


@dataclass(frozen=True)
class Command:
    """A subcommand: what `--help` says, its arguments, and what it does. `run` gives back the exit code."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN.JSON", help="a run of this suite, such as reports/run.json"
    )
    parser.add_argument(
        "--page",
        type=Path,
        default=Path("reports/index.html"),
        metavar="FILE",
        help="where the page of these runs goes (default: %(default)s)",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--card", action="store_true", help="print the cards and write no page")
    only.add_argument("--markdown", action="store_true", help="print GitHub-flavoured Markdown and write no page")
    only.add_argument("--csv", action="store_true", help="print all figures, one a line, and write no page")


def _report(arguments: argparse.Namespace) -> int:
    runs = [read_run(path) for path in arguments.runs]
    if arguments.csv:
        sys.stdout.write(cells_csv(runs))
        return 0
    if arguments.markdown:
        sys.stdout.write("\n".join(map(card_markdown, runs)))
        return 0
    if not arguments.card:
        from benchmarks.page import write_page  # here, since the drawing library takes a second to import

        try:
            made = write_page(runs, arguments.page)
        except OSError as error:
            raise RunFileError(f"{arguments.page} can't be written: {error.strerror or error}") from None
        print(f"page: {plain(made, 400)}", file=sys.stderr)
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    sys.stdout.write("\n\n".join("\n".join(card_lines(run, width)) for run in runs) + "\n")
    return 0


COMMANDS = {
    "accept": Command("make a run its machine's baseline, and say what that changes", accept.add_arguments, accept.run),
    "calibrate": Command("measure this machine's noise floors", calibration.add_arguments, calibration.run),
    "compare": Command("put runs or cards side by side", compare.add_arguments, compare.run),
    "diagnose": Command("what to try for a run before new hardware", diagnose.add_arguments, diagnose.run),
    "report": Command("the page of one or several runs, and their cards", _report_arguments, _report),
}


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command. A file that can't be used is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    chosen = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.arguments(chosen.add_parser(name, help=command.help, description=command.help))
    arguments = parser.parse_args(words)
    try:
        code = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()  # here, so that a reader who left is noticed here
        return code
    except RunFileError as error:
        print(f"{parser.prog} {arguments.command}: {plain(error, 400)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has left (`| head`): nothing is wrong, and the interpreter must not flush into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 still gets its card
    sys.exit(main())
