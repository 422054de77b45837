"""A look at a model's weights by name: shape, dtype, first values, checksum. Bounded."""

import difflib
import hashlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxhost.worker.errors import CallError

MAX_VALUES = 100
# Beyond this only the beginning is hashed, so that a look at an embedding does not hold up the streams.
MAX_HASHED_BYTES = 64 * 1024 * 1024


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, by name."""
    return {name: tuple(value.shape) for name, value in _flat(model)}


def describe(model: Any, name: str, count: int) -> dict[str, Any]:
    """The parameter `name`, its first `count` values (in C order) and the SHA-256 of its bytes.

    Raises CallError not_found, with similar names, when the model has none such.
    """
    parameters = dict(_flat(model))
    value = parameters.get(name)
    if value is None:
        close = difflib.get_close_matches(name, parameters, n=5, cutoff=0.3) or list(parameters)[:5]
        raise CallError(
            "not_found", f"no weight {name!r} among {len(parameters)}; there is {', '.join(close)}"
        )
    flat = value.reshape(-1)
    hashed = min(flat.nbytes, MAX_HASHED_BYTES)
    raw: Any = mx.contiguous(flat[: hashed // value.itemsize].view(mx.uint8))
    first: Any = flat[:count].tolist()
    return {
        "name": name,
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("mlx.core."),
        "bytes": value.nbytes,
        "first_values": first,
        "sha256": hashlib.sha256(memoryview(raw)).hexdigest(),
        "sha256_bytes": hashed,
    }


def _flat(model: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(model.parameters())
    return list(flat)
