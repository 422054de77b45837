"""Stopping a fleet that has work to do."""

import signal
import time
from pathlib import Path

import pytest
from support.supervisor_up import Stream, gone, posted, serving

SLOW_ROWS = {"length": 100_000, "step_ms": 20}


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


def test_sigterm_lets_running_rows_finish_and_refuses_new_ones(tmp_path: Path, llama: Path) -> None:
    """The running stream ends with all its tokens, new requests get 503 and Retry-After at once, exit 0."""
    with serving(tmp_path, f"m={llama}", script=SLOW_ROWS) as up:
        stream = Stream(up.url(), "m", 100).begun()
        children = up.descendants()
        up.signal(signal.SIGTERM)
        up.line("stopping: waiting for 1 in flight")
        began = time.monotonic()
        with posted(up.url(), "m") as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
        assert time.monotonic() - began < 0.5
        assert stream.join().finish == "length"
        assert len([e for e in stream.events if e["choices"][0]["text"]]) > 0
        assert up.exit_code() == 0
        assert gone(children)
        assert list((tmp_path / "run").iterdir()) == []


def test_idle_fleet_stops_within_two_seconds(tmp_path: Path, llama: Path) -> None:
    """With nothing to finish there is nothing to wait for."""
    with serving(tmp_path, f"m={llama}:2") as up:
        began = time.monotonic()
        up.signal(signal.SIGINT)
        assert up.exit_code() == 0
        assert time.monotonic() - began < 2.0


def test_second_signal_stops_at_once(tmp_path: Path, llama: Path) -> None:
    """A row with minutes to go is cut off; every process is gone; exit 0."""
    with serving(tmp_path, f"m={llama}", script=SLOW_ROWS) as up:
        stream = Stream(up.url(), "m", 5000).begun()
        children = up.descendants()
        up.signal(signal.SIGINT)
        up.line("stopping:")
        began = time.monotonic()
        up.signal(signal.SIGINT)
        assert up.exit_code() == 0
        assert time.monotonic() - began < 1.5
        assert gone(children)
        stream.join()


def test_rows_longer_than_the_limit_are_cut_off(tmp_path: Path, llama: Path) -> None:
    """Shutdown is bounded: after the limit the rest is ended, and it says so."""
    timing = {"drain_s": 0.8, "exit_s": 1.0}
    with serving(tmp_path, f"m={llama}", script=SLOW_ROWS, timing=timing) as up:
        stream = Stream(up.url(), "m", 5000).begun()
        up.signal(signal.SIGTERM)
        assert up.exit_code(8) == 0
        up.line("1 still in flight after 1 s: cut off")
        stream.join()


def test_a_stopped_worker_does_not_hold_up_the_end(tmp_path: Path, llama: Path) -> None:
    """A worker that hears no STOP is killed, and the fleet still ends in bounded time with exit 0."""
    timing = {"drain_s": 1.0, "exit_s": 0.5}
    with serving(tmp_path, f"m={llama}", timing=timing) as up:
        children = up.descendants()
        pid = up.replica("m/0")["pid"]
        next(p for p in children if p.pid == pid).suspend()
        up.signal(signal.SIGTERM)
        assert up.exit_code(8) == 0
        assert gone(children)
