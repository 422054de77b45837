"""The disk tier's thread: reads, writes, scans and clears away record files, so that the engine never waits.

Jobs go in by `submit`, outcomes come out by `outcomes`; the engine alone changes the index by them. Several
processes may share the root: names follow from content, files appear whole, and one that another process
removed is a miss.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from mlxhost.worker.cache import files
from mlxhost.worker.cache.files import BadRecord, Header, Piece
from mlxhost.worker.cache.index import Kind, Record

log = logging.getLogger(__name__)

_SWEEP_TO = 0.9  # of the cap, once it is passed
_SCAN_BATCH = 256  # headers handed over at once


@dataclass(frozen=True)
class Write:
    record: Record
    header: Header
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Read:
    record: Record


@dataclass(frozen=True)
class Touch:
    """These were used: they are to be the last to go."""

    names: Sequence[str]


@dataclass(frozen=True)
class Remove:
    names: Sequence[str]


@dataclass(frozen=True)
class Scan:
    """Find the model's own records, but for those that are known."""

    known: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Sweep:
    """Remove the least recently used until the cap is kept; `keep` are names that stay if they can."""

    keep: frozenset[str]


Job = Write | Read | Touch | Remove | Scan | Sweep


@dataclass(frozen=True)
class Outcome:
    """What came of a job. `error` is for people; `fatal`: the disk, not the record, is at fault."""

    job: Job
    error: str = ""
    fatal: bool = False
    seconds: float = 0.0
    size: int = 0
    pieces: Sequence[Piece] = ()
    headers: Sequence[Header] = ()
    removed: Sequence[str] = field(default=())
    over_cap: bool = False
    last: bool = True  # of this job


class Disk(threading.Thread):
    """One model's directory below the common `root`, which holds at most `cap` bytes of all models."""

    def __init__(self, root: Path, name: str, cap: int) -> None:
        super().__init__(name="kv-disk", daemon=True)
        self.root, self.directory, self.cap = root, root / name, cap
        self.bytes = 0  # of all models, as of the last look
        self.in_flight = 0  # jobs submitted and not come out yet; the engine's count
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._outcomes: deque[Outcome] = deque()
        self._arrived = threading.Event()
        self._warned: set[str] = set()

    def submit(self, job: Job) -> None:
        self.in_flight += 1
        self._jobs.put(job)

    def outcomes(self) -> list[Outcome]:
        """All that came out since the last call. Engine thread."""
        self._arrived.clear()
        found = []
        while self._outcomes:
            outcome = self._outcomes.popleft()
            self.in_flight -= outcome.last
            found.append(outcome)
        return found

    def wait(self, timeout_s: float) -> bool:
        """Until an outcome is there."""
        return self._arrived.wait(timeout_s)

    def stop(self, timeout_s: float) -> None:
        """End after what was submitted, or leave it undone after `timeout_s`."""
        self._jobs.put(None)
        self.join(timeout_s)

    # The thread

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            started = time.monotonic()
            try:
                self._do(job, started)
            except BadRecord as error:
                self._come_out(Outcome(job, str(error)))
            except FileNotFoundError:
                self._come_out(Outcome(job, "it is gone"))
            except OSError as error:
                self._warn_once(f"{self.directory}: {error.strerror or error}")
                self._come_out(Outcome(job, error.strerror or str(error), fatal=True))
            except Exception as error:  # whatever a file makes us run into, the thread goes on
                log.error("a job of the prefix cache failed: %s", error, exc_info=error)
                self._come_out(Outcome(job, f"{type(error).__name__}: {error}", fatal=True))

    def _do(self, job: Job, started: float) -> None:
        match job:
            case Write():
                try:
                    size = files.write(self._made(), job.header, job.pieces)
                except FileNotFoundError as error:
                    raise OSError(error.errno, "the directory was removed") from None
                self.bytes += size
                over = self.bytes > self.cap
                self._come_out(Outcome(job, seconds=time.monotonic() - started, size=size, over_cap=over))
            case Read():
                record = job.record
                try:
                    pieces = files.read(self.directory, record.node.key, record.kind)
                except BadRecord as error:
                    self._reject(files.file_name(record.node.key, record.kind), error)
                    raise
                self._come_out(Outcome(job, pieces=pieces, seconds=time.monotonic() - started))
            case Touch():
                for name in job.names:
                    with contextlib.suppress(OSError):
                        os.utime(self.directory / name)
                self._come_out(Outcome(job))
            case Remove():
                for name in job.names:
                    self._unlink(self.directory / name)
                self._come_out(Outcome(job))
            case Scan():
                self._scan(job)
            case Sweep():
                self._come_out(Outcome(job, removed=self._sweep(job.keep)))

    def _scan(self, job: Scan) -> None:
        self.bytes = 0
        headers: list[Header] = []
        for path, stat in files.record_files(self.root):
            self.bytes += stat.st_size
            if path.parent != self.directory or path.name in job.known:
                continue
            try:
                headers.append(files.read_header(path))
            except BadRecord as error:
                self._reject(path.name, error)
            except OSError as error:
                self._warn_once(f"{path}: {error.strerror or error}")
            if len(headers) >= _SCAN_BATCH:
                self._come_out(Outcome(job, headers=headers, last=False))
                headers = []
        self._come_out(Outcome(job, headers=headers, over_cap=self.bytes > self.cap))

    def _sweep(self, keep: frozenset[str]) -> list[str]:
        found = [(s.st_mtime, s.st_size, path) for path, s in files.record_files(self.root)]
        found.sort(key=lambda f: (f[2].name in keep, f[0]))
        self.bytes = sum(size for _, size, _ in found)
        removed = []
        for _, size, path in found:
            if self.bytes <= self.cap * _SWEEP_TO:
                break
            if self._unlink(path):
                self.bytes -= size
                if path.parent == self.directory:
                    removed.append(path.name)
        return removed

    def _made(self) -> Path:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.directory

    def _reject(self, name: str, error: BadRecord) -> None:
        """A file that can never be used goes."""
        log.warning("%s/%s is not used: %s", self.directory, name, error)
        self._unlink(self.directory / name)

    def _unlink(self, path: Path) -> bool:
        try:
            path.unlink()
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._warn_once(f"{path.parent}: a record cannot be removed: {error.strerror}")
            return False
        return True

    def _warn_once(self, message: str) -> None:
        if message not in self._warned and len(self._warned) < 100:
            self._warned.add(message)
            log.warning("prefix cache: %s; serving goes on without it", message)

    def _come_out(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._arrived.set()


def names(records: Sequence[Record]) -> list[str]:
    """File names of records."""
    return [files.file_name(r.node.key, Kind(r.kind)) for r in records]
