"""`mlxhost ctl state`: Show a worker's settings and figures, or change settings while it serves.

Settable: max_rows (requests computed together), max_queued (requests that may wait), max_gap_ms (the largest
gap wanted between two tokens of a stream while prompts are read). MODEL may also be one replica, `demo/0`.

  mlxhost ctl state demo
  mlxhost ctl state demo max_rows=4 max_gap_ms=100

On the wire: CTL {op: get_state or set_state, target: MODEL, args: the settings} -> REPLY {replicas: {slot:
answer}}.
"""

import argparse
import json
from typing import Any

from mlxhost.supervisor.commands.request import Request, answers_text, model_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", type=_setting, help="change these")


def request(args: argparse.Namespace) -> Request:
    op = "set_state" if args.settings else "get_state"
    return Request(op, _text, args.model, dict(args.settings))


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _text(result: dict[str, Any]) -> str:
    return answers_text(result, _block)


def _block(answer: dict[str, Any]) -> str:
    shown = {key: value for key, value in answer.items() if not isinstance(value, list)}
    return "\n".join(
        [str(shown.get("mode", "changed")), *(f"  {key} {json.dumps(value)}" for key, value in shown.items())]
    )
