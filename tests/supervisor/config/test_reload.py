"""`ctl reload` and SIGHUP on a real fleet with fake workers."""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.supervisor_up import Stream, Up, gone, status_of, wait_for

from mlxhost.supervisor.errors import UserError
from mlxhost.supervisor.modelspec import Model as ModelSpec
from mlxhost.supervisor.notify import READY
from mlxhost.supervisor.reload import Reload
from mlxhost.supervisor.settings import Settings
from mlxhost.supervisor.source import Source
from mlxhost.supervisor.state import new_fleet
from mlxhost.wire.control import Ctl


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


class Configured:
    """A fleet that serves a mlxhost.toml, and the file."""

    def __init__(self, home: Path, up: Up) -> None:
        self.file, self.up = home / "mlxhost.toml", up

    def reload(self, text: str, *, code: int = 0) -> dict[str, Any]:
        self.file.write_text(text)
        done = self.up.ctl("reload", "--json", check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return dict(json.loads(done.stdout))

    def pids(self) -> dict[str, int]:
        return {r["slot"]: r["pid"] for m in self.up.status()["models"] for r in m["replicas"]}


@contextlib.contextmanager
def configured(home: Path, text: str, *options: str, **more: Any) -> Iterator[Configured]:
    home.mkdir(exist_ok=True, mode=0o700)
    (home / "mlxhost.toml").write_text(text)
    with Up(home, "", *options, **more) as up:
        up.url(30)
        yield Configured(home, up)


def model(name: str, path: Path, more: str = "") -> str:
    return f'[models.{name}]\npath = "{path}"\n{more}\n'


def test_models_come_go_and_change_while_others_are_not_touched(tmp_path: Path, llama: Path) -> None:
    """a streams through it all in its one process; b is loaded anew, c ends, d comes."""
    a, script = model("a", llama), {"a": {"step_ms": 50, "length": 100}}
    with configured(tmp_path / "home", a + model("b", llama) + model("c", llama), script=script) as fleet:
        before = fleet.pids()
        stream = Stream(fleet.up.url(), "a", 60).begun()
        done = fleet.reload(a + model("b", llama, "context = 64") + model("d", llama))
        assert (done["added"], done["removed"], done["renewed"]) == (["d"], ["c"], {"b": ["context"]})
        after = fleet.pids()
        assert after.keys() == {"a/0", "b/0", "d/0"}
        assert after["a/0"] == before["a/0"]
        assert after["b/0"] != before["b/0"]
        url = fleet.up.url()
        assert [status_of(url, name) for name in ("b", "c", "d")] == [200, 404, 200]
        assert stream.join().finish == "length"
        assert fleet.reload(fleet.file.read_text())["changed"] is False


@pytest.mark.slow
def test_live_changes_need_no_new_process(tmp_path: Path, llama: Path) -> None:
    """An alias, routing, a log level and a replica more, then less."""
    with configured(tmp_path / "home", model("a", llama, "replicas = 2")) as fleet:
        before = fleet.pids()
        live = 'aliases = ["x"]\nrouting = "round-robin"\nreplicas = 3\n[fleet]\nlog_level = "warning"'
        done = fleet.reload(model("a", llama, live))
        assert done["live"] == {"a": ["replicas", "aliases", "routing"]}
        assert done["applied"] == {"log_level": ["info", "warning"]}
        assert fleet.pids().items() > before.items()
        assert fleet.up.status()["models"][0]["routing"] == "round-robin"
        assert status_of(fleet.up.url(), "x") == 200
        fleet.reload(model("a", llama, "replicas = 1"))
        assert fleet.pids() == {"a/0": before["a/0"]}
        assert status_of(fleet.up.url(), "x") == 404


@pytest.mark.slow
def test_a_replica_that_retires_finishes_its_stream(tmp_path: Path, llama: Path) -> None:
    """Two streams on two replicas; one replica less; both streams end whole."""
    script = {"a": {"step_ms": 50, "length": 100}}
    with configured(
        tmp_path / "home", model("a", llama, 'replicas = 2\nrouting = "round-robin"'), script=script
    ) as fleet:
        streams = [Stream(fleet.up.url(), "a", 40).begun() for _ in range(2)]
        fleet.reload(model("a", llama, 'replicas = 1\nrouting = "round-robin"'))
        assert list(fleet.pids()) == ["a/0"]
        assert [stream.join().finish for stream in streams] == ["length", "length"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[fleet]\nprot = 1\n", "mlxhost.toml:2:1: fleet.prot: unknown key"),
        ("[models.b]\npath = '/no/model'\n", "model '/no/model' not found"),
        (f"[models.b]\npath = '/{'x' * 5_000}'\n", "cannot be looked at: File name too long"),
        ("[fleet]\n", "names no model"),
        ("[keys.k]\nenv = 'NOT_SET'\n[models.demo]\n", "the variable NOT_SET is not set"),
        (None, "mlxhost.toml is gone"),
    ],
)
def test_a_broken_file_changes_nothing_and_says_why(
    tmp_path: Path, llama: Path, text: str | None, message: str
) -> None:
    """Exit 4 with the mistake; the fleet goes on as it was."""
    with configured(tmp_path / "home", model("a", llama)) as fleet:
        before = fleet.pids()
        fleet.file.unlink() if text is None else fleet.file.write_text(text)
        done = fleet.up.ctl("reload", check=False)
        assert done.returncode == 4
        assert "nothing was changed" in done.stderr
        assert message in done.stderr
        assert fleet.pids() == before
        assert status_of(fleet.up.url(), "a") == 200


@pytest.mark.slow
def test_what_needs_a_restart_is_named_and_flags_still_hold(tmp_path: Path, llama: Path) -> None:
    """`frontends` waits; the port of the flag is stronger than the file's, so that does not differ."""
    with configured(tmp_path / "home", model("a", llama)) as fleet:
        done = fleet.reload("[fleet]\nport = 1\nfrontends = 2\n" + model("a", llama))
        assert done["waiting"] == {"frontends": [1, 2]}
        assert "frontends = 2 needs a restart of the fleet (now 1)" in fleet.up.ctl("reload").stdout


@pytest.mark.slow
def test_a_model_that_cannot_load_fails_alone(tmp_path: Path, llama: Path) -> None:
    """The reload exits 4 with the reason; what else differed is applied, and a serves on."""
    script = {"bad": {"boot_error": ["bad_model", "its head is missing"]}}
    with configured(tmp_path / "home", model("a", llama), script=script) as fleet:
        done = fleet.reload(model("a", llama, 'aliases = ["x"]') + model("bad", llama), code=4)
        assert "its head is missing" in done["error"]["message"]
        assert [status_of(fleet.up.url(), name) for name in ("x", "bad")] == [200, 503]


def test_sighup_reloads_a_fleet_without_a_terminal(tmp_path: Path, llama: Path) -> None:
    """The new model serves; a broken file is told in the log, and the fleet goes on."""
    with configured(tmp_path / "home", model("a", llama)) as fleet:
        fleet.file.write_text(model("a", llama) + model("b", llama))
        fleet.up.signal(signal.SIGHUP)
        fleet.up.line("reloaded: b is new", 20)
        assert status_of(fleet.up.url(), "b") == 200
        fleet.file.write_text("[fleet]\nprot = 1\n")
        fleet.up.signal(signal.SIGHUP)
        fleet.up.line("mlxhost.toml:2:1: fleet.prot: unknown key")
        assert [status_of(fleet.up.url(), name) for name in ("a", "b")] == [200, 200]


@pytest.mark.slow
def test_keys_of_a_reload_hold_at_once(tmp_path: Path, llama: Path) -> None:
    """Without a key first, with one after, also for a frontend that starts later."""
    with configured(tmp_path / "home", model("a", llama)) as fleet:
        url = fleet.up.url()
        key = tmp_path / "home" / "k"
        key.write_text("0123456789abcdef")
        key.chmod(0o600)
        assert status_of(url, "a") == 200
        done = fleet.reload('[keys.me]\nfile = "k"\n' + model("a", llama))
        assert done["keys"] == ["me"]
        wait_for(lambda: status_of(url, "a") == 401)
        frontend = fleet.up.status()["frontends"][0]["pid"]
        processes = [p for p in fleet.up.descendants() if p.pid == frontend]
        processes[0].kill()
        wait_for(lambda: gone(processes))
        wait_for(lambda: fleet.up.status()["frontends"][0]["state"] == "ready", 20)
        assert status_of(url, "a") == 401


@pytest.mark.slow
def test_reloads_at_once_come_one_after_the_other(tmp_path: Path, llama: Path) -> None:
    """Ten signals while the file changes leave the fleet as the last file says."""
    with configured(tmp_path / "home", model("a", llama)) as fleet:
        for count in range(10):
            names = "b" if count % 2 else "c"
            fleet.file.write_text(model("a", llama) + model(names, llama))
            fleet.up.signal(signal.SIGHUP)
            time.sleep(0.05)
        fleet.reload(model("a", llama) + model("d", llama))
        wait_for(lambda: set(fleet.pids()) == {"a/0", "d/0"}, 30)
        assert [status_of(fleet.up.url(), name) for name in ("a", "d")] == [200, 200]


def test_reloaded_weights_stay_what_they_are() -> None:
    """A change of something else does not make later processes read the file's old weights again."""
    spec = ModelSpec("a", Path("/a"))
    state = new_fleet(name="f", url="", routing="round-robin", models=(spec,), frontends=0)
    model = state.models["a"]
    model.spec = replace(spec, path=Path("/checkpoint"))  # as after `ctl reload-weights`
    reload = Reload(cast(Any, SimpleNamespace(state=state)), cast(Any, None), cast(Any, None), None)
    reload._change(model, replace(spec, priority=3), ("priority",))
    assert (model.spec.path, model.spec.priority) == (Path("/checkpoint"), 3)
    reload._change(model, replace(spec, path=Path("/new")), ("path",))
    assert model.spec.path == Path("/new")


@pytest.mark.parametrize(("serving", "told"), [(False, []), (True, ["RELOADING=1", READY])])
def test_a_reload_while_the_fleet_starts_does_not_call_it_ready(serving: bool, told: list[str]) -> None:
    """A service manager hears of reloads only once it has heard that the fleet serves."""

    def read() -> Settings:
        raise UserError("a mistake")

    heard: list[str] = []
    manager = SimpleNamespace(reloading=lambda: heard.append("RELOADING=1"), tell=heard.append)
    core = cast(Any, SimpleNamespace(serving=serving))
    reload = Reload(core, cast(Any, None), cast(Any, None), Source(read, cast(Any, manager)))
    reply = asyncio.run(reload.run(b"", Ctl("1", "reload")))
    assert (reply.code, heard) == ("invalid", told)
