"""Shares the memory budget among the resident workers. Pure.

Each gets what it cannot do without (weights, process, the transient of one chunk) and the cache of one
serving context; what is left goes to their caches in equal parts, none more than it can fill. All leases
together stay within the budget, whatever is asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mlxhost.supervisor.estimate.transient import BUFFER_BYTES


@dataclass(frozen=True, slots=True)
class Tenant:
    """A worker's needs in bytes; measured where it has said READY, else estimated."""

    slot: str
    process: int  # before weights: interpreter, MLX, BLAS
    weights: int
    transient: int  # the largest chunk's activations
    kv_wanted: int  # one serving context
    kv_useful: int  # all its rows at their longest: more would lie idle
    plans_own_memory: bool = False
    importance: int = 0  # lower is served first when the budget does not suffice

    @property
    def base(self) -> int:
        return self.process + self.weights + self.transient


@dataclass(frozen=True, slots=True)
class Grant:
    """What one worker may take. `total` counts its process, as the kernel does; `memory` is MLX's part."""

    total: int
    process: int
    kv: int
    buffers: int

    @property
    def memory(self) -> int:
        return max(1, self.total - self.process)


def grant(budget: int, tenants: Sequence[Tenant]) -> dict[str, Grant]:
    """The grant of every tenant, by slot; a worker counts from the moment it is started.

    The totals' sum is at most the budget. When that does not hold everyone's base, the least important get
    less than theirs, down to nothing: they are over their lease from the start, and will be made to go.
    """
    room = max(0, budget)
    order = sorted(tenants, key=lambda t: (t.importance, t.slot))
    bases = _in_turn(room, [(t.slot, t.base) for t in order])
    room -= sum(bases.values())
    fed = [t for t in order if bases[t.slot] == t.base]
    kv = dict.fromkeys(bases, 0) | _fair(room, {t.slot: t.kv_wanted for t in fed})
    room -= sum(kv.values())
    useful = {t.slot: room if t.plans_own_memory else max(0, t.kv_useful - kv[t.slot]) for t in fed}
    more = dict.fromkeys(bases, 0) | _fair(room, useful)
    return {
        t.slot: Grant(
            total=bases[t.slot] + kv[t.slot] + more[t.slot],
            process=t.process,
            kv=kv[t.slot] + more[t.slot],
            buffers=max(BUFFER_BYTES, t.transient),
        )
        for t in order
    }


def _in_turn(room: int, wants: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Each what it wants, the first first, until the room is used up."""
    given = {}
    for slot, want in wants:
        given[slot] = min(want, room)
        room -= given[slot]
    return given


def _fair(room: int, wants: dict[str, int]) -> dict[str, int]:
    """Equal parts, no part larger than wanted, what one leaves to the others (max-min fairness)."""
    given = {}
    left = sorted(wants, key=lambda slot: (wants[slot], slot))
    for position, slot in enumerate(left):
        given[slot] = min(wants[slot], room // (len(left) - position))
        room -= given[slot]
    return given
