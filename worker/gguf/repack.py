"""GGUF blocks as MLX's own quantised layout: the same codes, moved; nothing is rounded or quantised anew.

MLX's affine mode: groups of 32 values along a row, value = scale * code + bias, codes in a little-endian
stream of bits over uint32 words (https://ml-explore.github.io/mlx, `mlx.core.quantize`). Its mxfp4 mode:
groups of 32 four-bit floats and one power of two. Block layouts: ggml-common.h and ggml-quants.c of ggml.

What has no such form stays out of LAYOUTS: Q2_K, Q3_K and Q6_K have groups of 16, which MLX's affine mode
lacks, and the IQ kinds draw their values from tables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from mlxhost.worker.gguf.metadata import Value

GROUP = 32

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Packed = tuple[Bytes, Floats, Floats]  # codes (blocks, values), scales and biases (blocks, groups)

# Plain integers would widen the types.
_ONE, _FOUR, _LOW, _SIGN = np.uint8(1), np.uint8(4), np.uint8(15), np.uint8(0x80)
# From here on 2**(exponent - 127) times the largest four-bit float, 6, is no float32.
_FIRST_INFINITE_EXPONENT = 253


@dataclass(frozen=True)
class Layout:
    """How a kind of block is laid out in MLX. `split` takes blocks of bytes apart; None for mxfp4, where
    the parts are the file's own."""

    bits: int
    split: Callable[[Bytes], Packed] | None

    @property
    def mode(self) -> str:
        return "affine" if self.split else "mxfp4"

    @property
    def settings(self) -> dict[str, Value]:
        """What config.json says of a layer that is laid out so."""
        return {"group_size": GROUP, "bits": self.bits, "mode": self.mode}

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(safetensors type, shape) of each part of a tensor of `shape`."""
        *rows, length = shape
        parts = {"weight": ("U32", (*rows, length * self.bits // 32))}
        groups = (*rows, length // GROUP)
        if self.split:
            return {**parts, "scales": ("F32", groups), "biases": ("F32", groups)}
        return {**parts, "scales": ("U8", groups)}


def repack(rows: Bytes, layout: Layout, block_bytes: int) -> dict[str, NDArray[Any]] | None:
    """The parts (see Layout.parts) of `rows`, which hold whole blocks: (rows, bytes a row).

    None when a scale is not finite: the data is damaged.
    """
    count = len(rows)
    blocks = rows.reshape(-1, block_bytes)
    if layout.split is None:
        exponents = blocks[:, 0]
        if (exponents >= _FIRST_INFINITE_EXPONENT).any():
            return None
        words = _words(_nibbles(blocks[:, 1:]), 4)
        return {"weight": words.reshape(count, -1), "scales": exponents.reshape(count, -1)}
    with np.errstate(all="ignore"):  # judged below
        codes, scales, biases = layout.split(blocks)
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        return None
    return {
        "weight": _words(codes, layout.bits).reshape(count, -1),
        "scales": scales.reshape(count, -1),
        "biases": biases.reshape(count, -1),
    }


def _words(codes: Bytes, bits: int) -> NDArray[np.uint32]:
    """The stream of bits: value i of a row takes the bits from i * bits on, lowest first."""
    if bits == 8:
        stream = np.ascontiguousarray(codes)
    elif bits == 4:
        stream = codes[:, ::2] | codes[:, 1::2] << _FOUR
    else:
        singles = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
        stream = np.packbits(singles.reshape(len(codes), -1), axis=-1, bitorder="little")
    return stream.view("<u4")


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves of the bytes, then high halves."""
    return np.concatenate([packed & _LOW, packed >> _FOUR], axis=1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """32 bits from byte `at` on, each where the fifth bit of a code is."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << _FOUR


def _q4_0(blocks: Bytes) -> Packed:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, scale * np.float32(-8)


def _q4_1(blocks: Bytes) -> Packed:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Packed:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), scale, scale * np.float32(-16)


def _q5_1(blocks: Bytes) -> Packed:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Packed:
    scale = _half(blocks, 0)
    return blocks[:, 2:] ^ _SIGN, scale, scale * np.float32(-128)  # two's complement plus 128


def _q4_k(blocks: Bytes) -> Packed:
    scales, biases = _k_scales(blocks)
    return _k_nibbles(blocks[:, 16:]), scales, biases


def _q5_k(blocks: Bytes) -> Packed:
    scales, biases = _k_scales(blocks)
    # Bit g of byte i is the fifth bit of value i of group g.
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & _ONE) << _FOUR
    return _k_nibbles(blocks[:, 48:]) | high.reshape(len(blocks), 256), scales, biases


def _k_nibbles(packed: Bytes) -> Bytes:
    """Each 32 bytes hold two groups: one in the low halves, the next in the high halves."""
    quarters = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([quarters & _LOW, quarters >> _FOUR], axis=2).reshape(len(packed), 256)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases of the eight groups. Their six-bit factors take twelve bytes: 17 bits of product at
    most, exact in float32."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    factors = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return _half(blocks, 0) * factors, _half(blocks, 2) * -minima.astype(np.float32)


_Q = GGMLQuantizationType
LAYOUTS: dict[GGMLQuantizationType, Layout] = {
    _Q.Q4_0: Layout(4, _q4_0),
    _Q.Q4_1: Layout(4, _q4_1),
    _Q.Q5_0: Layout(5, _q5_0),
    _Q.Q5_1: Layout(5, _q5_1),
    _Q.Q8_0: Layout(8, _q8_0),
    _Q.Q4_K: Layout(4, _q4_k),
    _Q.Q5_K: Layout(5, _q5_k),
    _Q.MXFP4: Layout(4, None),
}
