"""Writes a plan's tensors as safetensors, streaming: memory holds one chunk of rows, never a tensor.

A tensor is written in one of two forms: dequantised and cast to a dtype, or repacked into MLX's quantised
layout, as three tensors (`weight`, `scales`, `biases`) with the file's own codes.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.header import TensorInfo
from mlxhost.worker.gguf.plan import PlannedTensor
from mlxhost.worker.gguf.repack import LAYOUTS, Layout, repack
from mlxhost.worker.gguf.safetensors import Stored, encode_header
from mlxhost.worker.gguf.tensors import Floats, not_finite, read_blocks, read_rows

MAX_SHARD_BYTES = 4 << 30

Report = Callable[[int, int], None]  # bytes of the GGUF's tensors done, and in all

_WHOLE = "model.safetensors"


@dataclass(frozen=True)
class _Form:
    tag: str
    cast: Callable[[Floats], NDArray[Any]]


def _bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Upper halves, rounded to the nearest even; the values are finite."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _float16(values: Floats) -> NDArray[np.float16]:
    with np.errstate(over="raise", under="ignore"):
        return values.astype(np.float16)


FORMS = {
    "float32": _Form("F32", lambda values: values),
    "bfloat16": _Form("BF16", _bfloat16),
    "float16": _Form("F16", _float16),
}


def layout_of(tensor: PlannedTensor) -> Layout | None:
    """MLX's quantised layout of a tensor, when there is one for its kind."""
    if tensor.source is None or len(tensor.shape) < 2:
        return None
    layout = LAYOUTS.get(tensor.source.kind)
    # An mxfp4 embedding gives bfloat16 whatever the model computes in.
    return None if layout and layout.mode == "mxfp4" and "embed" in tensor.name else layout


@dataclass(frozen=True)
class Output:
    """A tensor of the plan and what is written of it."""

    tensor: PlannedTensor
    layout: Layout | None
    stored: dict[str, Stored]  # by part; a tensor that is not quantised has one

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.stored.values())


def outputs(tensors: Iterable[PlannedTensor], dtype: str, *, keep_quantised: bool) -> list[Output]:
    """What is written of `tensors`: in `dtype` (a key of FORMS), or quantised where `keep_quantised` and a
    layout allow it."""
    return [_output(tensor, dtype, layout_of(tensor) if keep_quantised else None) for tensor in tensors]


def _output(tensor: PlannedTensor, dtype: str, layout: Layout | None) -> Output:
    if layout is None:
        whole = Stored(tensor.name, FORMS[dtype].tag, tensor.shape)
        return Output(tensor, None, {"weight": whole})
    layer = tensor.name.removesuffix(".weight")
    parts = layout.parts(tensor.shape)
    return Output(tensor, layout, {n: Stored(f"{layer}.{n}", tag, s) for n, (tag, s) in parts.items()})


def write_weights(
    source: Path,
    written: Sequence[Output],
    directory: Path,
    dtype: str,
    report: Report,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `written` to model.safetensors, or to numbered shards and their index, in `directory`.

    Raises ModelError for damaged data and for values too large for float16; OSError when the disk does not
    take it.
    """
    shards = _shards(written, max_shard_bytes)
    total = sum(o.tensor.source.nbytes for o in written if o.tensor.source is not None)
    done = 0
    weight_map: dict[str, str] = {}
    with source.open("rb") as file:
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else _WHOLE
            stored = [part for output in shard for part in output.stored.values()]
            weight_map |= {part.name: name for part in stored}
            with (directory / name).open("wb", buffering=0) as out:
                head = encode_header(stored)
                _write(out.fileno(), head, 0)
                start = len(head)
                os.truncate(out.fileno(), start + sum(part.nbytes for part in stored))
                for output in shard:
                    info = output.tensor.source
                    if info is not None:  # else the zeros that are there already
                        for share in _write_tensor(
                            file.fileno(), source, info, output, dtype, out.fileno(), start
                        ):
                            report(done + int(info.nbytes * share), total)
                        done += info.nbytes
                    start += output.nbytes
                os.fsync(out.fileno())
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(o.nbytes for o in written)}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_tensor(
    fd: int, path: Path, info: TensorInfo, output: Output, dtype: str, out: int, start: int
) -> Iterator[float]:
    """Write a tensor's parts from byte `start` of `out` on; yields the share that is done."""
    places = {}
    for name, part in output.stored.items():
        places[name] = start
        start += part.nbytes
    rows = int(np.prod(output.tensor.shape[:-1], dtype=np.int64))
    done = 0
    if output.layout:
        chunks = _repacked(fd, path, info, output.tensor, output.layout)
    else:
        chunks = _dequantised(fd, path, info, output.tensor, dtype)
    for chunk in chunks:
        for name, values in chunk.items():
            places[name] += _write(out, np.ascontiguousarray(values).data.cast("B"), places[name])
        done += len(chunk["weight"]) if rows > 1 else 1
        yield done / rows


def _dequantised(
    fd: int, path: Path, info: TensorInfo, tensor: PlannedTensor, dtype: str
) -> Iterator[dict[str, NDArray[Any]]]:
    vector = len(tensor.shape) == 1
    for rows in read_rows(fd, path, info, tensor.head_rows or 1):
        values = rows.reshape(-1) if vector else rows
        if tensor.head_rows:
            values = half_split(values, tensor.head_rows)
        if tensor.shift:
            values = values + np.float32(tensor.shift)
        try:
            yield {"weight": FORMS[dtype].cast(np.ascontiguousarray(values))}
        except FloatingPointError:
            raise ModelError(
                "bad_model", f"{path}: tensor {info.name} does not fit float16; choose bfloat16"
            ) from None


def _repacked(
    fd: int, path: Path, info: TensorInfo, tensor: PlannedTensor, layout: Layout
) -> Iterator[dict[str, NDArray[Any]]]:
    _, block_bytes = GGML_QUANT_SIZES[info.kind]
    for rows in read_blocks(fd, path, info, tensor.head_rows or 1):
        blocks = half_split(rows, tensor.head_rows) if tensor.head_rows else rows
        parts = repack(np.ascontiguousarray(blocks), layout, block_bytes)
        if parts is None:
            raise not_finite(path, info)
        yield parts


def half_split(rows: NDArray[Any], head_rows: int) -> NDArray[Any]:
    """Rows of q or k in Hugging Face's order. llama.cpp interleaves the two halves of each head's rows
    (convert_hf_to_gguf's `permute`), for its rope pairs neighbours."""
    paired = rows.reshape(-1, head_rows // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _shards(written: Sequence[Output], limit: int) -> list[list[Output]]:
    shards: list[list[Output]] = [[]]
    size = 0
    for output in written:
        grown = size + output.nbytes
        if shards[-1] and grown > limit:
            shards.append([])
            grown = output.nbytes
        shards[-1].append(output)
        size = grown
    return shards


def _write(fd: int, data: bytes | memoryview, at: int) -> int:
    """All of `data` at offset `at`; how many bytes that were."""
    done = 0
    while done < len(data):  # one pwrite takes at most 2 GiB
        done += os.pwrite(fd, data[done:], at + done)
    return done
