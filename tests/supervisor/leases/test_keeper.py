"""The part that acts on leases: what it sends and when it ends a worker, and a real fleet's leases."""

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from support.supervisor_up import Up, serving, wait_for
from support.tiny_models import build

from mlxhost.supervisor.leases.keeper import LeaseKeeper
from mlxhost.supervisor.leases.shrink import Limits, Rung
from mlxhost.supervisor.leases.truth import held_bytes
from mlxhost.supervisor.modelspec import Model as ModelSpec
from mlxhost.supervisor.settings import Settings
from mlxhost.supervisor.state import FleetState, Goal, Replica, State, new_fleet

MIB = 1 << 20
LIMITS = Limits(dict.fromkeys(Rung, 0.05), slack_share=0.0, slack_bytes=0, calm_s=0.1)


@dataclass
class Process:
    """A child whose memory the test decides."""

    pid: int
    holds: int = 10 * MIB


@dataclass
class Effects:
    """Stands for core and lifecycle: records what the keeper does."""

    state: FleetState
    settings: Settings
    sent: list[tuple[str, str, int]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    events: Any = None
    on_effect: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.events = self

    def event(self, slot: str, text: str) -> None:
        """Not of interest here."""

    def changed(self) -> None:
        """Not of interest here."""

    def send_lease(self, replica: Replica) -> None:
        self.sent.append((replica.slot, replica.lease.shrink, replica.lease.kv_bytes))
        self.on_effect()

    def stop(self, replica: Replica, deadline_s: float) -> None:
        replica.stopping = True
        self.stopped.append(replica.slot)
        self.on_effect()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def effects(model: Path) -> Effects:
    specs = (ModelSpec("a", model), ModelSpec("b", model))
    state = new_fleet(name="f", url="", routing="round-robin", models=specs, frontends=0)
    for each in state.models.values():
        each.goal = Goal.SERVE
    for pid, replica in enumerate(state.replicas(), start=1):
        replica.state, replica.greeted, replica.child = State.READY, True, cast(Any, Process(pid))
    return Effects(state, Settings(models=specs))


def keeper_of(effects: Effects, budget: int = 4096 * MIB) -> LeaseKeeper:
    def measure(pid: int) -> int:
        return next(p.holds for p in processes(effects) if p.pid == pid)

    return LeaseKeeper(
        cast(Any, effects),
        cast(Any, effects),
        lambda: budget,
        measure=measure,
        interval_s=0.01,
        limits=LIMITS,
    )


def processes(effects: Effects) -> Iterator[Process]:
    return (cast(Process, r.child) for r in effects.state.replicas() if r.child)


def run(keeper: LeaseKeeper, effects: Effects, until: Callable[[], object]) -> None:
    """The keeper's loop until something it does makes `until` true."""

    async def loop() -> None:
        seen = asyncio.Event()
        effects.on_effect = lambda: seen.set() if until() else None
        task = asyncio.create_task(keeper.run())
        await asyncio.wait_for(seen.wait(), 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(loop())


def test_leases_change_only_when_the_fleet_does(effects: Effects) -> None:
    """One lease each, however often the keeper looks; both together within the budget."""
    each = keeper_of(effects).charged_beside("a")
    budget = 2 * each + MIB
    keeper = keeper_of(effects, budget)
    for _ in range(3):
        keeper.regrant()
    assert [slot for slot, _, _ in effects.sent] == ["a/0", "b/0"]
    assert sum(r.lease.memory_bytes for r in effects.state.replicas()) <= budget
    replica = effects.state.models["b"].replicas[0]
    replica.child, replica.state = None, State.UNLOADED
    keeper.regrant()
    assert [slot for slot, _, _ in effects.sent] == ["a/0", "b/0", "a/0"]
    assert effects.sent[2][2] > effects.sent[0][2]


def test_a_worker_over_its_lease_is_told_to_shrink_and_ended_at_last(effects: Effects) -> None:
    """Clear the cache, drop prefixes, pause; then it is drained, and the other one is left alone. As it holds
    more than the whole budget, it is not started again before somebody asks for it."""
    next(processes(effects)).holds = 1 << 40
    run(keeper_of(effects), effects, lambda: effects.stopped)
    orders = [shrink for slot, shrink, _ in effects.sent if slot == "a/0"]
    assert orders == ["", "clear_cache", "drop_prefixes", "pause"]
    assert effects.stopped == ["a/0"]
    assert effects.state.models["a"].replicas[0].state is State.DRAINING
    assert [m.goal for m in effects.state.models.values()] == [Goal.STANDBY, Goal.SERVE]
    assert [shrink for slot, shrink, _ in effects.sent if slot == "b/0"] == [""]


def test_a_worker_that_gave_back_is_let_go_on(effects: Effects) -> None:
    """Within its lease for the calm time, the order is lifted, and it is not ended."""
    process = next(processes(effects))
    process.holds = 1 << 40
    keeper = keeper_of(effects)
    run(keeper, effects, lambda: "drop_prefixes" in [s for _, s, _ in effects.sent])
    process.holds = 10 * MIB
    run(keeper, effects, lambda: effects.sent[-1][1] == "")
    assert not effects.stopped


def test_what_other_models_hold_does_not_count_the_model_itself(effects: Effects) -> None:
    """For `fit`: a model is not in its own way."""
    keeper = keeper_of(effects)
    assert keeper.charged_beside("a") == keeper.charged_beside("b") > 0
    assert keeper.charged_beside("neither") == 2 * keeper.charged_beside("a")


def test_the_kernel_is_asked_for_a_process() -> None:
    """This process holds something; one that is gone nothing."""
    assert held_bytes(os.getpid()) > MIB
    assert held_bytes(2**22 + 1) == 0


def leases(up: Up) -> dict[str, tuple[int, int]]:
    """Lease and KV lease of every replica."""
    replicas = [r for m in up.status()["models"] for r in m["replicas"]]
    return {r["slot"]: (r["lease_bytes"], r["kv_lease_bytes"]) for r in replicas}


@pytest.mark.slow
def test_a_fleets_leases_stay_within_its_budget(model: Path, tmp_path: Path) -> None:
    """All workers together; one that was unloaded holds none of it."""
    with serving(tmp_path, f"a={model},b={model}", "--budget", "3GiB") as up:
        before = leases(up)
        assert all(kv > 0 for _, kv in before.values())
        assert sum(memory for memory, _ in before.values()) <= 3 << 30
        held = wait_for(lambda: up.replica("a/0")["memory_bytes"], what="the kernel's figure")
        assert held > MIB
        up.ctl("unload", "b")
        wait_for(lambda: leases(up)["b/0"] == (0, 0), what="no lease without a process")
        assert leases(up)["a/0"] >= before["a/0"]
