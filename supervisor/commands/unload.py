"""`mlxhost ctl unload`: Drain a model, then end its processes and free their memory.

Requests for it are answered 503 until `ctl load`.

  mlxhost ctl unload demo

On the wire: CTL {op: unload, target: MODEL, args: {wait}} -> NEWS* -> REPLY {replicas: {slot: state}}.
"""

import argparse

from mlxhost.supervisor.commands.request import Request, waiting_arguments, waiting_request

arguments = waiting_arguments


def request(args: argparse.Namespace) -> Request:
    return waiting_request("unload", args)
