"""How a dataclass becomes a table of options: a field made by `option` has a flag, a variable and a key.

Everything that speaks of options (flags, environment, mlxhost.toml, `config init`, docs/configuration.md) is
made from these tables, so that an option is declared once, where its value is kept.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mlxhost.supervisor.config.kinds import Kind

_META = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """`unset` says in words what the default means when it is only a mark (0, empty)."""

    name: str
    kind: Kind
    help: str
    default: Any
    unset: str = ""
    live: bool = False  # `ctl reload` applies it without a restart

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"MLXHOST_{self.name.upper()}"

    @property
    def default_text(self) -> str:
        return self.unset or self.kind.shown(self.default).strip('"')


def option(default: Any, kind: Kind, help: str, *, unset: str = "", live: bool = False) -> Any:
    """A dataclass field that users can set."""
    return field(default=default, metadata={_META: (kind, help, unset, live)})


def options(table: type) -> dict[str, Option]:
    """The options of a dataclass by name, in their order."""
    found = {}
    for item in dataclasses.fields(table):
        if meta := item.metadata.get(_META):
            kind, help, unset, live = meta
            found[item.name] = Option(item.name, kind, help, item.default, unset, live)
    return found
