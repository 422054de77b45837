"""A worker process from boot to exit: handshake, load, serve."""

import faulthandler
import logging
import sys
from pathlib import Path
from queue import Empty

from mlxhost.wire import control, sockets
from mlxhost.wire.boot import Boot, read_boot
from mlxhost.wire.errors import ParentGone
from mlxhost.worker.backend import cores, detect, resident_bytes
from mlxhost.worker.cache.setup import open_cache
from mlxhost.worker.engine import Engine
from mlxhost.worker.errors import EngineFailure, ModelError
from mlxhost.worker.grammar.waiting import Grammars
from mlxhost.worker.link import Link
from mlxhost.worker.memory import Memory
from mlxhost.worker.operations import Operations
from mlxhost.worker.residence import Residence
from mlxhost.worker.threads import CpuThreads

log = logging.getLogger(__name__)

_INIT_TIMEOUT_S = 30.0


def main() -> None:
    """Run one worker; exit code 0 after STOP, 1 when the model cannot be served."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    faulthandler.enable()  # SIGABRT, which a stuck worker gets first, prints every thread's stack
    try:
        boot = read_boot()
    except ParentGone as error:
        sys.exit(str(error))
    sockets.process_dies_with_parent(boot.parent)
    link = Link(boot)
    link.start()
    failure = ""
    try:
        serve(boot, link)
    except ModelError as error:
        failure = str(error)
        link.send(None, control.Dead(error.code, failure))
    except EngineFailure as error:
        failure = str(error)
        link.send(None, control.Dead("engine", failure))
    except MemoryError:
        failure = "out of memory"
        link.send(None, control.Dead("out_of_memory", failure))
    except Exception as error:  # the supervisor should hear of it before it sees the exit
        log.critical("the worker failed: %s", error, exc_info=error)
        failure = f"{type(error).__name__}: {error}"
        link.send(None, control.Dead("engine", failure))
    link.close(failure=failure)
    sys.exit(1 if failure else 0)


def serve(boot: Boot, link: Link) -> None:
    """Load the model and run its requests until STOP. Raises ModelError or EngineFailure."""
    init = _await_init(link)
    logging.getLogger().setLevel(init.log_level.upper())
    config = init.worker
    if config is None:
        raise ModelError("bad_model", "the supervisor named no model to load")
    backend = detect()
    threads = CpuThreads(backend.blas, init.lease.cpu_threads or cores())
    residence = Residence(config, backend, init.lease, lambda progress: link.send(None, progress))
    resident = residence.load()
    tested = resident.tested
    capacity = residence.capacity(config.max_rows or backend.max_rows)
    grammars = Grammars(link.inbox.put, Path(config.cache_dir))
    grammars.use(resident.card, resident.loaded.vocab_size)
    engine = Engine(
        resident.loaded.model,
        vocab_size=resident.loaded.vocab_size,
        eos_ids=resident.card.eos_ids,
        capacity=capacity,
        max_gap_s=config.max_gap_ms / 1000,
        epoch=boot.epoch,
        threads=threads,
        inbox=link.inbox,
        outlet=link,
        grammars=grammars,
        shape=tested.shape,
        timing=resident.warm.timing,
    )
    engine.stepper.device = residence.device
    engine.stepper.prefix = open_cache(
        resident.loaded.model,
        resident.directory,
        residence.dtype,
        cache_dir=Path(config.cache_dir),
        ram_bytes=residence.cache_bytes,
        disk_bytes=config.cache_disk_bytes if config.cache_dir else 0,
    )
    engine.memory = Memory(engine, residence, backend)
    engine.memory.obey(init.lease)
    engine.stepper.jumps = engine.batch.jumps = config.jump_forward
    operations = Operations(
        engine,
        residence,
        link,
        max_queued=config.max_queued,
        open_for=link.open_for,
        directory=Path(config.cache_dir) / "profiles",
        label=f"{boot.slot.replace('/', '-')}-{boot.epoch}",
    )
    link.open_for(capacity.max_rows + config.max_queued)
    link.send(
        None,
        control.Ready(
            max_model_len=capacity.longest,
            kv_capacity_tokens=capacity.kv_tokens,
            kv_bytes_per_token=residence.cost.per_token,
            block_tokens=256,
            dtype=residence.dtype,
            weights_bytes=residence.weights_bytes,
            resident_bytes=resident_bytes(),
            device_working_set=backend.working_set,
            max_rows=capacity.max_rows,
            max_queued=config.max_queued,
            operations=operations.names,
            tasks=["generate"],
            card=resident.card,
            backend=backend.label,
            notes=[
                *backend.notes,
                *([residence.note] if residence.note else []),
                *resident.loaded.notes,
                *tested.notes,
            ],
        ),
    )
    del resident  # it holds the weights, which sleep must be able to drop
    engine.run()


def _await_init(link: Link) -> control.Init:
    try:
        message = link.inbox.get(timeout=_INIT_TIMEOUT_S)
    except Empty:
        sys.exit(f"the supervisor did not answer HELLO within {_INIT_TIMEOUT_S:.0f} s")
    if isinstance(message, control.Refused):
        sys.exit(f"the supervisor refused this worker: {message.code}: {message.message}")
    if not isinstance(message, control.Init):
        sys.exit(f"expected INIT, got {type(message).__name__}")
    return message
