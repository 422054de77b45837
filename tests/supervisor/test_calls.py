"""Control calls to workers, and waiting for changes."""

import asyncio

from mlxhost.supervisor.calls import Calls, Peer
from mlxhost.supervisor.changes import Changes
from mlxhost.wire.control import Ctl, Reply


class Outbox:
    """Where CTLs go instead of a socket."""

    def __init__(self, *, takes: bool = True) -> None:
        self.sent: list[tuple[Peer, Ctl]] = []
        self._takes = takes

    def send(self, peer: Peer, ctl: Ctl) -> bool:
        self.sent.append((peer, ctl))
        return self._takes


def test_each_call_gets_its_own_answer() -> None:
    """Answers are matched by call id, in whatever order they come."""

    async def run() -> None:
        outbox = Outbox()
        calls = Calls(outbox.send)
        one = asyncio.create_task(calls.call(("a", 1), "flush", {}, 5))
        two = asyncio.create_task(calls.call(("b", 1), "flush", {}, 5))
        await asyncio.sleep(0)
        for peer, ctl in reversed(outbox.sent):
            calls.on_reply(peer, Reply(ctl.call_id, result={"of": peer[0]}))
        assert [(await one).result, (await two).result] == [{"of": "a"}, {"of": "b"}]

    asyncio.run(run())


def test_answers_of_others_and_second_answers_are_dropped() -> None:
    """Only the process that was asked can answer, and only once."""

    async def run() -> None:
        outbox = Outbox()
        calls = Calls(outbox.send)
        call = asyncio.create_task(calls.call(("a", 2), "flush", {}, 5))
        await asyncio.sleep(0)
        call_id = outbox.sent[0][1].call_id
        calls.on_reply(("a", 1), Reply(call_id, result={"from": "predecessor"}))
        calls.on_reply(("a", 2), Reply("unknown"))
        calls.on_reply(("a", 2), Reply(call_id, result={"from": "it"}))
        calls.on_reply(("a", 2), Reply(call_id, result={"from": "it again"}))
        assert (await call).result == {"from": "it"}
        calls.on_reply(("a", 2), Reply(call_id))

    asyncio.run(run())


def test_deadline_death_and_a_full_queue_each_end_a_call() -> None:
    """No call waits for ever."""

    async def run() -> None:
        calls = Calls(Outbox().send)
        assert (await calls.call(("a", 1), "flush", {}, 0.02)).code == "timeout"
        call = asyncio.create_task(calls.call(("a", 1), "flush", {}, 5))
        await asyncio.sleep(0)
        calls.fail(("b", 1))
        calls.fail(("a", 2))
        assert not call.done()
        calls.fail(("a", 1))
        assert (await call).code == "lost"
        assert (await Calls(Outbox(takes=False).send).call(("a", 1), "flush", {}, 5)).code == "lost"

    asyncio.run(run())


def test_waiting_for_a_change_ends_with_it_or_with_its_deadline() -> None:
    """True when reached, False when time ran out; each change before is told."""

    async def run() -> None:
        changes, value, told = Changes(), [0], []
        waiting = asyncio.create_task(
            changes.until(lambda: value[0] >= 2, 5.0, lambda: told.append(value[0]))
        )
        for _ in range(2):
            await asyncio.sleep(0.01)
            value[0] += 1
            changes.notify()
        assert await waiting
        assert told == [0, 1]
        assert not await changes.until(lambda: value[0] > 2, 0.02)

    asyncio.run(run())
