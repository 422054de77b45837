"""A record store over small hand-made records, with a real disk thread behind it."""

import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlxhost.worker.cache.disk import Disk
from mlxhost.worker.cache.index import Kind, Node
from mlxhost.worker.cache.keys import BLOCK_TOKENS, root_key, token_bytes
from mlxhost.worker.cache.layout import Layout
from mlxhost.worker.cache.store import RECORD_OVERHEAD, RecordStore

ROOT = root_key("model", "scheme")
# Keys and values of 2 heads with 4 values of 4 bytes, ids, and what is counted for the record itself.
BLOCK_BYTES = 2 * 2 * BLOCK_TOKENS * 4 * 4 + 4 * BLOCK_TOKENS + RECORD_OVERHEAD


def layout() -> Layout:
    """Of a model with one growing layer."""
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, 1, 4)), mx.zeros((1, 2, 1, 4)))
    return Layout([cache])


def store(directory: Path | None, ram_blocks: float, *, cap: int = 1 << 30, spills: int = 100) -> RecordStore:
    """With room for `ram_blocks` records in RAM, `spills` on their way out, and `cap` bytes on disk."""
    disk = None
    if directory is not None:
        disk = Disk(directory, "model", cap)
        disk.start()
    made = RecordStore(layout(), int(ram_blocks * BLOCK_BYTES), disk, spills * BLOCK_BYTES)
    if disk is not None:
        until(made, lambda: made.scanned)
    return made


def block(made: RecordStore, number: int, parent: bytes = ROOT, start: int = 0) -> Node:
    """Insert a block whose tokens and KV are all `number`."""
    node = made.index.add(parent, start, token_bytes([number] * BLOCK_TOKENS))
    made.insert(node, Kind.KV, (mx.full((2, 2, BLOCK_TOKENS, 4), float(number)),))
    return node


def value(node: Node) -> float | None:
    """What the block's KV holds, None when it is not in RAM."""
    arrays = node.records[Kind.KV].arrays
    return None if arrays is None else float(mx.max(arrays[0]).item())  # type: ignore[arg-type]


def until(made: RecordStore, condition: Callable[[], bool], *, busy: bool = False) -> None:
    """Give the store turns until `condition` holds."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "the store did not get there within 30 s"
        made.pump(busy)
        made.wait(0.01)


def flush(made: RecordStore) -> None:
    """Write all that can be written."""
    made.flush()
    until(made, lambda: made.flushed)
    made.end_flush()
