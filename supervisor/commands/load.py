"""`mlxhost ctl load`: Load a model that is absent, was unloaded or has failed, and wait until it serves.

Other models make room for it by the rules that a request would meet: idle ones are unloaded, pinned and busy
ones are not. Earlier failures are forgotten: a model that died too often is tried again. Exit 4 when it fails
or cannot fit, with the numbers.

  mlxhost ctl load demo

On the wire: CTL {op: load, target: MODEL, args: {wait}} -> NEWS* -> REPLY {replicas: {slot: state}}.
"""

import argparse

from mlxhost.supervisor.commands.request import Request, waiting_arguments, waiting_request

arguments = waiting_arguments


def request(args: argparse.Namespace) -> Request:
    return waiting_request("load", args)
