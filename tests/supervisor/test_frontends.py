"""Several frontends on one port, before the same workers."""

import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.supervisor_up import Stream, Up, serving, status_of, wait_for

from mlxhost.supervisor import port
from mlxhost.supervisor.errors import PortError

pytestmark = pytest.mark.slow

FRONTENDS = 3


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]) -> Iterator[Up]:
    model = f"m={tiny_models['llama']}:2"
    script = {"length": 100_000, "step_ms": 5.0, "max_rows": 64, "max_model_len": 100_000}
    options = ("--frontends", str(FRONTENDS), "--routing", "round-robin")
    with serving(tmp_path_factory.mktemp("home"), model, *options, script=script) as running:
        yield running


def frontends(up: Up) -> dict[str, dict[str, int]]:
    return {f["slot"]: f for f in up.status()["frontends"]}


def test_connections_are_shared_out(up: Up) -> None:
    """Of 48 streams every frontend has some and none has most; the workers have all of them, in halves."""
    streams = [Stream(up.url(), "m", 2000) for _ in range(48)]
    for stream in streams:
        stream.begun()

    def shared() -> tuple[list[int], list[int]] | None:
        """Rows by frontend and by worker, once all have been reported."""
        status = up.status()
        ours = sorted(f["in_flight"] for f in status["frontends"])
        theirs = sorted(r["in_flight"] for r in status["models"][0]["replicas"])
        return (ours, theirs) if sum(ours) == sum(theirs) == 48 else None

    ours, theirs = wait_for(shared, 8)
    assert len(ours) == FRONTENDS
    assert ours[0] >= 4
    assert ours[-1] <= 32
    assert theirs[0] >= 24 - FRONTENDS  # each frontend takes its own turns
    for stream in streams:
        assert stream.join(60).finish == "length"


def test_a_frontends_death_touches_its_own_streams_only(up: Up) -> None:
    """SIGKILL: its streams break and its rows are stopped, those of the others go on; it is started again
    at once, and connections made meanwhile are served."""
    streams = [Stream(up.url(), "m", 1000) for _ in range(24)]
    for stream in streams:
        stream.begun()
    wait_for(lambda: sum(f["in_flight"] for f in frontends(up).values()) == 24, 5)
    victim = max(frontends(up).values(), key=lambda f: f["in_flight"])
    os.kill(victim["pid"], signal.SIGKILL)
    statuses = [status_of(up.url(), "m") for _ in range(12)]
    assert statuses == [200] * 12
    up.line("restarting in 0.1 s")
    wait_for(lambda: frontends(up)[str(victim["slot"])]["state"] == "ready", 10)
    outcomes = Counter(s.join(60).finish == "length" for s in streams)
    assert outcomes == {False: victim["in_flight"], True: 24 - victim["in_flight"]}
    wait_for(lambda: all(up.replica(f"m/{i}")["in_flight"] == 0 for i in (0, 1)), 5)


@pytest.mark.parametrize("count", [1, 4])
def test_the_port_is_ours_alone(count: int) -> None:
    """However many sockets share it, another fleet can neither bind the port nor listen on it."""
    first = port.bind("127.0.0.1", 0)
    number = first.getsockname()[1]
    early = port.bind("127.0.0.1", number)  # bound before we listen
    port.listen(first)
    sockets = port.share(first, count)
    try:
        assert len(sockets) == count
        with pytest.raises(PortError, match=str(number)):
            port.listen(early)
        with pytest.raises(PortError, match=str(number)):
            port.bind("127.0.0.1", number)
        clients = [socket.create_connection(("127.0.0.1", number), 5) for _ in range(64)]
        for client in clients:
            client.close()
    finally:
        for each in {*sockets, early}:
            each.close()
