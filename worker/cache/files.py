"""Records as files: safetensors, written whole or not at all, and checked before a byte of them is used.

One directory for each model fingerprint and KV scheme below the common root, one file for each record, named
after its key and kind. Format of safetensors: 8-byte little-endian header length, JSON header whose
data_offsets are relative to its end, data. No MLX here: arrays are buffers.
"""

import base64
import binascii
import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mlxhost.worker.cache.index import Kind
from mlxhost.worker.cache.keys import BLOCK_TOKENS, FORMAT, TOKEN_BYTES, child_key

SUFFIX = ".safetensors"
_MAX_HEADER = 1 << 20
_PARTIAL_AGE_S = 3600.0  # a partial file older than this was left by a process that died
# MLX's dtypes by their safetensors names.
DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "uint8": "U8",
    "int32": "I32",
}


class BadRecord(Exception):
    """A file that is torn, foreign or damaged; `str()` says how."""


@dataclass(frozen=True)
class Header:
    """What a record's file says of it. `size` is the file's."""

    key: bytes
    parent: bytes
    kind: Kind
    start: int
    tokens: bytes
    size: int


@dataclass(frozen=True)
class Piece:
    """One array: dtype as MLX names it, shape, and its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def file_name(key: bytes, kind: Kind) -> str:
    return f"{key.hex()}.{kind}{SUFFIX}"


def record_named(name: str) -> tuple[bytes, Kind] | None:
    """The key and kind of the record whose file is called `name`; None for any other file."""
    key, _, kind = name.removesuffix(SUFFIX).partition(".")
    try:
        return bytes.fromhex(key), Kind(kind)
    except ValueError:
        return None


def write(directory: Path, header: Header, pieces: Sequence[Piece]) -> int:
    """Write a record durably; its size. Raises OSError, and leaves nothing behind."""
    digest = _digest(header)
    tensors: dict[str, Any] = {}
    at = 0
    for i, piece in enumerate(pieces):
        _add(digest, piece)
        end = at + piece.data.nbytes
        tensors[str(i)] = {
            "dtype": DTYPES[piece.dtype],
            "shape": piece.shape,
            "data_offsets": (at, end),
        }
        at = end
    tensors["__metadata__"] = {
        "format": FORMAT,
        "key": header.key.hex(),
        "parent": header.parent.hex(),
        "kind": str(header.kind),
        "start": str(header.start),
        "tokens": base64.b64encode(header.tokens).decode(),
        "sha256": digest.hexdigest(),
    }
    head = msgspec.json.encode(tensors)
    head += b" " * (-len(head) % 8)
    path = directory / file_name(header.key, header.kind)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(head).to_bytes(8, "little"))
            file.write(head)
            for piece in pieces:
                file.write(piece.data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_directory(directory)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return 8 + len(head) + at


def read(directory: Path, key: bytes, kind: Kind) -> list[Piece]:
    """A record's arrays, checked. Raises BadRecord, or OSError when the file cannot be read."""
    path = directory / file_name(key, kind)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        raw = bytearray(size)
        if file.readinto(raw) != size:
            raise BadRecord("it became shorter while it was read")
    view = memoryview(raw)
    tensors, length = _tensors(view[: 8 + _MAX_HEADER], size)
    header = _header(tensors, path.name, size)
    names = sorted((n for n in tensors if n != "__metadata__"), key=int)
    known = {name: dtype for dtype, name in DTYPES.items()}
    digest = _digest(header)
    pieces, at = [], 8 + length
    for name in names:
        tensor = tensors[name]
        begin, end = tensor["data_offsets"]
        if 8 + length + begin != at or tensor["dtype"] not in known or not 0 <= end - begin <= size - at:
            raise BadRecord("its arrays do not follow one another")
        pieces.append(Piece(known[tensor["dtype"]], tuple(tensor["shape"]), view[at : at + end - begin]))
        _add(digest, pieces[-1])
        at += end - begin
    if at != size or digest.hexdigest() != tensors["__metadata__"]["sha256"]:
        raise BadRecord("its checksum is wrong")
    return pieces


def read_header(path: Path) -> Header:
    """What a file holds, without its data. Raises BadRecord or OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) == 8 and length <= _MAX_HEADER:
            head += file.read(length)
    tensors, length = _tensors(memoryview(head), size)
    header = _header(tensors, path.name, size)
    ends = [t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__"]
    if size != 8 + length + max(ends, default=0):
        raise BadRecord("it is truncated")
    return header


def record_files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every record below `root`; leftovers of processes that died while writing are removed."""
    for path in root.glob(f"*/*{SUFFIX}*"):
        try:
            stat = path.stat()
            if path.name.endswith(SUFFIX):
                yield path, stat
            elif path.name.endswith(".partial") and time.time() - stat.st_mtime > _PARTIAL_AGE_S:
                path.unlink()
        except OSError:
            continue  # another process removed it


def _tensors(view: memoryview, size: int) -> tuple[dict[str, Any], int]:
    """The parsed header and its length."""
    length = int.from_bytes(view[:8], "little")
    if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8) or len(view) < 8 + length:
        raise BadRecord("it is truncated, or no safetensors file")
    try:
        return msgspec.json.decode(view[8 : 8 + length], type=dict[str, Any]), length
    except msgspec.MsgspecError as error:
        raise BadRecord(f"its header is damaged ({error})") from None


def _header(tensors: dict[str, Any], name: str, size: int) -> Header:
    """Everything that the header says, held against itself and the file's name."""
    try:
        meta = tensors["__metadata__"]
        if meta["format"] != FORMAT:
            raise BadRecord(f"it has the format {meta['format']}, not {FORMAT}")
        header = Header(
            bytes.fromhex(meta["key"]),
            bytes.fromhex(meta["parent"]),
            Kind(meta["kind"]),
            int(meta["start"]),
            base64.b64decode(meta["tokens"], validate=True),
            size,
        )
        for tensor_name, tensor in tensors.items():
            if tensor_name != "__metadata__":
                int(tensor_name)
                begin, end = tensor["data_offsets"]
                shape_is_ints = all(type(side) is int for side in (*tensor["shape"], begin, end))
                if not shape_is_ints or not isinstance(tensor["dtype"], str):
                    raise BadRecord("its header is damaged")
        if not isinstance(meta["sha256"], str):
            raise BadRecord("its header is damaged")
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise BadRecord(f"its header is damaged ({type(error).__name__}: {error})") from None
    whole = 0 < len(header.tokens) <= BLOCK_TOKENS * TOKEN_BYTES and len(header.tokens) % TOKEN_BYTES == 0
    if not whole or child_key(header.parent, header.tokens) != header.key:
        raise BadRecord("its key is not that of its tokens")
    if header.start < 0 or header.start % BLOCK_TOKENS or file_name(header.key, header.kind) != name:
        raise BadRecord("it is not the record that its name says")
    return header


def _digest(header: Header) -> Any:
    """A checksum that the data is still to go into."""
    return hashlib.sha256(header.key + f"{header.kind} {header.start}".encode())


def _add(digest: Any, piece: Piece) -> None:
    digest.update(f"{piece.dtype} {piece.shape}".encode())
    digest.update(piece.data)


def _sync_directory(directory: Path) -> None:
    """Make a rename last through a power failure."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
