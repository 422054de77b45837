"""Life and death of the fleet's processes: spawn, exit, restart, stop."""

import asyncio
import errno
import math
import random
import secrets
import signal
import time

from mlxhost.supervisor import goals, restart
from mlxhost.supervisor.calls import Peer
from mlxhost.supervisor.child import FRONTEND_ENVIRONMENT, Child, ending, spawn, worker_environment
from mlxhost.supervisor.console import size
from mlxhost.supervisor.core import Core
from mlxhost.supervisor.errors import UserError
from mlxhost.supervisor.residency.freed import available_bytes, wait_freed
from mlxhost.supervisor.rundir import Child as RecordedChild
from mlxhost.supervisor.state import ALIVE, PAUSED, WAS_READY, Frontend, Goal, Member, Model, Replica, State
from mlxhost.supervisor.sweep import created
from mlxhost.wire.boot import Boot
from mlxhost.wire.control import Lease, Stop

# The machine is short of something; that may pass.
_TRANSIENT = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


def _living(replica: Replica) -> bool:
    """Whether it has a process, or will have one again, that is not on its way out."""
    here = replica.child is not None or replica.state in ALIVE or replica.state is State.BACKOFF
    return here and not replica.stopping


class Lifecycle:
    """The only part that spawns, signals or gives up processes."""

    def __init__(self, core: Core) -> None:
        self._core, self._state = core, core.state

    def start(self, member: Member) -> None:
        """Spawn a process for `member`, under the epoch it has."""
        now = time.monotonic()
        member.epoch = member.epoch or 1
        member.state, member.token = State.STARTING, secrets.token_hex(16)
        member.spawned_at = member.heard_at = now
        member.greeted = member.stopping = member.was_ready = member.load_timed_out = False
        member.kill_reason = member.dead_message = ""
        member.kill_at = member.disconnected_at = 0.0
        self._core.changed()
        self._core.background(self._live(member))

    async def _live(self, member: Member) -> None:
        core, replica = self._core, member if isinstance(member, Replica) else None
        boot = Boot(
            control=core.control.endpoint,
            token=member.token,
            slot=member.slot,
            epoch=member.epoch,
            model=replica.model.name if replica else "",
            runtime_dir=str(core.rundir.sockets),
            curve_public=core.curve.public if core.curve and replica else "",
            curve_secret=core.curve.secret if core.curve and replica else "",
        )
        command = core.settings.worker_command if replica else core.settings.frontend_command
        try:
            child = spawn(
                command,
                boot,
                on_line=lambda line: core.events.output(member.slot, line),
                env=worker_environment(core.cores) if replica else FRONTEND_ENVIRONMENT,
                pass_fds=() if replica else core.listen_fds(member),
            )
        except OSError as error:
            self._disown(member)
            reason = f"cannot start {command[0]}: {error.strerror}"
            self._decide(member, reason, crashed=error.errno in _TRANSIENT)
            return
        member.child = child
        self._record()
        if member.stopping:
            child.signal(signal.SIGKILL)
        code = await child.exit_code()
        await self._on_exit(member, child, code)

    def _record(self) -> None:
        """Write down which processes to kill should this one die without doing so."""
        children = [(m.slot, m.child.pid) for m in self._state.members() if m.child]
        self._core.rundir.record([RecordedChild(slot, pid, created(pid)) for slot, pid in children])

    async def _on_exit(self, member: Member, child: Child, code: int) -> None:
        if member.state in ALIVE:
            self._disown(member)
        member.child = None
        self._record()
        self._core.changes.notify()
        member.last_lines = await child.last_words()
        if member.stopping:
            if isinstance(member, Replica):
                await self._freed(member)
            member.state, member.stopping = State.UNLOADED, False
            self._core.changed()
            self._pursue_model_of(member)
        elif member.state is State.BACKOFF:  # not started again by `ctl load` in the meantime
            last = f": {member.last_lines[-1]}" if member.last_lines else ""
            before = "" if member.was_ready else " before it was ready"
            reason = member.dead_message or member.kill_reason or f"{ending(code)}{before}{last}"
            crashed = code < 0 and not member.dead_message and not member.load_timed_out
            self._decide(member, reason, crashed=crashed)

    async def _freed(self, replica: Replica) -> None:
        """Wait until the kernel shows that the memory of a worker that was unloaded is free."""
        before, expected = replica.available_before, replica.held_before
        replica.available_before = 0
        if before and not await wait_freed(expected, before, self._core.timing.freed_s):
            text = f"of the {size(expected)} it held not half were seen to be free after it had ended"
            self._core.events.event(replica.slot, text, "debug")

    def _disown(self, member: Member) -> None:
        """The process no longer speaks for its slot: the epoch moves on, so frontends end its streams."""
        self._core.calls.fail((member.slot, member.epoch))
        member.was_ready = member.state in WAS_READY
        member.epoch += 1
        if isinstance(member, Replica):
            member.held_before = member.held_bytes
        member.greeted, member.beat, member.held_bytes = False, None, 0
        member.state, member.restart_at = State.BACKOFF, math.inf
        if isinstance(member, Replica):
            member.ready = member.progress = None
            member.threads, member.lease = 1, Lease()
        elif isinstance(member, Frontend):
            member.endpoint = member.remote_endpoint = ""
        self._core.changed()
        self._core.regrant()

    def _decide(self, member: Member, reason: str, *, crashed: bool) -> None:
        """The process is gone and nobody asked for that: again, or not?"""
        now = time.monotonic()
        policy = restart.WORKERS if isinstance(member, Replica) else restart.FRONTENDS
        member.load_crashes = 0 if member.was_ready else member.load_crashes + 1
        if isinstance(member, Replica) and (member.was_ready or crashed):
            state = self._state
            state.last_incident = restart.incident_of(now, state.last_death, state.last_incident)
            state.last_death, member.incident = now, state.last_incident
        death = restart.Death(member.was_ready, crashed, reason)
        decision = restart.decide(death, member.restarts, member.load_crashes, now, random.random(), policy)
        if isinstance(decision, restart.GiveUp):
            self._give_up(member, decision.reason)
            return
        member.reason, member.restart_at = reason, now + decision.delay_s
        self._core.events.event(
            member.slot,
            f"lost: {reason}; restarting in {decision.delay_s:.1f} s "
            f"({decision.count} of at most {policy.max_restarts} in {policy.window_s:.0f} s)",
            "warning",
        )
        self._core.changed()
        self._pursue_model_of(member)

    def _give_up(self, member: Member, reason: str) -> None:
        member.state, member.reason = State.FAILED, reason
        if isinstance(member, Frontend):
            self._core.fatal = UserError(f"{member.slot} cannot run: {reason}")
        elif self._core.serving:
            self._core.events.event(member.slot, f"failed: {reason}", "error")
        self._core.changed()
        self._pursue_model_of(member)

    def restart(self, member: Member, now: float) -> None:
        """The wait after a death is over."""
        recent = [at for at in member.restarts if now - at < restart.WORKERS.window_s]
        member.restarts = [*recent, now]
        member.total_restarts += 1
        self.start(member)

    def kill(self, member: Member, reason: str) -> None:
        """Give a stuck process up: ask for a stack dump, and end it soon after."""
        if member.child is None or member.kill_at:
            return
        member.load_timed_out = member.state not in WAS_READY
        member.kill_reason = reason
        member.kill_at = time.monotonic() + self._core.timing.kill_s
        self._core.events.event(member.slot, f"given up: {reason}", "warning")
        self._disown(member)
        member.child.signal(signal.SIGABRT)

    def stop(self, member: Member, deadline_s: float) -> None:
        """Ask the process to finish and leave; it is killed if it has not done so in time."""
        member.stopping = True
        if member.state in WAS_READY:
            self._core.send((member.slot, member.epoch), Stop(deadline_s))
            member.kill_at = time.monotonic() + deadline_s + self._core.timing.exit_s
        elif member.child:  # it serves nothing yet, so there is nothing to finish
            member.child.signal(signal.SIGKILL)

    def _pursue_model_of(self, member: Member) -> None:
        if isinstance(member, Replica):
            self.pursue(member.model)

    def pursue(self, model: Model) -> None:
        """Take the next step towards the model's goal with every replica."""
        for replica in model.replicas:
            if replica.host and model.goal in (Goal.HOLD, Goal.STANDBY):
                continue  # what runs elsewhere takes no room here
            if not replica.stopping and self._state.accepting:
                self._take(goals.next_step(replica.goal, replica.state), replica)

    def _take(self, step: goals.Step, replica: Replica) -> None:
        match step:
            case goals.Step.START | goals.Step.STOP | goals.Step.FORGET if replica.host:
                pass  # its own supervisor does that, see remote.hosts
            case goals.Step.START:
                self.start(replica)
            case goals.Step.CLOSE:
                replica.state = State.DRAINING
                replica.quiet_after = time.monotonic() + self._core.timing.settle_s
                self.unpause(replica)
                self._core.changed()
                if not replica.host and not self._state.joined:
                    self._core.background(self._settle(replica, (replica.slot, replica.epoch)))
            case goals.Step.OPEN:
                replica.state = State.READY
                self._core.changed()
            case goals.Step.STOP if replica.state is State.DRAINED:
                self._core.background(self._flush_and_stop(replica, (replica.slot, replica.epoch)))
            case goals.Step.STOP:
                self.stop(replica, self._core.timing.exit_s)
            case goals.Step.FORGET:
                replica.state, replica.reason = State.UNLOADED, ""
                self._core.changed()
            case goals.Step.NOTHING:
                pass

    async def _settle(self, replica: Replica, peer: Peer) -> None:
        """Learn sooner than from the next heartbeat that a closed replica is idle: once every frontend has
        answered after it was told, all its requests are with the worker, whose answer brings a heartbeat."""
        calls, settle_s = self._core.calls, self._core.timing.settle_s
        frontends = [f for f in self._state.frontends if f.state in WAS_READY]
        asked = (calls.call((f.slot, f.epoch), "health", {}, settle_s) for f in frontends)
        told = all(reply.code == "ok" for reply in await asyncio.gather(*asked))
        if told and (replica.slot, replica.epoch) == peer and replica.state is State.DRAINING:
            replica.quiet_after = min(replica.quiet_after, time.monotonic())
        await calls.call(peer, "health", {}, settle_s)

    async def _flush_and_stop(self, replica: Replica, peer: Peer) -> None:
        """Make what a drained worker has cached durable, then end it, if that is still wanted."""
        if replica.flushing == replica.epoch:
            return
        replica.flushing = replica.epoch
        if replica.ready and "flush" in replica.ready.operations:
            flush_s = self._core.timing.flush_s
            reply = await self._core.calls.call(peer, "flush", {}, flush_s)
            if reply.code != "ok":
                text = f"its cache could not be made durable before it ended: {reply.message or reply.code}"
                self._core.events.event(replica.slot, text, "warning")
        replica.flushing = 0
        wanted = goals.next_step(replica.goal, replica.state) is goals.Step.STOP
        if (replica.slot, replica.epoch) == peer and wanted and not replica.stopping:
            replica.available_before = available_bytes()
            self.stop(replica, self._core.timing.exit_s)

    def unpause(self, replica: Replica) -> None:
        """Let the rows of a paused worker go on, so that they can finish."""
        if replica.mode in PAUSED:
            self._core.background(self._unpause((replica.slot, replica.epoch)))

    async def _unpause(self, peer: Peer) -> None:
        await self._core.calls.call(peer, "resume", {}, self._core.timing.exit_s)

    def load(self, model: Model) -> None:
        """Serve `model`, forgetting earlier failures; when it is absent, as soon as there is room for it."""
        for replica in model.replicas:
            if replica.host:
                if self._core.hosts and replica.state in (State.FAILED, State.UNLOADED):
                    self._core.hosts.order(replica, "load")
                continue
            replica.restarts.clear()
            replica.load_crashes = replica.incident = 0
            if replica.state is State.FAILED:
                replica.state, replica.reason = State.UNLOADED, ""
            elif replica.state is State.BACKOFF and replica.child is None and not replica.stopping:
                replica.restart_at = 0.0
        here = [r for r in model.replicas if not r.host]
        if not here or any(map(_living, here)):
            model.goal = Goal.SERVE
            self.pursue(model)
        else:
            model.goal = Goal.STANDBY
            self._core.want(model)

    async def kill_everything(self) -> None:
        """End every process of the fleet, whatever it does."""
        self._state.accepting = False  # or what was killed would be started again
        members = list(self._state.members())
        for member in members:
            member.stopping = True
            if member.child:
                member.child.signal(signal.SIGKILL)
        await self._core.changes.until(lambda: not any(m.child for m in members), self._core.timing.kill_s)
