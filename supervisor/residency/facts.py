"""What the residency planner is told and what it answers. Plain data, as JSON in the decision log.

Sizes are bytes, times are seconds of one monotonic clock.
"""

from enum import StrEnum

from msgspec import Struct


class Phase(StrEnum):
    """Where a model stands, all its replicas taken together."""

    ABSENT = "absent"  # no process; one is started when asked for
    LOADING = "loading"  # starting, loading, or about to be restarted
    RESIDENT = "resident"
    HELD = "held"  # takes nothing new, so that it becomes idle and makes room
    LEAVING = "leaving"  # being unloaded; its memory is not free yet
    OUT = "out"  # failed or unloaded by the operator: never loaded by a request


class Unit(Struct, frozen=True, forbid_unknown_fields=True):
    """One model, all its replicas. It is loaded and evicted as a whole."""

    name: str
    phase: Phase
    need: int  # what it takes when it is resident: measured where it was loaded before, else estimated
    holds: int = 0  # what it takes of the budget now
    busy: bool = False  # has requests, or was loaded for some that have not reached it yet
    pinned: bool = False
    priority: int = 0  # lower stays longer
    ttl_s: float = 0.0  # unloaded after so long without a request; 0: never
    since: float = 0.0  # when it became resident
    used: float = 0.0  # when it was last seen with a request (or became resident)


class Budget(Struct, frozen=True, forbid_unknown_fields=True):
    """What all models together may take, and the rules against thrash."""

    bytes: int
    max_resident: int = 0  # models; 0: no limit
    min_resident_s: float = 10.0  # a model that is used stays at least so long
    idle_s: float = 0.5  # without a request for so long a model is idle, and may go earlier
    patience_s: float = 2.0  # after so long a wait busy models are held, once they have had their time


class Wish(Struct, frozen=True, forbid_unknown_fields=True):
    """Somebody wants `model` resident since `since`."""

    model: str
    since: float
    preload: bool = False  # at the start: only if it fits beside what is there, evicting nothing


class Action(Struct, frozen=True, tag_field="do", forbid_unknown_fields=True):
    """What is to be done about `model`, and why."""

    model: str
    reason: str


class Load(Action, tag="load", frozen=True):
    """Start its processes; their memory is free now."""


class Evict(Action, tag="evict", frozen=True):
    """Unload it. `wanted_by` is the model that gets its room, if any."""

    wanted_by: str = ""


class Hold(Action, tag="hold", frozen=True):
    """Send it nothing new, so that it becomes idle: `wanted_by` has waited long enough."""

    wanted_by: str = ""


class Release(Action, tag="release", frozen=True):
    """Nobody needs its room any more: it takes requests again."""


class Refuse(Action, tag="refuse", frozen=True):
    """The wish cannot be granted, however long it waits. `code`: too_large, pinned, no_room or out."""

    code: str = ""


class Wait(Action, tag="wait", frozen=True):
    """Not yet. `until` is when time alone may change that; 0: something else must happen first."""

    until: float = 0.0


AnyAction = Load | Evict | Hold | Release | Refuse | Wait
