"""Reads a GGUF file's header: metadata and where each tensor lies. Never trusts a size it was given.

Every count and length is checked against the bytes that are left before anything is allocated or looped
over, which the gguf package's own reader does not do (a truncated or hostile file can keep it busy for
ever).
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.metadata import Metadata, Value

MAX_STRING = 64 << 20  # bytes; chat templates are the longest and stay far below
MAX_ITEMS = 16 << 20  # elements of one metadata list; the largest vocabularies have 0.5 million merges
MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 4

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` as numpy has it (rows first), `offset` from the start of the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """All of a GGUF file but the weights."""

    path: Path
    metadata: Metadata
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Header of the GGUF file `path`.

    Raises ModelError: "bad_model" when it is not a whole, well-formed little-endian GGUF of version 2 or
    3, or is one part of several; "unsupported_quantisation" for a tensor type that is not known.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            return _Cursor(path, file, size).header()
    except OSError as error:
        raise ModelError("bad_model", f"{path}: {error.strerror or error}") from None


class _Cursor:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.position = 0

    def bad(self, problem: str) -> ModelError:
        return ModelError("bad_model", f"{self.path}: {problem}")

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.position:
            raise self.bad(
                f"truncated: {what} needs {count} bytes at offset {self.position}, "
                f"the file has {self.size}; fetch it again"
            )
        self.position += count
        return self.file.read(count)

    def number(self, form: str, what: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form), what))
        return int(value)

    def string(self, what: str) -> str:
        length = self.number("<Q", what)
        if length > MAX_STRING:
            raise self.bad(f"damaged: {what} claims {length} bytes")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise self.bad(f"damaged: {what} is not UTF-8") from None

    def room_for(self, count: int, each: int, limit: int, what: str) -> None:
        if count > limit or count * each > self.size - self.position:
            raise self.bad(f"truncated or damaged: it claims {count} {what}")

    def header(self) -> Header:
        magic = self.take(4, "the GGUF mark") if self.size >= 4 else b""
        if magic != b"GGUF":
            raise self.bad("not a GGUF file (it does not begin with GGUF)")
        version = self.number("<I", "the version")
        if version & 0xFFFF == 0:
            raise self.bad("big-endian GGUF; convert it with gguf-convert-endian FILE little")
        if version not in (2, 3):
            raise self.bad(f"GGUF version {version}; versions 2 and 3 are supported")
        tensor_count = self.number("<Q", "the tensor count")
        key_count = self.number("<Q", "the key count")
        self.room_for(key_count, 13, MAX_ITEMS, "metadata keys")
        values: dict[str, Value] = {}
        for _ in range(key_count):
            key = self.string("a metadata key")
            if key in values:
                raise self.bad(f"damaged: metadata key {key} comes twice")
            values[key] = self.value(self.number("<I", f"the type of {key}"), key)
        metadata = Metadata(self.path, values)
        _refuse_parts(metadata)
        self.room_for(tensor_count, 32, MAX_TENSORS, "tensors")
        found = [self.tensor() for _ in range(tensor_count)]
        alignment = metadata.count("general.alignment", 32)
        start = -(-self.position // alignment) * alignment
        return Header(self.path, metadata, self.placed(found, start))

    def value(self, kind: int, key: str) -> Value:
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.bad(f"damaged: metadata key {key} has the unknown type {kind}")
        form = _SCALARS[kind]
        value: Value = struct.unpack(form, self.take(struct.calcsize(form), key))[0]
        return value

    def array(self, key: str) -> Value:
        kind = self.number("<I", f"the element type of {key}")
        count = self.number("<Q", f"the length of {key}")
        if kind == _STRING:
            self.room_for(count, 8, MAX_ITEMS, f"strings in {key}")
            return [self.string(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.bad(f"damaged: metadata key {key} is a list of the unsupported type {kind}")
        form = _SCALARS[kind]
        each = struct.calcsize(form)
        self.room_for(count, each, MAX_ITEMS, f"elements in {key}")
        return list(struct.unpack(f"<{count}{form[1]}", self.take(count * each, key)))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor's name")
        dimensions = self.number("<I", f"the dimensions of {name}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.bad(f"damaged: tensor {name} has {dimensions} dimensions")
        shape = [self.number("<Q", f"the shape of {name}") for _ in range(dimensions)]
        kind = self.number("<I", f"the type of {name}")
        offset = self.number("<Q", f"the offset of {name}")
        return name, tuple(reversed(shape)), kind, offset

    def placed(self, found: list[tuple[str, tuple[int, ...], int, int]], start: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, shape, number, offset in found:
            if name in tensors:
                raise self.bad(f"damaged: tensor {name} comes twice")
            kind = _quantisation(self.path, name, number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if 0 in shape or shape[-1] % block:
                raise self.bad(f"damaged: tensor {name} of type {kind.name} has the shape {list(shape)}")
            nbytes = prod(shape) // block * block_bytes
            if start + offset + nbytes > self.size:
                raise self.bad(
                    f"truncated: tensor {name} ends at byte {start + offset + nbytes}, "
                    f"the file has {self.size}; fetch it again"
                )
            tensors[name] = TensorInfo(name, shape, kind, start + offset, nbytes)
        return tensors


def _quantisation(path: Path, tensor: str, number: int) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(number)
    except ValueError:
        raise ModelError(
            "unsupported_quantisation",
            f"{path}: tensor {tensor} has the quantisation type {number}, which is not known; "
            "get the model in a common one such as Q4_K_M or Q8_0",
        ) from None


def _refuse_parts(metadata: Metadata) -> None:
    parts = metadata.values.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise ModelError(
            "bad_model",
            f"{metadata.path}: one of {parts} parts of a split GGUF; "
            "join them with llama-gguf-split --merge FIRST_PART WHOLE.gguf",
        )
