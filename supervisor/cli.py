"""The `mlxhost` command: finds the subcommand, turns its errors into one message and an exit code."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from mlxhost.supervisor.commands import config, ctl, fit, join, keys, pull, service, up
from mlxhost.supervisor.console import err, out
from mlxhost.supervisor.errors import EXIT_USAGE, UserError

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells say it

DESCRIPTION = """\
Serve several MLX models on one HTTP address, each in its own process.

  mlxhost up --models demo                     serve the embedded demo model on 127.0.0.1:8080
  mlxhost up --models ./my-model,other=./x:2   serve two, the second under another name and twice
  mlxhost ctl status                           what is running, and how loaded it is
"""
EPILOG = """\
exit codes:
  0  done; for `up` also: stopped by Ctrl-C, SIGTERM or the end of its terminal
  1  could not start or could not go on; the message says why
  2  a wrong command line, variable or mlxhost.toml
  3  ctl: no fleet is running (or not the one that was named)
  4  ctl: the fleet refused the operation or did not finish it; fit: the model does not fit
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line that ends with the way out."""

    def error(self, message: str) -> NoReturn:
        err(f"mlxhost: {message} (see `{self.prog} --help`)")
        sys.exit(EXIT_USAGE)


class _Version(argparse.Action):
    """Prints the version; looks it up only then."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nargs=0, **kwargs)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        from mlxhost.wire.version import BUILD

        out(f"mlxhost {BUILD}")
        sys.exit(0)


def parser() -> argparse.ArgumentParser:
    root = _Parser(
        prog="mlxhost",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action=_Version, help="print the version and exit")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (up, ctl, config, service, fit, pull, join, keys):
        command.add(commands)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")  # a terminal that lacks a character is no reason to fail
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except UserError as error:
        err(f"mlxhost: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
