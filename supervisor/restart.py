"""Whether and when a process that died is started again. Pure: no clock, no randomness, no I/O."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """Seconds and counts. The n-th restart within the window waits base * 2**(n-1), at most cap."""

    base_s: float = 0.5
    cap_s: float = 30.0
    jitter: float = 0.25  # a wait grows by up to this fraction, so that restarts do not march in step
    window_s: float = 60.0
    max_restarts: int = 5  # within the window
    max_load_crashes: int = 3  # in a row, none of them ever ready


WORKERS = Policy()
# Every model waits for a frontend, and it loads nothing: be quick.
FRONTENDS = Policy(base_s=0.1)


@dataclass(frozen=True, slots=True)
class Death:
    """How a process ended."""

    was_ready: bool
    crashed: bool  # by a signal, or killed for being stuck; not an exit with a code
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    delay_s: float
    count: int  # restarts within the window, this one included


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


def decide(
    death: Death, restarts: Sequence[float], load_crashes: int, now: float, chance: float, policy: Policy
) -> Restart | GiveUp:
    """What follows `death`.

    `restarts` are the times of earlier restarts, `load_crashes` how many crashes before readiness came in
    a row (this one included), `chance` a number in [0, 1) for the jitter. A process that leaves by itself
    before it was ready has a reason that the next try would meet again, so it is not tried.
    """
    if not death.was_ready:
        if not death.crashed:
            return GiveUp(death.reason)
        if load_crashes >= policy.max_load_crashes:
            return GiveUp(f"crashed {load_crashes} times in a row while loading: {death.reason}")
    recent = sum(now - at < policy.window_s for at in restarts)
    if recent >= policy.max_restarts:
        return GiveUp(f"died {recent + 1} times in {policy.window_s:.0f} s: {death.reason}")
    delay = policy.base_s * 2**recent * (1 + policy.jitter * chance)
    return Restart(min(policy.cap_s, delay), recent + 1)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A process that is to start again at `due`. Deaths close together share an `incident`."""

    slot: str
    due: float
    incident: int


INCIDENT_SECONDS = 2.0


def incident_of(now: float, last_death: float, last_incident: int) -> int:
    """Deaths within two seconds are one incident: a GPU fault takes bystanders with it."""
    return last_incident if now - last_death <= INCIDENT_SECONDS else last_incident + 1


def due(waiting: Sequence[Waiting], loading_incidents: Collection[int], now: float) -> list[str]:
    """Slots to start now: those whose time has come, one at a time within an incident."""
    taken = set(loading_incidents)
    started = []
    for item in sorted(waiting, key=lambda w: w.due):
        if item.due <= now and item.incident not in taken:
            taken.add(item.incident)
            started.append(item.slot)
    return started
