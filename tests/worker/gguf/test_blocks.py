"""Every kind of block that is read, against the format's description and against ggml's own code."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.constants import GGML_QUANT_SIZES
from support.ggml_blocks import DECODERS, GGML_DIGESTS, decode, digest, random_blocks

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.header import TensorInfo
from mlxhost.worker.gguf.repack import LAYOUTS, repack
from mlxhost.worker.gguf.tensors import SUPPORTED, Floats, read_rows

BLOCKS = 64


def read(path: Path, kind: Q) -> Floats:
    """What the converter reads from a file that holds `random_blocks`, 16 blocks a row."""
    width, size = GGML_QUANT_SIZES[kind]
    path.write_bytes(bytes(7) + random_blocks(kind, BLOCKS).tobytes())
    tensor = TensorInfo("t", (BLOCKS // 16, 16 * width), kind, 7, BLOCKS * size)
    with path.open("rb") as file:
        (rows,) = read_rows(file.fileno(), path, tensor, 1)
    return rows


def test_every_supported_kind_has_a_reference() -> None:
    """None is read that is not compared below."""
    assert DECODERS.keys() | GGML_DIGESTS.keys() == SUPPORTED


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_values_are_those_of_the_formats_description(tmp_path: Path, kind: Q) -> None:
    """Bit for bit what a plain decoder, one value at a time, makes of random blocks."""
    np.testing.assert_array_equal(
        read(tmp_path / "t", kind), decode(kind, random_blocks(kind, BLOCKS)).reshape(BLOCKS // 16, -1)
    )


@pytest.mark.parametrize("kind", GGML_DIGESTS, ids=lambda kind: kind.name)
def test_values_are_those_of_ggml(tmp_path: Path, kind: Q) -> None:
    """Bit for bit what ggml's C code made of the same random blocks."""
    assert digest(read(tmp_path / "t", kind)) == GGML_DIGESTS[kind]


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_repacked_blocks_dequantise_to_the_same_values(kind: Q) -> None:
    """MLX's dequantisation of a repacked block gives the described values, for every bit pattern."""
    _, size = GGML_QUANT_SIZES[kind]
    blocks, layout = random_blocks(kind, BLOCKS), LAYOUTS[kind]
    parts = repack(blocks.reshape(BLOCKS // 16, -1), layout, size)
    assert parts is not None
    arrays = {name: mx.array(part) for name, part in parts.items()}
    values = mx.dequantize(
        arrays["weight"],
        arrays["scales"],
        arrays.get("biases"),
        group_size=32,
        bits=layout.bits,
        mode=layout.mode,
    )
    found = np.array(values.astype(mx.float32))
    np.testing.assert_array_equal(found.reshape(BLOCKS, -1), decode(kind, blocks))


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=lambda kind: kind.name)
def test_blocks_of_ones_are_read_or_called_damaged(tmp_path: Path, kind: Q) -> None:
    """Scales that are no numbers, dequantised or repacked, are an error and never reach a model."""
    width, size = GGML_QUANT_SIZES[kind]
    blocks = np.full((4, size), 0xFF, np.uint8)
    if kind in LAYOUTS:
        assert repack(blocks, LAYOUTS[kind], size) is None
    path = tmp_path / "t"
    path.write_bytes(blocks.tobytes())
    tensor = TensorInfo("t", (4, width), kind, 0, blocks.size)
    with path.open("rb") as file, pytest.raises(ModelError, match="holds values that are not finite"):
        list(read_rows(file.fileno(), path, tensor, 1))
