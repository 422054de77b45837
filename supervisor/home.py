"""Where mlxhost keeps its state: `$MLXHOST_HOME`, else ~/.mlxhost, closed to other users.

`cache/` holds fetched and converted models, `run/` one directory for each fleet (see rundir).
"""

import os
from pathlib import Path

from mlxhost.supervisor.errors import UserError


def home() -> Path:
    """The state directory, created 0700 when absent. Raises UserError when that is not possible."""
    path = Path(os.environ.get("MLXHOST_HOME") or "~/.mlxhost").expanduser().absolute()
    make_private(path)
    return path


def cache_dir() -> Path:
    """Where fetched and converted models are kept."""
    path = home() / "cache"
    make_private(path)
    return path


def run_root() -> Path:
    """Where fleets keep their run directories."""
    path = home() / "run"
    make_private(path)
    return path


def make_private(path: Path) -> None:
    """Create `path` (and its parents) so that only this user can enter it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create {path}: {error.strerror}; set MLXHOST_HOME to a directory you can write to"
        ) from None
