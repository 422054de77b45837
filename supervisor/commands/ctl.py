"""`mlxhost ctl`: operations on a running fleet. Each has its own module beside this one."""

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlxhost.supervisor.commands import (
    abort,
    call,
    drain,
    explain,
    flush,
    load,
    load_watch,
    log_level,
    pause,
    pin,
    profile,
    reload,
    reload_weights,
    resume,
    routing,
    sessions,
    sleep,
    state,
    status,
    unload,
    unpin,
    wake,
)
from mlxhost.supervisor.commands.request import Request

if TYPE_CHECKING:
    from mlxhost.wire.control import News

MODULES = (
    status,
    drain,
    resume,
    pause,
    sleep,
    wake,
    flush,
    load,
    unload,
    pin,
    unpin,
    explain,
    routing,
    reload,
    reload_weights,
    state,
    abort,
    sessions,
    load_watch,
    profile,
    log_level,
    call,
)

DESCRIPTION = """\
Operate on a fleet that runs on this machine under this user (found through $MLXHOST_HOME, else ~/.mlxhost).

  mlxhost ctl status
  mlxhost ctl drain demo --timeout 60
  mlxhost ctl status --fleet 8081 --json
"""
EXIT_CODES = """\
exit codes:
  0  done
  2  a wrong command line
  3  no fleet is running, or not the one that was named
  4  the fleet refused the operation, or did not finish it in time
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "ctl",
        help="operate on a running fleet",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    operations = parser.add_subparsers(title="operations", metavar="OPERATION", required=True)
    for module in MODULES:
        description = (module.__doc__ or "").partition(": ")[2]
        operation = operations.add_parser(
            module.__name__.rpartition(".")[2].replace("_", "-"),
            help=description.partition(".")[0],
            description=description,
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        operation.add_argument(
            "--fleet", default="", metavar="NAME|PORT", help="which fleet, when several are running"
        )
        operation.add_argument("--json", action="store_true", help="print the answer as JSON")
        module.arguments(operation)
        operation.set_defaults(run=_runner(module.request, getattr(module, "without_fleet", None)))


def _runner(
    request: Callable[[argparse.Namespace], Request],
    without_fleet: Callable[[argparse.Namespace], int | None] | None,
) -> Callable[[argparse.Namespace], int]:
    """`without_fleet` may do all there is to do, and then tells the exit code."""

    def run(args: argparse.Namespace) -> int:
        done = without_fleet(args) if without_fleet else None
        return _call(request(args), fleet=args.fleet, as_json=args.json) if done is None else done

    return run


def _call(request: Request, *, fleet: str, as_json: bool) -> int:
    """Make the call and print its answer. Raises NoFleet or OperationFailed."""
    from mlxhost.supervisor import client
    from mlxhost.supervisor.console import err, out, printable_lines
    from mlxhost.supervisor.errors import EXIT_FAILED, EXIT_OK

    def tell(news: "News") -> None:
        if not as_json:
            out(printable_lines(news.message))
        elif request.news_as_json:
            out(json.dumps(news.data))

    reply = client.call(
        client.find_fleet(fleet),
        request.op,
        target=request.target,
        args=request.args,
        deadline_s=request.deadline_s,
        on_news=tell,
    )
    failed = reply.code != "ok"
    if as_json:
        error = {"error": {"code": reply.code, "message": reply.message}} if failed else {}
        out(json.dumps(reply.result | error, indent=None if request.news_as_json else 2))
    elif reply.result and (text := request.show(reply.result)):
        out(printable_lines(text))
    if failed:
        err(f"mlxhost: {printable_lines(reply.message or reply.code)}")
    return EXIT_FAILED if failed else EXIT_OK
