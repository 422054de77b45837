"""The estimate of a model's memory: one call, from a path to numbers."""

import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from mlxhost.supervisor.cores import available_cores
from mlxhost.supervisor.errors import ModelError
from mlxhost.supervisor.estimate.fields import Fields, Unsized
from mlxhost.supervisor.estimate.layers import Layer, layers_of
from mlxhost.supervisor.estimate.tensors import read_tensors
from mlxhost.supervisor.estimate.transient import chunk_tokens, transient_bytes
from mlxhost.supervisor.estimate.weights import ITEMSIZE, weights_bytes
from mlxhost.supervisor.modelfiles import GGUF_SUFFIX, check_model, read_json

SERVING_CONTEXT = 8192  # tokens that a model is sized for when nothing else is asked
PROCESS_BYTES = 48 * 1024 * 1024  # a worker before its weights: interpreter, MLX, BLAS (docs/fit.md)
CACHE_STEP = 256  # tokens by which a KV cache grows
_LONGEST = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")
AUTO_DTYPE = {"cpu": "float32", "metal": "bfloat16", "cuda": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that a worker will take for a model at `context` tokens.

    `kv_fixed_bytes` are sliding windows and recurrent states of one request, which do not grow with its
    length. `plans_own_memory`: it takes what it gets, so it is to be charged the whole budget. `sized` is
    false when the config does not tell enough: then all but the weights are zero.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    kv_fixed_bytes: int
    transient_bytes: int
    process_bytes: int
    context: int  # tokens it is for
    max_context: int  # tokens that the model allows; 0: not told
    dtype: str
    backend: str
    plans_own_memory: bool = False
    sized: bool = True
    notes: tuple[str, ...] = ()

    @property
    def kv_bytes(self) -> int:
        """Caches of one request of `context` tokens."""
        return self.kv_bytes_per_token * rounded(self.context) + self.kv_fixed_bytes

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.transient_bytes + self.process_bytes

    @property
    def base_bytes(self) -> int:
        """What it takes before the first request's cache."""
        return self.weights_bytes + self.process_bytes


def rounded(tokens: int) -> int:
    """Tokens that a cache has room for when it holds `tokens`."""
    return -(-tokens // CACHE_STEP) * CACHE_STEP


def estimate(
    path: Path, dtype: str = "auto", context: int = 0, backend: str = "", quantised: str = "auto"
) -> Estimate:
    """What the model at `path` (a directory or a GGUF file) will take.

    `context` 0: SERVING_CONTEXT; both are bounded by the model. `backend` empty: this machine's.
    `quantised` weights are kept, expanded, or (auto) expanded on a CPU. Reads
    headers only. Raises ModelError, naming file and field, for files that cannot be what they claim.
    """
    return sizer(path, dtype, backend, quantised).at(context)


def sizer(path: Path, dtype: str = "auto", backend: str = "", quantised: str = "auto") -> "Sizer":
    """The same for any context, the files read once. Raises ModelError."""
    backend = backend or machine_backend()
    chosen = AUTO_DTYPE[backend] if dtype == "auto" else dtype
    if chosen not in ITEMSIZE:
        raise ModelError(f"dtype {dtype!r} is not one of auto, {', '.join(ITEMSIZE)}")
    expand = quantised == "expand" or (quantised == "auto" and backend == "cpu")
    return _sizer(path, _stamp(path), chosen, backend, expand)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes when the files do."""
    try:
        files = [path, *path.glob("*.json"), *path.glob("*.safetensors")] if path.is_dir() else [path]
        stats = [file.stat() for file in files]
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror} ({error.filename})") from None
    return len(stats), max(s.st_mtime_ns for s in stats), sum(s.st_size for s in stats)


@lru_cache(maxsize=256)
def _sizer(path: Path, stamp: tuple[int, int, int], dtype: str, backend: str, expand: bool) -> "Sizer":
    if path.is_dir() and (path / "model_index.json").is_file() and not (path / "config.json").is_file():
        return Sizer(
            Fields(path, {}), sum(f.stat().st_size for f in path.glob("*/*.safetensors")), dtype, backend
        )
    check_model(path)
    if path.suffix.lower() == GGUF_SUFFIX and not path.is_dir():
        from mlxhost.supervisor.estimate.gguf import read_gguf

        fields, tensors = read_gguf(path, keep_quantised=not expand)
    else:
        fields, tensors = Fields(path / "config.json", read_json(path / "config.json")), read_tensors(path)
    weights = weights_bytes(tensors, fields, dtype, expand_quantised=expand)
    return Sizer(fields, weights, dtype, backend, expand)


@dataclass(frozen=True)
class Sizer:
    """A model's config and the bytes of its weights. `fields` without any value: a pipeline of several
    models (diffusers' form), which decides itself what it keeps in memory."""

    fields: Fields
    weights: int
    dtype: str
    backend: str
    expand_quantised: bool = False

    def at(self, context: int) -> Estimate:
        """The estimate for `context` tokens. Raises ModelError for a field that makes no sense."""
        found = Estimate(
            weights_bytes=self.weights,
            kv_bytes_per_token=0,
            kv_fixed_bytes=0,
            transient_bytes=0,
            process_bytes=PROCESS_BYTES,
            context=context or SERVING_CONTEXT,
            max_context=0,
            dtype=self.dtype,
            backend=self.backend,
        )
        if not self.fields.whole:
            note = "a pipeline of several models plans its own memory"
            return replace(found, plans_own_memory=True, notes=(note,))
        notes = _notes(self.fields, self.expand_quantised)
        try:
            return self._sized(replace(found, notes=tuple(notes)))
        except Unsized as missing:
            notes.append(f"only the weights are counted: {missing}")
            return replace(found, sized=False, notes=tuple(notes))

    def _sized(self, found: Estimate) -> Estimate:
        fields, size = self.fields, ITEMSIZE[self.dtype]
        longest = fields.count(*_LONGEST, default=SERVING_CONTEXT) or SERVING_CONTEXT
        served = min(found.context, longest)
        layers = layers_of(fields)
        embedding = fields.count("vocab_size", default=0) * fields.count("hidden_size", "d_model", default=0)
        chunk = chunk_tokens(
            max(1, self.weights // size - embedding), size, self.backend, available_cores(), served
        )
        return replace(
            found,
            kv_bytes_per_token=size * sum(layer.per_token for layer in layers if not layer.window),
            kv_fixed_bytes=sum(_fixed(layer, served, size) for layer in layers),
            transient_bytes=transient_bytes(fields, layers, chunk, served, size, self.backend),
            context=served,
            max_context=longest,
        )


def _fixed(layer: Layer, context: int, size: int) -> int:
    window = layer.per_token * min(layer.window, rounded(context))
    return size * (window + layer.state) + 4 * layer.state32


def _notes(fields: Fields, expand_quantised: bool) -> list[str]:
    notes = []
    quantised = isinstance(fields.whole.get("quantization"), dict)
    if quantised and expand_quantised:
        notes.append("quantised weights are expanded when they are loaded")
    method = fields.whole.get("quantization_config")
    if not quantised and isinstance(method, dict) and method.get("quant_method"):
        notes.append(f"the quantisation {method['quant_method']!r} is not one that is served")
    experts = fields.values.get("num_experts") or fields.values.get("num_local_experts")
    if isinstance(experts, int) and experts > 1:
        notes.append(f"all {experts} experts of a layer are in memory, whichever a token uses")
    return notes


@lru_cache(maxsize=1)
def machine_backend() -> str:
    """Which of MLX's backends workers will use here, told without importing MLX."""
    if sys.platform == "darwin":
        return "metal"
    installed = {(d.metadata["Name"] or "").lower() for d in metadata.distributions()}
    cuda = any(name.startswith("mlx-cuda") for name in installed) and Path("/proc/driver/nvidia").exists()
    return "cuda" if cuda else "cpu"
