"""Who is let in: the checks of a HELLO. Pure."""

import hmac
from dataclasses import dataclass

from mlxhost.wire.control import Hello, Refused
from mlxhost.wire.version import BUILD, PROTOCOL_MAJOR, SCHEMA


@dataclass(frozen=True, slots=True)
class Expected:
    """The one process that may speak for a slot. `greeted` once its HELLO was accepted."""

    role: str
    slot: str
    epoch: int
    token: str
    greeted: bool


def refuse(hello: Hello, sender: tuple[str, int] | None, expected: Expected | None) -> Refused | None:
    """The refusal of `hello`, or None. `sender` is its socket identity's (slot, epoch), `expected` what the
    supervisor knows of that slot."""
    mine = f"mlxhost {BUILD}"
    theirs = f"{hello.role} {hello.slot} is mlxhost {hello.build or 'of unknown version'}"
    if hello.protocol[0] != PROTOCOL_MAJOR:
        return Refused(
            "protocol",
            f"the supervisor ({mine}) speaks protocol {PROTOCOL_MAJOR}, {theirs} and speaks "
            f"{hello.protocol[0]}; run both from one installation",
        )
    if hello.schema != SCHEMA:
        return Refused(
            "schema",
            f"the supervisor ({mine}) and the process ({theirs}) have different message definitions; "
            "mlxhost was changed while it ran: restart `mlxhost up`",
        )
    if expected is None or sender != (hello.slot, hello.epoch) or hello.role != expected.role:
        return Refused("slot", f"{hello.role} {hello.slot} epoch {hello.epoch} is not part of this fleet")
    if hello.epoch != expected.epoch:
        return Refused(
            "slot", f"{hello.slot} epoch {hello.epoch} was replaced; the fleet is at epoch {expected.epoch}"
        )
    if not hmac.compare_digest(hello.token.encode(), expected.token.encode()):
        return Refused("token", f"{hello.slot}: wrong join token")
    if expected.greeted:
        return Refused("slot", f"{hello.slot} epoch {hello.epoch} has said HELLO already")
    return None
