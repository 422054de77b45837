"""Which signals stop a fleet."""

import signal


def stop_signals() -> list[signal.Signals]:
    """SIGINT and SIGTERM always (a shell script starts background jobs with SIGINT ignored, and its
    `kill -INT` should still work); SIGHUP unless it is ignored, as nohup does on purpose."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]
