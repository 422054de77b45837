"""The dispatcher over real sockets: every row ends exactly once, whatever workers send."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from mlxhost.frontend import dispatch
from mlxhost.frontend.dispatch import Dispatcher
from mlxhost.frontend.errors import ApiError, InternalError, ShuttingDown, Unavailable, WorkerLost
from mlxhost.frontend.models import ModelTable
from mlxhost.frontend.rows import Call, Row, RowSpec
from mlxhost.wire import data, sockets
from mlxhost.wire.codec import decode, encode
from mlxhost.wire.control import Fleet, FleetModel, FleetReplica, ModelCard

SPEC = RowSpec("r", b"\1\0\0\0", 1, data.Sampling(), data.Limits(max_tokens=9))
CARD = ModelCard("/x", [], "llama", 10, [0])


def fleet(*replicas: tuple[int, int, str], routing: str = "round-robin", accepting: bool = True) -> Fleet:
    """A fleet with the model "m" and (index, epoch, state) replicas."""
    listed = [FleetReplica(f"m/{i}", i, e, s, max_model_len=100) for i, e, s in replicas]
    return Fleet(1, [], [FleetModel("m", [], listed, routing, CARD)], accepting)


class Peer:
    """The worker's end of the data socket."""

    def __init__(self, context: Any, endpoint: str, slot: str = "m/0", epoch: int = 1) -> None:
        self.epoch = epoch
        self.socket = context.socket(zmq.DEALER)
        sockets.configure(self.socket)
        self.socket.setsockopt(zmq.IDENTITY, sockets.identity(slot, epoch))
        self.socket.connect(endpoint)
        self.out()

    def out(self, *rows: tuple[int, list[int], int], epoch: int | None = None, **columns: Any) -> None:
        """OUT with (handle, ids, finish) rows."""
        load = columns.pop("load", data.Load(running=1))
        ids = [i for _, new, _ in rows for i in new]
        handles, counts = [r[0] for r in rows], [len(r[1]) for r in rows]
        finish = [r[2] for r in rows]
        message = data.Out(epoch or self.epoch, 1, load, handles, counts, ids, finish, **columns)
        self.socket.send_multipart(encode(message))

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    async def receive(self) -> Any:
        for _ in range(500):
            if self.socket.poll(0):
                return decode(self.socket.recv_multipart())[0]
            await asyncio.sleep(0.01)
        raise AssertionError("nothing came")


class Bench:
    """A dispatcher under test."""

    def __init__(self, directory: str) -> None:
        self.context = sockets.new_context(zmq.Context)
        self.endpoint = dispatch.data_endpoint(directory, "frontend/0", 1)
        self.dispatcher = Dispatcher(self.context, self.endpoint, ModelTable())
        self.peers: list[Peer] = []

    def peer(self, slot: str = "m/0", epoch: int = 1) -> Peer:
        self.peers.append(Peer(self.context, self.endpoint, slot, epoch))
        return self.peers[-1]

    async def row(self) -> tuple[Call, Row]:
        call = await self.dispatcher.start("m", [SPEC])
        return call, call.rows[0]


def bench(test: Callable[[Bench], Awaitable[None]]) -> None:
    """Run a test body with a bench that is cleaned up."""

    async def body() -> None:
        with tempfile.TemporaryDirectory(prefix="mlxh-") as directory:
            made = Bench(str(Path(directory)))
            try:
                await asyncio.wait_for(test(made), 20)
            finally:
                made.dispatcher.close()
                for peer in made.peers:
                    peer.socket.close(linger=0)
                made.context.term()

    asyncio.run(body())


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never held")


def test_a_row_lives_from_add_to_finish() -> None:
    """ADD carries handle, sequence and ids; tokens arrive in order; usage comes with the end."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        peer = made.peer()
        call, row = await made.row()
        add = await peer.receive()
        assert (add.handle, add.seq, add.limits.max_tokens) == (row.handle, 1, 9)
        peer.socket.send_multipart(encode(data.Accepted(add.handle, 3, 9)))
        peer.out((add.handle, [5, 6], 0))
        peer.out((add.handle, [7], data.Finish.LENGTH), completion_tokens=[3], cached_tokens=[3])
        await until(lambda: row.ended)
        assert (row.tokens, row.finish, row.completion_tokens, row.cached_tokens) == ([5, 6, 7], 2, 3, 3)
        assert await call.news() == [row]

    bench(body)


def test_nothing_ends_twice_or_counts_from_strangers() -> None:
    """Duplicate terminals, a foreign epoch, foreign identities and garbage change no row."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        peer, orphan = made.peer(), made.peer("m/0", 9)
        _, row = await made.row()
        peer.out((row.handle, [1], data.Finish.STOP), epoch=7)
        orphan.out((row.handle, [2], data.Finish.STOP))
        peer.send(b"\xc1")
        peer.send(b"\x93\xa3out\x00\xa0", b"\xc1 no msgpack")
        peer.send(b"\x93\xa3zzz\x00\xa0", b"\x90")
        peer.send(b"cos\nsystem\n(S'true'\ntR.", b"x", b"y")
        peer.socket.send_multipart(encode(data.Abort([(row.handle, "x")])))
        peer.socket.send_multipart(
            encode(data.Out(1, 1, data.Load(), [row.handle], [5], [1], [data.Finish.STOP]))
        )
        peer.socket.send_multipart(encode(data.Out(1, 1, data.Load(), [row.handle], [-1, 1], [], [99])))
        await until(lambda: sum(made.dispatcher.dropped.values()) == 8)
        assert not row.ended
        assert not row.tokens
        peer.out((row.handle, [4], data.Finish.STOP))
        peer.out((row.handle, [5], data.Finish.LENGTH), (1234, [6], 0))
        peer.socket.send_multipart(encode(data.Reject(row.handle, "internal", "late")))
        _, other = await made.row()
        peer.out((other.handle, [8], 0))
        await until(lambda: other.tokens)
        assert (row.tokens, row.finish, row.error) == ([4], data.Finish.STOP, None)
        assert made.dispatcher.dropped == {"epoch": 1, "undecodable": 4, "unexpected": 1, "columns": 2}

    bench(body)


@pytest.mark.parametrize(
    ("columns", "finish", "error"),
    [
        ({"detail": ["poison"]}, data.Finish.ERROR, InternalError),
        ({}, data.Finish.ERROR, InternalError),
        ({}, data.Finish.ABORT, WorkerLost),
    ],
)
def test_failed_rows_carry_a_typed_error(columns: dict[str, Any], finish: int, error: type[ApiError]) -> None:
    """A row that fails, or that its worker gives up, ends with the error that says so."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        peer = made.peer()
        _, row = await made.row()
        peer.out((row.handle, [], finish), **columns)
        await until(lambda: row.ended)
        assert isinstance(row.error, error)
        assert columns.get("detail", [""])[0] in str(row.error)

    bench(body)


def test_abort_reaches_the_worker_and_later_tokens_are_ignored() -> None:
    """An aborted row is forgotten here at once and stopped there; aborting again sends nothing."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        peer = made.peer()
        call, row = await made.row()
        await peer.receive()
        made.dispatcher.abort(call, "gone")
        made.dispatcher.abort(call, "gone")
        assert (await peer.receive()).rows == [(row.handle, "gone")]
        peer.out((row.handle, [1], data.Finish.ABORT))
        _, other = await made.row()
        assert (await peer.receive()).handle == other.handle
        peer.out((other.handle, [2], 0))
        await until(lambda: other.tokens)
        assert not row.tokens
        assert not row.ended

    bench(body)


@pytest.mark.parametrize(
    "after",
    [fleet((0, 2, "loading")), fleet((0, 1, "backoff")), fleet(), Fleet(2, [], [])],
    ids=["respawned", "backoff", "no replica", "no model"],
)
def test_rows_of_a_dead_replica_are_lost_at_once(after: Fleet) -> None:
    """When FLEET no longer lists the spawn as alive its rows end with worker_lost, and no others do."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        made.peer()
        _, row = await made.row()
        made.dispatcher.on_fleet(after)
        assert isinstance(row.error, WorkerLost)

    bench(body)


def test_draining_keeps_rows_and_takes_no_new_ones() -> None:
    """A draining replica finishes what it has; new requests are refused with the state."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        peer = made.peer()
        _, row = await made.row()
        made.dispatcher.on_fleet(fleet((0, 1, "draining")))
        with pytest.raises(Unavailable, match="is draining"):
            await made.row()
        peer.out((row.handle, [1], data.Finish.STOP))
        await until(lambda: row.finish is data.Finish.STOP)

    bench(body)


def test_a_request_waits_briefly_for_the_data_link() -> None:
    """Ready in FLEET but not yet connected: the request is sent as soon as the worker says hello."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        starting = asyncio.create_task(made.row())
        await asyncio.sleep(0.1)
        assert not starting.done()
        made.peer()
        _, row = await starting
        assert row.replica == ("m/0", 1)

    bench(body)


def test_the_wait_for_the_data_link_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that never connects costs the client a bounded wait and a retryable 503."""
    monkeypatch.setattr(dispatch, "CONNECT_WAIT_S", 0.1)

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        with pytest.raises(Unavailable, match="not connected") as caught:
            await made.row()
        assert caught.value.retryable

    bench(body)


def test_waiting_requests_see_shutdown() -> None:
    """A request that waits for a data link is refused when admission stops."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        starting = asyncio.create_task(made.row())
        await asyncio.sleep(0.05)
        made.dispatcher.on_fleet(fleet((0, 1, "ready"), accepting=False))
        with pytest.raises(ShuttingDown):
            await starting

    bench(body)


def test_a_broken_link_moves_requests_to_another_replica() -> None:
    """A peer that vanished is skipped: the request goes to the replica that is still there."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready"), (1, 1, "ready")))
        gone, there = made.peer("m/0"), made.peer("m/1")
        await until(
            lambda: len(made.dispatcher.routable(fleet((0, 1, "ready"), (1, 1, "ready")).models[0])) == 2
        )
        _, first = await made.row()
        await gone.receive()
        gone.socket.close(linger=0)
        await asyncio.sleep(0.2)
        for _ in range(4):
            _, row = await made.row()
            assert row.replica == ("m/1", 1)
        assert (await there.receive()).task == "generate"
        assert isinstance(first.error, WorkerLost)

    bench(body)


def test_no_reachable_replica_is_worker_lost() -> None:
    """When the only worker vanished between hello and ADD the client gets a retryable error."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        peer = made.peer()
        await made.row()
        peer.socket.close(linger=0)
        await asyncio.sleep(0.2)
        with pytest.raises(WorkerLost, match="could not be reached"):
            await made.row()

    bench(body)


def test_what_was_dispatched_counts_until_a_report_includes_it() -> None:
    """Load reports take over ADDs up to last_seq; later ones stay on top of it; endings leave at once."""

    async def body(made: Bench) -> None:
        listed = fleet((0, 1, "ready"), routing="least-in-flight")
        made.dispatcher.on_fleet(listed)
        peer = made.peer()
        call = await made.dispatcher.start("m", [SPEC, SPEC, SPEC])
        replica = made.dispatcher.routable(listed.models[0])[0]
        assert (replica.candidate.in_flight, replica.candidate.kv_tokens) == (4, 30)
        peer.out(load=data.Load(running=2, kv_tokens=20, kv_capacity=100, last_seq=2))
        await until(lambda: replica.load.last_seq == 2)
        assert (replica.candidate.in_flight, replica.candidate.kv_ratio) == (3, 0.3)
        made.dispatcher.abort_row(call.rows[2], "x")
        assert (replica.candidate.in_flight, replica.candidate.kv_tokens) == (2, 20)

    bench(body)


def test_policies_route_over_the_wire() -> None:
    """least-in-flight spreads a burst that no report has mentioned yet."""

    async def body(made: Bench) -> None:
        listed = fleet((0, 1, "ready"), (1, 1, "ready"), routing="least-in-flight")
        made.dispatcher.on_fleet(listed)
        for slot in ("m/0", "m/1"):
            made.peer(slot)
        await until(lambda: len(made.dispatcher.routable(listed.models[0])) == 2)
        call = await made.dispatcher.start("m", [SPEC] * 6)
        slots = [row.replica[0] for row in call.rows]
        assert (slots.count("m/0"), slots.count("m/1")) == (3, 3)

    bench(body)


def test_a_row_that_its_worker_forgot_is_given_up() -> None:
    """A worker that reports for seconds that it has nothing to do lost our row: it ends, none hangs."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        peer = made.peer()
        _, row = await made.row()
        peer.out(load=data.Load(last_seq=1))
        await asyncio.sleep(0.1)
        for _ in range(dispatch.IDLE_TICKS):
            made.dispatcher.tick()
        assert not row.ended
        made.dispatcher.tick()
        assert isinstance(row.error, WorkerLost)

    bench(body)


def test_a_silent_worker_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However healthy the supervisor believes a worker to be, silence has an end."""
    monkeypatch.setattr(dispatch, "SILENCE_S", 0.05)

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        made.peer()
        _, row = await made.row()
        await asyncio.sleep(0.1)
        made.dispatcher.tick()
        assert isinstance(row.error, WorkerLost)

    bench(body)


def test_unknown_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that no FLEET lists cannot fill the memory."""
    monkeypatch.setattr(dispatch, "MAX_UNKNOWN_PEERS", 2)

    async def body(made: Bench) -> None:
        for epoch in range(4):
            made.peer("x/0", epoch)
        await until(lambda: made.dispatcher.dropped["unknown_peer"] == 2)

    bench(body)
