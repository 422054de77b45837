"""`mlxhost ctl reload-weights`: Read a model's weights again, from its own files or from PATH.

The replacement must have the same architecture and shapes. It is read and tried beside the weights that
serve, which stay when anything is wrong with it. What runs is finished first, or ended with `--abort`.
Processes that start later load PATH, too.

  mlxhost ctl reload-weights demo ./checkpoint-2000

On the wire: CTL {op: reload_weights, target: MODEL, args: {path, mode}} -> NEWS* -> REPLY {replicas: {slot:
answer}}.
"""

import argparse
import os
from typing import Any

from mlxhost.supervisor.commands.request import Request, answers_text, model_argument, timeout_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument("path", metavar="PATH", nargs="?", default="", help="model directory or GGUF file")
    parser.add_argument("--abort", action="store_true", help="end what runs instead of waiting for it")
    timeout_argument(parser)


def request(args: argparse.Namespace) -> Request:
    path = os.path.abspath(os.path.expanduser(args.path)) if args.path else ""
    wanted = {"path": path, "mode": "abort" if args.abort else "wait"}
    return Request("reload_weights", _text, args.model, wanted, args.timeout)


def _text(result: dict[str, Any]) -> str:
    return answers_text(result, lambda r: f"serves {r['path']} after {r['seconds']:.1f} s")
