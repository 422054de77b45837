"""Cheap checks of model files: each mistake is one message that names the file."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxhost.supervisor.errors import ModelError
from mlxhost.supervisor.modelfiles import check_model


def safetensors(path: Path, *, cut: int = 0) -> None:
    header = json.dumps(
        {"__metadata__": {"format": "mlx"}, "w": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}
    ).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(256)
    path.write_bytes(whole[: len(whole) - cut])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that passes."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    safetensors(directory / "model.safetensors")
    return directory


def test_a_sound_directory_passes(model: Path) -> None:
    """Nothing is said about a model that has what it needs."""
    check_model(model)


def test_real_models_pass(tiny_models: dict[str, Path]) -> None:
    """Directories that MLX wrote, quantised ones too, pass."""
    for path in tiny_models.values():
        check_model(path)


def remove_config(model: Path) -> None:
    (model / "config.json").unlink()


def config_is_not_json(model: Path) -> None:
    (model / "config.json").write_text("{")


def config_is_a_list(model: Path) -> None:
    (model / "config.json").write_text("[]")


def config_is_not_utf8(model: Path) -> None:
    (model / "config.json").write_bytes(b'{"model_type": "\xff"}')


def config_nests_deeply(model: Path) -> None:
    (model / "config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


def config_has_no_type(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": 3}')


def config_is_huge(model: Path) -> None:
    with (model / "config.json").open("wb") as file:
        file.truncate(17 * 1024 * 1024)


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").touch()


def cut_short(model: Path) -> None:
    safetensors(model / "model.safetensors", cut=1)


def cut_in_header(model: Path) -> None:
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 5000) + b"{")


def empty_weights(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")


def lfs_pointer(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.example/spec/v1\noid sha256:0\n")


def not_safetensors(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x80\x02}q\x00X\x05\x00 and so on")


def bad_header(model: Path) -> None:
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")


def missing_shard(model: Path) -> None:
    index = {"weight_map": {"w": "model.safetensors", "v": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def bad_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (remove_config, ["it has no config.json"]),
        (config_is_not_json, ["config.json is not a JSON object"]),
        (config_is_a_list, ["config.json is not a JSON object"]),
        (config_is_not_utf8, ["config.json is not a JSON object"]),
        (config_nests_deeply, ["config.json is not a JSON object"]),
        (config_has_no_type, ["config.json has no field model_type"]),
        (config_is_huge, ["config.json has 17,825,792 bytes"]),
        (no_weights, ["no *.safetensors file", "found pytorch_model.bin"]),
        (cut_short, ["model.safetensors is truncated: ", "its header promises"]),
        (cut_in_header, ["model.safetensors is truncated: its header alone has 5,000 bytes"]),
        (empty_weights, ["model.safetensors is truncated: 0 bytes"]),
        (lfs_pointer, ["Git LFS pointer", "git lfs pull"]),
        (not_safetensors, ["is not a safetensors file"]),
        (bad_header, ["is not a safetensors file: bad header"]),
        (missing_shard, ["model-00002-of-00002.safetensors is missing"]),
        (bad_index, ["has no weight_map"]),
    ],
)
def test_damage_is_named(model: Path, damage: Callable[[Path], None], parts: list[str]) -> None:
    """The message names the file and what is wrong with it."""
    damage(model)
    with pytest.raises(ModelError) as caught:
        check_model(model)
    assert str(model) in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_a_directory_that_holds_only_a_gguf_points_to_it(tmp_path: Path) -> None:
    """The way out is in the message."""
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"to serve the GGUF file in it, give .*/x\.gguf"):
        check_model(tmp_path)


def test_gguf_files_are_told_by_their_first_bytes(tmp_path: Path) -> None:
    """A file of that name must also be one."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    check_model(path)
    path.write_bytes(b"<html>")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        check_model(path)


def test_other_files_are_not_models(tmp_path: Path) -> None:
    """A file of another kind is neither of the two forms."""
    (tmp_path / "x.bin").touch()
    with pytest.raises(ModelError, match=r"neither a model directory nor a \.gguf file"):
        check_model(tmp_path / "x.bin")
