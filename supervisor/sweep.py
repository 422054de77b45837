"""Clean up after a supervisor that died without doing so itself: its processes and its run directory."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

import psutil

from mlxhost.supervisor import rundir

# The start of a process is told relative to boot, and a clock that was set since moves it a little.
SAME_START_SECONDS = 2.0


def sweep() -> list[rundir.Child]:
    """Kill what dead fleets left running and remove their run directories. Returns what was killed."""
    killed = []
    with rundir.dead_fleets() as fleets:
        for path, children in fleets:
            killed += [child for child in children.processes if _kill(child)]
            if children.sockets:
                shutil.rmtree(Path(children.sockets), ignore_errors=True)
            shutil.rmtree(path, ignore_errors=True)
    return killed


def created(pid: int) -> float:
    """When the process began (psutil's unix time), 0 when it is gone already."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def _kill(child: rundir.Child) -> bool:
    if abs(created(child.pid) - child.created) > SAME_START_SECONDS:
        return False
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)  # children lead their own process group
        return True
    return False
