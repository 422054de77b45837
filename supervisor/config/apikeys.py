"""API keys: named in mlxhost.toml, their values kept elsewhere and never shown.

Only a key's SHA-256 leaves this module: a frontend compares hashes, so that no message, log or state file
holds a key. (Keys are long random strings; a slow password hash would buy nothing.)
"""

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxhost.supervisor.config.kinds import Switch, Text
from mlxhost.supervisor.config.table import option
from mlxhost.supervisor.errors import ConfigError
from mlxhost.wire.control import ApiKey

MIN_LENGTH, MAX_LENGTH = 16, 512
_KEY = re.compile(rf"[\x21-\x7e]{{{MIN_LENGTH},{MAX_LENGTH}}}")


@dataclass(frozen=True, slots=True)
class KeyOptions:
    """One [keys.NAME] table."""

    file: str = option(
        "", Text("PATH", "a path"), "the file that holds the key (0600)", unset="see `env`", live=True
    )
    env: str = option(
        "", Text("VARIABLE", "a name"), "the variable that holds the key", unset="see `file`", live=True
    )
    admin: bool = option(False, Switch(), "whether it also opens /admin", live=True)


def read_key(name: str, options: KeyOptions, base: Path, environment: Mapping[str, str]) -> ApiKey:
    """The key `name`, hashed. Relative files are looked up in `base`. Raises ConfigError."""
    if options.env:
        key, where = environment.get(options.env, ""), f"${options.env}"
        if not key:
            raise ConfigError(f"the variable {options.env} is not set")
    else:
        path = base / os.path.expanduser(options.file)
        key, where = _read(path), str(path)
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"what {where} holds is no key: {MIN_LENGTH} to {MAX_LENGTH} printable characters without spaces "
            "(`openssl rand -hex 32` makes one)"
        )
    return ApiKey(name, hashlib.sha256(key.encode()).hexdigest(), options.admin)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            mode = path.stat().st_mode
            data = stream.read(MAX_LENGTH + 3)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is no path: {error}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{path} can be read by others; close it with `chmod 600 {path}`")
    return data.decode("ascii", "replace").rstrip("\r\n")
