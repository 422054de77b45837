"""`mlxhost ctl flush`: Make what a model (or all models) has cached durable, and tell how much it was.

Prints what each worker says it flushed. Exit 4 when one of them could not.

  mlxhost ctl flush
  mlxhost ctl flush demo

On the wire: CTL {op: flush, target: MODEL or empty} -> REPLY {replicas: {slot: {code, message, result}}}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="which model (default: all)")


def request(args: argparse.Namespace) -> Request:
    return Request("flush", flushed_text, args.model)


def flushed_text(result: dict[str, Any]) -> str:
    """`demo/0 flushed: tokens 512` for each worker that answered."""
    return "\n".join(
        f"{slot} flushed: {_figures(answer['result'])}"
        for slot, answer in result.get("replicas", {}).items()
        if answer["code"] == "ok"
    )


def _figures(result: dict[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in result.items()) or "nothing"
