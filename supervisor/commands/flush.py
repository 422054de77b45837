"""`mlxhost ctl flush`: Make what a model (or all models) has cached durable, and tell how much it was.

Writes the prefix cache to disk while the model goes on serving. Exit 4 when something could not be written.

  mlxhost ctl flush
  mlxhost ctl flush demo --timeout 60

On the wire: CTL {op: flush, target: MODEL or empty} -> REPLY {replicas: {slot: {code, message, result}}}. A
result is {durable, flushed, missing, pending_snapshots, pending_spills, dropped, failed, bytes, entries,
longest_durable_prefix_tokens, elapsed_s}: records written by this flush, not on disk, whole blocks of running
requests that are no records yet, records still to be written, lost since the start for want of room, refused
by the disk just now; bytes on disk and records in all.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request, seconds

HEADER = ("REPLICA", "DURABLE", "FLUSHED", "MISSING", "PENDING", "DROPPED", "FAILED", "ON DISK", "RECORDS")
LAST_HEADERS = ("LONGEST PREFIX", "TOOK")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="which model (default: all)")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for the disk (default: %(default).0f)",
    )


def request(args: argparse.Namespace) -> Request:
    return Request("flush", flushed_text, args.model, deadline_s=args.timeout)


def flushed_text(result: dict[str, Any]) -> str:
    """A row for each worker that answered with figures, a line for each that has none."""
    from mlxhost.supervisor.table import table

    answers = {
        slot: answer["result"]
        for slot, answer in result.get("replicas", {}).items()
        if answer.get("code", "ok") == "ok" or answer["result"]
    }
    rows = [_row(slot, figures) for slot, figures in answers.items() if "durable" in figures]
    lines = table([(*HEADER, *LAST_HEADERS), *rows]) if rows else []
    return "\n".join([*lines, *(f"{slot} flushed" for slot, f in answers.items() if "durable" not in f)])


def _row(slot: str, figures: dict[str, Any]) -> tuple[str, ...]:
    from mlxhost.supervisor.console import duration, size

    counted = ("flushed", "missing", "pending_spills", "dropped", "failed")
    return (
        slot,
        "yes" if figures["durable"] else "no",
        *(str(figures[name]) for name in counted),
        size(figures["bytes"]),
        str(figures["entries"]),
        f"{figures['longest_durable_prefix_tokens']} tokens",
        duration(figures["elapsed_s"]),
    )
