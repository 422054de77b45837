"""`mlxhost ctl explain`: Say why a model was loaded, unloaded, or refused, with the numbers of that moment.

Shows where every model stands and the last decisions; with a model, those about it or taken for it. With
--log the decisions of a log file (by default $MLXHOST_HOME/decisions.jsonl of every fleet) are shown instead,
and made again by the planner of this version: it says where it would decide differently now (exit 4). That
needs no running fleet.

  mlxhost ctl explain
  mlxhost ctl explain demo --last 3
  mlxhost ctl explain --log ~/.mlxhost/decisions.jsonl

On the wire: CTL {op: explain, target: MODEL or empty} -> REPLY {now, decisions: [...], log}.
"""

import argparse
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

from mlxhost.supervisor.commands.request import Request


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="which model (default: all)")
    parser.add_argument(
        "--last", type=_count, default=20, metavar="N", help="how many decisions (default: %(default)s)"
    )
    parser.add_argument("--log", default="", metavar="FILE", help="replay a log instead")


def request(args: argparse.Namespace) -> Request:
    return Request("explain", lambda result: _text(result, args.model, args.last), args.model)


def without_fleet(args: argparse.Namespace) -> int | None:
    """The exit code when no fleet is to be asked: for a log. Raises UserError."""
    if not args.log:
        return None
    import msgspec

    from mlxhost.supervisor.console import out, printable
    from mlxhost.supervisor.errors import EXIT_FAILED, EXIT_OK
    from mlxhost.supervisor.residency.decisions import read_log
    from mlxhost.supervisor.residency.explain import replay, replay_lines

    decisions = deque(read_log(Path(os.path.expanduser(args.log))), maxlen=args.last if args.last else None)
    differ = any(replay(d) for d in decisions if not args.model or d.concerns(args.model))
    if args.json:
        lines = [
            {"decision": msgspec.to_builtins(d), "differs": replay(d)}
            for d in decisions
            if not args.model or d.concerns(args.model)
        ]
        out(json.dumps(lines, indent=2))
    else:
        for line in replay_lines(decisions, args.model):
            out(printable(line))
    return EXIT_FAILED if differ else EXIT_OK


def _text(result: dict[str, Any], model: str, last: int) -> str:
    import msgspec

    from mlxhost.supervisor.residency.decisions import Decision
    from mlxhost.supervisor.residency.explain import decision_lines, now_lines

    decisions = msgspec.convert(result["decisions"], list[Decision])[-last:]
    told = [line for decision in decisions for line in decision_lines(decision, model)]
    return "\n".join([*now_lines(result["now"]), "", *(told or ["no decision yet"])])


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 100_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 100000")
    return int(text)
