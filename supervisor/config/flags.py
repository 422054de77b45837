"""Options as flags of a command."""

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mlxhost.supervisor.config.asked import CONFIG_VARIABLE, Asked
from mlxhost.supervisor.config.kinds import Switch, Texts
from mlxhost.supervisor.config.table import Option
from mlxhost.supervisor.config.tables import FLEET

_GIVEN = "option_"  # before the name of each option in the parsed arguments


def add_options(parser: argparse.ArgumentParser, names: Iterable[str] = tuple(FLEET)) -> None:
    """--config, and a flag for each of `names`."""
    parser.add_argument(
        "--config",
        default="",
        metavar="FILE",
        help=f"the configuration to read (default: ${CONFIG_VARIABLE}, else mlxhost.toml in $MLXHOST_HOME)",
    )
    for option in map(FLEET.__getitem__, names):
        words = f"{option.help} (default: {option.default_text}; {option.variable})".replace("%", "%%")
        parser.add_argument(option.flag, dest=_GIVEN + option.name, help=words, **_reading(option))


def asked(args: argparse.Namespace) -> Asked:
    """What the parsed arguments and the environment say."""
    given = {
        key.removeprefix(_GIVEN): value
        for key, value in vars(args).items()
        if key.startswith(_GIVEN) and value is not None
    }
    for name, value in given.items():
        if isinstance(FLEET[name].kind, Texts):
            given[name] = tuple(item for items in value for item in items)
    names = tuple(key.removeprefix(_GIVEN) for key in vars(args) if key.startswith(_GIVEN))
    return Asked(given, dict(os.environ), Path(args.config) if args.config else None, names)


def _reading(option: Option) -> dict[str, Any]:
    reading: dict[str, Any] = {"type": _checked(option), "default": None, "metavar": option.kind.metavar}
    if isinstance(option.kind, Texts):
        reading["action"] = "append"
    elif isinstance(option.kind, Switch):
        reading |= {"nargs": "?", "const": True}
    return reading


def _checked(option: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return option.kind.of_text(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return read
