"""The dispatcher over real sockets: every row ends exactly once, whatever workers send."""

import asyncio
from typing import Any

import pytest
from support.dispatch_bench import SPEC, Bench, bench, fleet, until

from mlxhost.frontend import dispatch
from mlxhost.frontend.errors import Aborted, ApiError, InternalError, ShuttingDown, Unavailable, WorkerLost
from mlxhost.frontend.rows import Row
from mlxhost.wire import data
from mlxhost.wire.codec import encode
from mlxhost.wire.control import Fleet


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
        ({}, data.Finish.CANCELLED, Aborted),
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
    """When FLEET no longer lists the spawn as alive, rows that were seen end with worker_lost."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        made.peer()
        _, row = await made.row()
        row.shown = True
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
    """A peer that vanished is skipped: requests go to the replica that is still there, what it had too."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready"), (1, 1, "ready")))
        gone, there = made.peer("m/0"), made.peer("m/1")
        await until(lambda: made.dispatcher.router.usable("m") == 2)
        _, first = await made.row()
        await gone.receive()
        gone.socket.close(linger=0)
        await asyncio.sleep(0.2)
        for _ in range(4):
            _, row = await made.row()
            assert row.replica == ("m/1", 1)
        assert (await there.receive()).task == "generate"
        await until(lambda: first.replica == ("m/1", 1))
        assert not first.ended

    bench(body)


def test_no_reachable_replica_is_worker_lost() -> None:
    """When the only worker vanished between hello and ADD the client gets a retryable error."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        peer = made.peer()
        await made.row()
        peer.socket.close(linger=0)
        await asyncio.sleep(0.2)
        made.dispatcher.replay_for(0.1)
        _, row = await made.row()
        await asyncio.sleep(0.2)
        made.dispatcher.tick()
        assert isinstance(row.error, WorkerLost)
        assert "could not be reached" in str(row.error)
        assert row.error.retryable

    bench(body)


def test_what_was_dispatched_counts_until_a_report_includes_it() -> None:
    """Load reports take over ADDs up to last_seq; later ones stay on top of it; endings leave at once."""

    async def body(made: Bench) -> None:
        listed = fleet((0, 1, "ready"), routing="least-in-flight")
        made.dispatcher.on_fleet(listed)
        peer = made.peer()
        call = await made.dispatcher.start("m", [SPEC, SPEC, SPEC])
        columns = made.dispatcher.router.columns("m")
        assert (columns.in_flight(0), columns.kv_tokens(0)) == (4, 30)
        peer.out(load=data.Load(running=2, kv_tokens=20, kv_capacity=100, last_seq=2))
        await until(lambda: columns.credit_rows[0] == 1)
        assert (columns.in_flight(0), columns.kv_tokens(0), columns.capacity[0]) == (3, 30, 100)
        made.dispatcher.abort_row(call.rows[2], "x")
        assert (columns.in_flight(0), columns.kv_tokens(0)) == (2, 20)

    bench(body)


def test_policies_route_over_the_wire() -> None:
    """least-in-flight spreads a burst that no report has mentioned yet."""

    async def body(made: Bench) -> None:
        listed = fleet((0, 1, "ready"), (1, 1, "ready"), routing="least-in-flight")
        made.dispatcher.on_fleet(listed)
        for slot in ("m/0", "m/1"):
            made.peer(slot)
        await until(lambda: made.dispatcher.router.usable("m") == 2)
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
        row.shown = True
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
        row.shown = True
        await asyncio.sleep(0.1)
        made.dispatcher.tick()
        assert isinstance(row.error, WorkerLost)
        assert made.dispatcher.router.usable("m") == 0

    bench(body)


def test_unknown_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that no FLEET lists cannot fill the memory."""
    monkeypatch.setattr(dispatch, "MAX_UNKNOWN_PEERS", 2)

    async def body(made: Bench) -> None:
        for epoch in range(4):
            made.peer("x/0", epoch)
        await until(lambda: made.dispatcher.dropped["unknown_peer"] == 2)

    bench(body)


def test_an_error_in_a_stream_ends_that_row_only() -> None:
    """A sink that raises ends its row with a 500 and an ABORT to the worker; the other row of the OUT gets
    its ids, and a handler that is not waiting finds them in the row."""

    async def body(made: Bench) -> None:
        made.dispatcher.on_fleet(fleet((0, 1, "ready")))
        peer = made.peer()
        (bad_call, bad), (call, row) = await made.row(), await made.row()
        for _ in range(2):
            await peer.receive()
        got: list[int] = []

        def fails(_row: Row, _ids: list[int]) -> bool:
            raise ValueError("a bug")

        def takes(_row: Row, ids: list[int]) -> bool:
            got.extend(ids)
            return True

        bad_call.sink, call.sink = fails, takes
        peer.out((bad.handle, [1], 0), (row.handle, [2], 0))
        await until(lambda: row.tokens == [2])  # nobody waits for news yet
        row.take()
        await call.news()
        await bad_call.news()
        waiting = [asyncio.ensure_future(c.news()) for c in (bad_call, call)]
        await asyncio.sleep(0)
        peer.out((bad.handle, [3], 0), (row.handle, [4], 0))
        await until(lambda: got == [4])
        assert await waiting[0] == [bad]
        assert isinstance(bad.error, InternalError)
        assert not waiting[1].done()
        assert (await peer.receive()).rows == [(bad.handle, "the answer failed")]
        waiting[1].cancel()

    bench(body)
