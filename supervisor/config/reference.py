"""The tables of docs/configuration.md, made from the options themselves."""

from collections.abc import Iterator, Mapping

from mlxhost.supervisor.config.apikeys import KeyOptions
from mlxhost.supervisor.config.sampling import SAMPLING, SamplingOptions
from mlxhost.supervisor.config.table import Option, options
from mlxhost.supervisor.config.tables import FLEET, MODEL


def reference() -> str:
    """Markdown: a table for [fleet], for [models.NAME], for its sampling and for [keys.NAME]."""
    parts = [
        "### `[fleet]`\n",
        *_table(FLEET, flags=True),
        "\n### `[models.NAME]`\n",
        *_table(MODEL, flags=False),
        f"\n### `[models.NAME.{SAMPLING}]`\n",
        *_table(options(SamplingOptions), flags=False),
        "\n### `[keys.NAME]`\n",
        *_table(options(KeyOptions), flags=False),
    ]
    return "\n".join(parts) + "\n"


def _table(table: Mapping[str, Option], *, flags: bool) -> Iterator[str]:
    names = "| key | flag | variable |" if flags else "| key |"
    yield f"{names} value | default | live | what |"
    yield "|---" * (names.count("|") - 1 + 4) + "|"
    for option in table.values():
        ways = f" `{option.flag}` | `{option.variable}` |" if flags else ""
        cells = (option.kind.allowed, _default(option), "yes" if option.live else "", option.help)
        yield f"| `{option.name}` |{ways} " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(option: Option) -> str:
    return option.unset or f"`{option.kind.shown(option.default)}`"
