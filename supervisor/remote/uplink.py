"""A joined machine's connection to the fleet: says what runs here, and hears where the frontends are.

A short cut is ridden out: the workers' own connections may not even notice. A longer one ends what they run,
as the fleet gave those rows up, too. The connection is dialled anew until it holds.
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from mlxhost.supervisor.core import Core
from mlxhost.supervisor.errors import UserError
from mlxhost.supervisor.lifecycle import Lifecycle
from mlxhost.supervisor.remote.keyring import Bundle
from mlxhost.supervisor.state import FleetState, Goal, Replica
from mlxhost.supervisor.workercalls import WorkerCalls
from mlxhost.wire import control, version
from mlxhost.wire.codec import decode, encode
from mlxhost.wire.curve import supervisor_slot
from mlxhost.wire.dial import Change, Dialer
from mlxhost.wire.errors import DecodeError
from mlxhost.wire.sockets import identity, new_context

JOIN_SECONDS = 10.0  # to reach the fleet at all, and then to be let in
PIECE_BYTES = 1024 * 1024  # of a card file, in one reply
# zmq's descriptors tell of edges only, so look again even if nothing was told.
_LOOK_SECONDS = 0.25
_BYE_MS = 1_000
# Trying again cannot help.
_FINAL = frozenset({"key", "server_key", "protocol"})


class Uplink:
    def __init__(self, core: Core, lifecycle: Lifecycle, endpoint: str, bundle: Bundle) -> None:
        self._core, self._lifecycle, self._bundle = core, lifecycle, bundle
        self._workers = WorkerCalls(core)
        self._slot = supervisor_slot(bundle.name)
        self._context = new_context(zmq.Context)
        self._dialer = Dialer(
            self._context,
            endpoint,
            bundle.keys,
            bundle.server_key,
            lambda connection: identity(self._slot, connection),
        )
        self._began = time.monotonic()
        self._answer_by = 0.0  # when a HELLO must have been answered
        self._heartbeat_s = core.timing.heartbeat_s
        self._next_report = 0.0
        self._told: control.HostReport | None = None
        self._cut_at = 0.0
        self.joined = False  # now
        self._was_joined = False

    async def run(self) -> None:
        """For ever. A refusal, or no fleet at the first try, ends the supervisor with a UserError."""
        while True:
            await self._wait()
            while (change := self._dialer.pump()) is not Change.NOTHING:
                self._on_change(change)
            if self._dialer.up:
                for frames in _received(self._dialer.socket):
                    self._on_frames(frames)
            self._keep_time()

    async def close(self) -> None:
        """Say that nothing runs here any more."""
        if self.joined:
            self._send(control.HostReport([], leaving=True))
        self._dialer.close(_BYE_MS)
        await asyncio.to_thread(self._context.term)

    async def _wait(self) -> None:
        """Until a message or event may have come, something changed here, or time is up."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        dialer, fds = self._dialer, []
        if not dialer.socket.closed:
            fds = [dialer.socket.FD, dialer.monitor.FD]
        for fd in fds:
            loop.add_reader(fd, woken.set)
        changed = asyncio.ensure_future(self._core.changes.until(self._has_news, _LOOK_SECONDS))
        try:
            waiter = asyncio.ensure_future(woken.wait())
            await asyncio.wait({waiter, changed}, return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
        finally:
            changed.cancel()
            for fd in fds:
                loop.remove_reader(fd)

    def _has_news(self) -> bool:
        return self.joined and _state_changed(self._told, report_of(self._core.state))

    # --- the connection -------------------------------------------------------------------------------

    def _on_change(self, change: Change) -> None:
        dialer = self._dialer
        if change is Change.UP:
            self._answer_by = time.monotonic() + JOIN_SECONDS
            self._send(self._hello())
            return
        lost = self.joined
        self.joined, self._answer_by = False, 0.0
        if lost:
            self._cut_at = time.monotonic()
            self._core.events.event("", f"{dialer.reason}; dialling again")
        hopeless = dialer.code in _FINAL and not (self._was_joined and dialer.code != "key")
        in_vain = not self._was_joined and time.monotonic() - self._began > JOIN_SECONDS / 2
        if hopeless or in_vain:
            self._fail(dialer.reason)

    def _hello(self) -> control.Hello:
        return control.Hello(
            protocol=(version.PROTOCOL_MAJOR, version.PROTOCOL_MINOR),
            schema=version.SCHEMA,
            role="host",
            slot=self._slot,
            epoch=self._dialer.connection,
            pid=os.getpid(),
            token=self._bundle.token,
            build=version.BUILD,
        )

    def _fail(self, reason: str) -> None:
        what = "may serve no longer" if self._was_joined else "cannot join"
        self._core.fatal = self._core.fatal or UserError(f"{what}: {reason}")
        self._core.changes.notify()

    def _send(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(zmq.Again):  # its queue is full: the next report says the same
            self._dialer.socket.send_multipart(encode(message), zmq.NOBLOCK)

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._answer_by and now > self._answer_by:
            self._answer_by = 0.0
            reason = f"{self._dialer.endpoint} did not answer within {JOIN_SECONDS:.0f} s"
            self._dialer.drop("cut", reason)
            if not self._was_joined:
                self._fail(reason)
        if self.joined and (now >= self._next_report or self._has_news()):
            self._next_report = now + self._heartbeat_s
            self._told = report_of(self._core.state)
            self._send(self._told)
        if self._cut_at and not self.joined and now - self._cut_at > self._core.timing.stale_s:
            self._cut_at = 0.0
            self._use_frontends([])

    def _use_frontends(self, frontends: list[control.FleetFrontend]) -> None:
        if self._core.state.joined_frontends != frontends:
            self._core.state.joined_frontends = frontends
            self._core.changed()

    # --- what the fleet says --------------------------------------------------------------------------

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message, _ = decode(frames)
        except DecodeError:
            self._core.state.bad_messages += 1
            return
        match message:
            case control.Init():
                self._heartbeat_s, self._answer_by, self._cut_at = message.heartbeat_s, 0.0, 0.0
                self._told, self._next_report = None, 0.0
                self.joined, first, self._was_joined = True, not self._was_joined, True
                how = "joined" if first else "back in"
                self._core.events.event("", f"{how} {self._dialer.endpoint} as {self._bundle.name}")
                self._core.changes.notify()
            case control.Refused():
                self._fail(message.message)
            case control.Fleet():
                self._use_frontends(message.frontends)
            case control.Ctl():
                self._core.background(self._answer(message))
            case _:
                self._core.state.bad_messages += 1

    def _pass_on(self, ctl: control.Ctl, news: control.News) -> None:
        if self.joined:
            self._send(msgspec.structs.replace(news, call_id=ctl.call_id))

    async def _answer(self, ctl: control.Ctl) -> None:
        """Do what the fleet asks of a replica here, and reply."""
        member = self._core.state.member(ctl.target)
        if not isinstance(member, Replica):
            reply = control.Reply(ctl.call_id, "not_found", f"{ctl.target} does not run here")
        elif ctl.op == "card_file":
            reply = await asyncio.to_thread(card_file, ctl, member)
        elif ctl.op in ("load", "unload"):
            if ctl.op == "load":
                self._lifecycle.load(member.model)
            else:
                member.model.goal = Goal.UNLOAD
                self._lifecycle.pursue(member.model)
            reply = control.Reply(ctl.call_id)
        else:
            reply = await self._workers.ask(member, ctl, lambda news: self._pass_on(ctl, news))
        if self.joined:
            self._send(msgspec.structs.replace(reply, call_id=ctl.call_id))


def report_of(state: FleetState) -> control.HostReport:
    """What runs here, as the fleet is told."""
    return control.HostReport(
        [
            control.HostReplica(
                slot=r.slot,
                epoch=r.epoch,
                model=r.model.name,
                aliases=list(r.model.spec.aliases),
                state=r.state.value,
                reason=r.reason,
                progress=r.progress,
                ready=r.ready,
                beat=r.beat,
            )
            for r in state.replicas()
        ],
        leaving=not state.accepting,
    )


def _state_changed(old: control.HostReport | None, new: control.HostReport) -> bool:
    """Whether `new` says more than newer figures."""

    def essence(report: control.HostReport) -> list[Any]:
        return [
            report.leaving,
            *((r.slot, r.epoch, r.state, _essence_of(r.beat)) for r in report.replicas),
        ]

    return old is None or essence(old) != essence(new)


def _essence_of(beat: control.Heartbeat | None) -> tuple[str, bool, bool] | None:
    return (beat.mode, beat.busy, beat.in_flight == 0) if beat else None


def card_file(ctl: control.Ctl, replica: Replica) -> control.Reply:
    """A piece of one of the files that the replica's card names, and of no other."""
    files = {f.sha256: f.name for f in replica.ready.card.files} if replica.ready else {}
    name, offset = files.get(str(ctl.args.get("sha256"))), ctl.args.get("offset", 0)
    if replica.ready is None or name is None or not isinstance(offset, int) or offset < 0:
        return control.Reply(ctl.call_id, "not_found", f"{replica.slot} has no such file")
    path = Path(replica.ready.card.directory) / name
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return control.Reply(ctl.call_id, result={"data": file.read(PIECE_BYTES)})
    except OSError as error:
        return control.Reply(ctl.call_id, "failed", f"{path}: {error.strerror}")


def _received(dealer: "zmq.Socket[bytes]") -> list[list[bytes]]:
    """All messages that are there now."""
    messages = []
    try:
        while True:
            messages.append(dealer.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        return messages
