"""`mlxhost ctl sleep`: Give a model's memory back, without ending its processes.

Level 2 frees the weights, caches and buffers; level 1 keeps the weights. Until `ctl wake`, requests for it
are answered 503 with Retry-After (or go to its other replicas). What runs is finished first, or ended with
`--abort`. MODEL may also be one replica, `demo/0`.

  mlxhost ctl sleep demo

On the wire: CTL {op: sleep, target: MODEL, args: {level, mode}} -> NEWS* -> REPLY {replicas: {slot: answer}}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request, answers_text, model_argument, timeout_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument("--level", type=int, choices=(1, 2), default=2, help="(default: %(default)s)")
    parser.add_argument("--abort", action="store_true", help="end what runs instead of waiting for it")
    timeout_argument(parser)


def request(args: argparse.Namespace) -> Request:
    wanted = {"level": args.level, "mode": "abort" if args.abort else "wait"}
    return Request("sleep", _text, args.model, wanted, args.timeout)


def _text(result: dict[str, Any]) -> str:
    from mlxhost.supervisor.console import size

    return answers_text(
        result,
        lambda r: f"asleep: {size(r['resident_before'])} before, {size(r['resident_after'])} after",
    )
