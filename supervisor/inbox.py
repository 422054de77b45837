"""Messages from workers, frontends and `ctl` clients: who may say what, and what it changes."""

import time
from typing import Any

from mlxhost.supervisor.core import Core
from mlxhost.supervisor.handshake import Expected, refuse
from mlxhost.supervisor.lifecycle import Lifecycle
from mlxhost.supervisor.operations import Operations
from mlxhost.supervisor.state import RUNNING, Frontend, Goal, Member, Replica, State
from mlxhost.wire import control
from mlxhost.wire.errors import DecodeError
from mlxhost.wire.sockets import parse_identity

# DEAD announces an exit; a process that then stays is helped along.
DEAD_GRACE_SECONDS = 0.5
CARD_FILE = "card_file"  # a frontend asks for a file that only another machine has


class Inbox:
    """Reads the control socket."""

    def __init__(self, core: Core, lifecycle: Lifecycle, operations: Operations) -> None:
        self._core, self._lifecycle, self._operations = core, lifecycle, operations

    async def run(self) -> None:
        while True:
            try:
                peer, message = await self._core.control.receive()
            except DecodeError:
                self._core.state.bad_messages += 1
                continue
            self._on_message(peer, message)

    async def watch(self) -> None:
        """Note which processes lose their connection. One that is heard again has it back."""
        while True:
            peer = await self._core.control.disconnected()
            if (member := self._member(parse_identity(peer))) and not member.stopping:
                member.disconnected_at = time.monotonic()

    def _on_message(self, peer: bytes, message: Any) -> None:
        sender = parse_identity(peer)
        if isinstance(message, control.Hello):
            self._on_hello(peer, sender, message)
        elif isinstance(message, control.Ctl) and message.op == CARD_FILE and self._core.hosts:
            self._core.background(self._core.hosts.answer_card_file(peer, message))
        elif isinstance(message, control.Ctl):
            self._core.background(self._operations.run(peer, message))
        elif (member := self._member(sender)) is None:
            self._core.state.bad_messages += 1
        else:
            member.heard_at, member.disconnected_at = time.monotonic(), 0.0
            self._on_member_message(member, message)

    def _member(self, sender: tuple[str, int] | None) -> Member | None:
        """Who speaks, if it is the present process of its slot and was let in."""
        member = self._core.state.member(sender[0]) if sender else None
        return member if member and member.greeted and sender == (member.slot, member.epoch) else None

    def _on_member_message(self, member: Member, message: Any) -> None:
        match message, member:
            case control.Heartbeat(), _:
                self._on_heartbeat(member, message)
            case control.Progress(), Replica():
                self._on_progress(member, message)
            case control.Ready(), Replica(state=State.LOADING):
                self._on_ready(member, message)
            case control.FrontendReady(), Frontend(state=State.LOADING):
                member.state, member.beat_at = State.READY, time.monotonic()
                member.remote_endpoint = message.remote_endpoint
                self._core.changed()
            case control.Dead(), _:
                member.dead_message = message.message or message.code
                member.kill_at = time.monotonic() + DEAD_GRACE_SECONDS
            case control.Reply(), _:
                self._core.calls.on_reply((member.slot, member.epoch), message)
            case control.News(), _:
                self._core.calls.on_news((member.slot, member.epoch), message)
            case _:
                self._core.state.bad_messages += 1

    def _on_hello(self, peer: bytes, sender: tuple[str, int] | None, hello: control.Hello) -> None:
        core = self._core
        member = core.state.member(hello.slot)
        alive = member is not None and member.state is not State.BACKOFF and member.child is not None
        expected = (
            Expected(member.role, member.slot, member.epoch, member.token, member.greeted)
            if member and alive
            else None
        )
        if refused := refuse(hello, sender, expected):
            core.control.send(peer, refused)
            if member and expected and not member.greeted and sender == (member.slot, member.epoch):
                member.dead_message = refused.message  # it will exit, and this is why
            return
        if member is None:
            return
        core.grant_memory()  # before it counts as greeted: its own lease travels in INIT
        member.greeted, member.state = True, State.LOADING
        member.heard_at = time.monotonic()
        init = control.Init(heartbeat_s=core.timing.heartbeat_s, log_level=core.log_level)
        if isinstance(member, Frontend):
            member.endpoint = hello.endpoint
            init.frontend = core.frontend_config(member)
        elif isinstance(member, Replica):
            member.progress, member.progress_at = None, member.heard_at
            member.phase_since = member.heard_at
            init.worker, init.lease = core.worker_config(member), core.lease_of(member)
        core.control.send(peer, init)
        if core.hosts and isinstance(member, Frontend):
            core.hosts.allow_on(member)
        core.changed()

    def _on_progress(self, replica: Replica, progress: control.Progress) -> None:
        replica.progress_at = time.monotonic()
        if replica.progress is None or replica.progress.phase != progress.phase:
            replica.phase_since = replica.progress_at
        replica.progress = progress
        self._core.changes.notify()

    def _on_ready(self, replica: Replica, ready: control.Ready) -> None:
        core, now = self._core, time.monotonic()
        replica.ready, replica.ready_at, replica.model.card = ready, now, ready.card
        replica.beat, replica.beat_at, replica.tick_at = None, now, now
        replica.load_crashes, replica.reason = 0, ""
        # A model that was drained while it loaded comes up closed; it has had nothing to finish.
        replica.state = State.READY if replica.goal is Goal.SERVE else State.DRAINED
        core.send((replica.slot, replica.epoch), control.Start())
        for note in ready.notes:
            core.events.event(replica.slot, note)
        if core.serving:
            core.events.event(replica.slot, f"{replica.state.value} after {now - replica.spawned_at:.1f} s")
        core.changed()
        if core.residency:
            core.residency.learn(replica)
        self._lifecycle.pursue(replica.model)

    def _on_heartbeat(self, member: Member, beat: control.Heartbeat) -> None:
        now, before = time.monotonic(), member.beat
        member.beat, member.beat_at = beat, now
        if isinstance(member, Replica):
            if not beat.busy or before is None or before.load.tick != beat.load.tick:
                member.tick_at = now
            if beat.in_flight or (before and before.in_flight):
                member.model.used_at = now
            if before is None or before.busy != beat.busy:
                self._core.regrant()
            if beat.mode != (before.mode if before else RUNNING):
                member.progress_at = now
                self._core.events.event(member.slot, beat.mode)
                self._core.changed()
            if member.state is State.DRAINING and beat.in_flight == 0 and now >= member.quiet_after:
                member.state = State.DRAINED
                self._core.events.event(member.slot, "drained")
                self._core.changed()
                self._lifecycle.pursue(member.model)
        self._core.changes.notify()
