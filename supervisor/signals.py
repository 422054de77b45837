"""Which signals a fleet heeds, and whether its terminal is still there."""

import os
import signal


def stop_signals() -> list[signal.Signals]:
    """SIGINT and SIGTERM always (a shell script starts background jobs with SIGINT ignored, and its
    `kill -INT` should still work); SIGHUP unless it is ignored, as nohup does on purpose."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def has_terminal() -> bool:
    """Whether this process has a controlling terminal; one that was closed is none."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
