"""`mlxhost ctl log-level`: Change how much processes log, while they run.

TARGET is a model, one replica (`demo/0`), `frontend`, or `supervisor`; without it all processes, also those
that start later. `log_level` in mlxhost.toml is what they start with.

  mlxhost ctl log-level debug
  mlxhost ctl log-level frontend warning

On the wire: CTL {op: configure_logging, target: TARGET, args: {level}} -> REPLY {replicas: {slot: answer}}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request, answers_text

LEVELS = ("debug", "info", "warning", "error")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", nargs="?", default="", help="whose (default: everyone's)")
    parser.add_argument("level", metavar="LEVEL", choices=LEVELS, help=", ".join(LEVELS))


def request(args: argparse.Namespace) -> Request:
    return Request("configure_logging", _text, args.target, {"level": args.level})


def _text(result: dict[str, Any]) -> str:
    return answers_text(result, lambda r: f"logs from {r['level']} on (before: {r['was']})")
