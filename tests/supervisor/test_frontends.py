"""Several frontends on one port, before the same workers."""

import os
import signal
import socket
import time
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
    streams = [Stream(up.url(), "m", 800) for _ in range(48)]
    for stream in streams:
        stream.begun()
    wait_for(lambda: sum(f["in_flight"] for f in frontends(up).values()) == 48, 5)
    shares = sorted(f["in_flight"] for f in frontends(up).values())
    assert len(shares) == FRONTENDS
    assert shares[0] >= 4
    assert shares[-1] <= 32
    wait_for(lambda: sum(up.replica(f"m/{i}")["in_flight"] for i in (0, 1)) == 48, 5)
    rows = [up.replica(f"m/{i}")["in_flight"] for i in (0, 1)]
    assert min(rows) >= 24 - FRONTENDS  # each frontend takes its own turns
    for stream in streams:
        assert stream.join(60).finish == "length"


def test_a_frontends_death_touches_its_own_streams_only(up: Up) -> None:
    """SIGKILL: its streams break and its rows are stopped, those of the others go on; a second later it is
    back, and connections made meanwhile are served."""
    streams = [Stream(up.url(), "m", 1000) for _ in range(24)]
    for stream in streams:
        stream.begun()
    wait_for(lambda: sum(f["in_flight"] for f in frontends(up).values()) == 24, 5)
    victim = max(frontends(up).values(), key=lambda f: f["in_flight"])
    os.kill(victim["pid"], signal.SIGKILL)
    killed = time.monotonic()
    statuses = [status_of(up.url(), "m") for _ in range(12)]
    assert statuses == [200] * 12
    wait_for(lambda: frontends(up)[str(victim["slot"])]["state"] == "ready", 5)
    assert time.monotonic() - killed < 3.0  # a new Python process on a busy machine
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
