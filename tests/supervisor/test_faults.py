"""Processes that die, hang or are stopped while a fleet serves."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.supervisor_up import Stream, Up, gone, serving, status_of, wait_for

SLOW_ROWS = {"length": 100_000, "step_ms": 20}


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


def kill_worker(up: Up, slot: str, number: signal.Signals = signal.SIGKILL) -> tuple[int, float]:
    pid = up.replica(slot)["pid"]
    os.kill(pid, number)
    return pid, time.monotonic()


def respawned(up: Up, slot: str, before: int) -> Any:
    def other() -> Any:
        replica = up.replica(slot)
        return replica if replica["pid"] not in (None, before) else None

    return other


def test_killed_worker_is_restarted_within_a_second_and_others_do_not_notice(
    tmp_path: Path, llama: Path
) -> None:
    """SIGKILL ends that worker's stream with worker_lost in time, its respawn starts <= 1 s later, and a
    stream of another model goes on to its end."""
    with serving(tmp_path, f"a={llama},b={llama}", script=SLOW_ROWS) as up:
        lost, kept = Stream(up.url(), "a", 5000).begun(), Stream(up.url(), "b", 60).begun()
        pid, killed_at = kill_worker(up, "a/0")
        again = wait_for(respawned(up, "a/0", pid), 2.0)
        assert again["restarts"] == 1
        line = up.line("a/0: lost: killed by SIGKILL")
        assert "(1 of at most 5 in 60 s)" in line
        created = psutil.Process(again["pid"]).create_time()
        assert created - time.time() + time.monotonic() - killed_at <= 1.0
        lost.join()
        assert lost.ended_at - killed_at <= 1.0
        assert lost.finish != "stop"
        assert lost.error is not None
        assert lost.error["code"] == "worker_lost"
        assert kept.join().finish == "length"
        wait_for(lambda: up.replica("a/0")["state"] == "ready")
        assert status_of(up.url(), "a") == 200


def test_engine_failure_announced_by_the_worker_is_the_reason_given(tmp_path: Path, llama: Path) -> None:
    """DEAD after READY: its message is the reason, and the worker comes back."""
    script = {**SLOW_ROWS, "abort_after": 5, "only_epoch": 1}
    with serving(tmp_path, f"m={llama}", script=script) as up:
        Stream(up.url(), "m", 50).join()
        up.line("m/0: lost: scripted engine failure; restarting")
        wait_for(lambda: up.replica("m/0")["state"] == "ready")
        assert up.replica("m/0")["epoch"] == 2


def test_boot_failure_after_a_restart_is_not_looped_and_load_rearms(tmp_path: Path, llama: Path) -> None:
    """A worker that cannot load again is failed at once with the reason; `ctl load` tries again."""
    script = {"boot_exit": 3, "only_epoch": 2}
    with serving(tmp_path, f"m={llama},other={llama}", script={"m": script}) as up:
        kill_worker(up, "m/0")
        up.line("m/0: failed: exited with code 3 before it was ready")
        time.sleep(1.0)
        replica = up.replica("m/0")
        assert (replica["state"], replica["restarts"], replica["pid"]) == ("failed", 1, None)
        assert "exited with code 3" in up.ctl("status").stdout
        assert status_of(up.url(), "m") == 503
        assert status_of(up.url(), "other") == 200
        up.ctl("load", "m")
        assert status_of(up.url(), "m") == 200


@pytest.mark.slow
def test_a_worker_that_keeps_dying_is_failed_after_five_restarts(tmp_path: Path, llama: Path) -> None:
    """The sixth death within 60 s ends the restarts; other models serve; `ctl load` re-arms."""
    with serving(tmp_path, f"m={llama},other={llama}") as up:
        for _ in range(6):
            kill_worker(up, "m/0")
            wait_for(lambda: up.replica("m/0")["state"] in ("ready", "failed"), 30.0)
            wait_for(lambda: up.replica("m/0")["state"] != "backoff", 30.0)
            wait_for(lambda: up.replica("m/0")["state"] in ("ready", "failed"), 30.0)
        replica = up.replica("m/0")
        assert (replica["state"], replica["restarts"]) == ("failed", 5)
        assert replica["reason"] == "died 6 times in 60 s: killed by SIGKILL"
        assert status_of(up.url(), "other") == 200
        up.ctl("load", "m")
        assert status_of(up.url(), "m") == 200


def test_stopped_worker_is_noticed_and_replaced(tmp_path: Path, llama: Path) -> None:
    """SIGSTOP: alive but silent; its streams end and another process takes its place."""
    with serving(tmp_path, f"m={llama}", script=SLOW_ROWS, timing={"stale_s": 1.0, "kill_s": 0.5}) as up:
        stream = Stream(up.url(), "m", 5000).begun()
        pid, stopped_at = kill_worker(up, "m/0", signal.SIGSTOP)
        up.line("m/0: given up: no heartbeat for 1 s")
        assert time.monotonic() - stopped_at < 2.5
        stream.join()
        wait_for(respawned(up, "m/0", pid), 5.0)
        assert not psutil.pid_exists(pid)
        wait_for(lambda: up.replica("m/0")["state"] == "ready")


def test_engine_that_stands_still_is_noticed_though_heartbeats_come(tmp_path: Path, llama: Path) -> None:
    """Busy without one step for the limit: given up, although its I/O goes on."""
    script = {**SLOW_ROWS, "silent_after": 3, "only_epoch": 1}
    with serving(tmp_path, f"m={llama}", script=script, timing={"stuck_s": 1.0, "kill_s": 0.2}) as up:
        Stream(up.url(), "m", 50).join()
        up.line("m/0: given up: busy for 1 s without one engine step")
        wait_for(lambda: up.replica("m/0")["epoch"] == 2 and up.replica("m/0")["state"] == "ready")


@pytest.mark.slow
def test_a_stopped_supervisor_blames_no_one_when_it_goes_on(tmp_path: Path, llama: Path) -> None:
    """Ctrl-Z for longer than the heartbeat limit: no worker is given up afterwards."""
    with serving(tmp_path, f"m={llama}", timing={"stale_s": 1.0}) as up:
        up.signal(signal.SIGSTOP)
        time.sleep(2.5)
        up.signal(signal.SIGCONT)
        time.sleep(0.5)
        assert up.replica("m/0")["epoch"] == 1
        assert up.status()["frontends"][0]["epoch"] == 1


def test_killed_frontend_is_replaced_within_a_second_and_workers_stay(tmp_path: Path, llama: Path) -> None:
    """The new frontend serves on the same address; the resident worker is the same process."""
    with serving(tmp_path, f"m={llama}") as up:
        worker, frontend = up.replica("m/0")["pid"], up.status()["frontends"][0]["pid"]
        os.kill(frontend, signal.SIGKILL)
        killed_at = time.monotonic()
        up.line("frontend/0: lost: killed by SIGKILL")
        # The listening socket was never closed: this connects at once and is answered by the new process.
        assert status_of(up.url(), "m") == 200
        assert time.monotonic() - killed_at < 3.0
        assert up.replica("m/0")["pid"] == worker
        assert up.status()["frontends"][0]["epoch"] == 2


def test_supervisor_sigkill_leaves_no_process_and_the_next_start_sweeps(tmp_path: Path, llama: Path) -> None:
    """All children end within 2 s; the next `up` removes the dead fleet's directory."""
    with serving(tmp_path, f"m={llama}:2") as up:
        children = up.descendants()
        assert len(children) == 3
        up.process.kill()
        wait_for(lambda: gone(children), 2.0, "children ended")
        assert up.ctl("status", check=False).returncode == 3
        (dead,) = (tmp_path / "run").iterdir()
        with serving(tmp_path, f"m={llama}"):
            assert not dead.exists()


def test_supervisor_sigkill_during_a_load_leaves_no_process(tmp_path: Path, llama: Path) -> None:
    """A worker that has not loaded yet goes with the supervisor, too."""
    with Up(tmp_path, f"m={llama}", script={"load_s": 30}) as up:
        up.line("m: loading")
        children = up.descendants()
        up.process.kill()
        wait_for(lambda: gone(children), 2.0, "children ended")


@pytest.mark.slow
def test_workers_that_die_together_restart_one_at_a_time(tmp_path: Path, llama: Path) -> None:
    """Deaths within 2 s are one incident: the second replica starts once the first is ready."""
    script = {"load_s": 1.0}
    with serving(tmp_path, f"m={llama}:2", script=script) as up:
        pids = [up.replica(slot)["pid"] for slot in ("m/0", "m/1")]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

        def loading() -> int:
            replicas = [r for m in up.status()["models"] for r in m["replicas"]]
            return sum(r["state"] in ("starting", "loading") for r in replicas)

        most = 0
        end = time.monotonic() + 8
        while time.monotonic() < end and {up.replica(s)["state"] for s in ("m/0", "m/1")} != {"ready"}:
            most = max(most, loading())
        assert most == 1
        assert {up.replica(s)["state"] for s in ("m/0", "m/1")} == {"ready"}
