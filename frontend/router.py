"""Chooses the replica of each request: what the request asks for, then what earlier requests suggest, then
the model's policy. Owns the columns and the memory of every model; sends nothing.
"""

from collections.abc import Mapping

from mlxhost.frontend.affinity import PrefixIndex, Sessions, block_hashes, rendezvous
from mlxhost.frontend.columns import Columns
from mlxhost.frontend.errors import BadRequest, ReplicaNotReady
from mlxhost.frontend.hints import REPLICA_HEADER, REPLICAS_HEADER, Hints
from mlxhost.frontend.models import READY, replica_key
from mlxhost.frontend.replica import Replica
from mlxhost.frontend.routing import NONE, ReplicaKey, pick, within_bound
from mlxhost.wire.control import Fleet, FleetModel

PREFIX_AFFINITY = "prefix-affinity"
BOOTSTRAP_ROOM = "bootstrap-room"


class Pool:
    """One model."""

    def __init__(self) -> None:
        self.columns = Columns(0)
        self.members: list[Replica | None] = []  # by position
        self.states: list[str] = []
        self.start: int | None = None  # where the next search begins
        self.prefixes = PrefixIndex()
        self.sessions = Sessions()

    def update(self, model: FleetModel, replicas: Mapping[ReplicaKey, Replica]) -> None:
        """Seat the living replicas that FLEET lists."""
        size = max((r.index for r in model.replicas), default=-1) + 1
        if size != len(self.columns):
            self.columns, old = Columns(size), self.members
            self.members, self.states = (old + [None] * size)[:size], [""] * size
            for member in self.members:
                if member is not None:
                    member.columns = None  # to be seated anew
        listed = {r.index: r for r in model.replicas}
        for position in range(size):
            here = listed.get(position)
            self.states[position] = here.state if here else "unloaded"
            member = replicas.get(replica_key(here)) if here else None
            if self.members[position] is not member:
                if (gone := self.members[position]) is not None:
                    gone.leave()
                    self.prefixes.forget(position)
                    self.sessions.forget(position)
                self.members[position] = member
            if member is not None and here is not None:
                if member.columns is not self.columns:
                    limit = here.max_rows + here.max_queued if here.max_queued else 0
                    member.seat(self.columns, position, limit)
                member.set_state(ready=here.state == READY)


class Router:
    """`ordinal` is this frontend's number: frontends begin their turns at different replicas."""

    def __init__(self, ordinal: int = 0) -> None:
        self._ordinal = ordinal
        self._frontends = 1
        self._pools: dict[str, Pool] = {}
        self._hashed: tuple[bytes, list[int]] = b"", []  # the last prompt: choices of a request share it

    def update(self, fleet: Fleet, replicas: Mapping[ReplicaKey, Replica]) -> None:
        """Take over a newer FLEET; `replicas` are the living ones."""
        self._frontends = max(1, len(fleet.frontends))
        for model in fleet.models:
            self._pools.setdefault(model.name, Pool()).update(model, replicas)
        for name in self._pools.keys() - {m.name for m in fleet.models}:
            del self._pools[name]

    def columns(self, model: str) -> Columns:
        """What is known of the replicas of a model that FLEET lists."""
        return self._pools[model].columns

    def usable(self, model: str) -> int:
        """How many replicas can take a request now."""
        pool = self._pools.get(model)
        return pool.columns.usable_count if pool else 0

    def can_route(self, model: FleetModel, hints: Hints) -> bool:
        """Whether `choose` would find a replica now. Raises what `choose` raises."""
        pool = self._pools[model.name]
        low, high = _subset(pool, model, hints)
        pinned = _pinned(model, hints, low, high)
        if pinned is None:
            return bool(pool.columns.usable[low:high].any())
        if pool.states[pinned] != READY:
            raise ReplicaNotReady(model.name, pinned, pool.states[pinned])
        return bool(pool.columns.usable[pinned])

    def choose(self, model: FleetModel, hints: Hints, prompt: bytes) -> Replica | None:
        """The replica to send a request to, or None when none can take it.

        Raises BadRequest for a replica that does not exist or a missing room, and InternalError for a
        policy that is not known here.
        """
        pool = self._pools[model.name]
        low, high = _subset(pool, model, hints)
        position = _pinned(model, hints, low, high)
        if position is None:
            position = self._suggested(pool, model.routing, hints, prompt, low, high)
        if position is None:
            start = pool.start
            if start is None:
                start = len(pool.columns) * self._ordinal // self._frontends
            position = pick(model.routing, pool.columns, low, high, start)
        if position == NONE or not pool.columns.usable[position]:
            return None
        return pool.members[position]

    def sent(self, model: FleetModel, replica: Replica, hints: Hints, prompt: bytes) -> None:
        """Remember where a request went."""
        pool = self._pools[model.name]
        pool.start = replica.position + 1
        if hints.session:
            pool.sessions.bind(hints.session, replica.position)
        if model.routing == PREFIX_AFFINITY:
            pool.prefixes.record(self._blocks(prompt), replica.position)

    def _suggested(
        self, pool: Pool, policy: str, hints: Hints, prompt: bytes, low: int, high: int
    ) -> int | None:
        """Where the session or the prefix is at home, if that replica is not overloaded."""
        columns = pool.columns
        if hints.session:
            home = pool.sessions.find(hints.session)
            if home is None and self._frontends > 1:  # what another frontend would choose, too
                home = rendezvous(hints.session, columns.open, low, high)
            if home is not None and low <= home < high and within_bound(columns, home, low, high):
                return home
        if policy == PREFIX_AFFINITY:
            holders = pool.prefixes.longest(
                self._blocks(prompt), lambda p: low <= p < high and bool(columns.usable[p])
            )
            home = min(reversed(holders), key=columns.in_flight, default=None)
            if home is not None and within_bound(columns, home, low, high):
                return home
        return None

    def _blocks(self, prompt: bytes) -> list[int]:
        if self._hashed[0] is not prompt:
            self._hashed = prompt, block_hashes(prompt)
        return self._hashed[1]


def _subset(pool: Pool, model: FleetModel, hints: Hints) -> tuple[int, int]:
    """[low, high) of the positions that the client may use. Raises BadRequest when they do not exist."""
    size = len(pool.columns)
    high = size if hints.last is None else hints.last + 1
    if high > size or (hints.last is not None and hints.first >= size):
        raise BadRequest(
            f"The model {model.name!r} has {size} replicas (0 to {size - 1}); "
            f"{hints.first}-{hints.last} is not among them",
            param=REPLICAS_HEADER,
        )
    return hints.first, high


def _pinned(model: FleetModel, hints: Hints, low: int, high: int) -> int | None:
    """The one position that will do, if the request or the policy leaves no choice. Raises BadRequest."""
    if hints.replica is not None:
        if not low <= hints.replica < high:
            raise BadRequest(
                f"The model {model.name!r} has no replica {hints.replica}; choose from {low} to {high - 1}",
                param=REPLICA_HEADER,
            )
        return hints.replica
    if hints.room is not None:
        return low + hints.room % (high - low)
    if model.routing == BOOTSTRAP_ROOM:
        raise BadRequest(
            f"The model {model.name!r} is routed by bootstrap_room: `bootstrap_room` is required",
            param="bootstrap_room",
        )
    return None
