"""Installing, removing and asking about the service, the same for every manager."""

import os
import re
import shutil
import sys
from pathlib import Path

from mlxhost.supervisor.config import effective
from mlxhost.supervisor.config.asked import Asked
from mlxhost.supervisor.config.checking import check
from mlxhost.supervisor.config.file import Problems
from mlxhost.supervisor.errors import UsageError, UserError
from mlxhost.supervisor.home import home
from mlxhost.supervisor.services.launchd import Launchd
from mlxhost.supervisor.services.service import Manager, Service
from mlxhost.supervisor.services.systemd import Systemd

MANAGERS: dict[str, type[Manager]] = {"systemd": Systemd, "launchd": Launchd}
DEFAULT_NAME = "mlxhost"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def manager(wanted: str = "") -> Manager:
    """The manager of that name, or this system's."""
    return MANAGERS[wanted or ("launchd" if sys.platform == "darwin" else "systemd")]()


def check_name(name: str) -> str:
    """Raises UsageError for what cannot name a file and a unit."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a service: letters, digits, '.', '_', '-', at most 64")
    return name


def service(name: str, config: Path | None) -> Service:
    """`mlxhost up` with a checked configuration. Raises UserError when there is none, or a wrong one."""
    asked = Asked(environment=os.environ, path=config)
    path, _ = effective.file_of(asked)
    if not path.exists():
        raise UserError(f"{path} does not exist; `mlxhost config init` writes it")
    if problems := check(path):
        raise Problems(problems)
    command = [str(executable()), "up"]
    if path != home() / "mlxhost.toml":
        command += ["--config", str(path)]
    # What is set now must hold for the service as well: it has a clean environment.
    environment = {"MLXHOST_HOME": str(home())} if os.environ.get("MLXHOST_HOME") else {}
    return Service(name, tuple(command), environment, Path("~/Library/Logs").expanduser())


def executable() -> Path:
    """The `mlxhost` command of this installation."""
    beside = Path(sys.executable).with_name("mlxhost")
    found = beside if beside.exists() else shutil.which("mlxhost")
    if not found:
        raise UserError("the mlxhost command is not on PATH; install the package first")
    return Path(found).absolute()


def install(at: Manager, wanted: Service) -> bool:
    """Write the file and load it; False when the very same one was loaded and running."""
    path, text = at.path(wanted.name), at.text(wanted)
    same = path.exists() and path.read_text() == text
    if same and at.status(wanted.name).running:
        return False
    if not same:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f".{path.name}.new")
            fresh.write_text(text)
            fresh.replace(path)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None
    at.load(wanted.name)
    return True


def uninstall(at: Manager, name: str) -> bool:
    """Stop the service and remove its file; False when there was none."""
    path = at.path(name)
    if not path.exists():
        return False
    at.unload(name)
    path.unlink(missing_ok=True)
    at.forget()
    return True
