"""A machine that joins a fleet serves for it, leaves it, and comes back after a cut."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.proxy import Proxy
from support.remote import Fleet, Join, new_bundle
from support.supervisor_up import Stream, posted, status_of, wait_for

SLOW_ROWS = {"length": 100_000, "step_ms": 20}
OTHER_LOOPBACK = "127.0.0.2"  # where the proxies are: the address that the fleet advertises


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


def stream(fleet: Fleet, model: str) -> Stream:
    return Stream(fleet.url(), model, 5000).begun()


def test_a_machine_serves_a_model_that_only_it_has(tmp_path: Path, llama: Path) -> None:
    """It becomes a model of the fleet, is listed with its machine, and answers; when the machine leaves, the
    model is gone."""
    bundle = new_bundle(tmp_path / "here")
    with (
        Fleet(tmp_path / "here") as fleet,
        Join(tmp_path / "there", fleet.endpoint, bundle, f"m={llama}") as join,
    ):
        fleet.wait_ready("studio:m/0")
        assert status_of(fleet.url(), "m") == 200
        assert "studio:0" in fleet.ctl("status").stdout
        assert join.replica("studio:m/0")["lease_bytes"] > 1, "its memory is shared out there"
        (host,) = fleet.remote()["hosts"]
        assert (host["name"], host["connected"]) == ("studio", True)
        join.signal(signal.SIGTERM)
        assert join.exit_code() == 0
        fleet.line("studio left")
        assert status_of(fleet.url(), "m") == 404


def test_a_machine_adds_replicas_to_a_model_of_the_fleet(tmp_path: Path, llama: Path) -> None:
    """The model has one local and two remote replicas with indices of their own, and all are used."""
    bundle = new_bundle(tmp_path / "here")
    with (
        Fleet(tmp_path / "here", f"m={llama}", "--routing", "round-robin") as fleet,
        Join(tmp_path / "there", fleet.endpoint, bundle, f"m={llama}:2"),
    ):
        for slot in ("m/0", "studio:m/0", "studio:m/1"):
            fleet.wait_ready(slot)
        (model,) = fleet.status()["models"]
        assert [r["slot"] for r in model["replicas"]] == ["m/0", "studio:m/0", "studio:m/1"]
        for _ in range(6):
            assert status_of(fleet.url(), "m") == 200
        answers = fleet.ctl("call", "m", "health", "--json").stdout
        assert all(slot in answers for slot in ("m/0", "studio:m/0", "studio:m/1"))
        assert '"emitted": 0' not in answers


def test_other_files_under_the_same_name_are_not_mixed(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """A remote replica whose files differ from the local model's is failed with their names, and requests go
    on to the local one."""
    bundle = new_bundle(tmp_path / "here")
    with (
        Fleet(tmp_path / "here", f"m={tiny_models['llama']}") as fleet,
        Join(tmp_path / "there", fleet.endpoint, bundle, f"m={tiny_models['qwen3']}"),
    ):
        wait_for(lambda: fleet.state_of("studio:m/0") == "failed", 15)
        assert "config.json" in next(
            r["reason"] for m in fleet.status()["models"] for r in m["replicas"] if r["host"]
        )
        assert [status_of(fleet.url(), "m") for _ in range(3)] == [200] * 3


def test_a_remote_worker_that_dies_is_restarted_by_its_own_machine(tmp_path: Path, llama: Path) -> None:
    """SIGKILL there ends its stream here with worker_lost within two seconds, and the replica comes back."""
    bundle = new_bundle(tmp_path / "here")
    with (
        Fleet(tmp_path / "here") as fleet,
        Join(tmp_path / "there", fleet.endpoint, bundle, f"m={llama}", script=SLOW_ROWS) as join,
    ):
        fleet.wait_ready("studio:m/0")
        lost = stream(fleet, "m")
        os.kill(join.replica("studio:m/0")["pid"], signal.SIGKILL)
        killed_at = time.monotonic()
        lost.join()
        assert lost.ended_at - killed_at < 2.0
        assert lost.error is not None
        assert lost.error["code"] == "worker_lost"
        wait_for(lambda: join.replica("studio:m/0")["state"] == "ready")
        fleet.wait_ready("studio:m/0")
        assert status_of(fleet.url(), "m") == 200


@pytest.mark.slow
def test_a_machine_whose_supervisor_is_killed_is_lost_at_once(tmp_path: Path, llama: Path) -> None:
    """Its stream ends within four seconds; requests are then told to retry, not of a model unknown."""
    bundle = new_bundle(tmp_path / "here")
    with (
        Fleet(tmp_path / "here") as fleet,
        Join(tmp_path / "there", fleet.endpoint, bundle, f"m={llama}", script=SLOW_ROWS) as join,
    ):
        fleet.wait_ready("studio:m/0")
        lost = stream(fleet, "m")
        join.process.kill()
        killed_at = time.monotonic()
        lost.join()
        assert lost.ended_at - killed_at < 4.0
        wait_for(lambda: fleet.state_of("studio:m/0") == "backoff")
        with posted(fleet.url(), "m") as response:
            assert response.status == 503
            assert response.headers["Retry-After"]


def test_leaving_finishes_what_runs(tmp_path: Path, llama: Path) -> None:
    """SIGTERM to the machine's supervisor: its stream goes on to the end, new requests do not go there."""
    bundle = new_bundle(tmp_path / "here")
    script = {"length": 100, "step_ms": 20}
    with (
        Fleet(tmp_path / "here") as fleet,
        Join(tmp_path / "there", fleet.endpoint, bundle, f"m={llama}", script=script) as join,
    ):
        fleet.wait_ready("studio:m/0")
        last = Stream(fleet.url(), "m", 100).begun()
        join.signal(signal.SIGTERM)
        fleet.line("studio is leaving")
        wait_for(lambda: fleet.state_of("studio:m/0") in ("draining", ""))
        assert status_of(fleet.url(), "m") in (503, 404)
        assert last.join().finish in ("length", "stop")
        assert join.exit_code() == 0


def test_a_new_frontend_is_dialled(tmp_path: Path, llama: Path) -> None:
    """SIGKILL of the frontend: remote workers connect to its successor's new address."""
    bundle = new_bundle(tmp_path / "here")
    with (
        Fleet(tmp_path / "here") as fleet,
        Join(tmp_path / "there", fleet.endpoint, bundle, f"m={llama}"),
    ):
        fleet.wait_ready("studio:m/0")
        assert status_of(fleet.url(), "m") == 200
        os.kill(fleet.status()["frontends"][0]["pid"], signal.SIGKILL)
        fleet.line("frontend/0: lost")
        wait_for(lambda: status_of(fleet.url(), "m") == 200, 15)


@pytest.mark.slow
def test_operations_reach_a_remote_model(tmp_path: Path, llama: Path) -> None:
    """drain and resume close and open it here; unload ends its process there, and load starts it again."""
    bundle = new_bundle(tmp_path / "here")
    with (
        Fleet(tmp_path / "here") as fleet,
        Join(tmp_path / "there", fleet.endpoint, bundle, f"m={llama}") as join,
    ):
        fleet.wait_ready("studio:m/0")
        assert "studio:m/0 drained" in fleet.ctl("drain", "m").stdout
        assert status_of(fleet.url(), "m") == 503
        fleet.ctl("resume", "m")
        fleet.wait_ready("studio:m/0")
        assert "studio:m/0 flushed" in fleet.ctl("flush", "m").stdout
        assert "studio:m/0 unloaded" in fleet.ctl("unload", "m").stdout
        assert join.replica("studio:m/0")["pid"] is None
        fleet.ctl("load", "m")
        fleet.wait_ready("studio:m/0")
        assert status_of(fleet.url(), "m") == 200


class Cable:
    """A fleet and a machine with a proxy on every connection between them."""

    def __init__(self, home: Path, llama: Path, stack: ExitStack, **network: float) -> None:
        bundle = new_bundle(home / "here")
        self.fleet = stack.enter_context(Fleet(home / "here", "", "--advertise", OTHER_LOOPBACK))
        self.fleet.url()
        port = int(self.fleet.endpoint.rpartition(":")[2])
        data = self.fleet.status()["frontends"][0]["remote_endpoint"]
        ports = (port, int(data.rpartition(":")[2]))
        self.proxies = [
            stack.enter_context(Proxy((OTHER_LOOPBACK, p), ("127.0.0.1", p), **network)) for p in ports
        ]
        self.join = stack.enter_context(
            Join(home / "there", self.fleet.endpoint, bundle, f"m={llama}", script=SLOW_ROWS)
        )
        self.fleet.wait_ready("studio:m/0")

    def each(self, what: str) -> None:
        for proxy in self.proxies:
            getattr(proxy, what)()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as entered:
        yield entered


@pytest.mark.slow
@pytest.mark.parametrize(("what", "bound_s"), [("silence", 6.0), ("cut", 4.0)])
def test_a_cut_ends_streams_in_time_and_a_heal_brings_the_replica_back(
    tmp_path: Path, llama: Path, stack: ExitStack, what: str, bound_s: float
) -> None:
    """Told (connections closed) or not (nothing gets through): the stream ends with worker_lost, and after
    the heal the same, still loaded process serves again; the fleet was not restarted."""
    cable = Cable(tmp_path, llama, stack)
    pid = cable.join.replica("studio:m/0")["pid"]
    lost = stream(cable.fleet, "m")
    cable.each(what)
    cut_at = time.monotonic()
    lost.join()
    assert lost.ended_at - cut_at < bound_s
    assert lost.error is not None
    assert lost.error["code"] == "worker_lost"
    wait_for(lambda: cable.fleet.state_of("studio:m/0") == "backoff")
    cable.each("heal")
    cable.fleet.wait_ready("studio:m/0", 20)
    wait_for(lambda: status_of(cable.fleet.url(), "m") == 200, 15)
    assert cable.join.replica("studio:m/0")["pid"] == pid


def test_a_slow_and_lossy_network_changes_no_answer(tmp_path: Path, llama: Path, stack: ExitStack) -> None:
    """40 ms each way and one piece in twenty held up: the stream comes whole, with every token."""
    cable = Cable(tmp_path, llama, stack, latency_s=0.04, loss=0.05)
    done: Any = Stream(cable.fleet.url(), "m", 60).join()
    assert done.finish == "length"
    usage = [c for e in done.events for c in e.get("choices", []) if c.get("text")]
    assert usage
