"""How a worker that holds more than its lease is made to give back: a ladder, with a deadline for each rung.

clear cache -> drop cached prefixes -> pause -> drain -> exit. Pure: the kernel's figure in, the rung out.
"""

from dataclasses import dataclass, replace
from enum import IntEnum


class Rung(IntEnum):
    """How far a worker must go. The first three are its own doing, told by the lease's `shrink`."""

    NONE = 0
    CLEAR_CACHE = 1
    DROP_PREFIXES = 2
    PAUSE = 3
    DRAIN = 4
    EXIT = 5

    @property
    def order(self) -> str:
        """The word for it on the wire; empty from DRAIN on, which the supervisor does itself."""
        return self.name.lower() if self in (Rung.CLEAR_CACHE, Rung.DROP_PREFIXES, Rung.PAUSE) else ""


@dataclass(frozen=True, slots=True)
class Limits:
    """`patience_s` is what each rung gets to take effect. `slack` is how much over the lease is let pass:
    allocators round, and the kernel counts pages that are shared differently from moment to moment."""

    patience_s: dict[Rung, float]
    slack_share: float = 0.05
    slack_bytes: int = 32 << 20
    calm_s: float = 10.0  # back within the lease for so long, and it is let go on

    def ceiling(self, lease: int) -> int:
        """What a worker may hold before anything is done."""
        return lease + max(self.slack_bytes, int(lease * self.slack_share))


LIMITS = Limits(
    {
        Rung.NONE: 4.0,
        Rung.CLEAR_CACHE: 4.0,
        Rung.DROP_PREFIXES: 6.0,
        Rung.PAUSE: 10.0,
        Rung.DRAIN: 30.0,
    }
)


@dataclass(frozen=True, slots=True)
class Shrink:
    """Where one worker stands. `since` is when it got to this rung, `calm_since` when it was back within
    its lease (0: it is not)."""

    rung: Rung = Rung.NONE
    since: float = 0.0
    calm_since: float = 0.0


def step(
    present: Shrink | None, holds: int, lease: int, now: float, limits: Limits = LIMITS
) -> Shrink | None:
    """The next standing; None when there is nothing to remember.

    A worker over its ceiling climbs one rung each time a rung's patience is over. Within its lease it stays
    where it is until it has been calm for `calm_s`, so that it does not swing up and down; a drain is not
    taken back: by then its requests are gone to others, and it may as well end.
    """
    if holds > limits.ceiling(lease):
        if present is None:
            return Shrink(Rung.NONE, now)
        present = replace(present, calm_since=0.0)
        if present.rung is Rung.EXIT or now - present.since < limits.patience_s[present.rung]:
            return present
        return Shrink(Rung(present.rung + 1), now)
    if present is None or present.rung is Rung.NONE:
        return None
    if present.rung >= Rung.DRAIN:
        return present
    if not present.calm_since:
        return replace(present, calm_since=now)
    return None if now - present.calm_since >= limits.calm_s else present
