"""Record files: whole or not at all, and never believed without their checksum."""

import json
import random
from pathlib import Path

import pytest

from mlxhost.worker.cache import files
from mlxhost.worker.cache.files import BadRecord, Header, Piece
from mlxhost.worker.cache.index import Kind
from mlxhost.worker.cache.keys import child_key, token_bytes

PARENT = b"p" * 32
TOKENS = token_bytes(range(40))
HEADER = Header(child_key(PARENT, TOKENS), PARENT, Kind.KV, 256, TOKENS, 0)
PIECES = [
    Piece("float32", (2, 3, 4), memoryview(bytes(range(96)))),
    Piece("bfloat16", (5,), memoryview(b"0123456789")),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A record that was just written."""
    files.write(tmp_path, HEADER, PIECES)
    return tmp_path / files.file_name(HEADER.key, Kind.KV)


def read(path: Path) -> list[tuple[str, tuple[int, ...], bytes]]:
    pieces = files.read(path.parent, HEADER.key, Kind.KV)
    return [(p.dtype, p.shape, bytes(p.data)) for p in pieces]


WRITTEN = [(p.dtype, p.shape, bytes(p.data)) for p in PIECES]


def test_what_was_written_is_read(path: Path) -> None:
    """Arrays, header and size come back; nothing else is left in the directory."""
    assert read(path) == WRITTEN
    header = files.read_header(path)
    assert (header.key, header.parent, header.kind, header.start, header.tokens, header.size) == (
        *(HEADER.key, PARENT, Kind.KV, 256, TOKENS),
        path.stat().st_size,
    )
    assert list(path.parent.iterdir()) == [path]


def test_the_file_is_safetensors(path: Path) -> None:
    """Another reader of the format finds the same arrays."""
    from safetensors import safe_open

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    assert header["__metadata__"]["format"] == "mlxhost-kv-1"
    with safe_open(path, framework="np") as opened:
        assert opened.get_tensor("0").tobytes() == bytes(range(96))


def test_a_flipped_bit_anywhere_is_noticed(path: Path) -> None:
    """No single bit can change without the record being refused, or being the same as before."""
    raw = path.read_bytes()
    rng = random.Random(0)
    for at in {*range(300), *(rng.randrange(len(raw)) for _ in range(300)), len(raw) - 1}:
        damaged = bytearray(raw)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert read(path) == WRITTEN, at
        except BadRecord:
            continue


def test_a_truncated_file_is_noticed(path: Path) -> None:
    """Whatever is missing at the end, header and record are refused."""
    raw = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:size])
        with pytest.raises(BadRecord):
            read(path)
        with pytest.raises(BadRecord):
            files.read_header(path)


def test_random_bytes_are_refused(path: Path) -> None:
    """Noise, and noise behind a plausible length, is a bad record and nothing worse."""
    rng = random.Random(1)
    for i in range(300):
        noise = rng.randbytes(rng.randrange(400))
        path.write_bytes((40).to_bytes(8, "little") + noise if i % 2 else noise)
        with pytest.raises(BadRecord):
            read(path)
        with pytest.raises(BadRecord):
            files.read_header(path)


def test_a_record_under_another_name_is_refused(path: Path) -> None:
    """A file that was renamed is not taken for the record that its name says."""
    other = child_key(PARENT, token_bytes(range(41)))
    path.rename(path.with_name(files.file_name(other, Kind.KV)))
    with pytest.raises(BadRecord):
        files.read(path.parent, other, Kind.KV)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Neither the record nor a part of it is there when the disk refuses it."""
    (tmp_path / files.file_name(HEADER.key, Kind.KV)).mkdir()  # the rename cannot succeed
    with pytest.raises(IsADirectoryError):
        files.write(tmp_path, HEADER, PIECES)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == []
