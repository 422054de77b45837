"""GGUF's quantised blocks, decoded one value at a time from the format's description.

Written from ggml-common.h and ggml-quants.c of ggml, independently of the converter, slow and plain. The IQ
kinds, whose values come from tables, have digests of what ggml's own C code gives instead (GGML_DIGESTS).
"""

import hashlib
import struct
from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

f32 = np.float32


def random_blocks(kind: Q, count: int) -> NDArray[np.uint8]:
    """(count, bytes a block): the same on every machine, and every float in them finite."""
    _, size = GGML_QUANT_SIZES[kind]
    noise = hashlib.shake_256(kind.name.encode()).digest(count * size)
    blocks = np.frombuffer(noise, np.uint8).reshape(count, size).copy()
    for at in HIGH_BYTES.get(kind, (1,)):
        blocks[:, at] &= 0xBF  # exponents of a half stay below 16, of a power of two below 192
    return blocks


# Where a block keeps the high byte of each half (the last byte of the scales in IQ1_M; the byte in MXFP4).
HIGH_BYTES: dict[Q, tuple[int, ...]] = {
    Q.F32: (3,),
    Q.Q4_1: (1, 3),
    Q.Q5_1: (1, 3),
    Q.Q2_K: (81, 83),
    Q.Q3_K: (109,),
    Q.Q4_K: (1, 3),
    Q.Q5_K: (1, 3),
    Q.Q6_K: (209,),
    Q.IQ1_M: (55,),
    Q.TQ1_0: (53,),
    Q.TQ2_0: (65,),
    Q.MXFP4: (0,),
}


def decode(kind: Q, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(blocks, values a block)."""
    return np.array([DECODERS[kind](block.tobytes()) for block in blocks], f32)


def digest(values: NDArray[np.float32]) -> str:
    """Of float32 values, -0 taken as 0."""
    return hashlib.sha256((values + f32(0)).astype("<f4").tobytes()).hexdigest()[:16]


def half(block: bytes, at: int) -> f32:
    return f32(struct.unpack_from("<e", block, at)[0])


def _f32(block: bytes) -> list[f32]:
    return [f32(struct.unpack("<f", block)[0])]


def _bf16(block: bytes) -> list[f32]:
    return [f32(struct.unpack("<f", b"\0\0" + block)[0])]


def _nibble(qs: bytes, i: int) -> int:
    """Value i of 32: the low halves of sixteen bytes, then the high ones."""
    return qs[i] & 15 if i < 16 else qs[i - 16] >> 4


def _q4_0(block: bytes) -> list[f32]:
    return [half(block, 0) * f32(_nibble(block[2:], i) - 8) for i in range(32)]


def _q4_1(block: bytes) -> list[f32]:
    return [half(block, 0) * f32(_nibble(block[4:], i)) + half(block, 2) for i in range(32)]


def _q5_0(block: bytes) -> list[f32]:
    high = int.from_bytes(block[2:6], "little")
    return [half(block, 0) * f32((_nibble(block[6:], i) | (high >> i & 1) << 4) - 16) for i in range(32)]


def _q5_1(block: bytes) -> list[f32]:
    high = int.from_bytes(block[4:8], "little")
    return [
        half(block, 0) * f32(_nibble(block[8:], i) | (high >> i & 1) << 4) + half(block, 2) for i in range(32)
    ]


def _q8_0(block: bytes) -> list[f32]:
    return [half(block, 0) * f32(struct.unpack_from("<b", block, 2 + i)[0]) for i in range(32)]


def _q2_k(block: bytes) -> list[f32]:
    d, dmin, scales, qs = half(block, 80), half(block, 82), block[:16], block[16:80]
    out = []
    for i in range(256):
        scale = scales[i // 16]
        code = qs[i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
        out.append(d * f32(scale & 15) * f32(code) - dmin * f32(scale >> 4))
    return out


def _q3_k(block: bytes) -> list[f32]:
    mask, qs, packed, d = block[:32], block[32:96], block[96:108], half(block, 108)
    out = []
    for i in range(256):
        group = i // 16
        low = packed[group % 8] >> (4 if group >= 8 else 0) & 15
        high = packed[8 + group % 4] >> (group // 4 * 2) & 3
        code = qs[i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
        if not mask[i % 32] >> (i // 32) & 1:
            code -= 4
        out.append(d * f32((low | high << 4) - 32) * f32(code))
    return out


def _six_bits(scales: bytes, group: int) -> tuple[int, int]:
    """The scale and the minimum of one of eight groups."""
    if group < 4:
        return scales[group] & 63, scales[group + 4] & 63
    low = scales[group + 4]
    return (
        low & 15 | scales[group - 4] >> 6 << 4,
        low >> 4 | scales[group] >> 6 << 4,
    )


def _q4_k(block: bytes) -> list[f32]:
    return _k(block, block[16:], lambda i: 0)


def _q5_k(block: bytes) -> list[f32]:
    return _k(block, block[48:], lambda i: (block[16 + i % 32] >> (i // 32) & 1) << 4)


def _k(block: bytes, qs: bytes, high: Callable[[int], int]) -> list[f32]:
    out = []
    for i in range(256):
        scale, minimum = _six_bits(block[4:16], i // 32)
        byte = qs[i // 64 * 32 + i % 32]
        code = (byte >> 4 if i % 64 >= 32 else byte & 15) | high(i)
        out.append(half(block, 0) * f32(scale) * f32(code) - half(block, 2) * f32(minimum))
    return out


def _q6_k(block: bytes) -> list[f32]:
    low, high, scales = block[:128], block[128:192], struct.unpack_from("<16b", block, 192)
    out = []
    for i in range(256):
        part, j = i // 128, i % 128
        byte = low[part * 64 + j % 64]
        code = (byte >> 4 if j >= 64 else byte & 15) | (high[part * 32 + j % 32] >> (j // 32 * 2) & 3) << 4
        out.append(half(block, 208) * f32(scales[i // 16]) * f32(code - 32))
    return out


def _tq2_0(block: bytes) -> list[f32]:
    qs = block[:64]
    codes = [qs[i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3 for i in range(256)]
    return [half(block, 64) * f32(code - 1) for code in codes]


def _tq1_0(block: bytes) -> list[f32]:
    """Base-3 digits, five to a byte, the first digit the highest; the byte is the fraction times 256."""
    qs, qh, d = block[:48], block[48:52], half(block, 52)
    digits = []
    for run in (qs[:32], qs[32:]):
        digits += [(byte * 3**n % 256) * 3 >> 8 for n in range(5) for byte in run]
    digits += [(byte * 3**n % 256) * 3 >> 8 for n in range(4) for byte in qh]
    return [d * f32(digit - 1) for digit in digits]


_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def _mxfp4(block: bytes) -> list[f32]:
    return [f32(_E2M1[_nibble(block[1:], i)] * 2.0 ** (block[0] - 127)) for i in range(32)]


DECODERS: dict[Q, Callable[[bytes], list[f32]]] = {
    Q.F32: _f32,
    Q.F16: lambda block: [half(block, 0)],
    Q.BF16: _bf16,
    Q.Q4_0: _q4_0,
    Q.Q4_1: _q4_1,
    Q.Q5_0: _q5_0,
    Q.Q5_1: _q5_1,
    Q.Q8_0: _q8_0,
    Q.Q2_K: _q2_k,
    Q.Q3_K: _q3_k,
    Q.Q4_K: _q4_k,
    Q.Q5_K: _q5_k,
    Q.Q6_K: _q6_k,
    Q.TQ1_0: _tq1_0,
    Q.TQ2_0: _tq2_0,
    Q.MXFP4: _mxfp4,
}

# Of what ggml's `dequantize_row_*` (llama.cpp v0.5.0, x86-64) makes of `random_blocks(kind, 64)`.
GGML_DIGESTS: dict[Q, str] = {
    Q.Q4_0: "6c2adcb23f209eab",
    Q.Q4_1: "9e506e85c5f6ee00",
    Q.Q5_0: "d3d3ad91a3ab0c25",
    Q.Q5_1: "52ec1424bebd099d",
    Q.Q8_0: "ed4ea038a8ad57dc",
    Q.Q2_K: "c28d7ab3b92cf642",
    Q.Q3_K: "2c0f9f2b6165080d",
    Q.Q4_K: "b9f119488a73b721",
    Q.Q5_K: "08d4d0e1ae0019a6",
    Q.Q6_K: "5fba5a44e318e3df",
    Q.IQ2_XXS: "ebb7116e5ecd0171",
    Q.IQ2_XS: "8705764af2aba4fc",
    Q.IQ3_XXS: "ff0983967ce7aa8d",
    Q.IQ1_S: "1ea144682b574db1",
    Q.IQ4_NL: "140b85aedc0b776b",
    Q.IQ3_S: "5df131ce97b9da8e",
    Q.IQ2_S: "02cb017a8f5f6ded",
    Q.IQ4_XS: "287059df138bcd0a",
    Q.IQ1_M: "7b39de84bc376774",
    Q.TQ1_0: "4010da399824e2b9",
    Q.TQ2_0: "c3db5e2ace4cbe44",
    Q.MXFP4: "b0191713e02d0bb0",
}
