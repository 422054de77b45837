"""`mlxhost keys`: who may serve for this machine's fleets from another one."""

import argparse
import time
from typing import Any

DESCRIPTION = """\
Keys for machines that join this machine's fleet (`mlxhost up --listen`, `mlxhost join`).

  mlxhost keys new studio      make keys for the machine `studio`, and print where its bundle is
  mlxhost keys list            who may join, and who no longer may
  mlxhost keys revoke studio   do not let it in any more; a running fleet acts on that at once
  mlxhost keys show            the fleet's public key

A bundle is one small file (0600) that holds a private key and a join token: carry it over a channel that you
trust, for example `scp`, and remove it here.
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "keys",
        help="let other machines serve for this one's fleet",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make keys for a machine")
    new.add_argument("name", metavar="NAME", help="what the machine is called here; its replicas bear it")
    new.set_defaults(run=_new)
    actions.add_parser("list", help="who may join").set_defaults(run=_list)
    revoke = actions.add_parser("revoke", help="withdraw a machine's keys")
    revoke.add_argument("name", metavar="NAME", help="as in `mlxhost keys list`")
    revoke.set_defaults(run=_revoke)
    actions.add_parser("show", help="the fleet's public key").set_defaults(run=_show)


def _new(args: argparse.Namespace) -> int:
    from mlxhost.supervisor.console import err, out
    from mlxhost.supervisor.remote.keyring import Keyring

    path = Keyring().new(args.name)
    out(str(path))
    err(f"Carry this file to {args.name}; there: mlxhost join tcp://HERE:PORT --bundle FILE --models M")
    return 0


def _list(args: argparse.Namespace) -> int:
    from mlxhost.supervisor.console import out
    from mlxhost.supervisor.remote.keyring import Keyring
    from mlxhost.supervisor.table import table

    rows = [("NAME", "PUBLIC KEY", "SINCE", "STATE")]
    for host in Keyring().hosts():
        state = f"revoked {_date(host.revoked)}" if host.revoked else "may join"
        rows.append((host.name, host.public_key, _date(host.created), state))
    out("\n".join(line.rstrip() for line in table(rows)))
    return 0


def _revoke(args: argparse.Namespace) -> int:
    from mlxhost.supervisor.console import out
    from mlxhost.supervisor.remote.keyring import Keyring

    Keyring().revoke(args.name)
    out(f"{args.name} may no longer join")
    return 0


def _show(args: argparse.Namespace) -> int:
    from mlxhost.supervisor.console import out
    from mlxhost.supervisor.errors import UserError
    from mlxhost.supervisor.remote.keyring import Keyring

    keyring = Keyring()
    keys = keyring.server_keys()
    if keys is None:
        raise UserError("there are no keys yet; `mlxhost keys new NAME` makes them")
    out(f"public key  {keys.public}")
    out(f"kept in     {keyring.directory}")
    out(f"may join    {', '.join(p.name for p in keyring.allowed()) or 'nobody'}")
    return 0


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
