"""Headers that are torn, or lie: clear errors, in no time."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from support.tiny_gguf import Q, TinyLlama
from support.tiny_models import build

from mlxhost.supervisor.errors import ModelError
from mlxhost.supervisor.estimate.estimate import estimate
from mlxhost.supervisor.estimate.tensors import read_header


def safetensors(path: Path, header: dict[str, Any], data: int = 0) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return path


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1] * 40, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
    ],
)
def test_a_tensor_that_does_not_add_up_is_refused(entry: dict[str, Any], tmp_path: Path) -> None:
    """The file and the tensor are named."""
    path = safetensors(tmp_path / "model.safetensors", {"t": entry}, 8)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        list(read_header(path))


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    """A huge length is not believed."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(ModelError, match="1,152,921,504,606,846,976"):
        list(read_header(path))


def test_quantised_weights_are_counted_as_the_worker_holds_them(tmp_path: Path) -> None:
    """Kept they take their packed bytes, expanded those of the plain model."""
    plain = build("llama", tmp_path / "plain")
    packed = build("llama", tmp_path / "packed", bits=4)
    expanded = estimate(packed, quantised="expand", backend="cpu").weights_bytes
    kept = estimate(packed, quantised="keep", backend="cpu").weights_bytes
    assert expanded == estimate(plain, backend="cpu").weights_bytes
    assert kept < expanded / 4


def test_a_gguf_is_sized_like_the_model_that_it_becomes(tmp_path: Path) -> None:
    """Its weights count in the compute dtype; quantised ones that are kept in MLX's form of them."""
    whole, packed = tmp_path / "f32.gguf", tmp_path / "q4.gguf"
    TinyLlama().write(whole)
    TinyLlama(kind=Q.Q4_0).write(packed)
    found = estimate(whole, backend="cpu")
    assert estimate(packed, backend="cpu").weights_bytes == found.weights_bytes
    assert estimate(packed, quantised="keep", backend="cuda").weights_bytes < found.weights_bytes / 5
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, size, float32
    assert found.max_context == 256


@pytest.mark.parametrize("keep", [0, 3, 4, 8, 23, 24, 60, 500, 3000])
def test_a_torn_gguf_is_an_error(keep: int, tmp_path: Path) -> None:
    """Wherever it was cut."""
    path = tmp_path / "m.gguf"
    TinyLlama().write(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"m\.gguf"):
        estimate(path)


def test_no_damage_to_a_gguf_header_is_more_than_an_error(tmp_path: Path) -> None:
    """Each byte of the first part set to 255 in turn: an estimate or a ModelError, nothing else."""
    path = tmp_path / "m.gguf"
    TinyLlama().write(path)
    whole = path.read_bytes()
    refused = 0
    for at in range(150):
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        try:
            estimate(path)
        except ModelError:
            refused += 1
    assert refused > 20


def test_files_that_change_are_sized_anew(tmp_path: Path) -> None:
    """What was read before is not kept beyond a change."""
    path = build("llama", tmp_path)
    before = estimate(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4, "spare": "x"}))
    assert estimate(path).kv_bytes_per_token == 2 * before.kv_bytes_per_token
