"""The estimate of a model's memory: one call, from a path to numbers."""

import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from mlxhost.supervisor.cores import available_cores
from mlxhost.supervisor.errors import ModelError
from mlxhost.supervisor.estimate.fields import Fields, Unsized
from mlxhost.supervisor.estimate.layers import Layer, layers_of
from mlxhost.supervisor.estimate.tensors import Tensor, read_tensors
from mlxhost.supervisor.estimate.transient import chunk_tokens, transient_bytes
from mlxhost.supervisor.estimate.weights import ITEMSIZE, weights_bytes
from mlxhost.supervisor.modelfiles import GGUF_SUFFIX, check_model, read_json

SERVING_CONTEXT = 8192  # tokens that a model is sized for when nothing else is asked
PROCESS_BYTES = 48 * 1024 * 1024  # a worker before its weights: interpreter, MLX, BLAS (docs/fit.md)
CACHE_STEP = 256  # tokens by which a KV cache grows
BACKENDS = ("cpu", "metal", "cuda")
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


def estimate(path: Path, dtype: str = "auto", context: int = 0, backend: str = "") -> Estimate:
    """What the model at `path` (a directory or a GGUF file) will take.

    `context` 0: SERVING_CONTEXT; both are bounded by the model. `backend` empty: this machine's. Reads
    headers only. Raises ModelError, naming file and field, for files that cannot be what they claim.
    """
    backend = backend or machine_backend()
    chosen = AUTO_DTYPE[backend] if dtype == "auto" else dtype
    if chosen not in ITEMSIZE:
        raise ModelError(f"dtype {dtype!r} is not one of auto, {', '.join(ITEMSIZE)}")
    return _estimate(path, _stamp(path), chosen, context, backend)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes when the files do."""
    try:
        files = [path, *path.glob("*.json"), *path.glob("*.safetensors")] if path.is_dir() else [path]
        stats = [file.stat() for file in files]
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror} ({error.filename})") from None
    return len(stats), max(s.st_mtime_ns for s in stats), sum(s.st_size for s in stats)


@lru_cache(maxsize=256)
def _estimate(path: Path, stamp: tuple[int, int, int], dtype: str, context: int, backend: str) -> Estimate:
    if path.is_dir() and (path / "model_index.json").is_file() and not (path / "config.json").is_file():
        return _pipeline(path, dtype, backend)
    check_model(path)
    if path.suffix.lower() == GGUF_SUFFIX and not path.is_dir():
        from mlxhost.supervisor.estimate.gguf import read_gguf

        fields, tensors = read_gguf(path, keep_quantised=backend != "cpu")
    else:
        fields, tensors = Fields(path / "config.json", read_json(path / "config.json")), read_tensors(path)
    return estimate_of(fields, tensors, dtype, context, backend)


def estimate_of(fields: Fields, tensors: list[Tensor], dtype: str, context: int, backend: str) -> Estimate:
    """The estimate from a config and a list of tensors. Pure."""
    size = ITEMSIZE[dtype]
    weights = weights_bytes(tensors, fields, dtype, expand_quantised=backend == "cpu")
    notes = list(_notes(fields, backend))
    try:
        longest = fields.count(
            "max_position_embeddings", "max_seq_len", "n_positions", "seq_length", default=SERVING_CONTEXT
        )
        served = min(context or SERVING_CONTEXT, longest or SERVING_CONTEXT)
        layers = layers_of(fields)
        chunk = chunk_tokens(weights, size, backend, available_cores(), served)
        transient = transient_bytes(fields, layers, chunk, served, size, backend)
    except Unsized as missing:
        notes.append(f"only the weights are counted: {missing}")
        return Estimate(
            weights, 0, 0, 0, PROCESS_BYTES, context or SERVING_CONTEXT, 0, dtype, backend,
            sized=False, notes=tuple(notes),
        )  # fmt: skip
    per_token = size * sum(layer.per_token for layer in layers if not layer.window)
    fixed = sum(_fixed(layer, served, size) for layer in layers)
    return Estimate(
        weights,
        per_token,
        fixed,
        transient,
        PROCESS_BYTES,
        served,
        longest,
        dtype,
        backend,
        notes=tuple(notes),
    )


def _fixed(layer: Layer, context: int, size: int) -> int:
    window = layer.per_token * min(layer.window, rounded(context))
    return size * (window + layer.state) + 4 * layer.state32


def _notes(fields: Fields, backend: str) -> list[str]:
    notes = []
    quantised = isinstance(fields.whole.get("quantization"), dict)
    if quantised and backend == "cpu":
        notes.append("quantised weights are expanded on a CPU, which is faster")
    method = fields.whole.get("quantization_config")
    if not quantised and isinstance(method, dict) and method.get("quant_method"):
        notes.append(f"the quantisation {method['quant_method']!r} is not one that is served")
    experts = fields.values.get("num_experts") or fields.values.get("num_local_experts")
    if isinstance(experts, int) and experts > 1:
        notes.append(f"all {experts} experts of a layer are in memory, whichever a token uses")
    return notes


def _pipeline(path: Path, dtype: str, backend: str) -> Estimate:
    """Several models under one index (diffusers' form): it decides itself what it keeps in memory."""
    weights = sum(file.stat().st_size for file in path.glob("*/*.safetensors"))
    return Estimate(
        weights, 0, 0, 0, PROCESS_BYTES, 0, 0, dtype, backend, plans_own_memory=True,
        notes=("a pipeline of several models plans its own memory",),
    )  # fmt: skip


@lru_cache(maxsize=1)
def machine_backend() -> str:
    """Which of MLX's backends workers will use here, told without importing MLX."""
    if sys.platform == "darwin":
        return "metal"
    installed = {(d.metadata["Name"] or "").lower() for d in metadata.distributions()}
    cuda = any(name.startswith("mlx-cuda") for name in installed) and Path("/proc/driver/nvidia").exists()
    return "cuda" if cuda else "cpu"
