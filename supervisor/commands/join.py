"""`mlxhost join`: serve models for the fleet of another machine."""

import argparse
import signal
from typing import Any

from mlxhost.supervisor.commands import up
from mlxhost.supervisor.config.flags import add_options, asked

DESCRIPTION = """\
Run workers on this machine for a fleet on another one, which was started with `mlxhost up --listen`.

  there:  mlxhost keys new studio        prints the path of a bundle; carry that file here
          mlxhost up --models demo --listen tcp://192.168.1.10:7777
  here:   mlxhost join tcp://192.168.1.10:7777 --bundle studio --models demo,./my-model:2

The replicas serve beside the fleet's own of the same name; a model that only runs here is served as well, and
its tokenizer and template travel to the fleet. The connection is encrypted, and both ends prove their keys.
When it is cut, this machine dials again and its models, still loaded, serve on.
"""

# The others are the fleet's, and set there.
OPTIONS = (
    "models",
    "dtype",
    "quantised",
    "context",
    "max_rows",
    "max_gap_ms",
    "jump_forward",
    "cache_ram",
    "cache_ssd",
    "log_level",
)


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "join",
        help="serve models for the fleet of another machine",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("endpoint", metavar="tcp://HOST:PORT", help="what the fleet says at its start")
    parser.add_argument(
        "--bundle",
        default="",
        metavar="FILE",
        help="the keys for this machine; without it, the content of $MLXHOST_BUNDLE",
    )
    add_options(parser, OPTIONS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return start(args)


def start(args: argparse.Namespace, **overrides: Any) -> int:
    """Serve what `args` ask for. `overrides` replace fields of Settings. Raises UserError."""
    from dataclasses import replace
    from functools import partial

    from mlxhost.supervisor.config import loading
    from mlxhost.supervisor.errors import UsageError
    from mlxhost.supervisor.remote.joined import join
    from mlxhost.supervisor.remote.keyring import read_bundle
    from mlxhost.supervisor.signals import stop_signals
    from mlxhost.supervisor.view import View
    from mlxhost.wire.curve import parse_endpoint

    for number in stop_signals():
        signal.signal(number, up.interrupt)
    view = View(live=up.is_terminal())
    try:
        try:
            _, port = parse_endpoint(args.endpoint)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if not port:
            raise UsageError(f"{args.endpoint}: port 0 is nobody's; the fleet says its port at its start")
        bundle = read_bundle(args.bundle)
        loaded = loading.load(asked(args))
        up.sweep_leftovers(view)
        settings = loaded.settings(partial(up.fetch, view=view))
        join(replace(settings, frontends=0, **overrides), args.endpoint, bundle, view)
    except KeyboardInterrupt:
        pass  # asked to stop before there was anything to stop
    finally:
        view.close()
    return 0
