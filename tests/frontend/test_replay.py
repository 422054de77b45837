"""Rows whose worker is lost before the client saw anything: started anew once, or ended for a reason."""

import pytest
from support.dispatch_bench import SPEC, Bench, Peer, bench, fleet, until

from mlxhost.frontend.errors import WorkerLost
from mlxhost.frontend.rows import Row
from mlxhost.wire import data


async def running(made: Bench, *replicas: tuple[int, int, str]) -> tuple[Peer, Row]:
    """A row that its worker (m/0, first of `replicas`) has answered two tokens of."""
    made.dispatcher.on_fleet(fleet(*replicas))
    peers = [made.peer(f"m/{index}", epoch) for index, epoch, state in replicas if state == "ready"]
    await until(lambda: made.dispatcher.router.usable("m") == len(peers))
    _, row = await made.row()
    assert row.replica == ("m/0", 1)
    await peers[0].receive()
    peers[0].out((row.handle, [5, 6], 0))
    await until(lambda: row.received == 2)
    return peers[-1], row


def test_another_replica_takes_over_at_once() -> None:
    """The same ADD goes to a live replica; what the first one said is void, and the answer counts once."""

    async def body(made: Bench) -> None:
        other, row = await running(made, (0, 1, "ready"), (1, 1, "ready"))
        made.dispatcher.on_fleet(fleet((0, 1, "backoff"), (1, 1, "ready")))
        add = await other.receive()
        assert (add.request_id, add.limits, add.handle) == (SPEC.request_id, SPEC.limits, row.handle)
        assert (row.tokens, row.received, row.attempt) == ([], 0, 2)
        other.out((add.handle, [5, 6, 7], data.Finish.STOP), completion_tokens=[3])
        await until(lambda: row.ended)
        assert (row.tokens, row.completion_tokens, row.error) == ([5, 6, 7], 3, None)

    bench(body)


def test_the_respawned_replica_takes_over_when_it_is_ready() -> None:
    """With no other replica the row waits for the next spawn, through backoff and loading."""

    async def body(made: Bench) -> None:
        _, row = await running(made, (0, 1, "ready"))
        for state in ("backoff", "starting", "loading", "ready"):
            made.dispatcher.on_fleet(fleet((0, 2, state)))
            made.dispatcher.tick()
            assert not row.ended
        peer = made.peer("m/0", 2)
        assert (await peer.receive()).handle == row.handle
        assert row.replica == ("m/0", 2)

    bench(body)


def test_a_second_loss_ends_the_row() -> None:
    """One replay, not two: a request that takes its workers with it is not worth a third."""

    async def body(made: Bench) -> None:
        _, row = await running(made, (0, 1, "ready"), (1, 1, "ready"))
        made.dispatcher.on_fleet(fleet((0, 1, "backoff"), (1, 1, "ready")))
        await until(lambda: row.replica == ("m/1", 1))
        made.dispatcher.on_fleet(fleet((0, 2, "ready"), (1, 1, "backoff")))
        assert isinstance(row.error, WorkerLost)
        assert not row.error.retryable

    bench(body)


def test_what_the_client_saw_is_not_taken_back() -> None:
    """A row of which something was sent to the client ends, retryable, though another replica is there."""

    async def body(made: Bench) -> None:
        _, row = await running(made, (0, 1, "ready"), (1, 1, "ready"))
        row.shown = True
        made.dispatcher.on_fleet(fleet((0, 1, "backoff"), (1, 1, "ready")))
        assert isinstance(row.error, WorkerLost)
        assert row.error.retryable

    bench(body)


def test_the_wait_has_an_end() -> None:
    """No replica in time: worker_lost, retryable, naming the wait."""

    async def body(made: Bench) -> None:
        made.dispatcher.replay_for(0.05)
        _, row = await running(made, (0, 1, "ready"))
        made.dispatcher.on_fleet(fleet((0, 2, "loading")))
        assert not row.ended
        await until(lambda: made.dispatcher.tick() or row.ended)
        assert isinstance(row.error, WorkerLost)
        assert "0.05 s" in str(row.error)
        assert row.error.retryable

    bench(body)


@pytest.mark.parametrize(
    ("state", "accepting", "words", "retryable"),
    [("failed", True, "is failed", False), ("backoff", False, "shutting down", True)],
)
def test_no_wait_without_hope(state: str, accepting: bool, words: str, retryable: bool) -> None:
    """A model that was given up, or a server that stops, ends the row at once."""

    async def body(made: Bench) -> None:
        _, row = await running(made, (0, 1, "ready"))
        made.dispatcher.on_fleet(fleet((0, 2, state), accepting=accepting))
        await until(lambda: row.ended)
        assert isinstance(row.error, WorkerLost)
        assert words in str(row.error)
        assert row.error.retryable == retryable

    bench(body)


def test_nobody_waits_nothing_is_started() -> None:
    """A client that leaves while its row waits for a worker leaves nothing behind."""

    async def body(made: Bench) -> None:
        _, row = await running(made, (0, 1, "ready"))
        made.dispatcher.on_fleet(fleet((0, 2, "loading")))
        made.dispatcher.abort(row.call, "the client went away")
        made.dispatcher.on_fleet(fleet((0, 2, "ready")))
        made.peer("m/0", 2)
        await until(lambda: made.dispatcher.router.usable("m"))
        _, other = await made.row()
        assert other.handle == row.handle + 1
        assert row.replica == ("m/0", 1)

    bench(body)
