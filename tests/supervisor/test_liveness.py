"""A process that lives and is of no use is found by what it does not do; one that only works long is not."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.supervisor_up import Stream, serving, wait_for

from mlxhost.supervisor.deadlines import overdue
from mlxhost.supervisor.modelspec import Model as ModelSpec
from mlxhost.supervisor.settings import Timing
from mlxhost.supervisor.state import Model, Replica, State
from mlxhost.wire.control import Heartbeat
from mlxhost.wire.data import Load

SLOW_ROWS = {"length": 100_000, "step_ms": 20}


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


def replica(mode: str = "running", **times: float) -> Replica:
    """A ready replica whose every sign of life is of second 100."""
    member = Replica(
        slot="m/0",
        role="worker",
        model=Model(spec=ModelSpec("m", Path("/m")), routing="round-robin"),
        index=0,
    )
    member.state, member.beat = State.READY, Heartbeat(False, Load(), mode=mode)
    member.beat_at = member.tick_at = member.progress_at = 100.0
    for name, at in times.items():
        setattr(member, name, at)
    return member


@pytest.mark.parametrize(
    ("member", "now", "reason"),
    [
        (replica(), 107.0, ""),
        (replica(), 108.5, "no heartbeat"),
        (replica(beat_at=200.0, tick_at=139.0), 200.0, "without one engine step"),
        (replica(beat_at=200.0, tick_at=141.0), 200.0, ""),
        (replica(disconnected_at=99.0), 101.5, ""),
        (replica(disconnected_at=99.0), 102.5, "closed its control connection"),
        (replica("reloading", beat_at=230.0, tick_at=230.0), 219.0, ""),
        (replica("reloading", beat_at=230.0, tick_at=230.0), 221.0, "while reading weights"),
        (replica("paused", beat_at=230.0, tick_at=230.0), 230.0, ""),
    ],
)
def test_signs_of_a_process_that_is_of_no_use(member: Replica, now: float, reason: str) -> None:
    """Each signal by itself is enough, and none of them is early."""
    found = overdue(member, now, Timing())
    assert reason in found
    assert bool(found) == bool(reason)


def test_silence_is_noticed_within_ten_seconds_by_default() -> None:
    """The last heartbeat, the limit and the look at it together."""
    timing = Timing()
    assert timing.heartbeat_s + timing.stale_s + timing.tick_s <= 10.0


def test_a_closed_control_connection_is_noticed_though_the_process_serves(
    tmp_path: Path, llama: Path
) -> None:
    """The worker hangs up and goes on: given up long before its heartbeats would count as missing."""
    script = {**SLOW_ROWS, "hang_up_after": 3, "only_epoch": 1}
    timing = {"disconnect_s": 0.5, "stale_s": 30.0, "kill_s": 0.3}
    with serving(tmp_path, f"m={llama}", script=script, timing=timing) as up:
        began = time.monotonic()
        Stream(up.url(), "m", 5000).join()
        up.line("m/0: given up: closed its control connection")
        assert time.monotonic() - began < 4.0
        wait_for(lambda: up.replica("m/0")["epoch"] == 2 and up.replica("m/0")["state"] == "ready")


def test_a_long_prefill_is_not_taken_for_a_hang(tmp_path: Path, llama: Path) -> None:
    """Four times the limit without one token, the tick advancing: the row is served by the same process."""
    script = {"prefill_s": 4.0, "step_ms": 100}
    with serving(tmp_path, f"m={llama}", script=script, timing={"stuck_s": 1.0, "stale_s": 1.0}) as up:
        stream = Stream(up.url(), "m", 3).join()
        assert stream.finish == "length"
        assert up.replica("m/0")["epoch"] == 1


def test_a_paused_worker_with_frozen_rows_is_not_taken_for_a_hang(tmp_path: Path, llama: Path) -> None:
    """Standing still on purpose for longer than the limit is fine."""
    answers = {"pause": {"mode": "paused", "result": {"mode": "paused"}}, "resume": {"mode": "running"}}
    script = {**SLOW_ROWS, "answers": answers}
    with serving(tmp_path, f"m={llama}", script=script, timing={"stuck_s": 0.5}) as up:
        stream = Stream(up.url(), "m", 30).begun()
        up.ctl("pause", "m", "--mode", "keep")
        time.sleep(1.5)
        up.ctl("resume", "m")
        assert stream.join().finish == "length"
        assert up.replica("m/0")["epoch"] == 1


def test_a_stuck_process_shows_where_it_stands_before_it_is_killed(tmp_path: Path, llama: Path) -> None:
    """SIGABRT comes first: the stack of every thread is among the lines it leaves."""
    script = {**SLOW_ROWS, "freeze_after": 3, "only_epoch": 1}
    with serving(tmp_path, f"m={llama}", script=script, timing={"stale_s": 0.6}) as up:
        Stream(up.url(), "m", 5000).join()
        up.line("m/0: given up: no heartbeat")
        up.line("Fatal Python error: Aborted")
        up.line("in apply_faults")


def test_a_frontend_shows_where_it_stands_too(tmp_path: Path, llama: Path) -> None:
    """SIGABRT to a frontend leaves its stack, and another takes its place."""
    with serving(tmp_path, f"m={llama}") as up:
        os.kill(up.status()["frontends"][0]["pid"], signal.SIGABRT)
        up.line("Fatal Python error: Aborted")
        wait_for(lambda: up.status()["frontends"][0]["epoch"] == 2)


@pytest.mark.slow
def test_sigstop_is_noticed_within_ten_seconds(tmp_path: Path, llama: Path) -> None:
    """With the intervals of a real fleet."""
    timing = {"heartbeat_s": 1.0, "tick_s": 0.1}
    with serving(tmp_path, f"m={llama}", script=SLOW_ROWS, timing=timing) as up:
        stream = Stream(up.url(), "m", 5000).begun()
        os.kill(up.replica("m/0")["pid"], signal.SIGSTOP)
        stopped_at = time.monotonic()
        stream.join(15)
        assert stream.ended_at - stopped_at <= 10.0
        up.line("m/0: given up: no heartbeat for 8 s")
