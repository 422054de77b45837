"""`mlxhost ctl`: operations on a running fleet. Each has its own module beside this one."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from mlxhost.supervisor.commands import drain, flush, load, resume, status, unload
from mlxhost.supervisor.commands.request import Request

DESCRIPTION = """\
Operate on a fleet that runs on this machine under this user (found through $MLXHOST_HOME, else ~/.mlxhost).

  mlxhost ctl status
  mlxhost ctl drain demo --timeout 60
  mlxhost ctl status --fleet 8081 --json
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "ctl",
        help="operate on a running fleet",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    operations = parser.add_subparsers(title="operations", metavar="OPERATION", required=True)
    for module in (status, drain, resume, flush, load, unload):
        description = (module.__doc__ or "").partition(": ")[2]
        operation = operations.add_parser(
            module.__name__.rpartition(".")[2],
            help=description.partition(".")[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        operation.add_argument(
            "--fleet", default="", metavar="NAME|PORT", help="which fleet, when several are running"
        )
        operation.add_argument("--json", action="store_true", help="print the answer as JSON")
        module.arguments(operation)
        operation.set_defaults(run=_runner(module.request))


def _runner(request: Callable[[argparse.Namespace], Request]) -> Callable[[argparse.Namespace], int]:
    return lambda args: _call(request(args), fleet=args.fleet, as_json=args.json)


def _call(request: Request, *, fleet: str, as_json: bool) -> int:
    """Make the call and print its answer. Raises NoFleet or OperationFailed."""
    from mlxhost.supervisor.client import call, find_fleet
    from mlxhost.supervisor.console import err, out, printable_lines
    from mlxhost.supervisor.errors import EXIT_FAILED, EXIT_OK

    reply = call(
        find_fleet(fleet),
        request.op,
        target=request.target,
        args=request.args,
        deadline_s=request.deadline_s,
        on_news=(lambda _: None) if as_json else (lambda text: out(printable_lines(text))),
    )
    failed = reply.code != "ok"
    if as_json:
        error = {"error": {"code": reply.code, "message": reply.message}} if failed else {}
        out(json.dumps(reply.result | error, indent=2))
    elif reply.result and (text := request.show(reply.result)):
        out(printable_lines(text))
    if failed:
        err(f"mlxhost: {printable_lines(reply.message or reply.code)}")
    return EXIT_FAILED if failed else EXIT_OK
