"""`mlxhost ctl drain`: Send a model nothing new and wait until what runs has finished.

Requests for it are answered 503 until `ctl resume`. Exit 4 when `--timeout` passes first; it then
goes on draining.

  mlxhost ctl drain demo --timeout 60

On the wire: CTL {op: drain, target: MODEL, args: {wait}} -> NEWS* -> REPLY {replicas: {slot: state}}.
"""

import argparse

from mlxhost.supervisor.commands.request import Request, waiting_arguments, waiting_request

arguments = waiting_arguments


def request(args: argparse.Namespace) -> Request:
    return waiting_request("drain", args)
