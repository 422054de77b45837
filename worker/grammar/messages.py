"""What the worker and its compiler process say to each other: msgpack behind a 32-bit length."""

from typing import BinaryIO

from msgspec import Struct


class Job(Struct):
    """Compile this. kind and value as in the wire's Grammar."""

    kind: str
    value: str
    stop_ids: list[int]


class Up(Struct, tag="up"):
    """The vocabulary is loaded, and in its cache file."""


class Result(Struct, tag="result"):
    """It compiles, within the limits: the value as prepared, and what of it cannot be enforced."""

    value: str
    notes: list[str]


class Failed(Struct, tag="failed"):
    """Why it does not compile, or why the process cannot work."""

    reason: str


Reply = Up | Result | Failed


def write_frame(file: BinaryIO, data: bytes) -> None:
    """Write `data` behind its length, little-endian."""
    file.write(len(data).to_bytes(4, "little") + data)
    file.flush()


def read_frame(file: BinaryIO) -> bytes | None:
    """The next one; None at the end of the stream, also when it ends inside a frame."""
    head = file.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "little")
    data = file.read(size)
    return data if len(data) == size else None
