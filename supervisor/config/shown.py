"""What `mlxhost config show` shows: each value in force, and where it comes from. Pure."""

from typing import Any

from mlxhost.supervisor.config.effective import SHARED, Config, Value
from mlxhost.supervisor.config.sampling import SAMPLING
from mlxhost.supervisor.config.table import Option
from mlxhost.supervisor.config.tables import FLEET, MODEL


def shown(config: Config) -> dict[str, Any]:
    """As JSON: {file, fleet: {key: {value, source}}, models: {name: {...}}, keys: {name: {...}}}."""
    document = config.document
    return {
        "file": str(document.path) if document.path else None,
        "fleet": {name: _cell(FLEET[name], found) for name, found in config.fleet.items()},
        "models": {name: _model(config, name) for name in document.models},
        # A key's value is not known here, and would not be shown.
        "keys": {
            key.name: {
                "admin": key.admin,
                "source": document.where(next(iter(document.keys[key.name].values()))),
            }
            for key in config.keys
        },
    }


def _model(config: Config, name: str) -> dict[str, Any]:
    document, table = config.document, config.document.models[name]
    cells = {}
    for option in MODEL.values():
        fleet = config.fleet.get(option.name) if option.name in SHARED else None
        entry = table.get(option.name)
        if fleet and fleet.explicit:
            found = fleet
        elif entry:
            found = Value(entry.value, document.where(entry))
        else:
            found = fleet or Value(option.default)
        cells[option.name] = _cell(option, found)
    if sampling := table.get(SAMPLING):
        cells |= {
            f"{SAMPLING}.{key}": {"value": entry.value, "source": document.where(entry)}
            for key, entry in sampling.value.items()
        }
    return cells


def _cell(option: Option, found: Value) -> dict[str, Any]:
    value = found.value if found.value != option.default or not option.unset else None
    return {"value": list(value) if isinstance(value, tuple) else value, "source": found.source}


def lines(table: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows (key, value, source) of what `shown` made."""
    rows = [("KEY", "VALUE", "SOURCE")]
    rows += [_row(f"fleet.{key}", cell) for key, cell in table["fleet"].items()]
    for name, cells in table["models"].items():
        rows += [_row(f"models.{name}.{key}", cell) for key, cell in cells.items()]
    for name, cell in table["keys"].items():
        rows.append((f"keys.{name}", "admin" if cell["admin"] else "set", cell["source"]))
    return rows


def _row(key: str, cell: dict[str, Any]) -> tuple[str, str, str]:
    value = cell["value"]
    if value is None or value == []:
        text = "-"
    elif isinstance(value, list):
        text = ", ".join(map(str, value))
    else:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    return key, text, cell["source"]
