"""The tables of options by name: [fleet] and [models.NAME] of mlxhost.toml."""

from mlxhost.supervisor.config.kinds import Text, Texts
from mlxhost.supervisor.config.table import Option, options
from mlxhost.supervisor.modelspec import Model
from mlxhost.supervisor.settings import Settings

MODELS = Option(
    "models",
    Texts("MODEL[,MODEL...]", "a list of models"),
    "what to serve: names of [models.NAME] tables, paths, ids or `demo`; may be given more than once",
    (),
    unset="all [models.NAME] tables",
)
PATH = Option(
    "path",
    Text("PATH", "a directory, a GGUF file, owner/name or demo"),
    "a model directory or GGUF file (relative to this file), owner/name, or demo",
    "",
    unset="the table's name",
)

FLEET: dict[str, Option] = {MODELS.name: MODELS} | options(Settings)
MODEL: dict[str, Option] = {PATH.name: PATH} | options(Model)
