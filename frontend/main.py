"""A frontend process from its first line to its exit.

boot line on stdin -> HELLO (naming our data ROUTER) -> INIT (naming the inherited listening socket) ->
HTTP -> FRONTEND_READY -> FLEET, heartbeats... -> STOP, exit 0. End-of-file on stdin means that the
supervisor is gone: exit at once.
"""

import asyncio
import faulthandler
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zmq
from aiohttp import web

from mlxhost.frontend import logs
from mlxhost.frontend.control import ControlLink
from mlxhost.frontend.dispatch import Dispatcher, data_endpoint
from mlxhost.frontend.garbage import Garbage
from mlxhost.frontend.gate import Gate, RequestIds
from mlxhost.frontend.http.access import Access
from mlxhost.frontend.http.app import build_app
from mlxhost.frontend.http.sse import KeepAlive
from mlxhost.frontend.models import ModelTable
from mlxhost.frontend.remote import RemoteListener
from mlxhost.frontend.services import Services
from mlxhost.frontend.text.model import TextModels
from mlxhost.frontend.text.prompts import Prompts
from mlxhost.frontend.text.store import CardStore
from mlxhost.frontend.waiting import Waiting
from mlxhost.wire import sockets
from mlxhost.wire.boot import LIFELINE_FD, Boot, read_boot
from mlxhost.wire.control import Fleet
from mlxhost.wire.errors import HandshakeRefused, ParentGone

BACKLOG = 1024
TEXT_THREADS = 4
SHUTDOWN_S = 1.0  # for handlers that are still there after the deadline of STOP
_PARENT_GONE = 3


def main() -> int:
    """Run until stopped; the exit code."""
    faulthandler.enable()  # SIGABRT, which a stuck process gets first, prints every thread's stack
    try:
        boot = read_boot()
    except ParentGone:
        return _PARENT_GONE
    sockets.process_dies_with_parent(boot.parent)
    sockets.allow_many_files()
    logs.set_up(boot.slot)
    try:
        asyncio.run(Frontend(boot).run())
    except HandshakeRefused as error:
        logs.warning("refused", code=error.code, reason=error)
        return 1
    except TimeoutError:
        logs.warning("no_answer", reason="the supervisor did not answer HELLO")
        return 1
    return 0


class Frontend:
    """Wires the parts together and keeps the beat."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._stop: asyncio.Future[float] | None = None

    async def run(self) -> None:
        """From HELLO to STOP."""
        loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        loop.add_reader(LIFELINE_FD, _exit_if_parent_is_gone)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_stop, 0.0)
        context = sockets.new_context(zmq.Context)
        table = ModelTable()
        endpoint = data_endpoint(self._boot.runtime_dir, self._boot.slot, self._boot.epoch)
        dispatcher = Dispatcher(context, endpoint, table, ordinal=_number(self._boot.slot))
        link = ControlLink(context, self._boot)
        init = await link.hello(endpoint)
        logs.set_level(init.log_level)
        if init.frontend is None:
            raise HandshakeRefused("role", "INIT says nothing about a frontend")
        gate = Gate(lambda: link.heartbeat(gate.in_flight))
        dispatcher.replay_for(init.frontend.replay_wait_s)
        executor = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
        cards = Path(init.frontend.cache_dir) / "cards" if init.frontend.cache_dir else None
        texts = TextModels(executor, CardStore(cards, executor, link.call) if cards else None)
        remote = None
        if where := init.frontend.remote:
            remote = RemoteListener(context, where, dispatcher.on_message)
            link.watch_allowed(remote.allow)
        waiting = Waiting(table, link.call, wait_s=init.frontend.load_wait_s, most=init.frontend.max_waiting)
        dispatcher.on_absent = waiting.wish
        services = Services(
            table=table,
            dispatcher=dispatcher,
            texts=texts,
            prompts=Prompts(executor),
            gate=gate,
            request_ids=RequestIds(),
            keep_alive=KeepAlive(),
            waiting=waiting,
            control=link,
            access=Access(init.frontend.keys),
            max_body_bytes=init.frontend.max_body_bytes,
        )
        link.watch_keys(services.access.replace)

        def on_fleet(fleet: Fleet) -> None:
            gate.set_open(fleet.accepting)
            dispatcher.on_fleet(fleet)
            waiting.wake()
            texts.keep([m.card for m in fleet.models if m.card is not None])

        # Bodies are decompressed by http.body, which knows the API's limits and error shapes.
        runner = web.AppRunner(
            build_app(services),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
            auto_decompress=False,
        )
        await runner.setup()
        listener = socket.socket(fileno=init.frontend.listen_fd)
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        if init.frontend.admin_fd >= 0:
            local = socket.socket(fileno=init.frontend.admin_fd)
            await web.SockSite(runner, local, backlog=BACKLOG).start()
        link.serve(on_fleet, self._on_stop, init.frontend.url, remote.endpoint if remote else "")
        logs.info("serving", url=init.frontend.url, epoch=self._boot.epoch)

        beat = asyncio.create_task(_beat(link, gate, dispatcher, init.heartbeat_s))
        idle_comments = asyncio.create_task(services.keep_alive.run())
        deadline_s = await self._stop
        gate.set_open(False)
        await gate.wait_empty(deadline_s)
        for task in (beat, idle_comments):
            task.cancel()
        await runner.cleanup()
        await waiting.close()
        link.close()
        dispatcher.close()
        if remote:
            remote.close()
        executor.shutdown(wait=False, cancel_futures=True)
        context.term()
        logs.info("stopped", epoch=self._boot.epoch)

    def _on_stop(self, deadline_s: float) -> None:
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(deadline_s)


async def _beat(link: ControlLink, gate: Gate, dispatcher: Dispatcher, interval_s: float) -> None:
    garbage = Garbage()
    while True:
        link.heartbeat(gate.in_flight)
        dispatcher.tick()
        garbage.tick(gate.in_flight)
        await asyncio.sleep(interval_s)


def _number(slot: str) -> int:
    """2 for the slot frontend/2."""
    return int(slot.rpartition("/")[2])


def _exit_if_parent_is_gone() -> None:
    if not os.read(LIFELINE_FD, 4096):
        sys.stderr.flush()
        os._exit(_PARENT_GONE)
