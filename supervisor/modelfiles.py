"""Cheap checks of a model's files before a worker is spawned. Reads headers only, never weights.

What is checked here is what a user gets wrong or a download breaks: no config, weights missing or cut
short. Whether the architecture is supported is for the worker to say.
"""

import struct
from pathlib import Path
from typing import Any

import msgspec

from mlxhost.supervisor.errors import ModelError

MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_HEADER_BYTES = 100 * 1024 * 1024  # what the safetensors format itself allows
GGUF_SUFFIX = ".gguf"


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


def check_model(path: Path) -> None:
    """Raises ModelError when the directory or GGUF file at `path` cannot possibly be loaded."""
    try:
        if path.is_dir():
            check_directory(path)
        elif path.suffix.lower() == GGUF_SUFFIX:
            check_gguf(path)
        else:
            raise ModelError(f"{path} is neither a model directory nor a {GGUF_SUFFIX} file")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror} ({error.filename})") from None


def check_directory(path: Path) -> None:
    config = path / "config.json"
    if not config.is_file():
        files = sorted(p.name for p in path.glob(f"*{GGUF_SUFFIX}"))
        hint = f"; to serve the GGUF file in it, give {path / files[0]}" if files else ""
        raise ModelError(f"{path} is not a model directory: it has no config.json{hint}")
    fields = read_json(config)
    if not isinstance(fields.get("model_type"), str):
        raise ModelError(f"{config} has no field model_type, so the model's architecture is unknown")
    for weights in weight_files(path):
        check_safetensors(weights)


def read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(f"{path} has {path.stat().st_size:,} bytes; at most {MAX_CONFIG_BYTES:,} are read")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not a JSON object: {error}") from None


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that hold the weights: those the index names, else all of them."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            raise ModelError(f"{index} has no weight_map of tensor names to file names")
        files = [path / name for name in sorted(set(shards.values()))]
        for file in files:
            if not file.is_file():
                raise ModelError(f"{file} is missing, though {index.name} names it; fetch the model again")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        other = sorted(p.name for suffix in ("bin", "pt", "pth", "gguf") for p in path.glob(f"*.{suffix}"))
        found = f" (found {', '.join(other[:3])})" if other else ""
        raise ModelError(f"{path} holds no weights: no *.safetensors file{found}")
    return files


def check_safetensors(path: Path) -> None:
    """Compare a safetensors file's own header with its size.

    Format: u64 little-endian header length, JSON header with `data_offsets` relative to its end, data.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        if first == b"version ":
            raise ModelError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` there")
        if len(first) < 8:
            raise ModelError(f"{path} is truncated: {size} bytes, not even a header; fetch it again")
        (header_bytes,) = struct.unpack("<Q", first)
        if header_bytes > MAX_HEADER_BYTES:
            raise ModelError(f"{path} is not a safetensors file: its header claims {header_bytes:,} bytes")
        if header_bytes > size - 8:
            raise ModelError(
                f"{path} is truncated: its header alone has {header_bytes:,} bytes, "
                f"the file {size:,}; fetch it again"
            )
        header = file.read(header_bytes)
    try:
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        ends = [msgspec.json.decode(raw, type=_Tensor).data_offsets[1] for raw in fields.values()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file: bad header ({error})") from None
    expected = 8 + header_bytes + max(ends, default=0)
    if size < expected:
        raise ModelError(
            f"{path} is truncated: {size:,} bytes, where its header promises {expected:,}; fetch it again"
        )


def check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
