"""What `flush` and `get_state` tell of the prefix cache, and the flush that many ticks share."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mlxhost.worker.cache.prefix import PrefixCache
from mlxhost.worker.row import Row

# A flush ends this long before its call's deadline, so that the answer is in time.
_MARGIN_S = 0.5


def figures(cache: PrefixCache) -> dict[str, Any]:
    """Sizes now and counts since the start. Bytes are those of arrays, in RAM as on disk."""
    store, usage = cache.store, cache.usage
    if store is None:
        return {"enabled": False}
    counters = store.counters
    return {
        "enabled": True,
        "queries": usage.queries,
        "hits": usage.hits,
        "queried_tokens": usage.queried_tokens,
        "restored_tokens": usage.restored_tokens,
        "restore_s": round(usage.restore_s, 3),
        "tokens": cache.tokens,
        "entries": store.records,
        "ram_bytes": store.ram_bytes,
        "ram_cap_bytes": store.ram_cap,
        "disk": store.durable,
        "disk_bytes": store.disk_bytes,
        "disk_cap_bytes": store.disk_cap,
        "pending_spills": store.pending,
        "evictions": counters.evictions,
        "spills": counters.spills,
        "dropped": counters.dropped,
        "failed": counters.failed,
        "unreadable": counters.unreadable,
        "demoted": counters.demoted,
    }


@dataclass(slots=True)
class _Flush:
    started: float
    end: float
    spills: int  # written before it began
    failed: int
    done: Callable[[dict[str, Any]], None]


class Flushes:
    """Flushes under way. The engine goes on serving meanwhile."""

    def __init__(self, cache: Callable[[], PrefixCache], rows: Callable[[], Iterable[Row]]) -> None:
        self._cache, self._rows = cache, rows
        self._flushes: list[_Flush] = []

    def begin(self, deadline_s: float, done: Callable[[dict[str, Any]], None]) -> None:
        """Write everything; `done` gets the report, within `deadline_s`."""
        now, cache = time.monotonic(), self._cache()
        counters = cache.store.counters if cache.store else None
        spills, failed = (counters.spills, counters.failed) if counters else (0, 0)
        end = now + max(0.0, deadline_s - _MARGIN_S)
        if cache.store is not None:
            cache.store.flush()
        self._flushes.append(_Flush(now, end, spills, failed, done))
        self.settle()

    def settle(self) -> None:
        """Report the flushes that are over."""
        if not self._flushes:
            return
        cache, now = self._cache(), time.monotonic()
        flushed = cache.store is None or cache.store.flushed
        for flush in list(self._flushes):
            if flushed or now >= flush.end:
                self._flushes.remove(flush)
                flush.done(self._report(cache, flush, now))
        if not self._flushes and cache.store is not None:
            cache.store.end_flush()

    def end(self) -> None:
        """Report them all as they stand."""
        for flush in self._flushes:
            flush.end = 0.0
        self.settle()

    def _report(self, cache: PrefixCache, flush: _Flush, now: float) -> dict[str, Any]:
        elapsed = round(now - flush.started, 3)
        store = cache.store
        if store is None:
            return {
                "durable": True,
                "flushed": 0,
                "missing": 0,
                "pending_snapshots": 0,
                "pending_spills": 0,
                "dropped": 0,
                "failed": 0,
                "bytes": 0,
                "entries": 0,
                "longest_durable_prefix_tokens": 0,
                "elapsed_s": elapsed,
            }
        missing, counters = store.missing, store.counters
        return {
            "durable": missing == 0,
            "flushed": counters.spills - flush.spills,
            "missing": missing,
            "pending_snapshots": cache.pending_snapshots(self._rows()),
            "pending_spills": store.pending,
            "dropped": counters.dropped,
            "failed": counters.failed - flush.failed,
            "bytes": store.disk_bytes,
            "entries": store.records,
            "longest_durable_prefix_tokens": store.index.longest(),
            "elapsed_s": elapsed,
        }
