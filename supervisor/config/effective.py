"""The one precedence of all options: flag, then environment, then mlxhost.toml, then default."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxhost.supervisor import modelspec
from mlxhost.supervisor.config import file
from mlxhost.supervisor.config.apikeys import KeyOptions, read_key
from mlxhost.supervisor.config.asked import CONFIG_VARIABLE, FILE_NAME, OTHER_VARIABLES, Asked
from mlxhost.supervisor.config.sampling import SAMPLING
from mlxhost.supervisor.config.table import Option
from mlxhost.supervisor.config.tables import FLEET, MODEL, MODELS, PATH
from mlxhost.supervisor.embedded import EMBEDDED
from mlxhost.supervisor.errors import ConfigError, UsageError
from mlxhost.supervisor.home import home
from mlxhost.supervisor.modelspec import Spec
from mlxhost.supervisor.nearby import nearby
from mlxhost.wire.control import ApiKey

# A model's own value of these is stronger than the fleet's in the file, and weaker than a flag or variable.
SHARED = tuple(name for name in MODEL if name in FLEET)


@dataclass(frozen=True, slots=True)
class Value:
    """`source`: flag --port, variable MLXHOST_PORT, FILE:LINE:COLUMN or default."""

    value: Any
    source: str = "default"

    @property
    def explicit(self) -> bool:
        """Whether it was given for this one start."""
        return self.source.startswith(("flag ", "variable "))


@dataclass(frozen=True, slots=True)
class Config:
    """Every option of the fleet with its source, the models' tables and the keys."""

    document: file.Document
    fleet: Mapping[str, Value]
    specs: tuple[Spec, ...]
    keys: tuple[ApiKey, ...]

    def values(self) -> dict[str, Any]:
        """The options of Settings, without the models."""
        return {name: found.value for name, found in self.fleet.items() if name != MODELS.name}


def read(asked: Asked) -> Config:
    """Everything, checked. Raises UserError: of the file with all its mistakes, else the first one."""
    document = _document(asked)
    _check_variables(asked.environment)
    fleet = {name: value(FLEET[name], asked, document) for name in asked.names}
    keys = tuple(_keys(document, asked.environment))
    return Config(document, fleet, tuple(_specs(document, fleet)), keys)


def file_of(asked: Asked) -> tuple[Path, bool]:
    """The file to read, and whether it was named (and so must be there)."""
    named = asked.path or asked.environment.get(CONFIG_VARIABLE)
    return (Path(os.path.expanduser(named)).absolute(), True) if named else (home() / FILE_NAME, False)


def _document(asked: Asked) -> file.Document:
    path, named = file_of(asked)
    return file.load(path) if named or path.exists() else file.Document()


def value(option: Option, asked: Asked, document: file.Document) -> Value:
    """The option's value from the strongest source that has one. Raises UsageError for a bad variable."""
    if option.name in asked.flags:
        return Value(asked.flags[option.name], f"flag {option.flag}")
    if (text := asked.environment.get(option.variable, "")) != "":
        try:
            return Value(option.kind.of_text(text), f"variable {option.variable}")
        except ValueError as error:
            raise UsageError(f"{option.variable}={text!r}: {error}") from None
    if entry := document.fleet.get(option.name):
        return Value(entry.value, document.where(entry))
    return Value(option.default)


def _check_variables(environment: Mapping[str, str]) -> None:
    """A variable that is nearly one of ours was meant to be: say so rather than ignore it."""
    known = [*(option.variable for option in FLEET.values()), *OTHER_VARIABLES]
    for name in environment:
        if name.startswith("MLXHOST_") and name not in known and (hint := nearby(name, known, cutoff=0.9)):
            raise UsageError(f"the variable {name} is none of mlxhost's{hint}")


def _specs(document: file.Document, fleet: Mapping[str, Value]) -> list[Spec]:
    """What to serve: the items of `models`, each with the settings of its table, or all tables."""
    listed = fleet[MODELS.name]
    if listed.source == "default":
        return [_of_table(document, fleet, Spec(name)) for name in document.models]
    return [_of_table(document, fleet, spec) for spec in modelspec.parse(listed.value)]


def _of_table(document: file.Document, fleet: Mapping[str, Value], spec: Spec) -> Spec:
    """`spec` with its table: the one it names, else the one of the name that it gives its model."""
    named = document.models.get(spec.source)
    table = named if named is not None else document.models.get(spec.alias)
    if table is None:
        return spec
    settings = {name: entry.value for name, entry in table.items() if name not in (PATH.name, SAMPLING)}
    for name in SHARED:
        if name in fleet and fleet[name].explicit:
            settings.pop(name, None)
    if sampling := table.get(SAMPLING):
        settings["sampling_defaults"] = {name: entry.value for name, entry in sampling.value.items()}
    if named is None:
        return replace(spec, settings=settings)
    source = table[PATH.name].value if PATH.name in table else spec.source
    return replace(spec, source=_beside(document, source), alias=spec.alias or spec.source, settings=settings)


def _beside(document: file.Document, source: str) -> str:
    """A path of the file is relative to the file."""
    if document.path is None or source in EMBEDDED:
        return source
    path = document.path.parent / os.path.expanduser(source)
    return str(path) if os.path.exists(path) or not modelspec.is_hub_id(source) else source


def _keys(document: file.Document, environment: Mapping[str, str]) -> list[ApiKey]:
    keys = []
    for name, table in document.keys.items():
        try:
            keys.append(key(document, name, environment))
        except ConfigError as error:
            where = document.where(next(iter(table.values())))
            raise ConfigError(f"{where}: keys.{name}: {error}") from None
    return keys


def key(document: file.Document, name: str, environment: Mapping[str, str]) -> ApiKey:
    """The key of one table. Raises ConfigError."""
    options = KeyOptions(**{key: entry.value for key, entry in document.keys[name].items()})
    base = document.path.parent if document.path else Path()
    return read_key(name, options, base, environment)


def spec_of_table(document: file.Document, name: str) -> Spec:
    """What the model's table by itself asks for."""
    return _of_table(document, {}, Spec(name))
