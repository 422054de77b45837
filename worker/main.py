"""A worker process from boot to exit: handshake, load, serve."""

import logging
import sys
from pathlib import Path
from queue import Empty

from mlxhost.wire import control, sockets
from mlxhost.wire.boot import Boot, read_boot
from mlxhost.wire.errors import ParentGone
from mlxhost.worker.admission import Capacity
from mlxhost.worker.backend import available_bytes, cores, detect, release_memory, resident_bytes
from mlxhost.worker.card import model_card
from mlxhost.worker.engine import OPERATIONS, Engine
from mlxhost.worker.errors import EngineFailure, ModelError
from mlxhost.worker.link import Link
from mlxhost.worker.models.load import DTYPES, LoadedModel, load_model
from mlxhost.worker.selftest import KVCost, self_test
from mlxhost.worker.threads import CpuThreads

log = logging.getLogger(__name__)

_INIT_TIMEOUT_S = 30.0
# Without a lease: the share of the free memory that KV caches may take.
_KV_SHARE = 0.4
_MIN_KV_BYTES = 64 * 1024 * 1024


def main() -> None:
    """Run one worker; exit code 0 after STOP, 1 when the model cannot be served."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    sockets.process_dies_with_parent()
    try:
        boot = read_boot()
    except ParentGone as error:
        sys.exit(str(error))
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
    link.close(failure=failure)
    sys.exit(1 if failure else 0)


def serve(boot: Boot, link: Link) -> None:
    """Load the model and run its requests until STOP. Raises ModelError or EngineFailure."""
    init = _await_init(link)
    config = init.worker
    if config is None:
        raise ModelError("bad_model", "the supervisor named no model to load")
    backend = detect()
    threads = CpuThreads(backend.blas, init.lease.cpu_threads or cores())
    dtype = backend.dtype if config.dtype == "auto" else config.dtype
    if dtype not in DTYPES:
        raise ModelError("bad_model", f"dtype {config.dtype!r} is not one of auto, {', '.join(DTYPES)}")
    directory = _directory(config, dtype, link)
    loaded = load_model(
        directory,
        dtype,
        expand_quantised=backend.kind == "cpu",
        on_progress=lambda done, total: link.send(None, control.Progress("loading", done, total)),
    )
    card = model_card(directory)
    link.send(None, control.Progress("warming up"))
    cost = self_test(loaded.model, loaded.vocab_size, dtype)
    release_memory()
    max_rows = config.max_rows or backend.max_rows
    capacity = _capacity(loaded, cost, init.lease, config.context, max_rows)
    engine = Engine(
        loaded.model,
        vocab_size=loaded.vocab_size,
        eos_ids=card.eos_ids,
        capacity=capacity,
        max_gap_s=config.max_gap_ms / 1000,
        epoch=boot.epoch,
        threads=threads,
        inbox=link.inbox,
        outlet=link,
    )
    link.open_for(max_rows + config.max_queued)
    link.send(
        None,
        control.Ready(
            max_model_len=capacity.longest,
            kv_capacity_tokens=capacity.kv_tokens,
            kv_bytes_per_token=cost.per_token,
            block_tokens=256,
            dtype=dtype,
            weights_bytes=loaded.weights_bytes,
            resident_bytes=resident_bytes(),
            device_working_set=backend.working_set,
            max_rows=max_rows,
            max_queued=config.max_queued,
            operations=list(OPERATIONS),
            tasks=["generate"],
            card=card,
            backend=backend.label,
            notes=[*backend.notes, *loaded.notes],
        ),
    )
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


def _directory(config: control.WorkerConfig, dtype: str, link: Link) -> Path:
    """The model's directory; a GGUF file is converted into one first, once."""
    path = Path(config.path)
    if path.is_dir():
        return path
    from mlxhost.worker.gguf.launch import ensure_converted

    def on_progress(done: int, total: int) -> None:
        link.send(None, control.Progress("converting", done, total))

    return ensure_converted(path, dtype, Path(config.cache_dir), on_progress)


def _capacity(
    loaded: LoadedModel, cost: KVCost, lease: control.Lease, context: int, max_rows: int
) -> Capacity:
    """How many KV tokens fit in the lease, or in a share of the free memory where there is none."""
    kv_bytes = lease.kv_bytes or max(int(available_bytes() * _KV_SHARE), _MIN_KV_BYTES)
    max_model_len = min(loaded.max_model_len, context or loaded.max_model_len)
    if cost.per_token:
        kv_tokens = max(0, kv_bytes - cost.per_row * max_rows) // cost.per_token
    else:
        kv_tokens = max_rows * max_model_len
    if kv_tokens < 2:
        raise ModelError(
            "bad_model",
            f"no room for a KV cache: {kv_bytes / 2**20:.0f} MiB for {max_rows} rows of "
            f"{cost.per_row / 2**20:.1f} MiB each and {cost.per_token} bytes a token; lower --max-rows",
        )
    return Capacity(kv_tokens, max_model_len, max_rows)
