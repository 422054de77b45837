"""Run directories: who is alive, who is dead, and what is swept."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlxhost.supervisor import rundir
from mlxhost.supervisor.sweep import created, sweep
from mlxhost.wire.sockets import ipc_endpoint


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXHOST_HOME", str(tmp_path / "h"))
    return tmp_path / "h"


def card(name: str) -> rundir.Card:
    return rundir.Card(os.getpid(), "ipc:///x", "http://127.0.0.1:1", name, time.time())


def die(run: rundir.RunDir) -> None:
    """What the kernel does for a process that was killed: its lock goes, its files stay."""
    os.close(run._lock_fd)


def test_a_fleet_is_found_until_it_is_removed(home: Path) -> None:
    """Held lock and card: alive. Removed: no trace."""
    run = rundir.RunDir.create()
    assert rundir.running_fleets() == []  # nothing to say yet
    run.publish(card(run.name))
    assert [c.name for c in rundir.running_fleets()] == [run.name]
    assert rundir.is_alive(run.name)
    run.remove()
    assert rundir.running_fleets() == []
    assert not rundir.is_alive(run.name)
    assert list((home / "run").iterdir()) == []


def test_a_dead_fleets_children_are_killed_and_its_directory_removed(home: Path) -> None:
    """The recorded process is ended with its group; the living fleet is left alone."""
    alive = rundir.RunDir.create()
    alive.publish(card(alive.name))
    dead = rundir.RunDir.create()
    dead.publish(card(dead.name))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as p:
        dead.record([rundir.Child("m/0", p.pid, created(p.pid))])
        assert sweep() == []
        die(dead)
        assert [child.slot for child in sweep()] == ["m/0"]
        assert p.wait(5) == -9
    assert [c.name for c in rundir.running_fleets()] == [alive.name]
    assert not dead.path.exists()
    alive.remove()


def test_another_process_that_got_the_same_id_is_left_alone(home: Path) -> None:
    """A process id that began at another time belongs to someone else."""
    dead = rundir.RunDir.create()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as p:
        dead.record([rundir.Child("m/0", p.pid, created(p.pid) - 3600)])
        die(dead)
        assert sweep() == []
        assert p.poll() is None
        p.kill()
    assert not dead.path.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe"])
def test_damaged_records_of_a_dead_fleet_do_not_stop_the_sweep(home: Path, content: bytes) -> None:
    """What cannot be read is removed."""
    dead = rundir.RunDir.create()
    for name in (rundir.CARD, rundir.CHILDREN):
        (dead.path / name).write_bytes(content)
    die(dead)
    assert rundir.running_fleets() == []
    assert sweep() == []
    assert not dead.path.exists()


def test_a_fleet_that_is_just_starting_is_not_swept(home: Path) -> None:
    """A directory without its final name is left alone while it is young."""
    young = home / "run" / ".new-abc"
    rundir.RunDir.create().remove()
    young.mkdir()
    assert sweep() == []
    assert young.exists()
    old = time.time() - 3600
    os.utime(young, (old, old))
    sweep()
    assert not young.exists()


def test_sockets_move_when_the_home_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ipc path has 103 bytes at most; the sockets then live in a private directory that goes, too."""
    monkeypatch.setenv("MLXHOST_HOME", str(tmp_path / ("h" * 100)))
    run = rundir.RunDir.create()
    assert run.sockets != run.path
    assert ipc_endpoint(run.sockets, "control")
    assert run.sockets.stat().st_mode & 0o777 == 0o700
    run.record([])
    die(run)
    sweep()
    assert not run.sockets.exists()
