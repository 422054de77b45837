"""Obeys the memory lease, between two ticks, and counts what the memory is used for. Engine thread only.

A smaller lease takes effect at once: MLX's limits are set, the prefix cache lets go of what is beyond its
share, and before the next step rows leave until the others fit. `Lease.shrink` goes further, for a worker
that holds too much all the same: clear MLX's freed buffers, drop cached prefixes, and at last stand still,
with every row set aside; rows go on, exactly, when a later lease allows.
"""

import logging
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxhost.wire.control import Lease, MemoryUse
from mlxhost.worker.backend import Backend, limit_memory, release_memory

if TYPE_CHECKING:
    from mlxhost.worker.engine import Engine
    from mlxhost.worker.residence import Residence

log = logging.getLogger(__name__)

# Each does what those before it do.
RUNGS = ("", "clear_cache", "drop_prefixes", "pause")


class Memory:
    """One engine's memory, under one lease at a time."""

    def __init__(self, engine: "Engine", residence: "Residence", backend: Backend) -> None:
        self._engine, self._residence, self._backend = engine, residence, backend
        self._lease = Lease()

    def obey(self, lease: Lease) -> None:
        """Take over a lease. One with an order that is not known is obeyed as far as it is known."""
        before, self._lease = self._lease, lease
        backend = self._backend
        limit_memory(backend.kind, lease.memory_bytes, lease.cache_bytes, backend.working_set)
        admission, stepper = self._engine.admission, self._engine.stepper
        if self._residence.lease(lease):
            admission.capacity = self._residence.capacity(admission.capacity.max_rows)
        rung = RUNGS.index(lease.shrink) if lease.shrink in RUNGS else 0
        was = RUNGS.index(before.shrink) if before.shrink in RUNGS else 0
        if rung != was:
            log.info("memory lease: %s", lease.shrink.replace("_", " ") if rung else "no need to shrink")
        stepper.prefix.shrink(0 if rung >= RUNGS.index("drop_prefixes") else self._residence.cache_bytes)
        self._engine.holds.out_of_memory = rung == RUNGS.index("pause")
        if self._engine.holds.out_of_memory:
            stepper.set_all_aside()
        if rung:
            release_memory()

    def use(self) -> MemoryUse:
        """The figures of now."""
        admission, stepper = self._engine.admission, self._engine.stepper
        return MemoryUse(
            active=mx.get_active_memory(),
            buffers=mx.get_cache_memory(),
            peak=mx.get_peak_memory(),
            kv_limit=admission.capacity.kv_bytes,
            kv_reserved=admission.reserved,
            kv_held=admission.held,
            kv_scheme=self._residence.kv_scheme,
            preemptions=stepper.preemptions,
            yields=stepper.yields,
            failed_steps=stepper.failed_steps,
        )
