"""An engine with a prefix cache, driven in this thread."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.engine_driver import Driver

from mlxhost.worker.cache.prefix import PrefixCache
from mlxhost.worker.cache.setup import open_cache
from mlxhost.worker.models.load import LoadedModel


class CachedDriver(Driver):
    """A Driver whose engine has a prefix cache."""

    @property
    def prefix(self) -> PrefixCache:
        return self.engine.stepper.prefix

    def until(self, condition: Callable[[], bool]) -> None:
        """Tick until `condition` holds."""
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "the engine did not get there within 60 s"
            self.tick()

    def close(self) -> None:
        """End the disk's thread, without a flush."""
        self.prefix.close(0.0)


def cached_driver(
    loaded: LoadedModel,
    cache_dir: Path,
    *,
    directory: Path | None = None,
    ram_bytes: int = 1 << 28,
    disk_bytes: int = 1 << 28,
    **capacity: Any,
) -> CachedDriver:
    """An engine for `loaded` with a cache in `cache_dir`, whose earlier records it has found. `directory` is
    the model's, by default one that is the same for all."""
    driver = CachedDriver(loaded.model, loaded.vocab_size, **capacity)
    driver.engine.stepper.prefix = open_cache(
        loaded.model,
        directory or cache_dir,
        "float32",
        cache_dir=cache_dir,
        ram_bytes=ram_bytes,
        disk_bytes=disk_bytes,
    )
    store = driver.prefix.store
    driver.until(lambda: store is None or store.scanned)
    return driver


def finish(driver: CachedDriver, *handles: int) -> None:
    """Tick until these requests have ended."""
    driver.until(lambda: all(driver.results[h].terminals for h in handles))
