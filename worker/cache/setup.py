"""The prefix cache of a model that was just loaded: how large, where, and whether there can be one."""

import logging
import shutil
from pathlib import Path
from typing import Any

from mlxhost.worker.cache.disk import Disk
from mlxhost.worker.cache.keys import model_fingerprint
from mlxhost.worker.cache.layout import Layout, Uncacheable
from mlxhost.worker.cache.prefix import PrefixCache
from mlxhost.worker.cache.store import RecordStore

log = logging.getLogger(__name__)

AUTO = -1
RAM_SHARE = 0.25  # of the KV budget
_DISK_SHARE = 0.1  # of what is free on the disk
_MAX_AUTO_DISK = 32 << 30
_DIRECTORY = "kv"


def open_cache(
    model: Any, directory: Path, dtype: str, *, cache_dir: Path, ram_bytes: int, disk_bytes: int
) -> PrefixCache:
    """A prefix cache for `model`, read from `directory` and computing in `dtype`; records of earlier
    processes are in it.

    `ram_bytes` 0: it is off; `disk_bytes` -1: a tenth of what is free, 32 GiB at most, 0: RAM only.
    """
    if ram_bytes <= 0:
        return PrefixCache()
    try:
        layout = Layout.of(model)
    except Uncacheable as error:
        log.warning("no prefix cache for this model: %s", error)
        return PrefixCache()
    root = cache_dir / _DIRECTORY
    cap = _auto_disk_bytes(cache_dir) if disk_bytes == AUTO else disk_bytes

    def open_store(fingerprint: str) -> RecordStore:
        disk = None
        if cap > 0:
            disk = Disk(root, f"{fingerprint[:24]}-{layout.scheme[:8]}", cap)
            disk.start()
        return RecordStore(layout, ram_bytes, disk)

    return PrefixCache(layout, model_fingerprint(directory, dtype), open_store)


def _auto_disk_bytes(directory: Path) -> int:
    """The default cap; 0 where the disk cannot be asked."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        return min(_MAX_AUTO_DISK, int(shutil.disk_usage(directory).free * _DISK_SHARE))
    except OSError:
        return 0
