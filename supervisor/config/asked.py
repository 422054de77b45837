"""What the command line and the environment say: the same for the whole life of a fleet, also at a reload."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxhost.supervisor.config.tables import FLEET

CONFIG_VARIABLE = "MLXHOST_CONFIG"
FILE_NAME = "mlxhost.toml"
# Variables of ours that are no options.
OTHER_VARIABLES = (CONFIG_VARIABLE, "MLXHOST_HOME", "MLXHOST_BUNDLE")


@dataclass(frozen=True, slots=True)
class Asked:
    flags: Mapping[str, Any] = field(default_factory=dict)  # only those given, by the option's name
    environment: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None  # of the file; None: the default file, if it is there
    names: tuple[str, ...] = tuple(FLEET)  # the options that the command has
