"""The other pure decisions: goals, CPU threads, deadlines, the handshake."""

from pathlib import Path

import msgspec
import pytest

from mlxhost.supervisor.cores import available_cores, grant_threads
from mlxhost.supervisor.deadlines import forgive, overdue
from mlxhost.supervisor.goals import Step, next_step
from mlxhost.supervisor.handshake import Expected, refuse
from mlxhost.supervisor.modelspec import Model as ModelSpec
from mlxhost.supervisor.settings import Timing
from mlxhost.supervisor.state import Frontend, Goal, Model, Replica, State
from mlxhost.wire.control import Hello, Progress
from mlxhost.wire.version import PROTOCOL_MAJOR, SCHEMA


@pytest.mark.parametrize(
    ("busy", "cores", "threads"),
    [
        ({}, 8, {}),
        ({"a": False}, 8, {"a": 1}),
        ({"a": True}, 8, {"a": 8}),
        ({"a": True, "b": False}, 8, {"a": 8, "b": 1}),
        ({"a": True, "b": True}, 8, {"a": 4, "b": 4}),
        ({"a": True, "b": True, "c": True}, 8, {"a": 2, "b": 2, "c": 2}),
        ({"a": True, "b": True, "c": True}, 2, {"a": 1, "b": 1, "c": 1}),
    ],
)
def test_busy_workers_share_the_cores(busy: dict[str, bool], cores: int, threads: dict[str, int]) -> None:
    """Together they never exceed the cores, unless there are more of them than cores."""
    assert grant_threads(busy, cores) == threads


def test_there_is_at_least_one_core() -> None:
    """The figure is what this process may really use."""
    assert available_cores() >= 1


@pytest.mark.parametrize("state", list(State))
def test_a_served_model_is_opened_or_started(state: State) -> None:
    """Serving never touches what failed, waits or already serves."""
    expected = {State.UNLOADED: Step.START, State.DRAINING: Step.OPEN, State.DRAINED: Step.OPEN}
    assert next_step(Goal.SERVE, state) is expected.get(state, Step.NOTHING)


@pytest.mark.parametrize("state", list(State))
def test_a_drained_model_is_only_closed(state: State) -> None:
    """Draining ends no process and starts none."""
    assert next_step(Goal.DRAIN, state) is (Step.CLOSE if state is State.READY else Step.NOTHING)


@pytest.mark.parametrize("state", list(State))
def test_an_unloaded_model_is_drained_before_it_is_stopped(state: State) -> None:
    """What serves is closed first; what has nothing to finish is stopped or forgotten at once."""
    expected = {
        State.READY: Step.CLOSE,
        State.DRAINING: Step.NOTHING,
        State.UNLOADED: Step.NOTHING,
        State.BACKOFF: Step.FORGET,
        State.FAILED: Step.FORGET,
    }
    assert next_step(Goal.UNLOAD, state) is expected.get(state, Step.STOP)


def replica(state: State, **times: float) -> Replica:
    made = Replica(
        slot="m/0",
        role="worker",
        state=state,
        model=Model(spec=ModelSpec("m", Path("/m")), routing="round-robin"),
        index=0,
    )
    for name, value in times.items():
        setattr(made, name, value)
    return made


TIMING = Timing(hello_s=60, progress_s=120, stale_s=8, stuck_s=60)


@pytest.mark.parametrize(
    ("member", "complaint"),
    [
        (replica(State.STARTING, spawned_at=941), ""),
        (replica(State.STARTING, spawned_at=939), "said nothing for 60 s"),
        (replica(State.LOADING, progress_at=881), ""),
        (replica(State.LOADING, progress_at=879), "made no progress for 120 s while starting up"),
        (replica(State.READY, beat_at=993, tick_at=941), ""),
        (replica(State.READY, beat_at=991, tick_at=1000), "no heartbeat for 8 s"),
        (replica(State.DRAINING, beat_at=991, tick_at=1000), "no heartbeat for 8 s"),
        (replica(State.READY, beat_at=1000, tick_at=939), "busy for 60 s without one engine step"),
        (replica(State.FAILED), ""),
        (replica(State.BACKOFF), ""),
        (replica(State.UNLOADED), ""),
        (Frontend(slot="frontend/0", role="frontend", state=State.READY, beat_at=991), "no heartbeat"),
        (Frontend(slot="frontend/0", role="frontend", state=State.LOADING, heard_at=879), "no progress"),
    ],
)
def test_who_was_silent_for_too_long(member: Replica | Frontend, complaint: str) -> None:
    """Each phase has its own deadline."""
    said = overdue(member, 1000.0, TIMING)
    assert bool(said) is bool(complaint)
    assert complaint in said


def test_the_phase_is_named_and_a_pause_is_forgiven() -> None:
    """A stuck load says in which phase; time in which nobody listened does not count."""
    stuck = replica(State.LOADING, progress_at=870, progress=Progress("converting"))
    assert overdue(stuck, 1000.0, TIMING) == "made no progress for 120 s while converting"
    forgive(stuck, 100.0)
    assert overdue(stuck, 1000.0, TIMING) == ""


KNOWN = Expected("worker", "m/0", 3, "secret", greeted=False)


def hello(**changes: object) -> Hello:
    fields: dict[str, object] = {
        "type": "hello",
        "protocol": (PROTOCOL_MAJOR, 0),
        "schema": SCHEMA,
        "role": "worker",
        "slot": "m/0",
        "epoch": 3,
        "pid": 1,
        "token": "secret",
    }
    return msgspec.convert(fields | changes, Hello)


def test_the_expected_process_is_let_in() -> None:
    """Right protocol, schema, slot, epoch and token; another minor version is no obstacle."""
    assert refuse(hello(), ("m/0", 3), KNOWN) is None
    assert refuse(hello(protocol=(PROTOCOL_MAJOR, 99)), ("m/0", 3), KNOWN) is None


@pytest.mark.parametrize(
    ("changes", "sender", "expected", "code"),
    [
        ({"protocol": (PROTOCOL_MAJOR + 1, 0)}, ("m/0", 3), KNOWN, "protocol"),
        ({"schema": "other"}, ("m/0", 3), KNOWN, "schema"),
        ({"token": "guess"}, ("m/0", 3), KNOWN, "token"),
        ({"token": "é"}, ("m/0", 3), KNOWN, "token"),
        ({"epoch": 2}, ("m/0", 2), KNOWN, "slot"),
        ({}, ("m/1", 3), KNOWN, "slot"),
        ({}, None, KNOWN, "slot"),
        ({"role": "frontend"}, ("m/0", 3), KNOWN, "slot"),
        ({}, ("m/0", 3), None, "slot"),
        ({}, ("m/0", 3), Expected("worker", "m/0", 3, "secret", greeted=True), "slot"),
    ],
)
def test_others_are_refused_with_a_code(
    changes: dict[str, object], sender: tuple[str, int] | None, expected: Expected | None, code: str
) -> None:
    """Each check has its code, and its message names the process."""
    refused = refuse(hello(**changes), sender, expected)
    assert refused is not None
    assert refused.code == code
    assert "m/0" in refused.message
