"""What a real worker takes for a model, as the kernel counts it: loaded, and with a context filled."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from support.worker_harness import WorkerProcess

from mlxhost.supervisor.estimate.estimate import Estimate
from mlxhost.wire import control, data

OUTPUT = 64
# What a chunk of a small model takes on a quiet machine; on a busy one starting a chunk seems to be dear, and
# the worker would take longer ones.
GAP_MS = 50.0


@dataclass(frozen=True)
class Measured:
    """Bytes. `floor` and `peak` are of the resident set: its largest value is the one peak that the kernel
    keeps, and a worker on its own shares nothing but libraries, which the floor holds too."""

    ready: control.Ready
    floor: int  # the process without weights
    peak: int


def measure(path: Path, expected: Estimate) -> Measured:
    """Load the model in a worker of its own, under a lease as the estimate would get it, and let it fill
    the estimate's context with one request (no prefix cache beside it)."""
    with (
        TemporaryDirectory(prefix="mlxhost-") as directory,
        WorkerProcess(
            Path(directory),
            path,
            context=expected.context,
            dtype=expected.dtype,
            max_gap_ms=GAP_MS,
            cache_ram_bytes=0,
            cache_disk_bytes=0,
        ) as worker,
    ):
        process = psutil.Process(worker.process.pid)
        floor = process.memory_info().rss - worker.ready.weights_bytes
        worker.tell(control.Lease(cpu_threads=2, cache_bytes=expected.transient_bytes))
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # forget the peak of the load
        prompt = [i * 7 % 500 + 3 for i in range(expected.context - OUTPUT)]
        worker.add(1, prompt, OUTPUT)
        finished = False
        while not finished:
            message = worker.receive(300)
            finished = isinstance(message, data.Out) and any(message.finish)
        return Measured(worker.ready, floor, _peak(process.pid))


def _peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel tells no peak")
