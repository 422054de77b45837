"""The process's one model: read from its files, dropped from memory, replaced by another of its shape.

Knows files, memory and the device; nothing of rows or messages. Engine thread only.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxhost.wire.control import Lease, ModelCard, Progress, WorkerConfig
from mlxhost.worker.admission import Capacity
from mlxhost.worker.backend import Backend, available_bytes, release_memory
from mlxhost.worker.cache.setup import RAM_SHARE
from mlxhost.worker.card import model_card, read_json
from mlxhost.worker.chunks import MAX_CHUNK
from mlxhost.worker.device import Device, reading, take_turns
from mlxhost.worker.errors import ModelError
from mlxhost.worker.kv import Batching
from mlxhost.worker.kvcost import KVCost
from mlxhost.worker.models.load import DTYPES, LoadedModel, check_safetensors, load_model
from mlxhost.worker.parameters import shapes
from mlxhost.worker.selftest import Tested, self_test
from mlxhost.worker.warmup import WarmUp, warm_up

log = logging.getLogger(__name__)

# Without a lease: the share of the free memory that KV caches may take.
_KV_SHARE = 0.4
_MIN_KV_BYTES = 64 * 1024 * 1024
# Fields of config.json that differ between models which cannot take one another's place.
_SHAPE_FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Resident:
    """A model in memory, and what was measured of it."""

    directory: Path
    loaded: LoadedModel
    card: ModelCard
    tested: Tested
    warm: WarmUp


class Residence:
    """Where the model is. `on_progress` is told while files are converted and weights are read."""

    def __init__(
        self, config: WorkerConfig, backend: Backend, lease: Lease, on_progress: Callable[[Progress], None]
    ) -> None:
        self.dtype = backend.dtype if config.dtype == "auto" else config.dtype
        if self.dtype not in DTYPES:
            raise ModelError("bad_model", f"dtype {self.dtype!r} is not one of auto, {', '.join(DTYPES)}")
        if config.quantised not in ("auto", "keep", "expand"):
            raise ModelError("bad_model", f"quantised {config.quantised!r} is not one of auto, keep, expand")
        # A CPU computes with plain float32 some 50 times faster than with quantised weights.
        self._expand = config.quantised == "expand" or (config.quantised == "auto" and backend.kind == "cpu")
        self.device: Device = take_turns(lease.device_lease, lease.weight)
        self.path = Path(config.path)
        self.resident: Resident | None = None
        self.cost = KVCost(0)
        self.weights_bytes = self._max_model_len = self._transient_bytes = 0
        self._config, self._backend, self._on_progress = config, backend, on_progress
        self.kv_scheme = self.note = ""
        self._lease = lease
        self._kv_bytes = 0
        self.one_at_a_time = False  # the model's rows may not be computed together
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._model_config: dict[str, Any] = {}

    def load(self) -> Resident:
        """Read the model into memory. Raises ModelError."""
        self._take(self.path, self._read(self.path))
        self._kv_bytes = self._kv_bytes or self._leased_kv_bytes() or _free_kv_bytes()
        return self._present

    def lease(self, lease: Lease) -> bool:
        """Take over a new lease; whether `capacity` changes by it. One without figures leaves it as it is."""
        self._lease, before = lease, self._kv_bytes
        self._kv_bytes = self._leased_kv_bytes() or before
        return self._kv_bytes != before

    def _leased_kv_bytes(self) -> int:
        return leased_kv_bytes(self._lease, self.weights_bytes, self._transient_bytes)

    @property
    def cache_bytes(self) -> int:
        """What of the KV budget is the prefix cache's: a quarter, or what is asked for, half at most."""
        asked = self._config.cache_ram_bytes
        return int(self._kv_bytes * RAM_SHARE) if asked < 0 else min(asked, self._kv_bytes // 2)

    def drop(self) -> None:
        """Let go of the weights; `load` brings them back."""
        self.resident = None
        gc.collect()
        release_memory()

    def check(self, path: Path) -> None:
        """What can be told of a replacement without reading its weights. Raises ModelError naming the file
        or field at fault."""
        if path.is_file() and path.suffix == ".gguf":
            return  # its header is checked by the conversion, its shape afterwards
        config = read_json(path / "config.json")
        for field in _SHAPE_FIELDS:
            if config.get(field) != self._model_config.get(field):
                raise ModelError(
                    "bad_model",
                    f"{path / 'config.json'}: {field} {config.get(field)!r} differs from the served "
                    f"model's {self._model_config.get(field)!r}; only the same shape can be reloaded",
                )
        model_card(path)
        files = sorted(path.glob("*.safetensors"))
        for file in files:
            check_safetensors(file)
        needed = max(self.weights_bytes, sum(file.stat().st_size for file in files))
        if self.resident is not None and needed > available_bytes():
            raise ModelError(
                "bad_model",
                f"{path}: {needed / 2**20:.0f} MiB of weights do not fit beside the served ones (free: "
                f"{available_bytes() / 2**20:.0f} MiB); put them to sleep first, or unload the model",
            )

    def replace(self, path: Path) -> Resident:
        """Read the weights in `path` beside the present ones and put them in their place.

        Raises ModelError, the present ones untouched, when they cannot be served or have another shape.
        """
        replacement = self._read(path)
        changed = _difference(self._shapes, shapes(replacement.loaded.model))
        if changed:
            raise ModelError(
                "bad_model", f"{path}: {changed}; only weights of the same shape can be reloaded"
            )
        if replacement.loaded.max_model_len < self._max_model_len:
            raise ModelError(
                "bad_model",
                f"{path}: a context of {replacement.loaded.max_model_len} tokens, and {self._max_model_len} "
                "are promised",
            )
        self._take(path, replacement)
        return self._present

    def capacity(self, max_rows: int) -> Capacity:
        """What `max_rows` rows (one, where the model does not batch) can hold: a short one at least, of which
        `note` then says so."""
        max_rows = 1 if self.one_at_a_time else max_rows
        context = self._config.context
        max_model_len = min(self._max_model_len, context or self._max_model_len)
        capacity = Capacity(self._kv_bytes - self.cache_bytes, max_model_len, max_rows, self.cost)
        self.note = ""
        if capacity.longest < 2:
            capacity = Capacity(self.cost.bytes(self.cost.step), max_model_len, max_rows, self.cost)
            self.note = (
                f"{self._kv_bytes / 2**20:.1f} MiB for KV caches hold no context: requests of up to "
                f"{capacity.longest} tokens are served all the same, one at a time, in "
                f"{capacity.kv_bytes / 2**20:.1f} MiB; give the model more memory, or a smaller dtype"
            )
            log.warning("%s", self.note)
        return capacity

    @property
    def _present(self) -> Resident:
        assert self.resident is not None
        return self.resident

    def _take(self, path: Path, resident: Resident) -> None:
        loaded = resident.loaded
        self.path, self.resident, self.cost = path, resident, resident.tested.cost
        self.kv_scheme = resident.warm.kv_scheme
        self.one_at_a_time = resident.tested.shape.batching is Batching.ALONE
        self._transient_bytes = resident.warm.transient_per_token * MAX_CHUNK
        self.weights_bytes, self._max_model_len = loaded.weights_bytes, loaded.max_model_len
        self._shapes, self._model_config = shapes(loaded.model), loaded.config

    def _read(self, path: Path) -> Resident:
        """Load and try the model in `path`."""
        directory = self._directory(path)
        card = model_card(directory)
        with reading(self.device) as next_part:

            def on_progress(done: int, total: int) -> None:
                self._on_progress(Progress("loading", done, total))
                next_part()

            loaded = load_model(directory, self.dtype, expand_quantised=self._expand, on_progress=on_progress)
        self._on_progress(Progress("warming up"))
        tested = self_test(loaded.model, loaded.vocab_size, self.dtype, self._backend.shape)
        warm = warm_up(loaded.model, loaded.vocab_size)
        release_memory()
        return Resident(directory, loaded, card, tested, warm)

    def _directory(self, path: Path) -> Path:
        """The model's directory; a GGUF file is converted into one first, once."""
        if path.is_dir():
            return path
        from mlxhost.worker.gguf.launch import ensure_converted

        def on_progress(done: int, total: int) -> None:
            self._on_progress(Progress("converting", done, total))

        cache_dir = Path(self._config.cache_dir)
        return ensure_converted(path, self.dtype, cache_dir, on_progress, keep_quantised=not self._expand)


def leased_kv_bytes(lease: Lease, weights_bytes: int, transient_bytes: int) -> int:
    """Bytes for KV caches, cached prefixes included, that `lease` allows; 0 when it sets no limit.

    Where it limits MLX's memory only: what weights, the largest chunk and freed buffers leave of that.
    """
    if lease.kv_bytes or not lease.memory_bytes:
        return lease.kv_bytes
    return max(1, lease.memory_bytes - weights_bytes - max(transient_bytes, lease.cache_bytes))


def _free_kv_bytes() -> int:
    return max(int(available_bytes() * _KV_SHARE), _MIN_KV_BYTES)


def _difference(ours: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> str:
    """The first parameter in which two models differ, in words; empty when they agree."""
    for name in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(name), theirs.get(name)
        if mine != other:
            return f"{name} has the shape {other or 'none'} where the served model has {mine or 'none'}"
    return ""
