"""The prefix cache as the engine sees it: what to call as a row starts, goes on and ends. Engine thread only.

`begin` when its prefill starts, `passed` after each chunk, `ended` when it is over; `save_row` instead of
`ended` when it is only put aside. With no store (the cache is off) every call does nothing.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxhost.worker.cache.index import Kind, Match, Node, Record
from mlxhost.worker.cache.keys import BLOCK_TOKENS, TOKEN_BYTES, root_key, token_bytes
from mlxhost.worker.cache.layout import Arrays, Layout
from mlxhost.worker.cache.store import RecordStore
from mlxhost.worker.kv import RowKV
from mlxhost.worker.row import Row

log = logging.getLogger(__name__)

_CHECKPOINT_TOKENS = 2048  # between two checkpoints of recurrent layers
_MIN_TAIL = 16  # tokens; fewer cost more to keep than to compute
_READ_S = 10.0  # what a row waits for the disk before it computes its prefix
_SLEEP_FLUSH_S = 5.0


@dataclass(slots=True, eq=False)
class Cursor:
    """Where a row stands: `blocks` whole blocks of it are recorded, the last with the key `parent`."""

    root: bytes
    prompt: bytes
    blocks: int = 0
    parent: bytes = b""
    begun: bool = False  # restored, as far as that was possible
    branch: int = 0  # where recurrent layers want a checkpoint: others had this much in common
    held: tuple[Node, ...] = ()
    reads: set[Record] = field(default_factory=set)
    read_by: float = 0.0
    pinned: list[Node] = field(default_factory=list)  # while the row is put aside


@dataclass(slots=True)
class Usage:
    """Since the start. Tokens queried are those that could have been restored at most."""

    queries: int = 0
    hits: int = 0
    queried_tokens: int = 0
    restored_tokens: int = 0
    restore_s: float = 0.0


class PrefixCache:
    """Records of one model. `open_store` makes the store for a fingerprint."""

    def __init__(
        self,
        layout: Layout | None = None,
        fingerprint: str = "",
        open_store: Callable[[str], RecordStore] | None = None,
    ) -> None:
        self.usage = Usage()
        self._layout, self._fingerprint, self._open_store = layout, fingerprint, open_store
        self._cursors: dict[Row, Cursor] = {}
        self._sessions: dict[str, list[Node]] = {}
        self.store = self._opened()

    @property
    def tokens(self) -> int:
        """Tokens that are held, in RAM or on disk."""
        return self.store.index.tokens if self.store else 0

    # A row's life

    def likely(self, row: Row) -> int:
        """Tokens of `row` that a restore would bring now."""
        if self.store is None or row.prompt_top is not None:
            return 0
        return self._match(self.store, self._cursor(row), row).position

    def begin(self, row: Row, model: Any) -> bool:
        """Put what is known of `row`'s tokens into its empty caches, all but its newest token at most.

        False while the disk fetches what that takes, for 10 s at most: the row is to wait, and to be asked
        for again. True once it is done, and from then on: `prefilled` and, the first time, `cached_tokens`
        say how much it was. Exact: the same bytes that were computed for an equal prefix. A row whose prompt
        log-probabilities are wanted has to compute them all.
        """
        if self.store is None or self._cursor(row).begun:
            return True
        if not self._ready(self.store, row):
            return False
        self._restore(self.store, row, model)
        return True

    def chunk(self, row: Row, size: int) -> int:
        """`size` cut so that the chunk ends where recurrent layers want a checkpoint."""
        if self.store is None or self._layout is None or not self._layout.stateful:
            return size
        done, branch = row.prefilled, self._cursor(row).branch
        stop = (done // _CHECKPOINT_TOKENS + 1) * _CHECKPOINT_TOKENS
        if done < branch:
            stop = min(stop, branch)
        return min(size, stop - done)

    def passed(self, row: Row) -> None:
        """A chunk of `row` is in its caches, evaluated: record the blocks that are whole now, and at the end
        of the prefill the rest."""
        if self.store is None or row.kv is None:
            return
        cursor, position = self._cursor(row), row.prefilled
        at_end = row.to_prefill == 0
        checkpoint = at_end or position == cursor.branch or position % _CHECKPOINT_TOKENS == 0
        self._publish(cursor, row, position, checkpoint, stops=False, tail=at_end)

    def ended(self, row: Row) -> None:
        """`row` is over; its caches, whole again, are still there: record what it has computed."""
        if self.store is None:
            return
        if row.kv is not None and row.kv.length:
            leaf = self._publish_all(self._cursor(row), row)
            if row.session_id and leaf is not None:
                self._pin_session(row.session_id, leaf)
        self.drop(row)

    def drop(self, row: Row) -> None:
        """`row` is over, and its caches are of no use."""
        if self.store is not None and (cursor := self._cursors.pop(row, None)) is not None:
            self._hold(cursor, ())
            self._unpin(cursor)

    def save_row(self, row: Row) -> int:
        """Record all that the caches of `row` hold, to its newest token, because it has to make way; how many
        tokens that was. Its caches must be whole (after Batch.leave) and may be let go of afterwards.

        The records are kept in preference to others until the row is restored or over. When it comes back,
        `begin` brings the same bytes; whatever was lost meanwhile (RAM full, and the disk full or slow) is
        missing from `prefilled`, and is to be computed from `row.tokens`.
        """
        if self.store is None or row.kv is None:
            return 0
        cursor = self._cursor(row)
        leaf = self._publish_all(cursor, row)
        length = row.kv.length
        root, prompt = cursor.root, cursor.prompt
        self.drop(row)
        if leaf is None:
            return 0
        cursor = self._cursors[row] = Cursor(root, prompt, parent=root)
        cursor.pinned = self.store.index.chain(leaf)
        self.store.pin(cursor.pinned, 1)
        return length

    # Sessions

    def unpin_session(self, session_id: str) -> None:
        """What the session had is like any other's from now on."""
        if nodes := self._sessions.pop(session_id, None):
            assert self.store is not None
            self.store.pin(nodes, -1)

    def _pin_session(self, session_id: str, leaf: Node) -> None:
        assert self.store is not None
        nodes = self.store.index.chain(leaf)
        self.store.pin(nodes, 1)
        self.unpin_session(session_id)
        self._sessions[session_id] = nodes

    # The whole of it

    def pump(self, busy: bool) -> float | None:
        """A turn between two ticks. Seconds until it wants another one; None: no sooner than something
        happens."""
        return self.store.pump(busy) if self.store else None

    def wait(self) -> None:
        """A moment, for the disk to bring what rows wait for."""
        if self.store is not None:
            self.store.wait(0.01)

    def shrink(self, cap: int) -> None:
        """Hold at most `cap` bytes in RAM from now on; what goes is written if it can be."""
        if self.store is not None:
            self.store.shrink(cap)

    def sleep(self) -> None:
        """Write what is not on disk, and let go of RAM. The index stays: records come back when asked for."""
        if self.store is not None:
            self.flush_now(_SLEEP_FLUSH_S)
            self.store.release()

    def flush_now(self, timeout_s: float) -> bool:
        """Write everything that can be, waiting for it; whether all of it is on disk."""
        if self.store is None:
            return True
        end = time.monotonic() + timeout_s
        self.store.flush()
        while not self.store.flushed and time.monotonic() < end:
            self.store.wait(0.05)
            self.store.pump(busy=False)
        self.store.end_flush()
        return self.store.missing == 0

    def rebase(self, fingerprint: str) -> None:
        """The weights may be others now, of which every record is foreign. No row may be running."""
        if fingerprint == self._fingerprint:
            return
        self.close(0.0)
        before, self._fingerprint = self.store, fingerprint
        self._cursors.clear()
        self._sessions.clear()
        self.store = self._opened()
        if before is not None:
            self.shrink(before.ram_cap)

    def close(self, flush_s: float) -> None:
        """Write what can be written within `flush_s`, and end the disk's thread."""
        if self.store is not None:
            if flush_s > 0 and not self.flush_now(flush_s) and self.store.durable:
                log.warning("%d records of the prefix cache were not written", self.store.missing)
            self.store.close(1.0)

    def pending_snapshots(self, rows: Iterable[Row]) -> int:
        """Whole blocks that running rows have computed and not recorded."""
        if self.store is None:
            return 0
        return sum(
            max(0, row.kv.length // BLOCK_TOKENS - cursor.blocks)
            for row in rows
            if row.kv is not None and (cursor := self._cursors.get(row)) is not None
        )

    # How

    def _opened(self) -> RecordStore | None:
        store = self._open_store(self._fingerprint) if self._open_store else None
        if store is not None:
            store.on_read = self._on_read
        return store

    def _on_read(self, record: Record) -> None:
        for cursor in self._cursors.values():
            cursor.reads.discard(record)

    def _cursor(self, row: Row) -> Cursor:
        cursor = self._cursors.get(row)
        if cursor is None:
            assert self._layout is not None
            root = root_key(self._fingerprint, self._layout.scheme, salt=row.cache_salt)
            cursor = self._cursors[row] = Cursor(root, token_bytes(row.prompt), parent=root)
        return cursor

    def _ready(self, store: RecordStore, row: Row) -> bool:
        """Whether all that a restore takes is in RAM, or too long in coming."""
        if row.prompt_top is not None:
            return True
        cursor = self._cursor(row)
        if cursor.reads:
            return time.monotonic() > cursor.read_by
        if cursor.read_by and time.monotonic() > cursor.read_by:
            return True
        match = self._match(store, cursor, row)
        missing = [r for r in self._wanted(match) if r.arrays is None]
        self._hold(cursor, match.nodes)
        if not missing:
            return True
        cursor.reads.update(missing)
        cursor.read_by = cursor.read_by or time.monotonic() + _READ_S
        store.read(missing)
        return False

    def _restore(self, store: RecordStore, row: Row, model: Any) -> None:
        cursor, position = self._cursor(row), 0
        if row.prompt_top is None:
            started = time.monotonic()
            match = self._match(store, cursor, row)
            cursor.branch = match.known
            if all(r.arrays is not None for r in self._wanted(match)) and match.position:
                position = self._fill(row, model, match)
            self.usage.queries += 1
            self.usage.hits += position > 0
            self.usage.queried_tokens += row.context - 1
            self.usage.restored_tokens += position
            self.usage.restore_s += time.monotonic() - started
            if position:
                cursor.blocks = position // BLOCK_TOKENS
                cursor.parent = match.nodes[cursor.blocks - 1].key if cursor.blocks else cursor.root
                store.touch(match.nodes)
        cursor.begun = True
        row.prefilled = position
        if not row.output:
            row.cached_tokens = position
        cursor.reads.clear()
        self._hold(cursor, ())
        self._unpin(cursor)

    def _match(self, store: RecordStore, cursor: Cursor, row: Row) -> Match:
        sequence = cursor.prompt + token_bytes(row.output)
        return store.index.match(cursor.root, sequence[: (row.context - 1) * TOKEN_BYTES])

    def _wanted(self, match: Match) -> list[Record]:
        """The records that a restore of `match` takes."""
        assert self._layout is not None
        oldest = match.position - max(self._layout.windows, default=0)
        found = []
        for node in match.nodes:
            found.append(node.records[Kind.KV])
            if self._layout.windows and node.stop > oldest:
                found.append(node.records[Kind.ROTATING])
        if match.nodes and self._layout.stateful:
            found.append(match.nodes[-1].records[Kind.STATE])
        return found

    def _fill(self, row: Row, model: Any, match: Match) -> int:
        """Restore `match` into the row's caches; how much that was: 0, the caches fresh, when it fails."""
        assert self._layout is not None
        assert row.kv is not None
        room = -(-(row.context + 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        try:
            mx.eval(self._layout.fill(row.kv.leaves, match.nodes, match.position, room))
        except Exception as error:  # a prefix that cannot be restored is computed
            log.error("a prefix could not be restored: %s", error, exc_info=error)
            row.kv = RowKV.new(model)
            return 0
        row.kv.count(match.position)
        return match.position

    def _publish_all(self, cursor: Cursor, row: Row) -> Node | None:
        """Record whatever is in the caches of a row that stops, as far as its tokens are known; the last
        node."""
        assert row.kv is not None
        position = row.kv.length
        known = min(position, row.context)
        return self._publish(cursor, row, known, position == known, stops=True)

    def _publish(
        self, cursor: Cursor, row: Row, stop: int, checkpoint: bool, *, stops: bool, tail: bool = True
    ) -> Node | None:
        """Record the first `stop` tokens of `row`: whole blocks, with `tail` the rest, and with `checkpoint`
        the state after the last of them, which is that of its caches now. The last node.

        What cannot be recorded is not: the row goes on whatever happens here.
        """
        try:
            cut, last = self._cut_all(cursor, row, stop, checkpoint, tail)
            arrays = [array for _, _, record in cut for array in record]
            if stops:
                mx.async_eval(arrays)
            else:
                mx.eval(arrays)  # at once: the next chunk would find its buffers shared, and copy them whole
        except Exception as error:
            log.error("a prefix could not be recorded: %s", error, exc_info=error)
            return None
        assert self.store is not None
        for node, kind, record in cut:
            self.store.insert(node, kind, record)
        if last is not None and last.records:
            self.store.touch_ram(last)
            self._supersede(self.store, last)
        return last

    def _cut_all(
        self, cursor: Cursor, row: Row, stop: int, checkpoint: bool, tail: bool
    ) -> tuple[list[tuple[Node, Kind, Arrays]], Node | None]:
        """New records of the first `stop` tokens, not evaluated, and the last node that they reach."""
        assert self.store is not None
        assert row.kv is not None
        index, leaves = self.store.index, row.kv.leaves
        sequence = cursor.prompt + token_bytes(row.output)
        cut: list[tuple[Node, Kind, Arrays]] = []
        last = None
        start = cursor.blocks * BLOCK_TOKENS
        while start < stop:
            end = min(start + BLOCK_TOKENS, stop)
            whole = end - start == BLOCK_TOKENS
            if not whole and (not tail or end - start < _MIN_TAIL):
                break
            tokens = sequence[start * TOKEN_BYTES : end * TOKEN_BYTES]
            node = index.find(cursor.parent, tokens)
            records = self._cut(node, leaves, start, end, checkpoint and end == stop)
            if node is None:
                if Kind.KV not in records:
                    break
                node = index.add(cursor.parent, start, tokens)
            cut += [(node, kind, arrays) for kind, arrays in records.items()]
            last = node
            if whole:
                cursor.blocks, cursor.parent = cursor.blocks + 1, node.key
            start = end
        return cut, last

    def _cut(
        self, node: Node | None, leaves: list[Any], start: int, end: int, checkpoint: bool
    ) -> dict[Kind, Arrays]:
        """The records of [start, end) that are not there yet and can be had."""
        layout = self._layout
        assert layout is not None
        there = node.records if node else {}
        kinds = [k for k in layout.kinds if k not in there and (k is not Kind.STATE or checkpoint)]
        return {k: layout.cut(leaves, k, start, end) for k in kinds if layout.holds(leaves, k, start, end)}

    def _supersede(self, store: RecordStore, node: Node) -> None:
        """Forget tails that `node` begins with, where any part of a span can be restored from it."""
        layout = self._layout
        assert layout is not None
        if layout.stateful or min(layout.windows, default=BLOCK_TOKENS) < BLOCK_TOKENS:
            return
        for tail in store.index.children(node.parent):
            shorter = tail.length < node.length and node.tokens.startswith(tail.tokens)
            if shorter and not tail.pins and not tail.holds:
                store.forget(tail)

    def _hold(self, cursor: Cursor, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            node.holds += 1
        for node in cursor.held:
            node.holds -= 1
        cursor.held = nodes

    def _unpin(self, cursor: Cursor) -> None:
        if cursor.pinned and self.store is not None:
            self.store.pin(cursor.pinned, -1)
            cursor.pinned = []
