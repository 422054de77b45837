"""The file that `mlxhost config init` writes: every option with what it does, commented out."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping

from mlxhost.supervisor.config.apikeys import KeyOptions
from mlxhost.supervisor.config.kinds import Choice, Memory, Size, Text, toml_text
from mlxhost.supervisor.config.sampling import SAMPLING, SamplingOptions
from mlxhost.supervisor.config.table import Option, options
from mlxhost.supervisor.config.tables import FLEET, MODEL

_HEAD = """\
# mlxhost.toml: what a fleet serves, and how. `mlxhost config check` checks it, `mlxhost config show` shows
# the values in force and where each comes from, `mlxhost ctl reload` applies a change to a running fleet.
#
# A flag is stronger than its environment variable, that than this file, and this file than the default.
# Sizes: 24GiB, 500MB or bytes. Times: 90s, 10m, 2h, 1d or seconds. Paths are relative to this file.
"""
_MODELS = """
# A table for each model; requests name it by the table's name. Without `models` under [fleet] and --models on
# the command line all of them are served."""
_KEYS = """
# API keys, by name; the key itself is in a file (closed to others: chmod 600) or a variable. Once there is
# one, every route but /health and /ready needs one: `Authorization: Bearer KEY` or `x-api-key: KEY`.
#   mkdir -p keys && (umask 077; openssl rand -hex 32 > keys/alice)"""
_COLUMNS = 108


def template() -> str:
    """A valid mlxhost.toml that serves the demo model."""
    parts: list[str] = [_HEAD, "[fleet]", *_lines(FLEET), _MODELS.lstrip(), "[models.demo]", *_lines(MODEL)]
    parts += [f"# Sampling of requests that do not say ([models.NAME.{SAMPLING}])."]
    parts += [f"# [models.demo.{SAMPLING}]", *_lines(options(SamplingOptions))]
    parts += [_KEYS.lstrip(), "# [keys.alice]", *_lines(options(KeyOptions))]
    return "\n".join(parts).rstrip() + "\n"


def _lines(table: Mapping[str, Option]) -> Iterator[str]:
    for option in table.values():
        words = f"{option.help} (default: {option.default_text})"
        yield from _comment(words)
        yield f"# {option.name} = {sample(option)}"
        yield ""


def _comment(words: str) -> Iterable[str]:
    return textwrap.wrap(words, _COLUMNS, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def sample(option: Option) -> str:
    """A value for the option as TOML: the default, where that is one that can be given."""
    kind = option.kind
    match kind:
        case Text() if not option.default:
            return toml_text(kind.metavar)
        case Choice() if not option.default:
            return toml_text(kind.names[0])
        case Memory() if not option.default:
            return toml_text("24GiB")
        case Size() if option.default < 0:
            return toml_text("8GiB")
    return "0" if option.default is None else kind.shown(option.default)
