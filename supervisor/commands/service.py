"""`mlxhost service`: run the fleet as a service of the system."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from mlxhost.supervisor.console import out
from mlxhost.supervisor.errors import EXIT_NO_FLEET, EXIT_OK

DESCRIPTION = """\
Start `mlxhost up` at login, and again when it fails: a systemd user unit on Linux, a launchd agent on macOS.
What it serves is in mlxhost.toml, which is checked first. docs/services.md says what the files hold.

  mlxhost config init
  mlxhost service install
  mlxhost service status
  mlxhost service uninstall
"""
_MANAGERS = ("systemd", "launchd")


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "service",
        help="run the fleet as a service of the system",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    install = _add(actions, "install", "Write the service's file, load it and start it", INSTALL)
    install.add_argument("--config", default="", metavar="FILE", help="the mlxhost.toml to serve")
    install.add_argument("--dry-run", action="store_true", help="print the file, and do nothing")
    install.set_defaults(run=_install)
    uninstall = _add(actions, "uninstall", "Stop the service and remove its file", UNINSTALL)
    uninstall.set_defaults(run=_uninstall)
    status = _add(actions, "status", "Show whether the service is installed and running", STATUS)
    status.add_argument("--json", action="store_true", help="print the answer as JSON")
    status.set_defaults(run=_status)


INSTALL = """
  mlxhost service install
  mlxhost service install --config ./mlxhost.toml --name test --dry-run

Doing it again changes nothing, or restarts the service when its file would differ. A change of mlxhost.toml
alone needs no new installation: `mlxhost ctl reload` applies it."""
UNINSTALL = """
  mlxhost service uninstall

Requests in flight are finished first. Models, caches and mlxhost.toml stay."""
STATUS = """
  mlxhost service status --json

Exit 0 when it is running, 3 when it is not."""


def _add(
    actions: "argparse._SubParsersAction[Any]", name: str, help: str, more: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=help[0].lower() + help[1:],
        description=f"{help}.\n{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", default="mlxhost", help="the service's name (default: %(default)s)")
    parser.add_argument("--manager", choices=_MANAGERS, default="", help="default: this system's")
    return parser


def _install(args: argparse.Namespace) -> int:
    from mlxhost.supervisor.services import install

    at = install.manager(args.manager)
    name = install.check_name(args.name)
    service = install.service(name, Path(args.config) if args.config else None)
    if args.dry_run:
        out(at.text(service).rstrip("\n"))
        return EXIT_OK
    if install.install(at, service):
        out(f"installed {at.path(name)} and started it; `mlxhost service status` shows it")
    else:
        out(f"{at.path(name)} is installed and running already")
    return EXIT_OK


def _uninstall(args: argparse.Namespace) -> int:
    from mlxhost.supervisor.services import install

    at = install.manager(args.manager)
    name = install.check_name(args.name)
    removed = install.uninstall(at, name)
    out(f"removed {at.path(name)}" if removed else f"{at.path(name)} is not there; nothing to do")
    return EXIT_OK


def _status(args: argparse.Namespace) -> int:
    from mlxhost.supervisor.services import install

    found = install.manager(args.manager).status(install.check_name(args.name))
    if args.json:
        out(json.dumps(dataclasses.asdict(found) | {"path": str(found.path)}, indent=2))
    else:
        where = f"{found.path}" if found.installed else f"not installed ({found.path} is not there)"
        pid = f", pid {found.pid}" if found.pid else ""
        out(f"{args.name}: {found.detail or 'not running'}{pid}; {where}")
    return EXIT_OK if found.running else EXIT_NO_FLEET
