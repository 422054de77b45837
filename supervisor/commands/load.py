"""`mlxhost ctl load`: Load a model that was unloaded or has failed, and wait until it serves.

Earlier failures are forgotten: a model that died too often is tried again. Exit 4 when it fails.

  mlxhost ctl load demo

On the wire: CTL {op: load, target: MODEL, args: {wait}} -> NEWS* -> REPLY {replicas: {slot: state}}.
"""

import argparse

from mlxhost.supervisor.commands.request import Request, waiting_arguments, waiting_request

arguments = waiting_arguments


def request(args: argparse.Namespace) -> Request:
    return waiting_request("load", args)
