"""sleep, wake and reload_weights: giving the model's memory back, taking it again, changing what is in it.

All run while no row does. Frozen rows (pause keep) count as running: their KV cache belongs to the weights.
"""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mlxhost.worker.backend import release_memory, resident_bytes
from mlxhost.worker.cache.keys import model_fingerprint
from mlxhost.worker.engine import Engine
from mlxhost.worker.errors import CallError, ModelError
from mlxhost.worker.modes import Hold
from mlxhost.worker.residence import Residence


def sleep(engine: Engine, residence: Residence, level: int) -> dict[str, Any]:
    """Free caches and, at level 2, the weights; refuse requests until `wake`. Bytes before and after are the
    kernel's."""
    before, started = resident_bytes(), time.monotonic()
    model = engine.model
    engine.let_go()
    engine.stepper.prefix.sleep()
    if level == 2:
        del model
        residence.drop()
    else:
        release_memory()
    after = resident_bytes()
    return {
        "level": level,
        "resident_before": before,
        "resident_after": after,
        "freed_bytes": max(0, before - after),
        "seconds": round(time.monotonic() - started, 3),
    }


def wake(engine: Engine, residence: Residence) -> dict[str, Any]:
    """Serve again, the weights read from disk if they were dropped. Raises ModelError, still asleep, when
    they cannot be read."""
    if not engine.holds.asleep:
        raise CallError("invalid", "the model does not sleep")
    before, started = resident_bytes(), time.monotonic()
    read = residence.resident is None
    if residence.resident is None:
        # The files may have changed meanwhile.
        _reading(engine, lambda: residence.replace(residence.path))
        _rebase(engine, residence)
    _serve(engine, residence)
    return {
        "read_weights": read,
        "resident_before": before,
        "resident_after": resident_bytes(),
        "seconds": round(time.monotonic() - started, 3),
    }


def check(engine: Engine, residence: Residence, path: Path) -> None:
    """What must hold before a reload is begun. Raises CallError or ModelError."""
    if not path.exists():
        raise CallError("invalid", f"{path}: no such file or directory")
    if engine.holds.hold is Hold.FREEZE and engine.admission.running:
        raise CallError(
            "invalid",
            f"{engine.admission.running} requests are frozen with a KV cache of the present weights; "
            "resume or abort them first",
        )
    residence.check(path)


def reload(engine: Engine, residence: Residence, path: Path) -> dict[str, Any]:
    """Put the weights in `path` in the place of the present ones. Raises ModelError, and the present ones go
    on, when they cannot be served."""
    started, asleep = time.monotonic(), engine.holds.asleep
    _reading(engine, lambda: residence.replace(path))
    _rebase(engine, residence)
    if asleep:
        residence.drop()
    else:
        _serve(engine, residence)
        gc.collect()
        release_memory()
    return {
        "path": str(residence.path),
        "weights_bytes": residence.weights_bytes,
        "resident_bytes": resident_bytes(),
        "seconds": round(time.monotonic() - started, 3),
        "card": None if asleep else _card(residence),
    }


def _card(residence: Residence) -> Any:
    return msgspec.to_builtins(residence.resident.card) if residence.resident else None


def _serve(engine: Engine, residence: Residence) -> None:
    if residence.resident is None:
        raise ModelError("bad_model", "the model is not in memory")
    engine.serve(residence.resident.loaded.model, residence.resident.card)


def _rebase(engine: Engine, residence: Residence) -> None:
    """What the prefix cache has of other weights must not be found."""
    if residence.resident is not None:
        engine.stepper.prefix.rebase(model_fingerprint(residence.resident.directory, residence.dtype))


def _reading(engine: Engine, read: Callable[[], object]) -> None:
    """Run `read` in the mode that tells others why the engine stands still."""
    engine.holds.reloading = True
    engine.publish()
    try:
        read()
    finally:
        engine.holds.reloading = False
