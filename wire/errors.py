"""What can go wrong on the wire, as types."""


class WireError(Exception):
    """Base of every protocol error."""


class DecodeError(WireError):
    """A message that could not be decoded.

    `tag`, `handle` and `request_id` hold what the header frame still told, so that an undecodable ADD
    can be rejected and its stream ended.
    """

    def __init__(self, message: str, *, tag: str = "", handle: int = 0, request_id: str = "") -> None:
        super().__init__(message)
        self.tag = tag
        self.handle = handle
        self.request_id = request_id


class HandshakeRefused(WireError):
    """The supervisor refused our HELLO; `code` says why (protocol, schema, token, slot)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ParentGone(WireError):
    """The process that should have told us how to start closed its end first."""
