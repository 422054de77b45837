"""`mlxhost join`: a supervisor whose workers serve the fleet of another machine.

All that a supervisor does goes on here: spawn, watch, restart, share the cores. There is no frontend; the
workers dial those of the fleet, and the uplink says what runs.
"""

import asyncio
import os
import time

from mlxhost.supervisor.clock import Clock
from mlxhost.supervisor.controlsocket import ControlSocket
from mlxhost.supervisor.core import Core
from mlxhost.supervisor.events import Events
from mlxhost.supervisor.inbox import Inbox
from mlxhost.supervisor.leases.keeper import keep_leases
from mlxhost.supervisor.lifecycle import Lifecycle
from mlxhost.supervisor.operations import Operations
from mlxhost.supervisor.remote.keyring import Bundle
from mlxhost.supervisor.remote.uplink import Uplink
from mlxhost.supervisor.residency.residency import Residency
from mlxhost.supervisor.rundir import Card, RunDir
from mlxhost.supervisor.serve import handle_signals, run
from mlxhost.supervisor.settings import Settings
from mlxhost.supervisor.state import FleetState, new_fleet
from mlxhost.wire.curve import host_slot
from mlxhost.wire.sockets import ipc_endpoint


def join(settings: Settings, endpoint: str, bundle: Bundle, events: Events) -> None:
    """Serve until a signal. Raises UserError when the fleet cannot be joined, or lets this machine in no
    longer."""
    rundir = RunDir.create()
    try:
        asyncio.run(_join(settings, endpoint, bundle, rundir, events))
    finally:
        rundir.remove()


async def _join(settings: Settings, endpoint: str, bundle: Bundle, rundir: RunDir, events: Events) -> None:
    control = ControlSocket(ipc_endpoint(rundir.sockets, "control"))
    state = _new_state(settings, endpoint, bundle.name, rundir.name)
    rundir.publish(Card(os.getpid(), control.endpoint, endpoint, rundir.name, time.time()))
    core = Core(settings, state, control, rundir, [], events)
    core.curve = bundle.keys
    lifecycle = Lifecycle(core)
    core.residency = residency = Residency(core, lifecycle)
    keep_leases(core, lifecycle)
    handle_signals(core)
    inbox = Inbox(core, lifecycle, Operations(core, lifecycle, residency))
    core.background(inbox.run())
    core.background(inbox.watch())
    core.background(Clock(core, lifecycle).run())
    uplink = Uplink(core, lifecycle, endpoint, bundle)
    core.background(uplink.run())
    try:
        # Nothing is loaded for a fleet that does not want it.
        await core.changes.until(lambda: uplink.joined or core.fatal or core.stop_requests)
        if core.fatal:
            raise core.fatal
        if not core.stop_requests:
            await run(core, lifecycle, residency)
    finally:
        await lifecycle.kill_everything()
        await core.cancel_background()
        await uplink.close()
        control.close()


def _new_state(settings: Settings, endpoint: str, name: str, fleet: str) -> FleetState:
    """A fleet without frontends, whose slots bear the machine's name, and whose epochs are later than those
    of any earlier process of this machine."""
    state = new_fleet(name=fleet, url=endpoint, routing=settings.routing, models=settings.models, frontends=0)
    state.joined = endpoint
    first_epoch = time.time_ns() // 1_000_000
    for replica in state.replicas():
        replica.slot, replica.epoch = host_slot(name, replica.slot), first_epoch
    return state
