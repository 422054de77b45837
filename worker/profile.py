"""Where the engine's time goes: laps of each step, in a bounded buffer, as a Chrome trace.

MLX is lazy. `launch` builds a step's graph. `sample` adds the draw and hands the graph over; on a CPU
the computing itself shows there, on a GPU in `wait` for the step before. `prefill` waits for its chunk.
"""

import json
import os
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

DEFAULT_EVENTS = 100_000
MAX_EVENTS = 1_000_000


class Profile:
    """Laps since `start`. Without a profile the engine tests one attribute a lap and does nothing else."""

    def __init__(self, max_events: int = DEFAULT_EVENTS) -> None:
        self.started = self._last = time.perf_counter()
        self._events: deque[tuple[str, float, float, int]] = deque(maxlen=max_events)
        self.recorded = 0

    def __len__(self) -> int:
        return len(self._events)

    def begin(self) -> None:
        """A step begins: what was before it belongs to no lap."""
        self._last = time.perf_counter()

    def lap(self, name: str, size: int = 0) -> None:
        """The time since the last lap went to `name`; `size` is in rows, or tokens for a prompt's chunk."""
        now = time.perf_counter()
        self._events.append((name, self._last, now, size))
        self._last = now
        self.recorded += 1

    def summary(self) -> dict[str, dict[str, float]]:
        """For each name: count and total, mean, median, 99th percentile and largest milliseconds."""
        by_name: dict[str, list[float]] = defaultdict(list)
        for name, start, end, _ in self._events:
            by_name[name].append((end - start) * 1000)
        return {name: _figures(sorted(ms)) for name, ms in by_name.items()}

    def write(self, directory: Path, label: str) -> Path:
        """Write the trace (open it in chrome://tracing or Perfetto); its path. Raises OSError."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06d}.json"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": self._trace()}, file)
        return path

    def _trace(self) -> list[dict[str, Any]]:
        pid = os.getpid()
        return [
            {
                "name": name,
                "ph": "X",
                "ts": round((start - self.started) * 1e6, 1),
                "dur": round((end - start) * 1e6, 1),
                "pid": pid,
                "tid": 1,
                "args": {"size": size},
            }
            for name, start, end, size in self._events
        ]


def _figures(ms: list[float]) -> dict[str, float]:
    total = sum(ms)
    at = [ms[min(len(ms) - 1, int(len(ms) * share))] for share in (0.5, 0.99)]
    return {
        "count": len(ms),
        "total_ms": round(total, 3),
        "mean_ms": round(total / len(ms), 4),
        "p50_ms": round(at[0], 4),
        "p99_ms": round(at[1], 4),
        "max_ms": round(ms[-1], 4),
    }
