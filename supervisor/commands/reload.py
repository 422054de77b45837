"""`mlxhost ctl reload`: Read the configuration again and apply what differs; other models are not touched.

New models are loaded, models that are gone end after what runs, changed ones are loaded anew; aliases,
routing, sampling defaults, API keys and options that are live change at once. What needs a restart of the
fleet is named. A file with a mistake changes nothing (exit 4). Flags and variables that the fleet was
started with still hold. SIGHUP does the same.

  mlxhost config check
  mlxhost ctl reload

On the wire: CTL {op: reload, args: {wait}} -> NEWS* -> REPLY {changed, added, removed, renewed, live,
applied, waiting, keys, replicas}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request, timeout_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    timeout_argument(parser)
    parser.add_argument("--no-wait", action="store_true", help="return once it has begun")


def request(args: argparse.Namespace) -> Request:
    return Request("reload", _text, args={"wait": not args.no_wait}, deadline_s=args.timeout)


def _text(result: dict[str, Any]) -> str:
    if not result.get("changed", True):
        return "nothing differs"
    lines = [f"{name}: new" for name in result.get("added", ())]
    lines += [f"{name}: gone" for name in result.get("removed", ())]
    lines += [f"{name}: loaded anew ({', '.join(f)})" for name, f in result.get("renewed", {}).items()]
    lines += [f"{name}: changed ({', '.join(fields)})" for name, fields in result.get("live", {}).items()]
    lines += [f"{key} = {after} (was {before})" for key, (before, after) in result.get("applied", {}).items()]
    lines += [f"key {name}: changed" for name in result.get("keys", ())]
    lines += [
        f"{key} = {after} needs a restart of the fleet (now {before})"
        for key, (before, after) in result.get("waiting", {}).items()
    ]
    return "\n".join(lines)
