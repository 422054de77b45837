"""One child process: how it is started, watched, heard and ended.

A child leads its own session, so a terminal's Ctrl-C reaches the supervisor alone, and whatever the child
starts is ended with its process group. Its stdin is the lifeline pipe (wire.boot); its output comes
back line by line.

Not asyncio's subprocesses: those report an exit only once the output is closed, which a grandchild (a
conversion, say) may hold open.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from mlxhost.wire.boot import Boot, write_boot

KEPT_LINES = 20
MAX_LINE_BYTES = 4096
READ_BYTES = 65_536
# A grandchild may hold the output open after the child is gone; its words can wait no longer than this.
LAST_WORDS_SECONDS = 0.3


class Child:
    """A running (or just ended) process of the fleet."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", output: int, lifeline: int, on_line: Callable[[str], None]
    ) -> None:
        self.pid = process.pid
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._process, self._output, self._lifeline, self._on_line = process, output, lifeline, on_line
        self._pending = b""
        self._output_ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(output, False)
        self._loop.add_reader(output, self._read)

    async def exit_code(self) -> int:
        """Wait for the end; negative is the signal that caused it. What is left of its group is killed."""
        await exited(self._process)
        self.signal(signal.SIGKILL)
        code = self._process.wait()
        os.close(self._lifeline)
        return code

    async def last_words(self) -> list[str]:
        """After the exit: the last lines it wrote."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._output_ended.wait(), LAST_WORDS_SECONDS)
        self._close_output()
        return list(self.lines)

    def signal(self, number: signal.Signals) -> None:
        """Send `number` to the child's whole process group."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, number)

    def _read(self) -> None:
        try:
            chunk = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return
        *whole, self._pending = (self._pending + chunk).split(b"\n")
        for line in whole:
            self._emit(line)
        if not chunk or len(self._pending) > MAX_LINE_BYTES:
            self._emit(self._pending)
            self._pending = b""
        if not chunk:
            self._close_output()

    def _close_output(self) -> None:
        if not self._output_ended.is_set():
            self._output_ended.set()
            self._loop.remove_reader(self._output)
            os.close(self._output)

    def _emit(self, raw: bytes) -> None:
        line = raw[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if line:
            self.lines.append(line)
            self._on_line(line)


async def exited(process: "subprocess.Popen[bytes]") -> None:
    """Wait until `process` has ended. On Linux it is not reaped yet, so its id is still its own."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    try:
        fd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # macOS, or an old kernel
        threading.Thread(target=_wait_in_thread, args=(process, loop, over), daemon=True).start()
        await over.wait()
        return
    try:
        loop.add_reader(fd, over.set)
        await over.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _wait_in_thread(
    process: "subprocess.Popen[bytes]", loop: asyncio.AbstractEventLoop, over: asyncio.Event
) -> None:
    process.wait()
    with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
        loop.call_soon_threadsafe(over.set)


def spawn(
    command: Sequence[str],
    boot: Boot,
    *,
    on_line: Callable[[str], None],
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `command` and tell it where to dial. Call from the main thread only: a child asks the kernel to
    die with the thread that spawned it. Raises OSError when it cannot be started."""
    with contextlib.ExitStack() as on_failure:
        stdin, lifeline = os.pipe()
        on_failure.callback(os.close, lifeline)
        output, stdout = os.pipe()
        on_failure.callback(os.close, output)
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stdout,
                env={**os.environ, **env},
                pass_fds=pass_fds,
                start_new_session=True,
            )
        finally:
            os.close(stdin)
            os.close(stdout)
        on_failure.pop_all()
    with contextlib.suppress(BrokenPipeError):  # it died at once; its exit tells why
        write_boot(lifeline, msgspec.structs.replace(boot, parent=os.getpid()))
    return Child(process, output, lifeline, on_line)


# numpy's BLAS would start a thread for each core, and a frontend multiplies no matrices.
FRONTEND_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


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
