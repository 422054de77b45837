"""Service files: what they say, that their managers take them, and what install and uninstall do."""

import json
import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.supervisor_up import mlxhost

from mlxhost.supervisor.errors import UserError
from mlxhost.supervisor.services import install
from mlxhost.supervisor.services.launchd import Launchd
from mlxhost.supervisor.services.service import Service, stop_seconds
from mlxhost.supervisor.services.systemd import Systemd, quoted
from mlxhost.supervisor.settings import Timing

DEPLOY = Path(__file__).parents[3] / "deploy"
EXAMPLE = Service(
    "mlxhost",
    ("/usr/local/bin/mlxhost", "up"),
    {"MLXHOST_HOME": "/var/lib/mlxhost"},
    Path("/var/log/mlxhost"),
)
AWKWARD = Service(
    "odd", ("/o p/mlxhost", "up", "--config", "/100%/$H'O\"ME.toml"), {"MLXHOST_HOME": "/a <b> & c"}
)


def settings(unit: str) -> dict[str, str]:
    lines = (line.partition("=") for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    return {key: value for key, _, value in lines}


def verified(unit: str, directory: Path) -> str:
    """What systemd-analyze says of a unit; nothing when all is well."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed (Debian: package systemd)")
    path = directory / "mlxhost.service"
    path.write_text(unit)
    env = os.environ | {"XDG_RUNTIME_DIR": str(directory)}
    done = subprocess.run(
        [analyze, "--user", "verify", str(path)], env=env, capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr + ("" if done.returncode == 0 else f"exit {done.returncode}")


def test_deploy_holds_what_install_writes() -> None:
    """The examples in deploy/ are the files of `service install`, comments included."""
    assert (DEPLOY / "mlxhost.service").read_text() == Systemd().text(EXAMPLE)
    assert (DEPLOY / "mlxhost.plist").read_text() == Launchd().text(EXAMPLE)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """systemd-analyze verify finds nothing in it, and does find a mistake."""
    unit = Systemd().text(Service("mlxhost", (sys.executable, "up"), EXAMPLE.environment))
    assert verified(unit, tmp_path) == ""
    assert "kill mode" in verified(unit.replace("KillMode=mixed", "KillMode=mixd"), tmp_path)


def test_systemd_takes_awkward_paths(tmp_path: Path) -> None:
    """Spaces, quotes, percent and dollar signs are taken literally."""
    odd = tmp_path / "o p" / "mlxhost"
    odd.parent.mkdir()
    shutil.copy("/bin/true", odd)
    service = Service("odd", (str(odd), *AWKWARD.command[1:]), AWKWARD.environment)
    assert verified(Systemd().text(service), tmp_path) == ""
    assert quoted("/100%/$HOME", command=True) == "/100%%/$$HOME"
    assert quoted('a "b"\\') == '"a \\"b\\"\\\\"'


def test_the_unit_restarts_on_failure_only_and_gives_time_to_stop() -> None:
    """Exit 0 and a wrong configuration end it; SIGTERM is for the supervisor; SIGKILL follows the drain."""
    unit = settings(Systemd().text(EXAMPLE))
    assert (unit["Type"], unit["Restart"], unit["RestartPreventExitStatus"]) == ("notify", "on-failure", "2")
    assert (unit["KillMode"], unit["OOMPolicy"]) == ("mixed", "continue")
    timing = Timing()
    assert int(unit["TimeoutStopSec"]) == stop_seconds(timing) > timing.drain_s + 4 * timing.exit_s
    assert unit["ExecStart"] == "/usr/local/bin/mlxhost up"


def test_the_agent_restarts_on_failure_only_and_gives_time_to_stop() -> None:
    """As plistlib reads it; whatever characters paths have."""
    agent = plistlib.loads(Launchd().text(EXAMPLE).encode())
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ExitTimeOut"] == stop_seconds(Timing())
    assert agent["ProgramArguments"] == ["/usr/local/bin/mlxhost", "up"]
    assert agent["StandardErrorPath"] == "/var/log/mlxhost/mlxhost.log"
    odd = plistlib.loads(Launchd().text(AWKWARD).encode())
    assert odd["ProgramArguments"] == list(AWKWARD.command)
    assert odd["EnvironmentVariables"] == AWKWARD.environment


class FakeSystemctl:
    """A `systemctl` on PATH that writes down how it was called, and knows whether the unit runs.

    There is no user manager where tests run.
    """

    def __init__(self, directory: Path) -> None:
        self.log, self.active = directory / "calls", directory / "active"
        directory.mkdir()
        script = directory / "systemctl"
        script.write_text(
            "#!/bin/sh\n"
            f'echo "$@" >> {self.log}\n'
            'case "$2" in\n'
            f"restart) touch {self.active};;\n"
            f"disable) rm -f {self.active};;\n"
            f"show) if [ -e {self.active} ]; then echo ActiveState=active; echo MainPID=7; "
            "echo SubState=running; else echo ActiveState=inactive; echo MainPID=0; fi;;\n"
            "esac\n"
        )
        script.chmod(0o755)

    def calls(self) -> list[str]:
        found = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.split()[1] for line in found]


@pytest.mark.slow
def test_install_is_idempotent_and_uninstall_undoes_it(tmp_path: Path) -> None:
    """The second install changes nothing; another file restarts; uninstall stops and removes."""
    systemctl = FakeSystemctl(tmp_path / "bin")
    home = tmp_path / "home"
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    unit = tmp_path / "xdg" / "systemd" / "user" / "mlxhost.service"

    def service(*args: str, code: int = 0) -> str:
        done = mlxhost(home, "service", *args, "--manager", "systemd", **env)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "`mlxhost config init` writes it" in service("install", code=1)
    assert mlxhost(home, "config", "init").returncode == 0
    assert service("status", code=3).startswith("mlxhost: inactive; not installed")
    systemctl.calls()
    assert f"installed {unit}" in service("install")
    assert systemctl.calls() == ["daemon-reload", "enable", "restart"]
    assert f"Environment=MLXHOST_HOME={home}" in unit.read_text()
    assert "installed and running already" in service("install")
    assert systemctl.calls() == ["show"]
    assert json.loads(service("status", "--json"))["pid"] == 7
    unit.write_text(unit.read_text() + "# changed\n")
    assert f"installed {unit}" in service("install")
    systemctl.calls()
    assert f"removed {unit}" in service("uninstall")
    assert systemctl.calls() == ["disable", "daemon-reload"]
    assert not unit.exists()
    assert "nothing to do" in service("uninstall")


@pytest.mark.parametrize(
    ("said", "fails"),
    [
        ("Failed to connect to bus: $DBUS_SESSION_BUS_ADDRESS and $XDG_RUNTIME_DIR not defined", True),
        ("Failed to disable unit: Unit file mlxhost.service does not exist.", False),
        ("Failed to stop mlxhost.service: Unit mlxhost.service not loaded.", False),
    ],
)
def test_a_service_that_could_not_be_stopped_keeps_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, fails: bool
) -> None:
    """Without its file, the process that goes on could not be asked about; one that is gone is no failure."""
    (tmp_path / "systemctl").write_text(
        f"#!/bin/sh\ncase \"$2\" in disable) echo '{said}' >&2; exit 1;; esac\n"
    )
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = Systemd().path("mlxhost")
    path.parent.mkdir(parents=True)
    path.write_text("")
    if fails:
        with pytest.raises(UserError, match="XDG_RUNTIME_DIR not defined"):
            install.uninstall(Systemd(), "mlxhost")
    else:
        assert install.uninstall(Systemd(), "mlxhost")
    assert path.exists() is fails


def test_a_wrong_configuration_is_not_installed(tmp_path: Path) -> None:
    """The file's mistakes are told, with exit 2, and nothing is written."""
    (tmp_path / "mlxhost.toml").write_text("[fleet]\nprot = 1\n")
    done = mlxhost(tmp_path, "service", "install", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert "mlxhost.toml:2:1: fleet.prot: unknown key" in done.stderr


@pytest.mark.parametrize("manager", ["systemd", "launchd"])
def test_dry_run_prints_the_file_and_does_nothing(tmp_path: Path, manager: str) -> None:
    """For either system, on any system; --config is in the command, relative paths made whole."""
    config = tmp_path / "mine.toml"
    config.write_text("[models.demo]\n")
    args = ("--config", str(config), "--manager", manager, "--dry-run", "--name", "test")
    done = mlxhost(tmp_path / "home", "service", "install", *args, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert str(config) in done.stdout
    assert str(install.executable()) in done.stdout
    assert not (tmp_path / ".config").exists()
    assert not (tmp_path / "Library").exists()


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 65])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    """Exit 2, nothing written."""
    done = mlxhost(tmp_path, "service", "uninstall", "--name", name)
    assert (done.returncode, "cannot name a service" in done.stderr) == (2, True)
