"""`mlxhost ctl unload`: Drain a model, then end its processes and free their memory.

Requests for it are answered 503 until `ctl load`; with --until-needed the next request loads it again.

  mlxhost ctl unload demo
  mlxhost ctl unload demo --until-needed

On the wire: CTL {op: unload, target: MODEL, args: {wait, until_needed}} -> NEWS* -> REPLY {replicas: {slot:
state}}.
"""

import argparse
from dataclasses import replace

from mlxhost.supervisor.commands.request import Request, waiting_arguments, waiting_request


def arguments(parser: argparse.ArgumentParser) -> None:
    waiting_arguments(parser)
    parser.add_argument("--until-needed", action="store_true", help="the next request loads it again")


def request(args: argparse.Namespace) -> Request:
    asked = waiting_request("unload", args)
    return replace(asked, args={**asked.args, "until_needed": True}) if args.until_needed else asked
