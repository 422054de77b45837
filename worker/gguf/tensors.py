"""Tensor data of a GGUF file, some rows at a time: as it lies there, or dequantised to float32."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.header import Header, TensorInfo

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

CHUNK_BYTES = 16 << 20  # of float32 output at a time; dequantising takes a few times that

# What gguf.quants turns into float32 (a test tries each).
_Q = GGMLQuantizationType
SUPPORTED = frozenset(
    {
        *(_Q.F32, _Q.F16, _Q.BF16),
        *(_Q.Q4_0, _Q.Q4_1, _Q.Q5_0, _Q.Q5_1, _Q.Q8_0),
        *(_Q.Q2_K, _Q.Q3_K, _Q.Q4_K, _Q.Q5_K, _Q.Q6_K),
        *(_Q.IQ1_S, _Q.IQ1_M, _Q.IQ2_XXS, _Q.IQ2_XS, _Q.IQ2_S, _Q.IQ3_XXS, _Q.IQ3_S, _Q.IQ4_NL, _Q.IQ4_XS),
        *(_Q.TQ1_0, _Q.TQ2_0, _Q.MXFP4),
    }
)


def check_supported(header: Header, tensors: Iterable[TensorInfo]) -> None:
    """Raises ModelError("unsupported_quantisation") naming the first tensor that cannot be dequantised, and
    what can."""
    for tensor in tensors:
        if tensor.kind not in SUPPORTED:
            raise ModelError(
                "unsupported_quantisation",
                f"{header.path}: tensor {tensor.name} has the quantisation {tensor.kind.name}, which is not "
                f"supported (supported: {', '.join(sorted(kind.name for kind in SUPPORTED))})",
            )


def read_tensor(header: Header, tensor: TensorInfo) -> Floats:
    """The whole of a small tensor, in its own shape. Raises ModelError as the functions around do."""
    check_supported(header, [tensor])
    with header.path.open("rb") as file:
        rows = list(read_rows(file.fileno(), header.path, tensor, 1))
    return np.concatenate(rows).reshape(tensor.shape)


def read_blocks(fd: int, path: Path, tensor: TensorInfo, group: int) -> Iterator[Bytes]:
    """Consecutive rows of `tensor` as the file has them, (rows, bytes a row), so many at a time that they
    make about CHUNK_BYTES of float32, and a multiple of `group`. A vector is one row. Raises
    ModelError("bad_model") when the file ends.
    """
    length = tensor.shape[-1]
    count = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    row_bytes = length // block * block_bytes
    step = max(group, CHUNK_BYTES // (4 * length) // group * group)
    for first in range(0, count, step):
        rows = min(step, count - first)
        raw = _read(fd, path, tensor.offset + first * row_bytes, rows * row_bytes)
        yield np.frombuffer(raw, np.uint8).reshape(rows, row_bytes)


def read_rows(fd: int, path: Path, tensor: TensorInfo, group: int) -> Iterator[Floats]:
    """What `read_blocks` gives, dequantised: (rows, row length). Raises ModelError("bad_model") for values
    that are not finite."""
    for blocks in read_blocks(fd, path, tensor, group):
        # A damaged block can hold any bit pattern; what it gives is judged below.
        with np.errstate(all="ignore"):
            values = dequantize(blocks, tensor.kind)
        values = np.ascontiguousarray(values, np.float32).reshape(len(blocks), tensor.shape[-1])
        if not np.isfinite(values).all():
            raise not_finite(path, tensor)
        yield values


def not_finite(path: Path, tensor: TensorInfo) -> ModelError:
    """An error about infinities or NaNs in `tensor`, for the caller to raise."""
    return ModelError("bad_model", f"{path}: damaged: tensor {tensor.name} holds values that are not finite")


def _read(fd: int, path: Path, offset: int, count: int) -> bytes:
    raw = os.pread(fd, count, offset)
    while len(raw) < count:  # one pread gives at most 2 GiB
        more = os.pread(fd, count - len(raw), offset + len(raw))
        if not more:
            raise ModelError("bad_model", f"{path}: became shorter while it was read")
        raw += more
    return raw
