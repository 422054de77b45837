"""What a request says about where it wants to run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mlxhost.frontend.errors import BadRequest

REPLICA_HEADER = "x-mlxhost-replica"
REPLICAS_HEADER = "x-mlxhost-replicas"
SESSION_HEADER = "x-mlxhost-session"

_INDEX = re.compile(r"\d{1,9}", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Hints:
    """All optional. `first` and `last` bound the replicas that the client may use, both included."""

    replica: int | None = None  # this replica and no other
    first: int = 0
    last: int | None = None
    session: str = ""  # requests of one session go to one replica while it lives and is not overloaded
    room: int | None = None  # replica number room % replicas


ANYWHERE = Hints()


def hints_of(headers: Mapping[str, str], *, session: str | None, room: int | None) -> Hints:
    """From a request's headers and body. Raises BadRequest for a header that is not what it must be."""
    replica = headers.get(REPLICA_HEADER)
    if replica is not None and not _INDEX.fullmatch(replica.strip()):
        raise BadRequest(
            f"the header {REPLICA_HEADER} is {replica!r}; it must be a replica's index, such as 0",
            param=REPLICA_HEADER,
        )
    subset = headers.get(REPLICAS_HEADER)
    bounds = None if subset is None else _RANGE.fullmatch(subset.strip())
    if subset is not None and (bounds is None or int(bounds[1]) > int(bounds[2])):
        raise BadRequest(
            f"the header {REPLICAS_HEADER} is {subset!r}; it must be the first and the last replica's index, "
            "such as 4-7",
            param=REPLICAS_HEADER,
        )
    here = headers.get(SESSION_HEADER, "")
    if any("\ud800" <= c <= "\udfff" for c in here):  # how bytes that are not UTF-8 are read
        raise BadRequest(f"the header {SESSION_HEADER} is not UTF-8", param=SESSION_HEADER)
    return Hints(
        replica=None if replica is None else int(replica),
        first=int(bounds[1]) if bounds else 0,
        last=int(bounds[2]) if bounds else None,
        session=session or here,
        room=room,
    )
