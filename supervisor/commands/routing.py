"""`mlxhost ctl routing`: Show or change how the replicas of a model are chosen for its requests.

Without a policy it shows the present one of each model; with a policy and no model it changes all of
them. What runs already stays where it is.

  mlxhost ctl routing
  mlxhost ctl routing demo prefix-affinity
  mlxhost ctl routing round-robin

On the wire: CTL {op: routing, target: MODEL or empty, args: {policy}} -> REPLY {routing: {model: policy}}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request
from mlxhost.wire.policies import ROUTINGS


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="", help="which model (default: all models)"
    )
    parser.add_argument(
        "policy", metavar="POLICY", nargs="?", default="", help=f"one of {', '.join(ROUTINGS)}"
    )


def request(args: argparse.Namespace) -> Request:
    model, policy = args.model, args.policy
    if not policy and model in ROUTINGS:
        model, policy = "", model
    return Request("routing", _text, model, {"policy": policy} if policy else {})


def _text(result: dict[str, Any]) -> str:
    return "\n".join(f"{model} {policy}" for model, policy in result["routing"].items())
