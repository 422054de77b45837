"""Grants memory leases, looks at what the kernel says, and makes a worker that holds too much give back.

The only part that sends leases for memory and ends a worker over it. Decisions are in `grant` and `shrink`.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

import msgspec

from mlxhost.supervisor.console import size
from mlxhost.supervisor.core import Core
from mlxhost.supervisor.estimate.estimate import machine_backend
from mlxhost.supervisor.leases.grant import Grant, Tenant, grant
from mlxhost.supervisor.leases.shrink import LIMITS, Limits, Rung, Shrink, step
from mlxhost.supervisor.leases.tenants import tenant
from mlxhost.supervisor.leases.truth import held_bytes
from mlxhost.supervisor.lifecycle import Lifecycle
from mlxhost.supervisor.residency.budget import budget_bytes, ram_bytes, working_set
from mlxhost.supervisor.residency.sizes import estimate_of
from mlxhost.supervisor.state import ALIVE, WAS_READY, Goal, Replica, State

MEASURE_S = 2.0


class LeaseKeeper:
    """`budget` tells the bytes that all workers of this machine may take together; `device_file` is where
    they take turns on their device (empty: they do not)."""

    def __init__(
        self,
        core: Core,
        lifecycle: Lifecycle,
        budget: Callable[[], int],
        *,
        measure: Callable[[int], int] = held_bytes,
        device_file: str = "",
        interval_s: float = MEASURE_S,
        limits: Limits = LIMITS,
    ) -> None:
        self._core, self._lifecycle, self._budget = core, lifecycle, budget
        self._device_file = device_file
        self._measure, self._interval_s, self._limits = measure, interval_s, limits
        self._grants: dict[str, Grant] = {}
        self._standing: dict[tuple[str, int], Shrink] = {}  # by slot and epoch

    async def run(self) -> None:
        """Until cancelled: measure, grant, and act on who is over its lease."""
        while True:
            await self._look()
            self.regrant()
            now = time.monotonic()
            for replica in self._local():
                if replica.state in WAS_READY and replica.child and not replica.stopping:
                    self._judge(replica, now)
            await asyncio.sleep(self._interval_s)

    def charged_beside(self, model: str) -> int:
        """What models other than `model` cannot do without: their bases and one serving context each."""
        tenants = [self._tenant(r) for r in self._local() if r.model.name != model]
        return sum(t.base + t.kv_wanted for t in tenants)

    def regrant(self) -> None:
        """Share the budget among the workers that there are now; tell those for whom that changed."""
        replicas = {r.slot: r for r in self._local()}
        self._grants = grant(self._budget(), [self._tenant(r) for r in replicas.values()])
        for slot, granted in self._grants.items():
            self._lease(replicas[slot], granted)

    def _local(self) -> list[Replica]:
        """Workers that run on this machine, or will again in a moment."""
        return [
            r
            for r in self._core.state.replicas()
            if not r.host and (r.child or r.state in ALIVE or r.state is State.BACKOFF)
        ]

    def _tenant(self, replica: Replica) -> Tenant:
        spec, settings = replica.model.spec, self._core.settings
        estimated = estimate_of(spec, settings)
        return tenant(replica, estimated, spec.max_rows or settings.max_rows)

    def _lease(self, replica: Replica, granted: Grant) -> None:
        standing = self._standing.get((replica.slot, replica.epoch), Shrink())
        lease = msgspec.structs.replace(
            replica.lease,
            memory_bytes=granted.memory,
            cache_bytes=granted.buffers,
            kv_bytes=max(1, granted.kv),
            shrink=standing.rung.order,
            device_lease=self._device_file,
            weight=replica.model.spec.weight,
        )
        if lease != replica.lease:
            replica.lease = lease
            if replica.greeted:
                self._core.send_lease(replica)

    async def _look(self) -> None:
        """Ask the kernel for each process, in a thread: it walks page tables."""
        pids = {m.slot: m.child.pid for m in self._core.state.local() if m.child}
        held = await asyncio.to_thread(_measure_all, pids, self._measure)
        for member in self._core.state.local():
            if member.child and pids.get(member.slot) == member.child.pid:
                member.held_bytes = held[member.slot]

    def _judge(self, replica: Replica, now: float) -> None:
        key, lease = (replica.slot, replica.epoch), self._grants[replica.slot].total
        before = self._standing.get(key)
        after = step(before, replica.held_bytes, lease, now, self._limits)
        self._standing = {k: v for k, v in self._standing.items() if k[0] != replica.slot}
        if after is not None:
            self._standing[key] = after
        was, now_at = before.rung if before else Rung.NONE, after.rung if after else Rung.NONE
        if was is now_at:
            return
        self._core.events.event(
            replica.slot,
            f"holds {size(replica.held_bytes)} of a lease of {size(lease)}: "
            + (now_at.name.lower().replace("_", " ") if now_at else "within it again"),
        )
        if now_at is Rung.DRAIN:
            replica.state = State.DRAINING
            if replica.model.goal is Goal.SERVE and replica.held_bytes > self._budget():
                # It would come to this again and again: from now on it is loaded when it is asked for.
                replica.model.goal = Goal.STANDBY
            self._lifecycle.stop(replica, self._limits.patience_s[Rung.DRAIN])
            self._core.changed()
        elif now_at < Rung.DRAIN:
            self._lease(replica, self._grants[replica.slot])


def keep_leases(core: Core, lifecycle: Lifecycle) -> None:
    """Share the budget that the fleet's settings give, from now on."""
    ram = ram_bytes()

    def budget() -> int:
        told = [r.ready.device_working_set for r in core.state.replicas() if r.ready and not r.host]
        return budget_bytes(core.settings.budget, working_set(told, ram))

    asked = core.settings.gpu_lease
    turns = asked == "on" or (asked == "auto" and machine_backend() == "metal")
    file = str(core.rundir.sockets / "device") if turns else ""
    keeper = LeaseKeeper(core, lifecycle, budget, device_file=file)
    core.grant_memory = keeper.regrant
    core.room = lambda model: (budget(), keeper.charged_beside(model))
    core.background(keeper.run())


def _measure_all(pids: Mapping[str, int], measure: Callable[[int], int]) -> dict[str, int]:
    return {slot: measure(pid) for slot, pid in pids.items()}
