"""CPU threads: how many there are, and who may use how many.

Two workers with as many BLAS threads each as there are cores run more than ten times slower than with a
share each, so busy workers together never get more threads than cores.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path

_CGROUP_MAX = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Cores this process may use: its affinity, bounded by a container's CPU quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_MAX.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def grant_threads(busy: Mapping[str, bool], cores: int) -> dict[str, int]:
    """Threads for each worker, by slot. The sole busy one gets all cores, k busy ones a k-th each; an idle
    one keeps a single thread, to start the step that makes it busy."""
    share = max(1, cores // max(1, sum(busy.values())))
    return {slot: share if is_busy else 1 for slot, is_busy in busy.items()}
