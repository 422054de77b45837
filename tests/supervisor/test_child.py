"""Child processes: their words, their end, and what they leave behind."""

import asyncio
import signal
import subprocess
import sys
import time

import psutil
import pytest
from support.supervisor_up import wait_for

from mlxhost.supervisor.child import MAX_LINE_BYTES, ending, exited, spawn
from mlxhost.wire.boot import Boot

BOOT = Boot("ipc:///x", "secret", "m/0", 1)


def run_child(code: str) -> tuple[int, list[str], list[str], float]:
    """Exit code, lines as they came, last words, and seconds from the exit to knowing it."""

    async def run() -> tuple[int, list[str], list[str], float]:
        lines: list[str] = []
        child = spawn([sys.executable, "-c", code], BOOT, on_line=lines.append, env={})
        status = await asyncio.wait_for(child.exit_code(), 20)
        known = time.monotonic()
        words = await child.last_words()
        return status, lines, words, time.monotonic() - known

    return asyncio.run(run())


def test_output_comes_line_by_line_and_the_last_lines_are_kept() -> None:
    """stdout and stderr, the last 20 lines, also an unfinished one and one that is not UTF-8."""
    code = (
        "import sys, os\n"
        "for i in range(30): print(i, flush=True)\n"
        "os.write(2, b'bad \\xff\\r\\n\\n'); os.write(2, b'no newline'); sys.exit(5)"
    )
    status, lines, words, _ = run_child(code)
    assert status == 5
    assert lines == [*map(str, range(30)), "bad \N{REPLACEMENT CHARACTER}", "no newline"]
    assert words == lines[-20:]


def test_a_line_without_end_is_cut() -> None:
    """A flood without a newline neither grows without bound nor blocks the child."""
    status, lines, _, _ = run_child("import os; os.write(1, b'x' * 1000000)")
    assert status == 0
    assert all(len(line) <= MAX_LINE_BYTES for line in lines)


def test_the_boot_line_is_on_stdin_and_the_pipe_stays_open() -> None:
    """The child reads its orders; a further read would wait for the parent's end."""
    code = (
        "import sys, select\n"
        "print(sys.stdin.readline().strip())\n"
        "print(bool(select.select([0], [], [], 0.2)[0]))"
    )
    _, lines, _, _ = run_child(code)
    assert '"token":"secret"' in lines[0]
    assert lines[1] == "False"


def test_a_grandchild_that_holds_the_output_neither_survives_nor_delays() -> None:
    """The exit is known at once, and the whole group is ended."""
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(p.pid, flush=True); sys.exit(3)"
    )
    began = time.monotonic()
    status, lines, _, words_s = run_child(code)
    assert status == 3
    assert time.monotonic() - began < 3
    assert words_s < 0.5
    wait_for(lambda: not psutil.pid_exists(int(lines[0])), what="the grandchild's end")


@pytest.mark.parametrize("pidfd", [True, False])
def test_the_end_is_noticed_with_and_without_pidfd(pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel offers no pidfd (macOS) a thread waits instead."""
    if not pidfd:
        monkeypatch.delattr("os.pidfd_open", raising=False)

    async def wait() -> None:
        await asyncio.wait_for(exited(process), 10)

    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2)"])
    asyncio.run(wait())
    assert process.wait(0) == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (7, "exited with code 7"),
        (-signal.SIGKILL, "killed by SIGKILL"),
        (-99, "killed by signal 99"),
    ],
)
def test_an_end_in_words(code: int, words: str) -> None:
    """Signals by name, codes by number."""
    assert ending(code) == words
