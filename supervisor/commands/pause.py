"""`mlxhost ctl pause`: Stop a model's workers from computing, without unloading it.

`wait` lets what runs finish, `abort` ends it, and `keep` freezes it where it is, to go on exactly there at
`ctl resume`. While a model is paused, new requests are answered 503 with Retry-After (or go to its other
replicas), and those that a worker has accepted wait in its queue. MODEL may also be one replica, `demo/0`.

  mlxhost ctl pause demo --mode keep
  mlxhost ctl resume demo

On the wire: CTL {op: pause, target: MODEL, args: {mode}} -> NEWS* -> REPLY {replicas: {slot: answer}}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request, answers_text, model_argument, timeout_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument("--mode", choices=("wait", "abort", "keep"), default="wait", help="for what runs")
    timeout_argument(parser)


def request(args: argparse.Namespace) -> Request:
    return Request("pause", _text, args.model, {"mode": args.mode}, args.timeout)


def _text(result: dict[str, Any]) -> str:
    return answers_text(result, _line)


def _line(answer: dict[str, Any]) -> str:
    counts = [f"{answer[key]} {key}" for key in ("aborted", "frozen", "waiting") if answer.get(key)]
    return ", ".join([str(answer["mode"]), *counts])
