"""How much memory all models together may take. Pure, except for asking the machine."""

import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARE = 0.7  # of the working set, when nothing else is asked: the rest is for caches, prefill and the system
RAM_SHARE = 0.75  # the working set of a machine whose device does not tell its own
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def working_set(device_bytes: Iterable[int], ram_bytes: int) -> int:
    """What models can use: the device's own figure as workers told it in READY, else a share of the RAM."""
    return max(device_bytes, default=0) or int(RAM_SHARE * ram_bytes)


def budget_bytes(asked: float, working_set_bytes: int) -> int:
    """`asked` in bytes, or up to 1 as a fraction of the working set; 0: SHARE of it."""
    if asked > 1:
        return int(asked)
    return int((asked or SHARE) * working_set_bytes)


def ram_bytes() -> int:
    """The machine's memory, or the container's limit where that is lower."""
    total = int(psutil.virtual_memory().total)
    if sys.platform == "linux":
        for path in _CGROUP_LIMITS:
            try:
                text = Path(path).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                total = min(total, int(text))
    return total
