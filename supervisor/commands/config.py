"""`mlxhost config`: write, check and show the configuration of a fleet."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from mlxhost.supervisor.config.flags import add_options, asked
from mlxhost.supervisor.console import err, out, printable_lines
from mlxhost.supervisor.errors import EXIT_OK, EXIT_USAGE, UserError

DESCRIPTION = """\
A fleet's configuration is mlxhost.toml in $MLXHOST_HOME (else ~/.mlxhost), or the file that --config or
$MLXHOST_CONFIG names. docs/configuration.md lists every key.

  mlxhost config init                 write a commented file to begin with
  mlxhost config check                every mistake in it, with line and column
  mlxhost config show --port 9000     the values in force, and where each comes from
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "config",
        help="write, check and show mlxhost.toml",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    init = _add(actions, "init", "Write a commented mlxhost.toml that serves the demo model", INIT)
    _file(init, "where to (default: the default file)")
    init.add_argument("--force", action="store_true", help="overwrite the file that is there")
    init.set_defaults(run=_init)
    check = _add(actions, "check", "Check mlxhost.toml, and the models and keys that it names", CHECK)
    _file(check, "which file (default: the one that `up` would read)")
    check.add_argument("--json", action="store_true", help="print the answer as JSON")
    check.set_defaults(run=_check)
    show = _add(actions, "show", "Show the values in force, and where each comes from", SHOW)
    add_options(show)
    show.add_argument("--json", action="store_true", help="print the answer as JSON")
    show.set_defaults(run=_show)


INIT = """
  mlxhost config init
  mlxhost config init ./mlxhost.toml

A file that is there is left as it is, and the exit code is 1, unless --force is given."""
CHECK = """
  mlxhost config check
  mlxhost config check ./mlxhost.toml --json

Prints FILE:LINE:COLUMN: KEY: what is wrong, a line for each mistake. Exit 0 when there is none, else 2."""
SHOW = """
  mlxhost config show
  MLXHOST_ROUTING=round-robin mlxhost config show --port 9000 --json

Takes the flags of `mlxhost up`. A flag is stronger than its environment variable, that than the file, and
the file than the default. API keys are named, never shown."""


def _add(
    actions: "argparse._SubParsersAction[Any]", name: str, help: str, more: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=help[0].lower() + help[1:],
        description=f"{help}.\n{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _file(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("file", metavar="FILE", nargs="?", default="", help=help)


def _path(args: argparse.Namespace) -> Path:
    from mlxhost.supervisor.config import effective
    from mlxhost.supervisor.config.asked import Asked

    return effective.file_of(Asked(environment=os.environ, path=Path(args.file) if args.file else None))[0]


def _init(args: argparse.Namespace) -> int:
    from mlxhost.supervisor.config.template import template

    path = _path(args)
    try:
        with path.open("w" if args.force else "x", encoding="utf-8") as stream:
            stream.write(template())
    except FileExistsError:
        raise UserError(f"{path} is there already; --force overwrites it") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    out(f"wrote {path}; `mlxhost up` serves what it says")
    return EXIT_OK


def _check(args: argparse.Namespace) -> int:
    from mlxhost.supervisor.config.checking import check

    path = _path(args)
    problems = check(path)
    if args.json:
        found = [{"line": p.line, "column": p.column, "key": p.key, "message": p.message} for p in problems]
        out(json.dumps({"file": str(path), "ok": not found, "problems": found}, indent=2))
    elif problems:
        err("\n".join(map(str, problems)))
    else:
        out(f"{path}: nothing wrong")
    return EXIT_USAGE if problems else EXIT_OK


def _show(args: argparse.Namespace) -> int:
    from mlxhost.supervisor.config import effective, shown
    from mlxhost.supervisor.table import table

    found = shown.shown(effective.read(asked(args)))
    if args.json:
        out(json.dumps(found, indent=2))
        return EXIT_OK
    out(printable_lines("\n".join(line.rstrip() for line in table(shown.lines(found)))))
    if found["file"] is None:
        out("no file is read; `mlxhost config init` writes one")
    return EXIT_OK
