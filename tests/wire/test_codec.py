"""Codec: what is broken is named, what is newer is understood."""

import msgspec
import pytest

from mlxhost.wire import control, data
from mlxhost.wire.codec import decode, encode
from mlxhost.wire.errors import DecodeError


def test_prompt_frame_survives_as_it_is() -> None:
    """The binary frame of an ADD comes back untouched."""
    prompt = bytes(range(16))
    _, binary = decode(encode(data.Add(1, 1, "r"), prompt))
    assert list(binary) == [prompt]


def test_trailing_fields_of_a_newer_peer_are_ignored() -> None:
    """An array with one field more than we know still decodes."""
    header, body = encode(data.Accepted(7, 1, 2))
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(body), "new"])
    assert decode([header, longer])[0] == data.Accepted(7, 1, 2)


def test_unknown_map_fields_of_a_newer_peer_are_ignored() -> None:
    """A control message with a key we do not know still decodes."""
    header, body = encode(control.Progress("loading", 1, 2))
    longer = msgspec.msgpack.encode({**msgspec.msgpack.decode(body), "new": 1})
    assert decode([header, longer])[0] == control.Progress("loading", 1, 2)


def test_broken_add_still_tells_whom_to_reject() -> None:
    """An ADD with an unreadable body keeps its handle and request id."""
    header, _ = encode(data.Add(31, 1, "req-9"))
    with pytest.raises(DecodeError) as caught:
        decode([header, b"\xc1"])
    assert (caught.value.tag, caught.value.handle, caught.value.request_id) == ("add", 31, "req-9")


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\x91\xa3out"],
        [b"", b""],
        [b"\xc1", b"\x90"],
        [b"\x91\xa3xyz", b"\x90"],
        [b"\x93\xa3add\xa1x\xa1y", b"\x90"],
        [b"\x91\xa3out", b"\x91" * 5000],
        [b"\x80\x04\x95pickle.", b"\x80\x04\x95pickle."],
        [b"\xa5hello", b"world"],
        [b"\x91\xa3out", msgspec.msgpack.encode(["out", 1])],
        [b"\x91\xa2\xff\xfe", b"\x90"],
    ],
)
def test_garbage_is_a_typed_error(frames: list[bytes]) -> None:
    """Nothing but DecodeError comes out of bytes that are no message."""
    with pytest.raises(DecodeError):
        decode(frames)
