"""Writes a plan's tensors as safetensors, streaming: memory holds one chunk of rows, never a tensor.

safetensors' own writers want every tensor of a file in memory at once. The format is simple enough to be
written as it goes: 8 bytes of header length, a JSON header of names, dtypes, shapes and offsets (all known
before the first weight is read), then the data (https://github.com/huggingface/safetensors#format).
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.architectures import PlannedTensor
from mlxhost.worker.gguf.tensors import Floats, check_supported, read_rows

MAX_SHARD_BYTES = 4 << 30

Report = Callable[[int, int], None]  # bytes of the GGUF's tensors done, and in all


@dataclass(frozen=True)
class _Form:
    tag: str
    itemsize: int
    cast: Callable[[Floats], NDArray[Any]]


def _bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Upper halves, rounded to the nearest even; the values are finite."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _float16(values: Floats) -> NDArray[np.float16]:
    with np.errstate(over="raise", under="ignore"):
        return values.astype(np.float16)


FORMS = {
    "float32": _Form("F32", 4, lambda values: values),
    "bfloat16": _Form("BF16", 2, _bfloat16),
    "float16": _Form("F16", 2, _float16),
}


def output_bytes(tensors: list[PlannedTensor], dtype: str) -> int:
    """Bytes that the weights take on disk, headers aside."""
    return sum(_size(tensor, FORMS[dtype]) for tensor in tensors)


def write_weights(
    source: Path,
    tensors: list[PlannedTensor],
    directory: Path,
    dtype: str,
    report: Report,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `tensors` to model.safetensors, or to numbered shards and their index, in `directory`.

    Raises ModelError for a quantisation that is not supported (before anything is written), for damaged
    data and for values too large for float16; OSError when the disk does not take it.
    """
    for tensor in tensors:
        if tensor.source is not None:
            check_supported(source, tensor.source)
    form = FORMS[dtype]
    shards = _shards(tensors, form, max_shard_bytes)
    total = sum(tensor.source.nbytes for tensor in tensors if tensor.source is not None)
    done = 0
    weight_map: dict[str, str] = {}
    with source.open("rb") as file:
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else _WHOLE
            with (directory / name).open("wb") as out:
                out.write(_header(shard, form))
                for tensor in shard:
                    weight_map[tensor.name] = name
                    done = _write_tensor(file, source, tensor, form, out, report, done, total)
                out.flush()
                os.fsync(out.fileno())
    if len(shards) > 1:
        index = {"metadata": {"total_size": output_bytes(tensors, dtype)}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


_WHOLE = "model.safetensors"


def _write_tensor(
    file: BinaryIO,
    path: Path,
    tensor: PlannedTensor,
    form: _Form,
    out: BinaryIO,
    report: Report,
    done: int,
    total: int,
) -> int:
    if tensor.source is None:
        out.write(bytes(_size(tensor, form)))
        return done
    vector = len(tensor.shape) == 1
    read = 0
    for rows in read_rows(file.fileno(), path, tensor.source, tensor.head_rows or 1):
        values = rows.reshape(-1) if vector else rows
        if tensor.head_rows:
            values = half_split(values, tensor.head_rows)
        try:
            out.write(np.ascontiguousarray(form.cast(values)).data)
        except FloatingPointError:
            raise ModelError(
                "bad_model", f"{path}: tensor {tensor.source.name} does not fit float16; choose bfloat16"
            ) from None
        read += rows.size
        report(done + tensor.source.nbytes * read // int(np.prod(tensor.shape)), total)
    return done + tensor.source.nbytes


def half_split(values: Floats, head_rows: int) -> Floats:
    """Rows of q or k in Hugging Face's order. llama.cpp interleaves the two halves of each head's rows
    (convert_hf_to_gguf's `permute`), for its rope pairs neighbours."""
    paired = values.reshape(-1, head_rows // 2, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def _shards(tensors: list[PlannedTensor], form: _Form, limit: int) -> list[list[PlannedTensor]]:
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        grown = size + _size(tensor, form)
        if shards[-1] and grown > limit:
            shards.append([])
            grown = _size(tensor, form)
        shards[-1].append(tensor)
        size = grown
    return shards


def _header(shard: list[PlannedTensor], form: _Form) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for tensor in shard:
        end = offset + _size(tensor, form)
        entries[tensor.name] = {
            "dtype": form.tag,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # keeps the data aligned
    return len(encoded).to_bytes(8, "little") + encoded


def _size(tensor: PlannedTensor, form: _Form) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * form.itemsize
