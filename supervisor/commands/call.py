"""`mlxhost ctl call`: Call any control operation by its name, with arguments as a JSON object.

docs/operations.md lists them. TARGET is a model, one replica (`demo/0`), or `frontend`. An operation that
a process does not have is answered `unsupported`, with the reason, and exits 4.

  mlxhost ctl call demo get_weights_by_name '{"name": "model.norm.weight"}'

On the wire: CTL {op: OP, target: TARGET, args: JSON} -> NEWS* -> REPLY.
"""

import argparse
import json
from typing import Any

from mlxhost.supervisor.commands.request import Request, timeout_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="who is asked")
    parser.add_argument("op", metavar="OP", help="the operation")
    parser.add_argument("args", metavar="JSON", nargs="?", default={}, type=_object, help="its arguments")
    timeout_argument(parser)


def request(args: argparse.Namespace) -> Request:
    return Request(args.op, lambda result: json.dumps(result, indent=2), args.target, args.args, args.timeout)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
