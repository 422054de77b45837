"""`mlxhost ctl pin`: Never evict a model once it is resident.

It may still be absent: `ctl load` loads it now, `--preload` at the start. A pinned model also outlives its
idle time to live. `pin = true` in its table of mlxhost.toml pins it at the start.

  mlxhost ctl pin demo

On the wire: CTL {op: pin, target: MODEL} -> REPLY {model, pinned}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request, model_argument

arguments = model_argument


def request(args: argparse.Namespace) -> Request:
    return Request("pin", _text, args.model)


def _text(result: dict[str, Any]) -> str:
    return f"{result['model']} {'pinned' if result['pinned'] else 'not pinned'}"
