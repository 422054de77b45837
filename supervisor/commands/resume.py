"""`mlxhost ctl resume`: Send a drained model requests again.

  mlxhost ctl resume demo

On the wire: CTL {op: resume, target: MODEL} -> REPLY {replicas: {slot: state}}.
"""

import argparse

from mlxhost.supervisor.commands.request import Request, model_argument, states_text

arguments = model_argument


def request(args: argparse.Namespace) -> Request:
    return Request("resume", states_text, args.model)
