"""`mlxhost pull NAME`: fetch an embedded model now, and print where it is."""

import argparse
import os
import sys
import time
from typing import Any

DESCRIPTION = """\
Fetch an embedded model into the cache ($MLXHOST_HOME, else ~/.mlxhost) and print its path.

  mlxhost pull demo
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "pull",
        help="fetch an embedded model",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="name of the model, for example: demo")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mlxhost.supervisor.console import out
    from mlxhost.supervisor.liveview import LiveBlock
    from mlxhost.supervisor.pull import fetch
    from mlxhost.supervisor.rows import progress_row

    # Progress goes to stderr: stdout is the path alone, for use in scripts.
    live = LiveBlock(sys.stderr) if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb" else None
    phase_now, since = "", 0.0

    def show(phase: str, done: int, total: int) -> None:
        nonlocal phase_now, since
        now = time.monotonic()
        changed = phase != phase_now
        if changed:
            phase_now, since = phase, now
        if live:
            live.draw([progress_row(args.name, phase, done, total, now - since)], now=changed)
        elif changed:
            sys.stderr.write(f"{args.name}: {phase}\n")

    try:
        path = fetch(args.name, show)
    finally:
        if live:
            live.clear()
    out(str(path))
    return 0
