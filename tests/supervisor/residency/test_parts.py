"""The parts around the planner: budget, sizes, the view of the fleet, the log, the start."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import build

from mlxhost.supervisor.config.kinds import Memory
from mlxhost.supervisor.errors import UsageError, UserError
from mlxhost.supervisor.estimate.estimate import estimate
from mlxhost.supervisor.goals import Step, next_step
from mlxhost.supervisor.modelspec import Model as ModelSpec
from mlxhost.supervisor.residency import decisions
from mlxhost.supervisor.residency.budget import budget_bytes, ram_bytes, working_set
from mlxhost.supervisor.residency.decisions import DecisionLog, decision, read_log
from mlxhost.supervisor.residency.facts import Budget, Load, Phase, Unit, Wish
from mlxhost.supervisor.residency.freed import TOLD_FROM_NOISE, wait_freed
from mlxhost.supervisor.residency.preload import chosen, order
from mlxhost.supervisor.residency.sizes import Sizes
from mlxhost.supervisor.residency.units import unit
from mlxhost.supervisor.settings import Settings
from mlxhost.supervisor.state import Goal, Model, Replica, State
from mlxhost.wire.control import Heartbeat, ModelCard, Ready
from mlxhost.wire.data import Load as WorkerLoad

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "device", "expected"),
    [
        ("", 0, 0.7 * 0.75 * 32),
        ("", 20, 14),
        ("0.5", 20, 10),
        ("50%", 20, 10),
        ("6GiB", 20, 6),
        ("1", 20, 20),
    ],
)
def test_a_budget_is_bytes_or_a_part_of_the_working_set(text: str, device: int, expected: float) -> None:
    """The device's own figure counts before the RAM."""
    asked = Memory().of_text(text) if text else 0.0
    assert budget_bytes(asked, working_set([0, device * GIB], 32 * GIB)) == int(expected * GIB)


@pytest.mark.parametrize("text", ["", "0", "-1", "120%", "lots", "1e3"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    """With what is allowed."""
    with pytest.raises(ValueError, match="such as 24GiB"):
        Memory().of_text(text)


def test_this_machine_has_memory() -> None:
    """A real figure, not more than there is."""
    assert 2**28 < ram_bytes() < 2**50


def model(goal: Goal, *states: State, **more: Any) -> Model:
    made = Model(spec=ModelSpec("m", Path("/m"), idle_ttl=9.0), routing="round-robin", goal=goal, **more)
    made.replicas = [
        Replica(slot=f"m/{i}", role="worker", model=made, index=i, state=state, ready_at=50.0)
        for i, state in enumerate(states)
    ]
    return made


@pytest.mark.parametrize(
    ("goal", "states", "phase", "holds"),
    [
        (Goal.STANDBY, [State.UNLOADED], Phase.ABSENT, 0),
        (Goal.UNLOAD, [State.UNLOADED], Phase.OUT, 0),
        (Goal.DRAIN, [State.UNLOADED], Phase.OUT, 0),
        (Goal.SERVE, [State.FAILED], Phase.OUT, 0),
        (Goal.STANDBY, [State.UNLOADED, State.FAILED], Phase.ABSENT, 0),
        (Goal.SERVE, [State.STARTING, State.UNLOADED], Phase.LOADING, 20),
        (Goal.SERVE, [State.BACKOFF], Phase.LOADING, 10),
        (Goal.SERVE, [State.READY, State.BACKOFF], Phase.RESIDENT, 20),
        (Goal.SERVE, [State.READY, State.FAILED], Phase.RESIDENT, 10),
        (Goal.HOLD, [State.DRAINING], Phase.HELD, 10),
        (Goal.STANDBY, [State.DRAINED, State.UNLOADED], Phase.LEAVING, 10),
        (Goal.DRAIN, [State.DRAINED], Phase.RESIDENT, 10),
    ],
)
def test_where_a_model_stands(goal: Goal, states: list[State], phase: Phase, holds: int) -> None:
    """All replicas taken together; what will take memory again counts, what is gone does not."""
    seen = unit(model(goal, *states), 10, 0.0, 100.0)
    assert (seen.phase, seen.holds, seen.need, seen.ttl_s) == (phase, holds, 10 * len(states), 9.0)
    assert seen.pinned is (goal is Goal.DRAIN)


def test_who_is_busy() -> None:
    """Rows in flight, or requests that it was loaded for and that have not reached it yet; by the kernel's
    count it may take more than it needs."""
    made = model(Goal.SERVE, State.READY)
    assert not unit(made, 10, 0.0, 51.0).busy
    made.owed = True
    assert unit(made, 10, 0.0, 51.0).busy
    assert not unit(made, 10, 0.0, 60.0).busy
    made.used_at = 55.0
    assert not unit(made, 10, 0.0, 51.0).busy
    made.replicas[0].beat = Heartbeat(True, WorkerLoad(), in_flight=1)
    made.replicas[0].held_bytes = 25
    seen = unit(made, 10, 0.0, 70.0)
    assert (seen.busy, seen.used, seen.holds) == (True, 70.0, 25)


def test_what_stands_by_is_stopped_but_its_failure_is_kept() -> None:
    """A failed model is not tried again because it was evicted."""
    assert next_step(Goal.STANDBY, State.DRAINED) is Step.STOP
    assert next_step(Goal.STANDBY, State.BACKOFF) is Step.FORGET
    assert next_step(Goal.STANDBY, State.FAILED) is Step.NOTHING
    assert next_step(Goal.HOLD, State.READY) is Step.CLOSE
    assert next_step(Goal.HOLD, State.DRAINED) is Step.NOTHING


def test_what_is_loaded_at_the_start() -> None:
    """All but the lazy ones, none, or those named, by any of their names; important ones first."""
    a, b = ModelSpec("a", Path("/a"), lazy=True), ModelSpec("b", Path("/b"), aliases=("bee",))
    c = ModelSpec("c", Path("/c"), pin=True)
    assert chosen([a, b], ["all"]) == [(b, False)]
    assert chosen([a, b], ["none"]) == []
    assert chosen([a, b], ["bee", "a"]) == [(b, True), (a, True)]
    assert [m.name for m in order([a, b, c])] == ["c", "a", "b"]
    with pytest.raises(UsageError, match="--preload x: no such model"):
        chosen([a, b], ["x"])


def test_freed_memory_is_waited_for() -> None:
    """Half of what is expected will do; little is not looked for; the wait ends."""
    big = 2 * TOLD_FROM_NOISE
    figures = iter([0, 0, big // 2])
    assert asyncio.run(wait_freed(big, 0, 5.0, lambda: next(figures)))
    assert asyncio.run(wait_freed(1000, 0, 5.0, lambda: 0))
    assert not asyncio.run(wait_freed(big, 0, 0.05, lambda: 0))


def test_the_log_is_capped_and_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It rotates at its cap; when it cannot be written that is said once, and memory keeps the last ones."""
    one = decision("f", 1.0, Budget(10), [Unit("m", Phase.ABSENT, 4)], [Wish("m", 0.5)], [Load("m", "fits")])
    told: list[str] = []
    monkeypatch.setattr(decisions, "MAX_BYTES", 1000)
    log = DecisionLog(tmp_path / "d.jsonl", told.append)
    for _ in range(20):
        log.add(one)
    assert log.path.stat().st_size <= 1000
    assert (tmp_path / "d.jsonl.1").stat().st_size <= 1000
    assert next(read_log(log.path)) == one
    broken = DecisionLog(tmp_path / "none" / "d.jsonl", told.append)
    broken.add(one)
    broken.add(one)
    assert len(broken.recent) == 2
    assert len(told) == 1
    with pytest.raises(UserError, match="cannot be read"):
        list(read_log(broken.path))


def test_sizes_follow_the_settings_of_now(tmp_path: Path) -> None:
    """What was measured holds for the settings under which it was; quantised weights count as kept."""
    built = build("llama", tmp_path / "m", bits=4)
    made = Model(spec=ModelSpec("m", built), routing="round-robin")
    settings = [Settings(models=(), dtype="float32", quantised="keep")]
    sizes = Sizes(lambda: settings[0])
    kept = sizes.replica(made, GIB)
    assert kept == estimate(built, "float32", quantised="keep").total_bytes
    card = ModelCard(str(built), [], "llama", 300, [])
    ready = Ready(64, 64, 1, 16, "float32", GIB, 5 * GIB, 0, 16, 16, [], [], card)
    sizes.learn(Replica(slot="m/0", role="worker", model=made, index=0, ready=ready))
    assert sizes.is_measured(made)
    assert sizes.replica(made, GIB) > 5 * GIB
    settings[0] = replace(settings[0], quantised="expand")
    assert not sizes.is_measured(made)
    assert kept < sizes.replica(made, GIB) < GIB
