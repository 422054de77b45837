"""`mlxhost ctl unpin`: Let a pinned model make room for others again, by the rules.

  mlxhost ctl unpin demo

On the wire: CTL {op: unpin, target: MODEL} -> REPLY {model, pinned}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request, model_argument

arguments = model_argument


def request(args: argparse.Namespace) -> Request:
    return Request("unpin", _text, args.model)


def _text(result: dict[str, Any]) -> str:
    return f"{result['model']} {'pinned' if result['pinned'] else 'not pinned'}"
