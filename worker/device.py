"""Turns on one device: which of the workers that share it may run a prefill chunk, or read weights, now.

A long chunk of one process holds up the decode steps of the others, so at most one process runs a chunk at
a time, and between two chunks every process that decodes gets a step. Decode steps never wait. Whose chunk
is next goes by the device time that each had, divided by its weight.

The workers meet in a small file that they all map (one row of numbers for each) and lock; there is no
process in between, so a turn costs microseconds. The lock is the kernel's: it falls free with its holder.
What a process wrote counts only while it is fresh, so one that died or stands still is passed over. And no
wait is longer than MAX_WAIT_S: then the chunk runs without a turn.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)

MAX_WAIT_S = 1.0  # from asking for a turn to running without one
FRESH_S = 0.5  # how long a process counts as waiting or decoding after it last said so
STEP_PATIENCE_S = 0.1  # how long a decode step of another process is waited for between two chunks
NAP_S = 0.001
ROWS = 64  # workers that can share a device; more take no turns
# Numbers (float64) of a worker's row; times are of the system's monotonic clock.
_USED, _WAITS, _STEPPED, _FIELDS = 0, 1, 2, 4
_SHARED = ROWS * _FIELDS  # when the last chunk of anyone ended
_BYTES = (ROWS + 1) * _FIELDS * 8
_TURN_LOCK = 0  # byte ranges of the file; row i's owner holds byte 1 + i as long as it lives


@dataclass
class Counts:
    """Of this worker, for its state: turns it had, seconds it waited for them, chunks it ran without one."""

    turns: int = 0
    waited_s: float = 0.0
    untimely: int = 0


class Device(Protocol):
    """What the stepper asks."""

    counts: Counts

    def may_run(self, *, wait: bool) -> bool: ...
    def ran(self) -> None: ...
    def withdraw(self) -> None: ...
    def stepped(self) -> None: ...
    def weigh(self, weight: float) -> None: ...


class Alone:
    """No turns are taken: one worker, or a device where they do not pay."""

    def __init__(self) -> None:
        self.counts = Counts()

    def may_run(self, *, wait: bool) -> bool:
        return True

    def ran(self) -> None:
        """Nothing to give back."""

    def withdraw(self) -> None:
        """Nobody to tell."""

    def stepped(self) -> None:
        """Nobody to tell."""

    def weigh(self, weight: float) -> None:
        """All turns are its own."""


class Turns:
    """A worker's place among those that share `path`. One thread only. Raises OSError when the file cannot
    be used or holds ROWS workers already."""

    def __init__(self, path: str, weight: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = Counts()
        self._clock = clock
        self.weigh(weight)
        self._asked = self._began = 0.0
        self._holds = False
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(self._fd).st_size < _BYTES:
                os.ftruncate(self._fd, _BYTES)
            self._row = self._take_row() * _FIELDS
            self._map = mmap.mmap(self._fd, _BYTES)
        except BaseException:
            os.close(self._fd)
            raise
        self._numbers = memoryview(self._map).cast("d")
        for field in range(_FIELDS):
            self._numbers[self._row + field] = 0.0

    def may_run(self, *, wait: bool) -> bool:
        """Whether a chunk may run now; then `ran` must follow. `wait`: nothing else is to be done, so a
        moment may be slept over it."""
        now = self._clock()
        if not self._asked:
            self._asked = now
            self._catch_up(now)
        self._numbers[self._row + _WAITS] = now
        if self._is_next(now) and self._lock():
            self._holds = True
            self.counts.turns += 1
        elif now - self._asked < MAX_WAIT_S:
            if wait:
                time.sleep(NAP_S)
            return False
        else:
            self.counts.untimely += 1
        self.counts.waited_s += now - self._asked
        self._numbers[self._row + _WAITS] = self._asked = 0.0
        self._began = now
        return True

    def ran(self) -> None:
        """The chunk is over, its results are there."""
        now = self._clock()
        self._numbers[self._row + _USED] += (now - self._began) / self._weight
        if self._holds:
            self._numbers[_SHARED] = now
            self._holds = False
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _TURN_LOCK)

    def withdraw(self) -> None:
        """There is no chunk to run any more: a turn that was asked for is not wanted."""
        if self._asked:
            self._numbers[self._row + _WAITS] = self._asked = 0.0

    def stepped(self) -> None:
        """A decode step ended, and another one follows."""
        self._numbers[self._row + _STEPPED] = self._clock()

    def weigh(self, weight: float) -> None:
        """Its share of the turns from now on, relative to the others'."""
        self._weight = max(weight, 1e-3)

    def close(self) -> None:
        """Leave; what is held falls free."""
        self._numbers.release()
        self._map.close()
        os.close(self._fd)

    def _take_row(self) -> int:
        for row in range(ROWS):
            with contextlib.suppress(BlockingIOError):
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + row)
                return row
        raise OSError(errno.EAGAIN, f"{ROWS} workers share the device already")

    def _others(self) -> Iterator[int]:
        return (row for row in range(0, ROWS * _FIELDS, _FIELDS) if row != self._row)

    def _catch_up(self, now: float) -> None:
        """A worker that had nothing to do does not save up its turns: it begins with the least that those
        who wait have had."""
        numbers = self._numbers
        waiting = [numbers[r + _USED] for r in self._others() if now - numbers[r + _WAITS] < FRESH_S]
        numbers[self._row + _USED] = max(numbers[self._row + _USED], min(waiting, default=0.0))

    def _is_next(self, now: float) -> bool:
        numbers, mine, last = self._numbers, self._numbers[self._row + _USED], self._numbers[_SHARED]
        for row in self._others():
            if now - numbers[row + _WAITS] < FRESH_S and (numbers[row + _USED], row) < (mine, self._row):
                return False
            decodes = now - numbers[row + _STEPPED] < FRESH_S
            if decodes and numbers[row + _STEPPED] <= last and now - last < STEP_PATIENCE_S:
                return False
        return True

    def _lock(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _TURN_LOCK)
        except BlockingIOError:
            return False
        return True


def take_turns(path: str, weight: float) -> "Turns | Alone":
    """A place among the workers that share the file `path`; Alone when it is empty or cannot be used."""
    if not path:
        return Alone()
    try:
        return Turns(path, weight)
    except OSError as error:
        log.warning("no turns are taken on the device: %s: %s", path, error.strerror)
        return Alone()


@contextlib.contextmanager
def reading(device: Device) -> Iterator[Callable[[], None]]:
    """Read weights in turns. What it gives is to be called between parts, so that others may go first."""

    def begin() -> None:
        while not device.may_run(wait=True):
            pass

    def next_part() -> None:
        device.ran()
        begin()

    begin()
    try:
        yield next_part
    finally:
        device.ran()
