"""`mlxhost ctl wake`: Wake a sleeping model; its weights are read again.

  mlxhost ctl wake demo

On the wire: CTL {op: wake, target: MODEL} -> REPLY {replicas: {slot: answer}}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request, answers_text, model_argument, timeout_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    timeout_argument(parser)


def request(args: argparse.Namespace) -> Request:
    return Request("wake", _text, args.model, {}, args.timeout)


def _text(result: dict[str, Any]) -> str:
    from mlxhost.supervisor.console import size

    return answers_text(result, lambda r: f"awake after {r['seconds']:.1f} s: {size(r['resident_after'])}")
