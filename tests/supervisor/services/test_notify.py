"""sd_notify: what a real socket gets from a real fleet, and what the protocol asks for."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.supervisor_up import Up, wait_for

from mlxhost.supervisor.notify import WATCHDOG, Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A service manager's socket and its address."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(address)
        bound.settimeout(20)
        yield bound, address


def test_nothing_is_told_without_a_manager() -> None:
    """No socket, or a name that is none: telling does nothing."""
    for environment in ({}, {"NOTIFY_SOCKET": "relative"}):
        notifier = Notifier(environment)
        assert not notifier
        notifier.tell("READY=1")
        notifier.close()


def test_variables_are_taken_out_of_the_environment(manager: tuple[socket.socket, str]) -> None:
    """Children must not speak for the service; the watchdog of another process is not ours."""
    _, address = manager
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1", "OTHER": "x"}
    notifier = Notifier(environment)
    assert (environment, notifier.watchdog_s) == ({"OTHER": "x"}, 0.0)
    notifier.close()
    ours = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())})
    assert ours.watchdog_s == 1.5
    ours.close()


def test_an_abstract_address_and_a_reload(tmp_path: Path) -> None:
    """@name is in the abstract namespace; RELOADING=1 carries the time, one datagram a message."""
    name = f"mlxhost-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(f"\0{name}")
        bound.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": f"@{name}"})
        notifier.reloading()
        notifier.status("one\ntwo")
        first, time_line = bound.recv(4096).decode().split("\n")
        assert (first, time_line.partition("=")[0]) == ("RELOADING=1", "MONOTONIC_USEC")
        assert abs(int(time_line.partition("=")[2]) / 1e6 - time.monotonic()) < 5
        assert bound.recv(4096) == b"STATUS=one two"
        notifier.close()


def test_a_manager_that_does_not_read_holds_nothing_up(manager: tuple[socket.socket, str]) -> None:
    """Ten thousand messages into a full socket return at once."""
    notifier = Notifier({"NOTIFY_SOCKET": manager[1]})
    for _ in range(10_000):
        notifier.tell(WATCHDOG)
    notifier.close()


def test_a_fleet_tells_ready_once_it_serves_feeds_the_watchdog_and_tells_its_end(
    tmp_path: Path,
    tiny_models: dict[str, Path],
    manager: tuple[socket.socket, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """STATUS while it loads, READY=1 when all is ready, WATCHDOG=1 in time, RELOADING=1, STOPPING=1."""
    bound, address = manager
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "600000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    told: list[str] = []

    def read() -> list[str]:
        told.append(bound.recv(4096).decode())
        return told

    with Up(tmp_path / "home", f"m={tiny_models['llama']}", script={"load_s": 0.5}) as up:
        wait_for(lambda: "READY=1" in read(), 30)
        assert any(line.endswith("1 loading") for line in told if line.startswith("STATUS="))
        at = len(told)
        wait_for(lambda: read()[at:].count(WATCHDOG) >= 3, 20)
        assert any(line.endswith(": 1 ready") for line in told)
        for process in up.descendants():
            assert "NOTIFY_SOCKET" not in process.environ()
        at = len(told)
        up.signal(signal.SIGHUP)  # there is no file to read again: told to the manager all the same
        wait_for(lambda: "READY=1" in read()[at:], 20)
        assert any(line.startswith("RELOADING=1\nMONOTONIC_USEC=") for line in told[at:])
        up.signal(signal.SIGTERM)
        wait_for(lambda: "STOPPING=1" in read(), 20)
        assert up.exit_code() == 0
