"""Turns on a device, taken by real processes over the real file."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxhost.worker import device
from mlxhost.worker.device import Alone, Turns, reading, take_turns

CHUNK = """
import sys, time, json
from mlxhost.worker.device import Turns
path, weight, seconds, chunk_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
turns = Turns(path, weight)
print("here", flush=True)
sys.stdin.readline()
spans, end = [], time.monotonic() + seconds
while time.monotonic() < end:
    if turns.may_run(wait=True):
        began = time.monotonic()
        spans or print("runs", flush=True)
        time.sleep(chunk_s)
        spans.append((began, time.monotonic()))
        turns.ran()
print(json.dumps({"spans": spans, "untimely": turns.counts.untimely}))
"""


@contextlib.contextmanager
def worker(
    path: Path, *, weight: float = 1.0, seconds: float = 1.5, chunk_s: float = 0.01
) -> Iterator["subprocess.Popen[str]"]:
    """A process that runs chunks of `chunk_s` for `seconds` once it is told to."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHUNK, str(path), str(weight), str(seconds), str(chunk_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def result(process: "subprocess.Popen[str]") -> tuple[list[tuple[float, float]], int]:
    out, _ = process.communicate(timeout=30)
    found = json.loads(out.splitlines()[-1])
    return [tuple(span) for span in found["spans"]], found["untimely"]


Spans = list[tuple[float, float]]


def shared(first: Spans, second: Spans) -> tuple[int, int]:
    """Chunks of each in the time in which both were at work."""
    begin, end = max(first[0][0], second[0][0]), min(first[-1][1], second[-1][1])
    counts = [sum(begin <= at < end for at, _ in spans) for spans in (first, second)]
    return counts[0], counts[1]


def test_two_processes_never_run_a_chunk_at_once(tmp_path: Path) -> None:
    """Their chunks do not overlap, and each gets about half of the time."""
    with worker(tmp_path / "d") as a, worker(tmp_path / "d") as b:
        go(a)
        go(b)
        (first, late_a), (second, late_b) = result(a), result(b)
    if late_a + late_b == 0:
        spans = sorted(first + second)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    ours, theirs = shared(first, second)
    assert 0.5 <= ours / theirs <= 2.0


def test_turns_follow_the_weights(tmp_path: Path) -> None:
    """A worker of weight 3 runs about three chunks for one of a worker of weight 1."""
    with worker(tmp_path / "d", weight=3.0) as heavy, worker(tmp_path / "d") as light:
        go(heavy)
        go(light)
        (first, _), (second, _) = result(heavy), result(light)
    many, few = shared(first, second)
    assert 1.8 <= many / few <= 4.5


def test_a_turn_falls_free_with_its_dead_holder(tmp_path: Path) -> None:
    """A process killed in its chunk holds nobody up."""
    mine = Turns(str(tmp_path / "d"))
    with worker(tmp_path / "d", chunk_s=60.0) as other:
        go(other)
        assert other.stdout is not None
        assert other.stdout.readline() == "runs\n"
        other.kill()
        other.wait()
        while not mine.may_run(wait=True):
            pass
    assert mine.counts.untimely == 0
    mine.ran()
    mine.close()


def test_a_stopped_holder_is_not_waited_for_long(tmp_path: Path) -> None:
    """After MAX_WAIT_S the chunk runs without a turn, and that is counted."""
    mine = Turns(str(tmp_path / "d"))
    with worker(tmp_path / "d", chunk_s=60.0) as other:
        go(other)
        assert other.stdout is not None
        assert other.stdout.readline() == "runs\n"
        os.kill(other.pid, signal.SIGSTOP)
        while not mine.may_run(wait=True):
            pass
        assert mine.counts.untimely == 1
        mine.ran()
    mine.close()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Second(Turns):
    """Takes the second row: the lock on the first one is this process's own."""

    def _take_row(self) -> int:
        return 1


def pair(tmp_path: Path) -> tuple[Turns, Turns, Clock]:
    """Two places in one file. (Locks are a process's own, so only the order is seen here.)"""
    clock = Clock()
    first = Turns(str(tmp_path / "d"), clock=clock)
    second = Second(str(tmp_path / "d"), clock=clock)
    return first, second, clock


def test_between_two_chunks_a_decoding_worker_gets_a_step(tmp_path: Path) -> None:
    """A chunk waits until those who decode have had a step since the last one, and no longer than that."""
    prefills, decodes, clock = pair(tmp_path)
    decodes.stepped()
    clock.now += 0.01
    assert prefills.may_run(wait=False)
    prefills.ran()
    assert not prefills.may_run(wait=False)
    clock.now += 0.01
    decodes.stepped()
    assert prefills.may_run(wait=False)
    prefills.ran()
    clock.now += device.STEP_PATIENCE_S + 0.01  # a step that does not come is not waited for
    assert prefills.may_run(wait=False)


def test_a_worker_that_was_idle_has_saved_up_nothing(tmp_path: Path) -> None:
    """After long work of the other, a newcomer goes first once, not for as long as the other worked."""
    busy, newcomer, clock = pair(tmp_path)
    for _ in range(50):
        assert busy.may_run(wait=False)
        clock.now += 0.1
        busy.ran()
    order = []
    for _ in range(6):
        for name, turns in (("busy", busy), ("new", newcomer)):
            if turns.may_run(wait=False):
                order.append(name)
                clock.now += 0.1
                turns.ran()
    assert order.count("busy") >= 2


def test_a_turn_that_is_not_wanted_any_more_holds_nobody_up_and_is_not_counted(tmp_path: Path) -> None:
    """Its prompt was aborted while it waited: the other goes at once, and the next turn is asked for anew."""
    first, second, clock = pair(tmp_path)
    second.stepped()
    clock.now += 0.01
    assert first.may_run(wait=False)
    first.ran()
    assert not first.may_run(wait=False)  # a step of the other is due
    first.withdraw()
    assert second.may_run(wait=False)
    second.ran()
    clock.now += 3600
    assert first.may_run(wait=False)
    first.ran()
    assert (first.counts.turns, first.counts.untimely) == (2, 0)
    assert first.counts.waited_s < 1


def test_without_a_file_every_turn_is_free() -> None:
    """No lease means no waiting."""
    alone = take_turns("", 1.0)
    assert isinstance(alone, Alone)
    assert alone.may_run(wait=False)


def test_a_file_that_cannot_be_used_means_no_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The worker says so and serves all the same."""
    assert isinstance(take_turns(str(tmp_path / "none" / "d"), 1.0), Alone)
    assert "no turns are taken" in caplog.text


def test_a_load_lets_others_run_between_its_parts(tmp_path: Path) -> None:
    """Its turn is given back and taken again at each part, and is free at the end."""
    mine = Turns(str(tmp_path / "d"))
    with reading(mine) as next_part:
        for _ in range(3):
            next_part()
    assert mine.counts.turns == 4
    with worker(tmp_path / "d", seconds=0.2) as other:
        go(other)
        spans, untimely = result(other)
    assert spans
    assert untimely == 0
    mine.close()
