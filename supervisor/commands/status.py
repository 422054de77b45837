"""`mlxhost ctl status`: Show every model and replica, and how loaded it is.

  mlxhost ctl status
  mlxhost ctl status --json

On the wire: CTL {op: status} -> REPLY {fleet, url, models: [...], frontends: [...]}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def request(args: argparse.Namespace) -> Request:
    return Request("status", _text)


def _text(result: dict[str, Any]) -> str:
    from mlxhost.supervisor.table import status_text

    return status_text(result)
