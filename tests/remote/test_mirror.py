"""A machine's report as replicas of the fleet: decided as tables, without sockets."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxhost.supervisor.modelspec import Model as ModelSpec
from mlxhost.supervisor.remote import mirror
from mlxhost.supervisor.state import FleetState, Goal, Replica, State, new_fleet
from mlxhost.wire.control import CardFile, Heartbeat, HostReplica, ModelCard, Ready
from mlxhost.wire.data import Load

CARD = ModelCard("/there/m", [CardFile("tokenizer.json", "a" * 64, 10)], "llama", 512, [0])
READY = Ready(4096, 1000, 10, 256, "float32", 1, 1, 0, 8, 16, ["flush"], ["generate"], CARD)


@pytest.fixture
def state() -> FleetState:
    """A fleet with one model, `local`."""
    spec = ModelSpec("local", Path("/here/local"))
    return new_fleet(name="f", url="u", routing="round-robin", models=(spec,), frontends=1)


def report(slot: str = "studio:m/0", model: str = "m", **fields: Any) -> HostReplica:
    known = {"epoch": 5, "aliases": [], "state": "ready", "ready": READY}
    return HostReplica(slot=slot, model=model, **(known | fields))


def only(state: FleetState) -> Replica:
    (replica,) = (r for r in state.replicas() if r.host)
    return replica


@pytest.mark.parametrize(
    ("reported", "goal", "more", "expected"),
    [
        (State.READY, Goal.SERVE, {}, State.READY),
        (State.LOADING, Goal.SERVE, {}, State.LOADING),
        (State.BACKOFF, Goal.DRAIN, {}, State.BACKOFF),
        (State.READY, Goal.DRAIN, {}, State.DRAINED),
        (State.READY, Goal.DRAIN, {"in_flight": 2}, State.DRAINING),
        (State.READY, Goal.DRAIN, {"settled": False}, State.DRAINING),
        (State.READY, Goal.UNLOAD, {}, State.DRAINED),
        (State.READY, Goal.SERVE, {"leaving": True, "in_flight": 1}, State.DRAINING),
        (State.DRAINED, Goal.SERVE, {}, State.DRAINED),
        (State.READY, Goal.SERVE, {"matches": False}, State.FAILED),
        (State.UNLOADED, Goal.SERVE, {"matches": False}, State.UNLOADED),
    ],
)
def test_state_here(reported: State, goal: Goal, more: dict[str, Any], expected: State) -> None:
    """What is ready there may be closed here; what is not ready there never is here."""
    known: dict[str, Any] = {"leaving": False, "in_flight": 0, "settled": True, "matches": True}
    assert mirror.state_here(reported, goal, **(known | more)) is expected


def test_a_new_model_appears_and_goes_with_its_last_replica(state: FleetState) -> None:
    """The report is whole: what it no longer lists is gone, and so is a model that was only there."""
    mirror.apply(state, "studio", [report(), report("studio:m/1")], leaving=False)
    assert [r.index for r in state.models["m"].replicas] == [0, 1]
    mirror.apply(state, "studio", [report("studio:m/1")], leaving=False)
    assert only(state).slot == "studio:m/1"
    mirror.apply(state, "studio", [], leaving=False)
    assert list(state.models) == ["local"]


def test_a_local_model_gains_replicas_and_keeps_its_own(state: FleetState) -> None:
    """Indices are unique within the model; the local replica is not touched."""
    mirror.apply(state, "studio", [report("studio:local/0", "local")], leaving=False)
    assert [(r.slot, r.index) for r in state.models["local"].replicas] == [
        ("local/0", 0),
        ("studio:local/0", 1),
    ]
    mirror.apply(state, "studio", [], leaving=False)
    assert [r.slot for r in state.models["local"].replicas] == ["local/0"]


def test_machines_do_not_touch_each_other(state: FleetState) -> None:
    """Two machines with one model: the report of one says nothing of the other's replicas."""
    mirror.apply(state, "studio", [report()], leaving=False)
    mirror.apply(state, "mini", [report("mini:m/0")], leaving=False)
    mirror.apply(state, "studio", [], leaving=False)
    assert only(state).slot == "mini:m/0"


@pytest.mark.parametrize(
    "bad",
    [
        report("mini:m/0"),
        report("m/0"),
        report("studio:other/0"),
        report("studio:m/x"),
        report("studio:m/0", state="dancing"),
        report("studio:\x1b/0", "\x1b"),
    ],
)
def test_reports_that_no_machine_may_make_are_left_out(state: FleetState, bad: HostReplica) -> None:
    """Slots of others, names that are none, states that are none."""
    mirror.apply(state, "studio", [bad], leaving=False)
    assert not [r for r in state.replicas() if r.host]


def test_a_name_that_a_local_replica_bears_is_left_out(state: FleetState) -> None:
    """A local model may be called like a machine's slot; the local process keeps it."""
    spec = ModelSpec("studio:m", Path("/here/odd"))
    fleet = new_fleet(name="f", url="u", routing="round-robin", models=(spec,), frontends=1)
    (news,) = mirror.apply(fleet, "studio", [report()], leaving=False)
    assert "another replica" in news
    assert not [r for r in fleet.replicas() if r.host]


def test_other_files_fail_the_replica_until_nobody_serves_with_the_old_ones(state: FleetState) -> None:
    """The first to be ready decides what the model is; once it is gone the other may serve."""
    other = msgspec.structs.replace(CARD, files=[CardFile("tokenizer.json", "b" * 64, 10)])
    second = report("mini:m/0", ready=msgspec.structs.replace(READY, card=other))
    mirror.apply(state, "studio", [report()], leaving=False)
    mirror.apply(state, "mini", [second], leaving=False)
    failed = next(r for r in state.replicas() if r.host == "mini")
    assert failed.state is State.FAILED
    assert "tokenizer.json" in failed.reason
    mirror.apply(state, "studio", [], leaving=False)
    mirror.apply(state, "mini", [second], leaving=False)
    assert only(state).state is State.READY


def test_ready_figures_are_those_of_the_machine(state: FleetState) -> None:
    """READY overrides what was assumed; a lost machine's figures are forgotten."""
    beat = Heartbeat(True, Load(running=2), in_flight=2)
    mirror.apply(state, "studio", [report(beat=beat)], leaving=False)
    replica = only(state)
    assert replica.ready is not None
    assert (replica.ready.max_model_len, replica.in_flight) == (4096, 2)
    mirror.lose(replica, "cut")
    assert (replica.state, replica.ready, replica.in_flight) == (State.BACKOFF, None, 0)


def test_more_replicas_than_a_machine_may_have_are_cut_off(state: FleetState) -> None:
    """A report cannot fill the fleet."""
    many = [report(f"studio:m/{i}") for i in range(mirror.MAX_REPLICAS + 50)]
    mirror.apply(state, "studio", many, leaving=False)
    assert sum(1 for _ in state.replicas()) == mirror.MAX_REPLICAS + 1
