"""A GGUF file's header as config fields and tensors: sizes only, no weights, no vocabulary.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count is checked against the bytes
that are left before it is believed; lists are skipped unless they are short. The worker has its own, fuller
reader (worker/gguf/header.py): the packages share no code.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mlxhost.supervisor.errors import ModelError
from mlxhost.supervisor.estimate.fields import Fields
from mlxhost.supervisor.estimate.tensors import Tensor

MAX_ITEMS = 16 << 20
MAX_TENSORS = 1 << 20
MAX_KEY_BYTES = 65_536
_KEPT_ITEMS = 4096  # lists as long as a model has layers are read, vocabularies are skipped
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Bits of a weight in ggml's types that MLX has a form for (worker/gguf/repack.py): groups of 32 with a scale
# and a bias of the compute dtype, or (MXFP4) with one byte.
_GROUP = 32
_AFFINE = {2: 4, 3: 4, 6: 5, 7: 5, 8: 8, 12: 4, 13: 5}  # Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K
_MXFP4 = 39
_CONFIG = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_MODEL_TYPES = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe", "qwen3next": "qwen3_next"}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


def read_gguf(path: Path, *, keep_quantised: bool) -> tuple[Fields, list[Tensor]]:
    """The model as config.json would describe it, and its tensors as the conversion will write them: floats
    everywhere, unless `keep_quantised` and MLX has the form. Raises ModelError."""
    with path.open("rb") as file:
        values, tensors = _Skimmer(path, file, path.stat().st_size).header()
    if isinstance(parts := values.get("split.count"), int) and parts > 1:
        raise ModelError(f"{path} is one of {parts} parts of a split GGUF; join them with llama-gguf-split")
    parts = [part for found in tensors for part in _parts(*found, keep_quantised)]
    return Fields(path, _config(values, tensors)), parts


def _config(values: Mapping[str, Any], tensors: list[tuple[str, tuple[int, ...], int]]) -> dict[str, Any]:
    kind = str(values.get("general.architecture", ""))
    config: dict[str, Any] = {"model_type": _MODEL_TYPES.get(kind, kind)}
    for theirs, ours in _CONFIG.items():
        if (value := values.get(f"{kind}.{theirs}")) is not None:
            config[ours] = value
    pattern = values.get(f"{kind}.attention.sliding_window_pattern")
    if isinstance(pattern, list):  # which layers slide, one by one
        pattern = pattern.index(False) + 1 if False in pattern else len(pattern) + 1
    if not config.get("sliding_window"):
        pattern = 1  # every layer sees everything
    if pattern is not None:
        config["sliding_window_pattern"] = pattern
    shapes = {name: shape for name, shape, _ in tensors}
    config["vocab_size"] = shapes.get(_EMBEDDING, (0,))[0]
    config["tie_word_embeddings"] = _HEAD not in shapes
    return config


def _parts(name: str, shape: tuple[int, ...], kind: int, keep: bool) -> list[Tensor]:
    """The tensors that one becomes."""
    elements, layer = math.prod(shape), name.removesuffix(".weight")
    if keep and len(shape) > 1 and shape[-1] % _GROUP == 0:
        groups = (*shape[:-1], shape[-1] // _GROUP)
        if bits := _AFFINE.get(kind):
            scales = [
                Tensor(f"{layer}.{part}", "F32", groups, elements // 8) for part in ("scales", "biases")
            ]
            return [Tensor(name, "U32", shape, elements * bits // 8), *scales]
        if kind == _MXFP4 and name != _EMBEDDING:
            codes = Tensor(name, "U32", shape, elements // 2)
            return [codes, Tensor(f"{layer}.scales", "U8", groups, elements // _GROUP)]
    return [Tensor(name, "F32", shape, elements * 4)]


class _Skimmer:
    """Reads forward, never past the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._at = 0

    def header(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int]]]:
        """Metadata without long lists, and (name, shape with rows first, ggml type) of every tensor."""
        if self._take(4, "the mark") != b"GGUF":
            raise self._bad("it does not begin with the letters GGUF")
        version = self._number("I", "the version")
        if version not in (2, 3):
            raise self._bad(f"it says version {version}; 2 and 3 are known")
        tensors, keys = self._number("Q", "the tensor count"), self._number("Q", "the key count")
        self._room(keys, 13, MAX_ITEMS, "metadata keys")
        values = {}
        for _ in range(keys):
            key = self._string("a key", MAX_KEY_BYTES)
            if (value := self._value(self._number("I", f"the type of {key}"), key)) is not None:
                values[key] = value
        self._room(tensors, 32, MAX_TENSORS, "tensors")
        return values, [self._tensor() for _ in range(tensors)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int]:
        name = self._string("a tensor's name", MAX_KEY_BYTES)
        dimensions = self._number("I", f"the dimensions of {name}")
        if not 1 <= dimensions <= 4:
            raise self._bad(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self._number("Q", f"the shape of {name}") for _ in range(dimensions))
        kind = self._number("I", f"the type of {name}")
        offset = self._number("Q", f"the offset of {name}")
        # The densest type takes under 2 bits a weight, so more weights than this cannot be in the file.
        if math.prod(shape) > 8 * self._size or offset > self._size:
            raise self._bad(f"tensor {name} of shape {shape} at {offset:,} is larger than the file")
        return name, tuple(reversed(shape)), kind

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key, self._size)
        if kind != _ARRAY:
            return self._scalar(kind, key)
        inner, count = self._number("I", f"the type of {key}"), self._number("Q", f"the length of {key}")
        if inner == _STRING:
            self._room(count, 8, MAX_ITEMS, f"strings in {key}")
            for _ in range(count):
                self._skip(self._number("Q", key), key)
            return None
        if inner not in _SCALARS:
            raise self._bad(f"{key} is a list of the unknown type {inner}")
        each = struct.calcsize("<" + _SCALARS[inner])
        self._room(count, each, MAX_ITEMS, f"numbers in {key}")
        if count > _KEPT_ITEMS:
            self._skip(count * each, key)
            return None
        return [self._scalar(inner, key) for _ in range(count)]

    def _scalar(self, kind: int, key: str) -> Any:
        if kind not in _SCALARS:
            raise self._bad(f"{key} has the unknown type {kind}")
        form = "<" + _SCALARS[kind]
        return struct.unpack(form, self._take(struct.calcsize(form), key))[0]

    def _number(self, form: str, what: str) -> int:
        return int(struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}"), what))[0])

    def _string(self, what: str, limit: int) -> str:
        length = self._number("Q", what)
        if length > limit:
            raise self._bad(f"{what} claims {length:,} bytes")
        return self._take(length, what).decode("utf-8", "replace")

    def _room(self, count: int, each: int, limit: int, what: str) -> None:
        if count > limit or count * each > self._size - self._at:
            raise self._bad(f"it claims {count:,} {what}")

    def _take(self, count: int, what: str) -> bytes:
        self._advance(count, what)
        taken = self._file.read(count)
        if len(taken) < count:  # the file shrank while it was read
            raise self._bad(f"it ends within {what}")
        return taken

    def _skip(self, count: int, what: str) -> None:
        self._advance(count, what)
        self._file.seek(count, 1)

    def _advance(self, count: int, what: str) -> None:
        if count > self._size - self._at:
            raise self._bad(f"it ends within {what}")
        self._at += count

    def _bad(self, problem: str) -> ModelError:
        return ModelError(f"{self._path} is damaged or not a GGUF file: {problem}; fetch it again")
