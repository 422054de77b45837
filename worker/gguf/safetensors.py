"""The safetensors format, laid out before the first weight is read.

safetensors' own writers want every tensor of a file in memory at once. The format is simple enough to be
written as it goes: 8 bytes of header length, a JSON header of names, dtypes, shapes and offsets, then the
data (https://github.com/huggingface/safetensors#format).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1}


@dataclass(frozen=True)
class Stored:
    """One tensor of a file. `tag` is its type, a key of ITEMSIZE."""

    name: str
    tag: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.tag]


def encode_header(tensors: Sequence[Stored]) -> bytes:
    """The file's beginning, up to the data, which holds `tensors` in this order without gaps."""
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.tag,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # keeps the data aligned
    return len(encoded).to_bytes(8, "little") + encoded
