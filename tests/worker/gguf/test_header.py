"""Damaged, foreign and hostile GGUF files: a named error each, and soon."""

import random
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_architectures import TINY
from support.tiny_gguf import TinyLlama

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.architectures import plan
from mlxhost.worker.gguf.convert import convert
from mlxhost.worker.gguf.header import read_header
from mlxhost.worker.gguf.tokenizer import tokenizer_files


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    TinyLlama(Q.Q4_0).write(path)
    return path


def changed(tiny: Path, tmp_path: Path, **metadata: object) -> Path:
    path = tmp_path / "changed.gguf"
    TinyLlama(metadata={key.replace("__", "."): value for key, value in metadata.items()}).write(path)
    return path


def test_agrees_with_the_gguf_packages_reader(tiny: Path) -> None:
    """Keys, values, shapes and places are those that the reference reader finds."""
    header = read_header(tiny)
    reference = GGUFReader(tiny)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert header.metadata.values[key] == field.contents(), key
    assert [
        (t.name, tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes) for t in reference.tensors
    ] == [(t.name, t.shape, t.offset, t.nbytes) for t in header.tensors.values()]


def test_a_file_cut_anywhere_is_called_truncated(tiny: Path, tmp_path: Path) -> None:
    """Every prefix of the file is refused as bad_model; no prefix crashes or is taken as whole."""
    whole = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    rng = random.Random(0)
    for length in [0, 3, 4, 8, 23, 24, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(120))]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"truncated|not a GGUF") as caught:
            read_header(cut)
        assert caught.value.code == "bad_model"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_flipped_bytes_never_crash_the_reader(tiny: Path, data: st.DataObject) -> None:
    """Any damage to the header gives a header or a ModelError, nothing else."""
    whole = bytearray(tiny.read_bytes())
    end = 11_000  # past the tensor table of this file
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(4, end))] = data.draw(st.integers(0, 255))
    path = tiny.with_name("flipped.gguf")
    path.write_bytes(whole)
    with suppress(ModelError):
        header = read_header(path)
        planned = plan(header)
        tokenizer_files(header.metadata, planned.vocabulary, 256)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A quantised GGUF of each kind of architecture."""
    folder = tmp_path_factory.mktemp("families")
    names = ("gemma3 with all keys", "ministral", "qwen2", "qwen3moe")
    return {name: TINY[name].write(folder / name, Q.Q4_K)[1].read_bytes() for name in names}


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_damage_anywhere_never_crashes_the_conversion(
    families: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A flipped byte or number, in the header or in the weights, is named or converts, in either form; what
    was refused leaves nothing behind."""
    whole = bytearray(families[data.draw(st.sampled_from(sorted(families)))])
    end = data.draw(st.sampled_from([14_000, len(whole) - 8]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, end))
        patch = data.draw(st.sampled_from([b"\xff", b"\x00", b"\xff\xff\xff\x7f", b"\x01" + bytes(7)]))
        whole[at : at + len(patch)] = patch
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "damaged.gguf").write_bytes(whole)
    keep = data.draw(st.booleans())
    try:
        convert(folder / "damaged.gguf", folder / "out", "float32", lambda *_: None, keep_quantised=keep)
    except ModelError:
        assert sorted(path.name for path in folder.iterdir()) == ["damaged.gguf", "out.lock"]
    shutil.rmtree(folder)


def test_absurd_counts_are_refused_at_once(tmp_path: Path) -> None:
    """2**60 keys, tensors, elements or characters in a small file end in an error, not in a loop."""
    path = tmp_path / "absurd.gguf"
    head = b"GGUF" + struct.pack("<I", 3)
    key = struct.pack("<Q", 1) + b"k"
    for body in (
        struct.pack("<QQ", 1, 1 << 60),
        struct.pack("<QQ", 1 << 60, 0),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1 << 60),
        struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 0, 1 << 60),
        struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, 1 << 60),
        struct.pack("<QQ", 1, 0) + key + struct.pack("<IQQQIQ", 3, 1 << 40, 1 << 40, 1 << 40, 0, 0),
    ):
        path.write_bytes(head + body + bytes(64))
        with pytest.raises(ModelError, match=r"truncated|damaged"):
            read_header(path)


def test_what_is_not_a_gguf_says_so(tmp_path: Path) -> None:
    """A zip, a directory, an absent file and an old version each get their own words."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_header(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100))
    with pytest.raises(ModelError, match="GGUF version 1; versions 2 and 3"):
        read_header(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))
    with pytest.raises(ModelError, match="big-endian"):
        read_header(path)
    with pytest.raises(ModelError, match="Is a directory"):
        read_header(tmp_path)
    with pytest.raises(ModelError, match="No such file"):
        read_header(tmp_path / "absent.gguf")


def test_a_part_of_a_split_model_says_how_to_join_it(tiny: Path, tmp_path: Path) -> None:
    """One of several parts is refused with the command that joins them."""
    with pytest.raises(ModelError, match=r"one of 3 parts .* llama-gguf-split --merge"):
        read_header(changed(tiny, tmp_path, split__count=3))


def test_an_unknown_quantisation_is_named(tiny: Path, tmp_path: Path) -> None:
    """A type number that does not exist is unsupported_quantisation, with tensor and number."""
    whole = tiny.read_bytes()
    name = b"blk.1.ffn_up.weight"
    at = whole.index(name) + len(name) + 4 + 16
    path = tmp_path / "unknown.gguf"
    path.write_bytes(whole[:at] + struct.pack("<I", 4711) + whole[at + 4 :])
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight has the quantisation type 4711") as caught:
        read_header(path)
    assert caught.value.code == "unsupported_quantisation"
