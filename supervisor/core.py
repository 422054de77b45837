"""What every part of the supervisor's event loop shares: the fleet's state and the ways to tell of it.

The parts: lifecycle (spawn, death, restart, stop), inbox (messages), clock (deadlines), operations (ctl),
shutdown. They run on one event loop and take turns only where they await, so the state needs no locks.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from mlxhost.supervisor.calls import Calls, Peer
from mlxhost.supervisor.changes import Changes
from mlxhost.supervisor.controlsocket import ControlSocket
from mlxhost.supervisor.cores import available_cores, grant_threads
from mlxhost.supervisor.events import Events
from mlxhost.supervisor.home import cache_dir
from mlxhost.supervisor.report import fleet_message
from mlxhost.supervisor.rundir import RunDir
from mlxhost.supervisor.settings import Settings
from mlxhost.supervisor.source import Source
from mlxhost.supervisor.state import WAS_READY, FleetState, Frontend, Member, Model, Replica
from mlxhost.wire.control import Ctl, FrontendConfig, Lease, RemoteListen, WorkerConfig
from mlxhost.wire.curve import KeyPair
from mlxhost.wire.sockets import identity


class RemoteHosts(Protocol):
    """The machines that serve for this fleet (see supervisor.remote.hosts)."""

    def frontend_config(self) -> RemoteListen: ...
    def allow_on(self, frontend: Frontend) -> None: ...
    def publish(self) -> None: ...
    def send(self, replica: Replica, ctl: Ctl) -> bool: ...
    def order(self, replica: Replica, op: str) -> None: ...
    def status(self) -> dict[str, Any]: ...
    async def answer_card_file(self, client: bytes, ctl: Ctl) -> None: ...
    def close(self) -> None: ...


class Residency(Protocol):
    """Which models are in memory (see supervisor.residency)."""

    def want(self, model: Model) -> None: ...
    def learn(self, replica: Replica) -> None: ...
    def room_for(self, model: Model) -> tuple[int, int, int]: ...


class Core:
    """The state of one running fleet, and who must hear when it changes."""

    def __init__(
        self,
        settings: Settings,
        state: FleetState,
        control: ControlSocket,
        rundir: RunDir,
        listen_fds: Sequence[int],
        events: Events,
        admin_fd: int = -1,
    ) -> None:
        self.settings, self.timing, self.state, self.events = settings, settings.timing, state, events
        self.control, self.rundir, self._listen_fds = control, rundir, listen_fds
        self._admin_fd = admin_fd
        self.cores = available_cores()
        self.changes = Changes()
        self.calls = Calls(self.send)
        self.log_level = settings.log_level  # of processes that start
        events.set_level(settings.log_level)
        self.serving = False  # everything asked for at the start was ready once
        self.room: Callable[[str], tuple[int, int]] = lambda _: (0, 0)  # budget, and what other models hold
        self.grant_memory: Callable[[], None] = lambda: None  # shares the budget anew (see leases.keeper)
        self.stop_requests = 0  # SIGINT and SIGTERM; the second one is impatient
        self.fatal: BaseException | None = None
        self._cache_dir = str(cache_dir())
        self._tasks: set[asyncio.Task[None]] = set()
        self._publish_due = False
        self.residency: Residency | None = None  # set before anything runs
        self.source: Source | None = None  # of the settings, for a reload; None: there is none
        self.hosts: RemoteHosts | None = None  # the machines that joined, when any may
        self.curve: KeyPair | None = None  # with which this machine's workers dial another one's frontends

    def want(self, model: Model) -> None:
        """Have a model loaded as soon as there is room."""
        if self.residency:
            self.residency.want(model)

    def send(self, peer: Peer, message: msgspec.Struct) -> bool:
        member = self.state.member(peer[0]) if self.hosts else None
        if self.hosts and isinstance(member, Replica) and member.host:
            return isinstance(message, Ctl) and member.epoch == peer[1] and self.hosts.send(member, message)
        return self.control.send(identity(*peer), message)

    def changed(self) -> None:
        """The fleet as others see it is a new one: tell them, once for all changes of this turn."""
        self.changes.notify()
        self.events.changed(self.state)
        if not self._publish_due:
            self._publish_due = True
            asyncio.get_running_loop().call_soon(self._publish)

    def _publish(self) -> None:
        self._publish_due = False
        self.state.version += 1
        for member in self.state.members():
            if member.greeted and (member.role == "frontend" or member.state in WAS_READY):
                self.tell_fleet(member)
        if self.hosts:
            self.hosts.publish()

    def tell_fleet(self, member: Member) -> None:
        self.send((member.slot, member.epoch), fleet_message(self.state))

    def regrant(self) -> None:
        """Share the cores among the workers that are busy now."""
        ready = {r.slot: r for r in self.state.replicas() if r.state in WAS_READY and not r.host}
        busy = {slot: bool(r.beat and r.beat.busy) for slot, r in ready.items()}
        for slot, threads in grant_threads(busy, self.cores).items():
            replica = ready[slot]
            if replica.threads != threads:
                replica.threads = threads
                self.send_lease(replica)

    def lease_of(self, replica: Replica) -> Lease:
        """All that the worker may use now."""
        return msgspec.structs.replace(replica.lease, cpu_threads=replica.threads)

    def send_lease(self, replica: Replica) -> None:
        self.send((replica.slot, replica.epoch), self.lease_of(replica))

    def worker_config(self, replica: Replica) -> WorkerConfig:
        settings, model = self.settings, replica.model.spec
        return WorkerConfig(
            model=model.name,
            path=str(model.path),
            dtype=model.dtype or settings.dtype,
            quantised=model.quantised or settings.quantised,
            context=model.context or settings.context,
            max_rows=model.max_rows or settings.max_rows,
            max_gap_ms=settings.max_gap_ms,
            jump_forward=settings.jump_forward == "on",
            cache_dir=self._cache_dir,
            cache_ram_bytes=settings.cache_ram,
            cache_disk_bytes=settings.cache_ssd,
        )

    def listen_fds(self, frontend: Member) -> tuple[int, int]:
        """The listening sockets of a frontend, for all its lives: its own on TCP, and the shared /admin."""
        return self._listen_fds[int(frontend.slot.rpartition("/")[2])], self._admin_fd

    def frontend_config(self, frontend: Frontend) -> FrontendConfig:
        listen_fd, admin_fd = self.listen_fds(frontend)
        return FrontendConfig(
            listen_fd,
            self.state.url,
            cache_dir=self._cache_dir,
            remote=self.hosts.frontend_config() if self.hosts else None,
            replay_wait_s=self.timing.replay_s,
            admin_fd=admin_fd,
            keys=list(self.settings.keys),
            load_wait_s=self.timing.load_wait_s,
        )

    def background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run `work` beside the rest. An error in it is a bug, and ends the fleet rather than part of it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.fatal = self.fatal or error
            self.changes.notify()

    async def cancel_background(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
