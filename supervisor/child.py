"""One child process: how it is started, watched, heard and ended.

A child leads its own session, so a terminal's Ctrl-C reaches the supervisor alone, and whatever the child
starts is ended with its process group. Its stdin is the lifeline pipe (wire.boot); its output comes
back line by line.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from mlxhost.wire.boot import Boot, write_boot

KEPT_LINES = 20
MAX_LINE_BYTES = 4096
# A grandchild may hold the output open after the child is gone; its words can wait no longer than this.
LAST_WORDS_SECONDS = 0.3


class Child:
    """A running (or just ended) process of the fleet."""

    def __init__(
        self, process: asyncio.subprocess.Process, lifeline: int, on_line: Callable[[str], None]
    ) -> None:
        self._process, self._lifeline, self._on_line = process, lifeline, on_line
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._reader = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def exit_code(self) -> int:
        """Wait for the end; negative is the signal that caused it. What is left of its group is killed."""
        code = await self._process.wait()
        self.signal(signal.SIGKILL)
        self._close_lifeline()
        return code

    async def last_words(self) -> list[str]:
        """After the exit: the last lines it wrote."""
        await asyncio.wait([self._reader], timeout=LAST_WORDS_SECONDS)
        self._reader.cancel()
        return list(self.lines)

    def signal(self, number: signal.Signals) -> None:
        """Send `number` to the child's whole process group."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, number)

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    async def _read(self) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        pending = b""
        while chunk := await stream.read(65_536):
            *whole, pending = (pending + chunk).split(b"\n")
            for line in whole:
                self._emit(line)
            if len(pending) > MAX_LINE_BYTES:
                self._emit(pending)
                pending = b""
        if pending:
            self._emit(pending)

    def _emit(self, raw: bytes) -> None:
        line = raw[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if line:
            self.lines.append(line)
            self._on_line(line)


async def spawn(
    command: Sequence[str],
    boot: Boot,
    *,
    on_line: Callable[[str], None],
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `command` and tell it where to dial. Call from the main thread only: a child asks the kernel to
    die with the thread that spawned it. Raises OSError when it cannot be started."""
    read_end, write_end = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=read_end,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **env},
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    with contextlib.suppress(BrokenPipeError):  # it died at once; its exit tells why
        write_boot(write_end, boot)
    return Child(process, write_end, on_line)


def worker_environment(cores: int) -> dict[str, str]:
    """Environment that keeps a worker lean: without it glibc keeps freed prompt and weight buffers in
    per-thread arenas. BLAS starts with all cores; the lease sets the live number."""
    return {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "OPENBLAS_NUM_THREADS": str(cores),
    }


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
