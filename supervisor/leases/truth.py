"""What a process holds, as the kernel counts it: not the resident set, which counts shared pages in full.

Linux: the proportional set size (PSS), plus what of it was swapped out. macOS: phys_footprint, the figure of
Activity Monitor, through proc_pid_rusage; written from Apple's headers and untested, as no Mac was at hand.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

_RUSAGE_INFO_V0 = 0


class _RusageInfoV0(ctypes.Structure):
    """struct rusage_info_v0 of <sys/resource.h>."""

    _fields_ = (
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("ri_user_time", ctypes.c_uint64),
        ("ri_system_time", ctypes.c_uint64),
        ("ri_pkg_idle_wkups", ctypes.c_uint64),
        ("ri_interrupt_wkups", ctypes.c_uint64),
        ("ri_pageins", ctypes.c_uint64),
        ("ri_wired_size", ctypes.c_uint64),
        ("ri_resident_size", ctypes.c_uint64),
        ("ri_phys_footprint", ctypes.c_uint64),
        ("ri_proc_start_abstime", ctypes.c_uint64),
        ("ri_proc_exit_abstime", ctypes.c_uint64),
    )


def held_bytes(pid: int) -> int:
    """Memory of process `pid`; 0 when it is gone or may not be looked at. Takes milliseconds for gigabytes:
    the kernel walks the page tables."""
    return _READ(pid)


def _linux(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:] if ":" in line)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Pss", "SwapPss") if name in fields)


def _darwin(pid: int) -> int:
    info = _RusageInfoV0()
    library = ctypes.CDLL("/usr/lib/libproc.dylib", use_errno=True)
    failed = library.proc_pid_rusage(pid, _RUSAGE_INFO_V0, ctypes.byref(info))
    return 0 if failed else int(info.ri_phys_footprint)


_READ: Callable[[int], int] = _darwin if sys.platform == "darwin" else _linux
