"""`mlxhost ctl abort`: End one running request of a model, or all of them.

Requests are named by their X-Request-Id, which every answer carries. Their clients get an error.

  mlxhost ctl abort demo req-1f2e
  mlxhost ctl abort demo --all

On the wire: CTL {op: abort, target: MODEL, args: {requests} or {all}} -> REPLY {replicas: {slot: answer}}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request, answers_text, model_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("requests", metavar="REQUEST", nargs="*", default=[], help="ids of requests")
    which.add_argument("--all", action="store_true", help="everything that runs or waits")


def request(args: argparse.Namespace) -> Request:
    wanted = {"all": True} if args.all else {"requests": args.requests}
    return Request("abort", _text, args.model, wanted)


def _text(result: dict[str, Any]) -> str:
    return answers_text(result, lambda r: f"aborted: {', '.join(r['aborted']) or 'nothing'}")
