"""A dispatcher over real sockets, with the test as its workers and its supervisor."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import zmq

from mlxhost.frontend import dispatch
from mlxhost.frontend.dispatch import Dispatcher
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
