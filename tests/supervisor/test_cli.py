"""The command line without a fleet: help, version, usage errors, and mistakes that cost nothing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.supervisor_up import mlxhost

from mlxhost.wire.version import BUILD


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["up"],
        ["pull"],
        ["config"],
        ["config", "init"],
        ["config", "check"],
        ["config", "show"],
        ["ctl"],
        *(["ctl", op] for op in ("status", "drain", "resume", "flush", "load", "unload")),
    ],
)
def test_help_teaches_by_example(tmp_path: Path, command: list[str]) -> None:
    """Every command explains itself and shows itself in use."""
    done = mlxhost(tmp_path, *command, "--help")
    assert done.returncode == 0
    assert f"  mlxhost {' '.join(command)}".rstrip() in done.stdout


def test_version(tmp_path: Path) -> None:
    """One line."""
    assert mlxhost(tmp_path, "--version").stdout == f"mlxhost {BUILD}\n"


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "required: COMMAND"),
        (["serve"], "invalid choice: 'serve'"),
        (["up"], "--models names no model"),
        (["up", "--models", "demo", "--port", "70000"], "'70000': must be a whole number from 0 to 65535"),
        (["up", "--models", "demo", "--port", "-1"], "'-1': must be a whole number from 0 to 65535"),
        (["up", "--models", "demo", "--routing", "fastest"], "'fastest': must be one of round-robin, "),
        (["up", "--models", "demo", "--context", "-1"], "'-1': must be a whole number from 0 up"),
        (["up", "--models", "demo:none"], "replica count after ':' is 'none'"),
        (["up", "--models", ","], "--models names no model"),
        (["ctl"], "required: OPERATION"),
        (["ctl", "drain"], "required: MODEL"),
        (["ctl", "drain", "m", "--timeout", "nan"], "'nan' is not a number of seconds"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(tmp_path: Path, args: list[str], part: str) -> None:
    """The message names the value; nothing else is printed."""
    done = mlxhost(tmp_path, *args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert part in done.stderr


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--models", "/nonexistent/model"], "/nonexistent does not exist"),
        (["--models", "dem"], "did you mean demo?"),
        (["--models", "{broken}"], "model.safetensors is truncated"),
        (["--models", "a={llama}", "--models", "a={llama}"], "two models would be called 'a'"),
        (["--models", "{llama}", "--host", "no.such.host.invalid"], "is not an address or name"),
        (["--models", "{llama}", "--host", "192.0.2.1", "--port", "0"], "is not an address of this machine"),
    ],
)
def test_mistakes_are_one_message_without_traceback(
    tmp_path: Path, tiny_models: dict[str, Path], args: list[str], part: str
) -> None:
    """Exit code not 0, one line on stderr, no process started."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny_models["llama"], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    filled = [arg.format(broken=broken, llama=tiny_models["llama"]) for arg in args]
    done = mlxhost(tmp_path / "home", "up", *filled)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("mlxhost: ")
    assert part in done.stderr


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """The message names the directory and the variable that chooses another."""
    (tmp_path / "file").touch()
    done = mlxhost(tmp_path / "file" / "home", "up", "--models", str(tiny_models["llama"]), "--port", "0")
    assert done.returncode == 1
    assert "MLXHOST_HOME" in done.stderr
    assert "Traceback" not in done.stderr


def test_neither_help_nor_ctl_imports_the_heavy_parts(tmp_path: Path) -> None:
    """Help loads no zmq; nothing of the supervisor loads mlx, torch, transformers or numpy."""
    code = (
        "import sys\nfrom mlxhost.supervisor import cli\ncli.parser()\n"
        "assert not {'zmq', 'msgspec', 'asyncio'} & set(sys.modules), 'help is slow'\n"
        "import mlxhost.supervisor.serve, mlxhost.supervisor.resolve, mlxhost.supervisor.client\n"
        "heavy = {'mlx', 'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
