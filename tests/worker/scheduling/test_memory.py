"""A real worker process under memory leases, and out of memory."""

import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import solo
from support.loading import load
from support.worker_harness import WorkerProcess

from mlxhost.wire import control, data
from mlxhost.wire.data import Finish
from mlxhost.worker.residence import leased_kv_bytes

PROMPT = [(7 * i) % 400 + 3 for i in range(40)]
WAIT_S = 60.0


@pytest.fixture
def worker(tiny_models: dict[str, Path]) -> Iterator[WorkerProcess]:
    with (
        tempfile.TemporaryDirectory() as directory,
        WorkerProcess(Path(directory), tiny_models["llama"]) as process,
    ):
        yield process


def beat_with(worker: WorkerProcess, wanted: Callable[[control.Heartbeat], bool]) -> control.Heartbeat:
    """The next heartbeat that is as `wanted`."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        beat = worker.expect(control.Heartbeat, WAIT_S)
        if wanted(beat):
            return beat
    raise AssertionError(f"no such heartbeat; the last: {beat}")


def assert_solo(worker: WorkerProcess, model: Path, tokens: dict[int, list[int]]) -> None:
    loaded = load(model)
    for handle, got in tokens.items():
        expected, margin = solo.greedy(loaded.model, [*PROMPT, 3 + handle], len(got), frozenset())
        if margin > 1e-4:
            assert got == expected


def test_heartbeats_say_what_the_memory_is_used_for(worker: WorkerProcess) -> None:
    """Weights, limits, what rows hold and what the caches are; all of it is back when they have ended."""
    idle = beat_with(worker, lambda b: b.memory.active > 0).memory
    assert idle.active >= worker.ready.weights_bytes
    assert idle.kv_scheme == "full float32"
    worker.add(1, PROMPT, 3000)
    busy = beat_with(worker, lambda b: b.memory.kv_held > 0).memory
    assert busy.kv_held <= busy.kv_reserved <= busy.kv_limit
    worker.send(*worker_abort(1))
    worker.collect({1})
    after = beat_with(worker, lambda b: b.memory.kv_held == 0).memory
    assert after.kv_reserved == 0
    assert after.peak >= after.active


def worker_abort(handle: int) -> list[bytes]:
    from mlxhost.wire.codec import encode

    return list(encode(data.Abort([(handle, "test")])))


def test_a_smaller_lease_drives_rows_out_and_they_end_exactly(
    worker: WorkerProcess, tiny_models: dict[str, Path]
) -> None:
    """While three rows decode the KV memory shrinks to what one of them needs; each ends as if alone."""
    per_token = worker.ready.kv_bytes_per_token
    for handle in (1, 2, 3):
        worker.add(handle, [*PROMPT, 3 + handle], 900)
    beat_with(worker, lambda b: b.load.running == 3)
    worker.tell(control.Lease(cpu_threads=1, kv_bytes=per_token * 1700 * 4 // 3))
    beat = beat_with(worker, lambda b: b.memory.kv_limit <= per_token * 1700)
    assert beat.load.running == 3
    outcomes = worker.collect({1, 2, 3}, WAIT_S)
    assert all(finish == Finish.LENGTH for _, finish in outcomes.values())
    assert beat_with(worker, lambda b: not b.busy).memory.preemptions >= 1
    assert_solo(worker, tiny_models["llama"], {h: tokens for h, (tokens, _) in outcomes.items()})


def test_the_last_rung_stands_still_and_goes_on_exactly(
    worker: WorkerProcess, tiny_models: dict[str, Path]
) -> None:
    """Told to pause, the worker holds no KV and computes nothing; a later lease lets the rows go on."""
    for handle in (1, 2):
        worker.add(handle, [*PROMPT, 3 + handle], 600)
    beat_with(worker, lambda b: b.memory.kv_held > 0)
    worker.tell(control.Lease(cpu_threads=1, shrink="pause"))
    still = beat_with(worker, lambda b: b.mode == "paused")
    assert (still.memory.kv_held, still.load.running, still.busy) == (0, 2, False)
    tick = still.load.tick
    assert worker.expect(control.Heartbeat).load.tick == tick
    worker.tell(control.Lease(cpu_threads=1))
    outcomes = worker.collect({1, 2}, WAIT_S)
    assert_solo(worker, tiny_models["llama"], {h: tokens for h, (tokens, _) in outcomes.items()})


def test_a_worker_without_room_for_a_context_serves_what_fits(tiny_models: dict[str, Path]) -> None:
    """It says so at the start, serves short requests, and refuses others with the numbers."""
    with (
        tempfile.TemporaryDirectory() as directory,
        WorkerProcess(
            Path(directory), tiny_models["llama"], lease=control.Lease(cpu_threads=1, kv_bytes=1000)
        ) as worker,
    ):
        assert worker.ready.max_model_len == 256
        assert any("no context" in note for note in worker.ready.notes)


@pytest.mark.parametrize(
    ("lease", "expected"),
    [
        (control.Lease(), 0),
        (control.Lease(kv_bytes=7), 7),
        (control.Lease(memory_bytes=1000), 1000 - 600 - 50),
        (control.Lease(memory_bytes=1000, cache_bytes=100), 1000 - 600 - 100),
        (control.Lease(memory_bytes=100), 1),
    ],
)
def test_what_a_lease_leaves_for_kv(lease: control.Lease, expected: int) -> None:
    """The KV figure where there is one, else what weights, chunks and buffers leave of the memory."""
    assert leased_kv_bytes(lease, 600, 50) == expected


def test_running_out_of_memory_costs_the_worker_only(worker: WorkerProcess) -> None:
    """A process that gets no more memory from the system ends, or its request does; it never hangs."""
    assert worker.process.pid
    with open(f"/proc/{worker.process.pid}/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.prlimit(worker.process.pid, resource.RLIMIT_AS, (size + (4 << 20), size + (4 << 20)))
    for handle in range(1, 9):
        worker.add(handle, PROMPT * 90, 100)
    end = time.monotonic() + WAIT_S
    ended: set[int] = set()
    while worker.process.poll() is None and len(ended) < 8 and time.monotonic() < end:
        if worker.data.poll(200):
            message = worker.receive()
            if isinstance(message, data.Reject):
                ended.add(message.handle)
            elif isinstance(message, data.Out):
                ended |= {h for h, f in zip(message.handles, message.finish, strict=True) if f}
    assert worker.process.poll() is not None or len(ended) == 8
