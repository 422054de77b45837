"""`mlxhost config`: init, check and show as a user meets them."""

import json
from pathlib import Path

from support.supervisor_up import mlxhost


def test_init_writes_a_file_that_check_accepts_and_never_overwrites(tmp_path: Path) -> None:
    """Into the state directory; a second time it says how to overwrite, and changes nothing."""
    first = mlxhost(tmp_path, "config", "init")
    path = tmp_path / "mlxhost.toml"
    assert (first.returncode, str(path) in first.stdout) == (0, True)
    assert mlxhost(tmp_path, "config", "check").stdout == f"{path}: nothing wrong\n"
    path.write_text("mine")
    again = mlxhost(tmp_path, "config", "init")
    assert (again.returncode, "--force" in again.stderr, path.read_text()) == (1, True, "mine")
    assert mlxhost(tmp_path, "config", "init", "--force").returncode == 0
    assert "[models.demo]" in path.read_text()


def test_check_tells_every_mistake_and_exits_2(tmp_path: Path) -> None:
    """Also of the models and keys that the file names, by line; as JSON with --json."""
    path = tmp_path / "f.toml"
    path.write_text('[models.a]\npath = "/no/model"\n[keys.k]\nenv = "NOT_SET"\n')
    done = mlxhost(tmp_path, "config", "check", str(path))
    assert done.returncode == 2
    assert f"{path}:2:1: models.a: model '/no/model' not found" in done.stderr
    assert f"{path}:4:1: keys.k: the variable NOT_SET is not set" in done.stderr
    found = json.loads(mlxhost(tmp_path, "config", "check", str(path), "--json").stdout)
    assert (found["ok"], sorted((p["line"], p["key"]) for p in found["problems"])) == (
        False,
        [(2, "models.a"), (4, "keys.k")],
    )


def test_show_tells_where_each_value_comes_from_and_no_key(tmp_path: Path) -> None:
    """Flag, variable, file and default, one of each."""
    path = tmp_path / "mlxhost.toml"
    path.write_text('[fleet]\nrouting = "round-robin"\n[keys.k]\nenv = "SECRET"\n')
    secret = "s3cret-" * 4
    args = ("config", "show", "--port", "9")
    env = {"MLXHOST_MAX_ROWS": "3", "SECRET": secret}
    shown = json.loads(mlxhost(tmp_path, *args, "--json", **env).stdout)
    assert shown["fleet"]["port"] == {"value": 9, "source": "flag --port"}
    assert shown["fleet"]["max_rows"] == {"value": 3, "source": "variable MLXHOST_MAX_ROWS"}
    assert shown["fleet"]["routing"] == {"value": "round-robin", "source": f"{path}:2:1"}
    assert shown["fleet"]["host"] == {"value": "127.0.0.1", "source": "default"}
    assert shown["keys"] == {"k": {"admin": False, "source": f"{path}:4:1"}}
    text = mlxhost(tmp_path, *args, **env)
    assert secret not in text.stdout + text.stderr
