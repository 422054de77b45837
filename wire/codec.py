"""Messages to frames and back.

A message is [header, body, binary frame...]: the header is a msgpack array [tag, handle, request id] that
can be read even when the body cannot, so that a broken ADD is rejected rather than lost; the body is the
struct itself (an array on the data plane, a map on the control plane). No pickle anywhere.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from mlxhost.wire import control, data
from mlxhost.wire.errors import DecodeError


class Header(Struct, array_like=True):
    tag: str
    handle: int = 0
    request_id: str = ""


Buffer = bytes | memoryview

_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)


def tag_of(message: type[Struct]) -> str:
    """The tag that names a message type in the header."""
    return str(message.__struct_config__.tag)


_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    tag_of(m): msgspec.msgpack.Decoder(m) for m in (*data.MESSAGES, *control.MESSAGES)
}
_headers: dict[type[Struct], bytes] = {
    m: _encoder.encode(Header(tag_of(m))) for m in (*data.MESSAGES, *control.MESSAGES)
}


def encode(message: Struct, *binary: Buffer) -> list[Buffer]:
    """Frames of `message` followed by its binary frames."""
    if isinstance(message, data.Add):
        header = _encoder.encode(Header(tag_of(data.Add), message.handle, message.request_id))
    else:
        header = _headers[type(message)]
    return [header, _encoder.encode(message), *binary]


def decode(frames: Sequence[Buffer]) -> tuple[Any, Sequence[Buffer]]:
    """The message in `frames` and its binary frames.

    Raises DecodeError, holding whatever the header still told.
    """
    if len(frames) < 2:
        raise DecodeError(f"a message has at least 2 frames, this one has {len(frames)}")
    try:
        header = _header_decoder.decode(frames[0])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DecodeError(f"unreadable header: {error}") from None
    decoder = _decoders.get(header.tag)
    if decoder is None:
        raise DecodeError(f"unknown message {header.tag!r}", tag=header.tag)
    try:
        return decoder.decode(frames[1]), frames[2:]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DecodeError(
            f"unreadable {header.tag}: {error}",
            tag=header.tag,
            handle=header.handle,
            request_id=header.request_id,
        ) from None
