"""One fleet from its first process to its last: what `mlxhost up` runs once the models are known."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from mlxhost.supervisor.adminsocket import bind_admin
from mlxhost.supervisor.clock import Clock
from mlxhost.supervisor.controlsocket import ControlSocket
from mlxhost.supervisor.core import Core
from mlxhost.supervisor.errors import UserError
from mlxhost.supervisor.events import Events
from mlxhost.supervisor.inbox import Inbox
from mlxhost.supervisor.leases.keeper import keep_leases
from mlxhost.supervisor.lifecycle import Lifecycle
from mlxhost.supervisor.notify import Notifier
from mlxhost.supervisor.operations import Operations
from mlxhost.supervisor.port import listen, share, url_of
from mlxhost.supervisor.remote.hosts import open_hosts
from mlxhost.supervisor.residency.residency import Residency
from mlxhost.supervisor.rundir import Card, RunDir
from mlxhost.supervisor.servicestate import keep_told
from mlxhost.supervisor.settings import Settings
from mlxhost.supervisor.shutdown import shut_down
from mlxhost.supervisor.signals import has_terminal, stop_signals
from mlxhost.supervisor.source import Source
from mlxhost.supervisor.state import Member, Replica, State, new_fleet
from mlxhost.wire.sockets import allow_many_files, ipc_endpoint


def serve(
    settings: Settings, listener: socket.socket, events: Events, reread: Callable[[], Settings]
) -> None:
    """Run the fleet until a signal ends it; `reread` gives the settings anew at a reload. Raises UserError
    when it cannot start or go on."""
    allow_many_files()
    notifier = Notifier(os.environ)
    source = Source(reread, notifier)
    listen(listener)
    listeners = share(listener, settings.frontends)
    rundir = RunDir.create()
    try:
        asyncio.run(_serve(settings, listeners, rundir, events, source))
    finally:
        notifier.close()
        rundir.remove()
        for other in listeners:
            other.close()


async def _serve(
    settings: Settings,
    listeners: Sequence[socket.socket],
    rundir: RunDir,
    events: Events,
    source: Source,
) -> None:
    url = url_of(listeners[0])
    control = ControlSocket(ipc_endpoint(rundir.sockets, "control"))
    state = new_fleet(
        name=rundir.name,
        url=url,
        routing=settings.routing,
        models=settings.models,
        frontends=settings.frontends,
    )
    rundir.publish(Card(os.getpid(), control.endpoint, url, rundir.name, time.time()))
    admin = bind_admin(rundir.sockets)
    fds = [s.fileno() for s in listeners]
    core = Core(settings, state, control, rundir, fds, events, admin.fileno())
    lifecycle = Lifecycle(core)
    core.residency = residency = Residency(core, lifecycle)
    core.source = source
    operations = Operations(core, lifecycle, residency)
    handle_signals(core, operations.reload.hangup)
    inbox = Inbox(core, lifecycle, operations)
    core.background(inbox.run())
    core.background(inbox.watch())
    core.background(Clock(core, lifecycle).run())
    if source.told:
        core.background(keep_told(core, source.told))
    keep_leases(core, lifecycle)
    try:
        if settings.listen:
            core.hosts = hosts = open_hosts(core)
            hosts.run()
            how = f"mlxhost join {hosts.endpoint} --bundle FILE --models MODEL"
            events.event("", f"machines join with: {how}")
        await run(core, lifecycle, residency)
    finally:
        await lifecycle.kill_everything()
        await core.cancel_background()
        if core.hosts:
            core.hosts.close()
        control.close()
        admin.close()


async def run(core: Core, lifecycle: Lifecycle, residency: Residency) -> None:
    """Start everything, serve until a signal, stop everything. Raises UserError."""
    for frontend in core.state.frontends:
        lifecycle.start(frontend)
    residency.start()
    core.background(residency.run())
    await core.changes.until(lambda: _ended(core) or _all_ready(core) or _first_failure(core))
    if not _ended(core):
        if failure := _first_failure(core):
            raise UserError(failure)
        core.serving = True
        core.events.serving(core.state)
        await core.changes.until(lambda: _ended(core))
    if core.fatal:
        raise core.fatal
    await shut_down(core, lifecycle)


def _ended(core: Core) -> bool:
    return core.stop_requests > 0 or core.fatal is not None


def _all_ready(core: Core) -> bool:
    return all(m.state in (State.READY, State.DRAINED, State.UNLOADED) for m in _first(core))


def _first(core: Core) -> Iterator[Member]:
    """What the start is for: the frontends, and the models that are loaded without being asked for. Others
    may be asked for already; what becomes of them is for who asked."""
    return (m for m in core.state.local() if not (isinstance(m, Replica) and m.model.owed))


def _first_failure(core: Core) -> str:
    """Why the first start is in vain, if it is: one bad model should not go unseen among good ones."""
    for member in _first(core):
        if isinstance(member, Replica) and member.state is State.FAILED:
            return f"{member.model.name}: {member.reason}"
    return ""


def handle_signals(core: Core, on_hangup: Callable[[], None] | None = None) -> None:
    """The handler only counts; the event loop acts. `on_hangup` is called at a SIGHUP that is no farewell."""

    def count() -> None:
        core.stop_requests += 1
        core.changes.notify()

    loop = asyncio.get_running_loop()
    had_terminal = has_terminal()

    def hang_up() -> None:
        if on_hangup is None or (had_terminal and not has_terminal()):
            count()  # the terminal that the fleet was started on is gone
        else:
            on_hangup()

    for number in stop_signals():
        loop.add_signal_handler(number, hang_up if number == signal.SIGHUP else count)
