"""What tensors a model's safetensors files hold: names, dtypes and shapes, from the headers alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mlxhost.supervisor.errors import ModelError
from mlxhost.supervisor.modelfiles import check_safetensors, weight_files

# https://github.com/huggingface/safetensors#format; sizes in bits, for the sub-byte kinds.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
MAX_DIMENSIONS = 16


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file. `nbytes` as stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_tensors(directory: Path) -> list[Tensor]:
    """Every tensor of the model in `directory`. Raises ModelError for a header that is torn or lies."""
    return [tensor for file in weight_files(directory) for tensor in read_header(file)]


def read_header(path: Path) -> Iterator[Tensor]:
    """The tensors of one file, each claim checked against the bytes that it is said to take."""
    check_safetensors(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
    fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    fields.pop("__metadata__", None)
    for name, raw in fields.items():
        try:
            entry = msgspec.json.decode(raw, type=_Entry)
        except msgspec.MsgspecError as error:
            raise ModelError(f"{path}: tensor {name[:80]!r} is not described rightly: {error}") from None
        begin, end = entry.data_offsets
        plausible = len(entry.shape) <= MAX_DIMENSIONS and all(size >= 0 for size in entry.shape)
        if entry.dtype not in _BITS or not plausible or not 0 <= begin <= end:
            raise ModelError(
                f"{path}: tensor {name[:80]!r} claims dtype {entry.dtype!r} and shape {entry.shape[:8]}"
            )
        if (math.prod(entry.shape) * _BITS[entry.dtype] + 7) // 8 != end - begin:
            raise ModelError(
                f"{path}: tensor {name[:80]!r} of shape {entry.shape} does not take the "
                f"{end - begin:,} bytes that its header says; fetch the file again"
            )
        yield Tensor(name, entry.dtype, tuple(entry.shape), end - begin)
