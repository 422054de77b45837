"""CURVE connections: who gets in, who is told what, and what a dialer makes of it."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from mlxhost.wire import sockets
from mlxhost.wire.control import AllowedPeer
from mlxhost.wire.curve import (
    KEY,
    NAME,
    KeyPair,
    belongs_to,
    bind_tcp,
    host_slot,
    new_keys,
    parse_endpoint,
    serve_curve,
    supervisor_slot,
    tcp_endpoint,
)
from mlxhost.wire.dial import Change, Dialer
from mlxhost.wire.zap import Allowlist, bind_zap, user_of


class Server:
    """A CURVE ROUTER with an allowlist, answered in a thread."""

    def __init__(self) -> None:
        self.keys, self.allowlist = new_keys(), Allowlist()
        self.context = zmq.Context()
        self.zap = self.context.socket(zmq.REP)
        bind_zap(self.zap)
        self.router = self.context.socket(zmq.ROUTER)
        sockets.configure(self.router)
        serve_curve(self.router, self.keys)
        self.endpoint = tcp_endpoint("127.0.0.1", bind_tcp(self.router, "tcp://127.0.0.1:0"))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while not self._over.is_set():
            if self.zap.poll(20):
                self.zap.send_multipart(self.allowlist.answer(self.zap.recv_multipart()))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.context.destroy(linger=0)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def dial(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, keys: KeyPair, server_public: str
) -> Dialer:
    return Dialer(context, endpoint, keys, server_public, lambda n: sockets.identity("studio:m/0", 5, n))


def outcome(dialer: Dialer, timeout_s: float = 12.0) -> Change:
    """The next thing that happens to the connection."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if (change := dialer.pump()) is not Change.NOTHING:
            return change
        time.sleep(0.01)
    raise AssertionError("nothing happened")


def test_allowed_key_is_let_in_under_its_name(
    server: Server, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    """The handshake succeeds, and messages carry the allowlist's name for the sender."""
    keys = new_keys()
    server.allowlist.replace([AllowedPeer("studio", keys.public)])
    dialer = dial(context, server.endpoint, keys, server.keys.public)
    assert outcome(dialer) is Change.UP
    dialer.socket.send(b"hello")
    assert server.router.poll(5000)
    identity, body = server.router.recv_multipart(copy=False)
    assert user_of(body) == "studio"
    assert sockets.parse_identity(identity.bytes) == ("studio:m/0", 5)
    dialer.close()


def test_unknown_key_is_refused_and_counted(
    server: Server, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    """Without an allowlist entry a client that knows the server's key does not get in."""
    dialer = dial(context, server.endpoint, new_keys(), server.keys.public)
    assert outcome(dialer) is Change.FAILED
    assert dialer.code == "key"
    assert server.allowlist.refused["key"] == 1
    dialer.close()


def test_wrong_server_key_is_told_from_an_endpoint_that_is_down(
    server: Server, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    """Each kind of failure has a code of its own, within the connect deadline."""
    keys = new_keys()
    server.allowlist.replace([AllowedPeer("studio", keys.public)])
    wrong = dial(context, server.endpoint, keys, new_keys().public)
    assert outcome(wrong) is Change.FAILED
    assert wrong.code == "server_key"
    wrong.close()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    down = dial(context, f"tcp://127.0.0.1:{port}", keys, server.keys.public)
    assert outcome(down) is Change.FAILED
    assert down.code == "unreachable"
    down.close()


def test_dials_again_with_a_new_identity(server: Server, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """After an end the next connection has another number, so a ROUTER cannot take it for the old one."""
    keys = new_keys()
    dialer = dial(context, server.endpoint, keys, server.keys.public)
    assert outcome(dialer) is Change.FAILED
    first = dialer.connection
    server.allowlist.replace([AllowedPeer("studio", keys.public)])
    assert outcome(dialer) is Change.UP
    assert dialer.connection > first
    dialer.close()


def test_end_of_the_server_is_seen(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """A connection that was up goes down once, with a reason."""
    server = Server()
    keys = new_keys()
    server.allowlist.replace([AllowedPeer("studio", keys.public)])
    dialer = dial(context, server.endpoint, keys, server.keys.public)
    assert outcome(dialer) is Change.UP
    server.close()
    assert outcome(dialer) is Change.DOWN
    assert dialer.code == "cut"
    assert not dialer.up
    dialer.close()


@pytest.mark.parametrize(
    "request_",
    [
        [],
        [b"1.0", b"7"],
        [b"1.0", b"7", b"mlxhost", b"10.0.0.1", b"", b"NULL"],
        [b"2.0", b"7", b"mlxhost", b"10.0.0.1", b"", b"CURVE", b"k" * 32],
        [b"1.0", b"7", b"mlxhost", b"10.0.0.1", b"", b"PLAIN", b"user", b"password"],
    ],
)
def test_anything_but_curve_is_refused(request_: list[bytes]) -> None:
    """No other mechanism, version or shape of a request is let in; each is counted."""
    allowlist = Allowlist()
    assert allowlist.answer(request_)[2] == b"400"
    assert allowlist.refused["not_curve"] == 1


def test_replacing_the_allowlist_takes_names_away() -> None:
    """Only who is on the newest list is allowed."""
    allowlist = Allowlist()
    allowlist.replace([AllowedPeer("a", "k" * 40), AllowedPeer("b", "l" * 40)])
    allowlist.replace([AllowedPeer("b", "l" * 40)])
    assert (allowlist.allows("a"), allowlist.allows("b")) == (False, True)


@pytest.mark.parametrize(
    ("slot", "host", "allowed"),
    [
        ("studio:m/0", "studio", True),
        ("studio:org/m:x/3", "studio", True),
        ("host/studio", "studio", True),
        ("studio2:m/0", "studio", False),
        ("host/studio2", "studio", False),
        ("m/0", "studio", False),
        ("frontend/0", "studio", False),
        ("m/0", "", False),
    ],
)
def test_who_may_speak_for_a_slot(slot: str, host: str, allowed: bool) -> None:
    """A machine speaks for its own replicas and for its supervisor, and for nothing else."""
    assert belongs_to(slot, host) is allowed


def test_slots_of_a_machine_are_its_own() -> None:
    """What is built for a machine belongs to it."""
    assert belongs_to(host_slot("studio", "m/0"), "studio")
    assert belongs_to(supervisor_slot("studio"), "studio")


@pytest.mark.parametrize("text", ["tcp://h", "tcp://h:x", "ipc:///x", "h:1", "tcp://:1", "tcp://h:1/x", ""])
def test_other_endpoints_are_refused(text: str) -> None:
    """Only tcp://HOST:PORT is an endpoint."""
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        parse_endpoint(text)


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:80", "tcp://[::1]:80", "tcp://fleet.example:7777"])
def test_endpoint_round_trips(text: str) -> None:
    """IPv4, IPv6 and names come back as they were."""
    assert tcp_endpoint(*parse_endpoint(text)) == text


def test_keys_and_names_have_their_form() -> None:
    """Every made key is recognised; names are short and plain."""
    for _ in range(50):
        keys = new_keys()
        assert KEY.fullmatch(keys.public)
        assert KEY.fullmatch(keys.secret)
    assert NAME.fullmatch("studio-1.lab")
    for bad in ("", "a:b", "a/b", "-a", "a" * 21, "a b"):
        assert not NAME.fullmatch(bad)
