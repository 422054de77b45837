"""The start-up view on a real (pseudo) terminal."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.supervisor_up import ENTRY, QUICK, wait_for

# Takes the terminal as the controlling one, as a shell's job has it.
_IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """`mlxhost up` in a terminal of a given size, and everything it wrote."""

    def __init__(self, home: Path, models: str, columns: int) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns)
        self._bytes = bytearray()
        self._hung_up = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, str(ENTRY), "up", "--models", models, "--port", "0"],
            # COLUMNS and LINES, which parallel test runs set, count for more than the terminal's size.
            env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            | {
                "MLXHOST_HOME": str(home),
                "MLXHOST_FAKE": json.dumps({"load_s": 1.5}),
                "MLXHOST_TEST_UP": json.dumps({"timing": QUICK}),
                "TERM": "xterm",
                "PYTHONIOENCODING": "utf-8",
            },
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while not self._hung_up.is_set():
                if select.select([self.master], [], [], 0.05)[0]:
                    self._bytes += os.read(self.master, 4096)

    def hang_up(self) -> None:
        """Close the terminal's window."""
        self._hung_up.set()
        self._reader.join(5)
        os.close(self.master)

    @property
    def text(self) -> str:
        return self._bytes.decode("utf-8", "replace")

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if not self._hung_up.is_set():
            self.hang_up()


@contextlib.contextmanager
def terminal(home: Path, models: str, columns: int = 100) -> Iterator[Terminal]:
    opened = Terminal(home, models, columns)
    try:
        yield opened
    finally:
        opened.close()


def lines_of(text: str) -> list[str]:
    """What was written, without cursor movements."""
    return re.sub(r"\x1b\[[0-9]*[AK]|\r", "", text).split("\n")


def test_progress_is_drawn_in_place_and_ends_in_ordinary_lines(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    """A bar that is redrawn, then one line for each model, the address and the example; Ctrl-C exits 0."""
    with terminal(tmp_path, f"one={tiny_models['llama']},two={tiny_models['llama']}") as view:
        wait_for(lambda: "Serving on http://127.0.0.1:" in view.text, 15)
        before = view.text.partition("Serving on")[0]
        assert before.count("\x1b[2A\r") > 3  # redrawn in place, two lines at a time
        assert "░" in before
        assert re.search(r"one +loading +█+░+ +\d+ %", before)
        final = lines_of(before)[-3:]
        assert [line.split()[:2] for line in final if line] == [["one", "ready"], ["two", "ready"]]
        os.kill(view.process.pid, signal.SIGINT)
        assert view.process.wait(10) == 0
        assert "\x1b[?25l" not in view.text  # the cursor was never hidden, so it cannot stay so


@pytest.mark.parametrize("columns", [12, 40])
def test_a_narrow_terminal_gets_lines_that_fit(
    tmp_path: Path, tiny_models: dict[str, Path], columns: int
) -> None:
    """No line of the block reaches the edge, so none wraps."""
    with terminal(tmp_path, f"a-rather-long-name={tiny_models['llama']}", columns) as view:
        wait_for(lambda: "Serving on" in view.text, 15)
        block = [line for line in lines_of(view.text.partition("Serving on")[0]) if line.startswith("  ")]
        assert block
        assert max(map(len, block)) < columns


def test_resizing_while_loading_keeps_going(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """Every size from wide to one column, during the load."""
    with terminal(tmp_path, f"m={tiny_models['llama']}") as view:
        for columns in (80, 30, 1, 7, 200):
            view.resize(columns)
            time.sleep(0.2)
        wait_for(lambda: "Serving on" in view.text, 15)


def test_a_closed_terminal_stops_the_fleet_in_order(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """The kernel's SIGHUP ends it, exit 0, and writing to the vanished terminal is no error."""
    with terminal(tmp_path, f"m={tiny_models['llama']}") as view:
        wait_for(lambda: "Serving on" in view.text, 30)
        view.hang_up()
        assert view.process.wait(20) == 0


def test_sighup_reloads_while_the_terminal_is_there(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """Sent by hand it stops nothing; here there is no file to read, which is told."""
    with terminal(tmp_path, f"m={tiny_models['llama']}") as view:
        wait_for(lambda: "Serving on" in view.text, 30)
        os.kill(view.process.pid, signal.SIGHUP)
        wait_for(lambda: "mlxhost.toml does not exist" in view.text, 20)
        assert view.process.poll() is None
