"""Where records are: in RAM under a byte cap, on disk, or on their way there. Engine thread only.

Records are born in RAM, dirty. They are written behind, oldest first, while the engine is idle, or, while it
is busy, so seldom that writing takes at most a hundredth of the time. When RAM is full the least recently
used goes: at once if it is on disk, else once it has been written; if too many wait for that, the oldest is
lost.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import mlx.core as mx

from mlxhost.worker.cache import disk, files
from mlxhost.worker.cache.disk import Disk, Outcome, Scan
from mlxhost.worker.cache.index import Kind, Needs, Node, PrefixIndex, Record
from mlxhost.worker.cache.layout import Arrays, Layout

log = logging.getLogger(__name__)

RECORD_OVERHEAD = 512  # bytes of a record beside its arrays and tokens, so that empty ones count, too
SPILL_CAP = 128 * 1024 * 1024  # bytes of records that have left the RAM tier and wait to be written
BUSY_SHARE = 0.01  # of the time, for writing while rows run
_IN_FLIGHT = 3  # writes handed to the disk thread at once while idle
_RETRY_S = 30.0  # after the disk refused a write
RESCAN_S = 60.0  # of idleness, between two looks for what other processes have written
_DEMOTE_AFTER_S = 300.0  # of idleness, after which what is on disk leaves RAM


@dataclass(slots=True)
class Counters:
    """Since the start."""

    evictions: int = 0  # records that left RAM for want of room
    spills: int = 0  # records written
    dropped: int = 0  # records lost because too many waited to be written
    failed: int = 0  # writes that the disk refused
    unreadable: int = 0  # records that were not what they should be, or gone
    demoted: int = 0  # records that left RAM because nobody had used the model for a while


class RecordStore:
    """All records of one model. `disk` None: RAM only."""

    def __init__(self, layout: Layout, ram_cap: int, disk: Disk | None, spill_cap: int = SPILL_CAP) -> None:
        self.index = PrefixIndex(Needs(layout.windows, layout.stateful))
        self.counters = Counters()
        self.ram_cap, self.spill_cap = ram_cap, spill_cap
        self.ram_bytes = self.spill_bytes = self.disk_bytes = 0
        self.demote_after_s = _DEMOTE_AFTER_S
        self.flushing = False
        self.on_read: Callable[[Record], None] = lambda record: None
        self.scanned = disk is None
        self._layout, self._disk = layout, disk
        self._ram: OrderedDict[Record, None] = OrderedDict()  # the least recently used first
        self._dirty: OrderedDict[Record, None] = OrderedDict()  # in RAM, not on disk; the oldest first
        self._spilled: OrderedDict[Record, None] = OrderedDict()  # out of the RAM tier, not written yet
        self._skip: set[Record] = set()  # refused in the present flush
        self._reading: set[Record] = set()
        self._pinned_bytes = 0  # of the RAM tier
        self._writing = 0  # records handed to the disk
        self._write_after = self._retry_after = 0.0
        self._scan_after = time.monotonic() + RESCAN_S
        self._idle_since: float | None = None
        self._over_cap = False
        if disk is not None:
            disk.submit(Scan())

    # Records

    def insert(self, node: Node, kind: Kind, arrays: Arrays) -> None:
        """A new record, evaluated and independent of any row."""
        size = sum(a.nbytes for a in arrays) + len(node.tokens) + RECORD_OVERHEAD
        record = self.index.put(node, kind, size)
        record.arrays = arrays
        if self._disk is not None:
            self._dirty[record] = None
        self._enter(record)

    def forget(self, node: Node) -> None:
        """Drop a node from both tiers."""
        for record in list(node.records.values()):
            self._leave(record)
            self._dirty.pop(record, None)
            if record in self._spilled:
                del self._spilled[record]
                self.spill_bytes -= record.nbytes
            if record.on_disk and self._disk is not None:
                self.disk_bytes -= record.nbytes
                self._disk.submit(disk.Remove(disk.names([record])))
            record.on_disk = False
            self.index.discard(record)

    def touch(self, nodes: Sequence[Node]) -> None:
        """These were used. An ancestor ends up fresher than what extends it, so that it never goes first."""
        on_disk = []
        for node in reversed(nodes):
            for record in node.records.values():
                if record in self._ram:
                    self._ram.move_to_end(record)
                if record.on_disk:
                    on_disk.append(record)
        if on_disk and self._disk is not None:
            self._disk.submit(disk.Touch(disk.names(on_disk)))

    def touch_ram(self, leaf: Node) -> None:
        """`leaf` and what it extends are the last to leave RAM."""
        for node in reversed(self.index.chain(leaf)):
            for record in node.records.values():
                if record in self._ram:
                    self._ram.move_to_end(record)

    def read(self, records: Iterable[Record]) -> None:
        """Fetch records into RAM; `on_read` is told of each when it is there, or was found unusable."""
        for record in records:
            if self._disk is not None and record not in self._reading:
                self._reading.add(record)
                self._disk.submit(disk.Read(record))

    def pin(self, nodes: Iterable[Node], by: int) -> None:
        """Keep nodes in preference to others (by=1), or no more (by=-1)."""
        for node in nodes:
            was = node.pins > 0
            node.pins += by
            if was != (node.pins > 0):
                size = sum(r.nbytes for r in node.records.values() if r in self._ram)
                self._pinned_bytes += size if node.pins else -size

    def release(self) -> None:
        """Empty the RAM tier; what could not be written is lost."""
        for record in [*self._ram, *self._spilled]:
            self._leave(record)
            self._dirty.pop(record, None)
            if record in self._spilled:
                self._unspill(record)
            record.arrays = None
            if not record.on_disk:
                self.index.discard(record)

    @property
    def disk_cap(self) -> int:
        """Bytes that all models together may take on disk."""
        return self._disk.cap if self._disk else 0

    @property
    def durable(self) -> bool:
        """Whether there is a disk tier."""
        return self._disk is not None

    def shrink(self, cap: int) -> None:
        """Keep the RAM tier below `cap` bytes from now on."""
        self.ram_cap = cap
        self._evict()

    # Turns between two ticks

    def pump(self, busy: bool) -> float | None:
        """Take in what the disk has done and give it more. Seconds until there is something to do again; None
        when there is nothing to come."""
        if self._disk is None:
            return None
        for outcome in self._disk.outcomes():
            self._on_outcome(outcome)
        now = time.monotonic()
        self._idle_since = None if busy else (self._idle_since or now)
        if self._over_cap:
            self._over_cap = False
            pinned = [r for n in self.index.nodes.values() if n.pins for r in n.records.values()]
            self._disk.submit(disk.Sweep(frozenset(disk.names(pinned))))
        if self.flushing or now >= self._retry_after:
            self._write(busy, now)
        if self._disk.in_flight or self.flushing:
            return 0.005
        if self._idle_since is None:
            return None
        if self._dirty or self._spilled:
            return max(0.005, self._retry_after - now)
        if now >= self._scan_after:
            self._scan_after = now + RESCAN_S
            held = [r for n in self.index.nodes.values() for r in n.records.values() if r.on_disk]
            self._disk.submit(disk.Scan(frozenset(disk.names(held))))
            return 0.005
        left = self._idle_since + self.demote_after_s - now
        if left <= 0:
            self._demote()
        return min(self._scan_after - now, left if left > 0 and self._ram else RESCAN_S)

    def wait(self, timeout_s: float) -> None:
        """Until the disk has done something."""
        if self._disk is not None and self._disk.in_flight:
            self._disk.wait(timeout_s)

    def flush(self) -> None:
        """Write everything as fast as the disk takes it, what it refused before included; `flushed` tells
        when that is over."""
        self.flushing = self._disk is not None
        self._skip.clear()

    @property
    def flushed(self) -> bool:
        """Whether everything is on disk, or has been refused by it."""
        return not self.flushing or (not self._writing and self._next() is None)

    def end_flush(self) -> None:
        self.flushing = False
        self._skip.clear()

    @property
    def missing(self) -> int:
        """Records that are not on disk."""
        return sum(not r.on_disk for n in self.index.nodes.values() for r in n.records.values())

    @property
    def pending(self) -> int:
        """Records that are to be written."""
        return len(self._dirty) + len(self._spilled)

    @property
    def records(self) -> int:
        return sum(len(node.records) for node in self.index.nodes.values())

    def close(self, timeout_s: float) -> None:
        if self._disk is not None:
            self._disk.stop(timeout_s)

    # RAM

    def _enter(self, record: Record) -> None:
        self._ram[record] = None
        self.ram_bytes += record.nbytes
        if record.node.pins:
            self._pinned_bytes += record.nbytes
        self._evict()

    def _leave(self, record: Record) -> None:
        if record in self._ram:
            del self._ram[record]
            self.ram_bytes -= record.nbytes
            if record.node.pins:
                self._pinned_bytes -= record.nbytes

    def _evict(self) -> None:
        while self.ram_bytes > self.ram_cap and (victim := self._victim()) is not None:
            self.counters.evictions += 1
            self._leave(victim)
            if victim.on_disk:
                victim.arrays = None
            elif victim in self._dirty:
                del self._dirty[victim]
                self._spilled[victim] = None
                self.spill_bytes += victim.nbytes
                self._drop_spills()
            else:
                victim.arrays = None
                self.index.discard(victim)

    def _victim(self) -> Record | None:
        """The least recently used that may go: pinned ones only when they hold more than half of the room, or
        nothing else is left."""
        keep_pinned = self._pinned_bytes <= self.ram_cap // 2
        pinned = None
        for record in self._ram:
            if record.node.holds:
                continue
            if not (keep_pinned and record.node.pins):
                return record
            pinned = pinned or record
        return pinned

    def _drop_spills(self) -> None:
        """Hold to the cap; the newest stays whatever its size."""
        while self.spill_bytes > self.spill_cap and len(self._spilled) > 1:
            oldest = next((r for r in self._spilled if not r.writing and not r.node.holds), None)
            if oldest is None or oldest is next(reversed(self._spilled)):
                return
            self._unspill(oldest)
            self.index.discard(oldest)
            self.counters.dropped += 1

    def _unspill(self, record: Record) -> None:
        del self._spilled[record]
        self.spill_bytes -= record.nbytes
        record.arrays = None

    def _demote(self) -> None:
        for record in [r for r in self._ram if r.on_disk and not r.node.holds]:
            self._leave(record)
            record.arrays = None
            self.counters.demoted += 1

    # Disk

    def _next(self) -> Record | None:
        """What to write next: what would be lost first, then the oldest."""
        for record in chain(self._spilled, self._dirty):
            if not record.writing and record not in self._skip:
                return record
        return None

    def _write(self, busy: bool, now: float) -> None:
        assert self._disk is not None
        gated = busy and not self.flushing
        if gated and (now < self._write_after or self._disk.in_flight):
            return
        while self._writing < (1 if gated else _IN_FLIGHT) and (record := self._next()) is not None:
            record.writing = True
            self._writing += 1
            node = record.node
            header = files.Header(node.key, node.parent, record.kind, node.start, node.tokens, 0)
            self._disk.submit(disk.Write(record, header, _pieces(record.arrays)))

    def _on_outcome(self, outcome: Outcome) -> None:
        job = outcome.job
        match job:
            case disk.Write():
                self._on_written(job.record, outcome)
            case disk.Read():
                self._on_read(job.record, outcome)
            case disk.Scan():
                self._on_scanned(outcome)
            case disk.Sweep():
                self._on_removed(outcome.removed)
        self._over_cap = self._over_cap or outcome.over_cap

    def _on_written(self, record: Record, outcome: Outcome) -> None:
        assert self._disk is not None
        record.writing = False
        self._writing -= 1
        if outcome.error:
            self.counters.failed += 1
            if self.flushing:
                self._skip.add(record)
            self._retry_after = time.monotonic() + _RETRY_S
            return
        self._write_after = time.monotonic() + outcome.seconds / BUSY_SHARE
        self.counters.spills += 1
        if record.node.records.get(record.kind) is not record:  # forgotten meanwhile
            self._disk.submit(disk.Remove(disk.names([record])))
            return
        record.on_disk = True
        self.disk_bytes += record.nbytes
        self._dirty.pop(record, None)
        if record in self._spilled:
            self._unspill(record)

    def _on_read(self, record: Record, outcome: Outcome) -> None:
        self._reading.discard(record)
        known = record.node.records.get(record.kind) is record
        if known and record.arrays is None:
            arrays = None if outcome.error else self._arrays(record, outcome.pieces)
            if arrays is not None:
                record.arrays = arrays
                self._enter(record)
            else:
                self.counters.unreadable += 1
                self._lose(record)
        self.on_read(record)

    def _arrays(self, record: Record, pieces: Sequence[files.Piece]) -> Arrays | None:
        """A file's arrays, if they have the shapes of this model's."""
        wanted = self._layout.shapes(record.kind, record.node.length)
        if [(p.shape, p.dtype) for p in pieces] != [(s, _name(d)) for s, d in wanted]:
            log.warning("a record of the prefix cache has the wrong shapes and is not used")
            return None
        return tuple(
            mx.array(piece.data).view(dtype).reshape(shape)  # type: ignore[arg-type]
            for piece, (shape, dtype) in zip(pieces, wanted, strict=True)
        )

    def _lose(self, record: Record) -> None:
        """A record that is in no tier any more."""
        if record.on_disk:
            record.on_disk = False
            self.disk_bytes -= record.nbytes
        self.index.discard(record)

    def _on_scanned(self, outcome: Outcome) -> None:
        for header in outcome.headers:
            node = self.index.add(header.parent, header.start, header.tokens)
            record = node.records.get(header.kind)
            if record is None:
                record = self.index.put(node, header.kind, header.size)
            elif record.on_disk or record.writing:
                continue
            record.on_disk = True
            self.disk_bytes += record.nbytes
            self._dirty.pop(record, None)
            if record in self._spilled:
                self._unspill(record)
        self.scanned = self.scanned or outcome.last

    def _on_removed(self, names: Sequence[str]) -> None:
        for name in names:
            if (named := files.record_named(name)) is None:
                continue  # a stranger's file
            key, kind = named
            node = self.index.nodes.get(key)
            record = node.records.get(kind) if node else None
            if record is None or not record.on_disk:
                continue
            record.on_disk = False
            self.disk_bytes -= record.nbytes
            if record.arrays is None:
                self.index.discard(record)


def _pieces(arrays: Arrays) -> list[files.Piece]:
    """Arrays as buffers, which stay alive with them."""
    return [
        files.Piece(_name(a.dtype), tuple(a.shape), memoryview(mx.contiguous(a).view(mx.uint8)).cast("B"))  # type: ignore[arg-type]
        for a in arrays
    ]


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
