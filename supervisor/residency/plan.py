"""What to load, evict, hold or refuse now. Pure: no clock, no I/O, no logging.

Rules, in this order:

- A wish that cannot be granted at all (larger than the budget, or than what pinned models leave of it) is
  refused at once, and nothing is evicted for it.
- What fits is loaded. A load counts at its estimate from that moment on, so two cannot take the same room.
- Else models that are idle and not pinned are evicted: see `victims` for which. A model stays at least
  `min_resident_s`, unless it has been idle for `idle_s`: two models that alternate are both served, and
  requests that come thick and fast for both do not make them swap at each one.
- Else the wish waits. Once it has waited `patience_s`, busy models that have had their time are held: they
  get nothing new, finish what runs, and are evicted then. So nobody is cut off and nobody starves.
- Wishes are served oldest first, those of more important models before others that came within
  `patience_s`. A later one may pass an earlier one that waits, as long as nothing is being freed for that.
- Without any wish: what has been idle for its `ttl_s` goes, and what takes more than the budget because it
  grew makes room as if somebody wanted it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from mlxhost.supervisor.console import size
from mlxhost.supervisor.residency import victims
from mlxhost.supervisor.residency.facts import (
    AnyAction,
    Budget,
    Evict,
    Hold,
    Load,
    Phase,
    Refuse,
    Release,
    Unit,
    Wait,
    Wish,
)
from mlxhost.supervisor.residency.room import Room

_HERE = frozenset({Phase.RESIDENT, Phase.HELD})
_COUNTED = frozenset({Phase.LOADING, Phase.RESIDENT, Phase.HELD, Phase.LEAVING})


def plan(fleet: Sequence[Unit], budget: Budget, request: Sequence[Wish], now: float) -> list[AnyAction]:
    """The actions that the fleet's present state and the open wishes call for, at most one for each model.

    Called again whenever anything changes, and at the `until` of each Wait.
    """
    return _Planner(fleet, budget, now).run(request)


class _Planner:
    """One call of `plan`."""

    def __init__(self, fleet: Sequence[Unit], budget: Budget, now: float) -> None:
        self._units = {u.name: u for u in fleet}
        self._budget, self._now = budget, now
        leaving = [u for u in fleet if u.phase is Phase.LEAVING]
        counted = sum(u.phase in _COUNTED for u in fleet)
        self._room = Room(
            free=budget.bytes - sum(u.holds for u in fleet),
            coming=sum(u.holds for u in leaving),
            places=budget.max_resident - counted if budget.max_resident else math.inf,
            places_coming=len(leaving),
        )
        self._actions: dict[str, AnyAction] = {}
        self._needed: set[str] = set()  # held models whose room a wish still waits for

    def run(self, wishes: Sequence[Wish]) -> list[AnyAction]:
        for wish in sorted(wishes, key=self._turn):
            self._grant(wish)
        self._release()
        self._shrink()
        self._expire()
        return list(self._actions.values())

    def _turn(self, wish: Wish) -> tuple[float, int, float, str]:
        unit = self._units[wish.model]
        patience = self._budget.patience_s
        slot = wish.since // patience if patience else wish.since
        return (slot, unit.priority, wish.since, wish.model)

    # --- one wish

    def _grant(self, wish: Wish) -> None:
        unit = self._units[wish.model]
        if unit.phase is Phase.OUT:
            self._do(Refuse(unit.name, f"{unit.name} is not to be loaded", code="out"))
        elif unit.phase in (Phase.LEAVING, Phase.HELD):
            self._wait(unit, "it is being unloaded; it is loaded again when its memory is free")
            if unit.phase is Phase.LEAVING and self._room.will_fit(unit.need):
                self._room = self._room.take(unit.need)
        elif unit.phase is not Phase.ABSENT:
            return  # resident, or on its way: loaded once however many ask
        elif refusal := self._hopeless(unit):
            self._do(refusal)
        elif self._room.fits(unit.need):
            self._room = self._room.take(unit.need)
            self._do(Load(unit.name, f"needs {size(unit.need)}, {self._left()}"))
        elif wish.preload:
            self._do(Refuse(unit.name, f"needs {size(unit.need)}, {self._left()}", code="no_room"))
        elif self._room.will_fit(unit.need):
            self._room = self._room.take(unit.need)
            self._wait(unit, "its room is being freed")
        else:
            self._make_room(wish, unit)

    def _hopeless(self, unit: Unit) -> Refuse | None:
        """Why no waiting will help, if so."""
        budget = self._budget
        if unit.need > budget.bytes:
            return Refuse(
                unit.name,
                f"needs {size(unit.need)}, and the whole budget is {size(budget.bytes)}; give a larger "
                "--budget, a shorter --context, or a smaller quantisation",
                code="too_large",
            )
        pinned = [u for u in self._units.values() if u.pinned and u.phase in _COUNTED]
        kept = sum(u.holds for u in pinned)
        full = bool(budget.max_resident) and len(pinned) >= budget.max_resident
        if unit.need > budget.bytes - kept or full:
            names = ", ".join(u.name for u in pinned)
            why = (
                f"at most {budget.max_resident} models may be resident, and {names} (pinned or drained) are"
                if full
                else f"needs {size(unit.need)}, and {names} (pinned or drained) keep {size(kept)} of the "
                f"budget of {size(budget.bytes)}"
            )
            return Refuse(
                unit.name, f"{why}; `mlxhost ctl unpin MODEL` or `ctl unload MODEL` makes room", code="pinned"
            )
        return None

    def _make_room(self, wish: Wish, unit: Unit) -> None:
        """Evict what is idle, or hold what is busy until it is, or wait."""
        short = unit.need - self._room.free - self._room.coming
        places = 0 if self._room.places + self._room.places_coming >= 1 else 1
        idle = [u for u in self._candidates() if self._may_go(u)]
        if (chosen := victims.choose(idle, short, places)) is not None:
            for victim in chosen:
                self._evict(victim, f"idle for {self._idle(victim)}, {_frees(victim)} for {unit.name}", unit)
            self._room = self._room.take(unit.need)
            self._wait(unit, f"its room is being freed by {', '.join(v.name for v in chosen)}")
            return
        if self._now - wish.since >= self._budget.patience_s:
            timely = [u for u in self._candidates() if self._had_its_time(u)]
            if (chosen := victims.choose(timely, short, places)) is not None:
                self._hold(chosen, unit)
                return
        soonest = min(
            (t for u in self._candidates() if (t := self._free_at(u, wish)) > self._now), default=0.0
        )
        busy = ", ".join(u.name for u in self._units.values() if u.busy and u.phase in _COUNTED)
        why = f"{busy} busy" if busy else "the models in its way have just been loaded"
        self._wait(unit, f"needs {size(unit.need)}, {self._left()}; {why}", soonest)

    def _hold(self, chosen: Sequence[Unit], unit: Unit) -> None:
        """Let `chosen` run dry. Nobody else may take their room meanwhile."""
        for victim in chosen:
            self._needed.add(victim.name)
            if victim.phase is Phase.RESIDENT:
                kept = f"{unit.name} has waited; {victim.name} has been resident for {self._age(victim)}"
                self._do(Hold(victim.name, kept, wanted_by=unit.name))
            self._units[victim.name] = _taken(victim)
            self._room = replace(
                self._room,
                coming=self._room.coming + victim.holds,
                places_coming=self._room.places_coming + 1,
            )
        self._room = self._room.take(unit.need)
        self._wait(unit, f"waits for {', '.join(v.name for v in chosen)} to finish what runs")

    def _evict(self, victim: Unit, reason: str, wanted_by: Unit | None = None) -> None:
        self._do(Evict(victim.name, reason, wanted_by=wanted_by.name if wanted_by else ""))
        self._units[victim.name] = _taken(victim)
        self._room = replace(
            self._room, coming=self._room.coming + victim.holds, places_coming=self._room.places_coming + 1
        )

    # --- without a wish

    def _release(self) -> None:
        for unit in self._units.values():
            if unit.phase is Phase.HELD and unit.name not in self._needed:
                self._do(Release(unit.name, "nobody waits for its room any more"))

    def _shrink(self) -> None:
        """Resident models grew beyond the budget: the idle ones that bring it back go."""
        excess = sum(u.holds for u in self._units.values()) - self._budget.bytes
        excess -= sum(u.holds for u in self._units.values() if u.phase is Phase.LEAVING)
        idle = [u for u in self._candidates() if self._may_go(u)]
        alone = sum(u.phase in _COUNTED for u in self._units.values()) < 2
        if excess > 0 and not alone and (chosen := victims.choose(idle, excess)):
            for victim in chosen:
                self._evict(
                    victim, f"models take {size(excess)} more than the budget; idle, {_frees(victim)}"
                )

    def _expire(self) -> None:
        for unit in self._candidates():
            if unit.ttl_s and not unit.busy and self._now - unit.used >= unit.ttl_s:
                self._evict(unit, f"idle for {self._idle(unit)}, its idle time to live is {unit.ttl_s:.0f} s")

    # --- who may go

    def _candidates(self) -> list[Unit]:
        return [u for u in self._units.values() if u.phase in _HERE and not u.pinned]

    def _had_its_time(self, unit: Unit) -> bool:
        return unit.phase is Phase.HELD or self._now - unit.since >= self._budget.min_resident_s

    def _may_go(self, unit: Unit) -> bool:
        idle = self._now - unit.used >= self._budget.idle_s
        return not unit.busy and (idle or self._had_its_time(unit))

    def _free_at(self, unit: Unit, wish: Wish) -> float:
        """When time alone makes `unit` eligible, to be evicted or to be held."""
        timely = unit.since + self._budget.min_resident_s
        if unit.busy:
            return max(timely, wish.since + self._budget.patience_s)
        return min(timely, unit.used + self._budget.idle_s)

    # --- words

    def _wait(self, unit: Unit, reason: str, until: float = 0.0) -> None:
        # A model that is evicted or held for another one may be wanted itself: that is what is done now.
        self._actions.setdefault(unit.name, Wait(unit.name, reason, until=until))

    def _do(self, action: AnyAction) -> None:
        self._actions[action.model] = action

    def _left(self) -> str:
        of = f"{size(max(0, self._room.free))} of the budget of {size(self._budget.bytes)} is free"
        if self._budget.max_resident:
            of += f", {max(0, int(self._room.places))} of {self._budget.max_resident} places"
        return of

    def _idle(self, unit: Unit) -> str:
        return f"{max(0.0, self._now - unit.used):.1f} s"

    def _age(self, unit: Unit) -> str:
        return f"{self._now - unit.since:.0f} s"


def _taken(unit: Unit) -> Unit:
    """The unit once it has been chosen: nobody chooses it again."""
    return msgspec.structs.replace(unit, phase=Phase.LEAVING)


def _frees(unit: Unit) -> str:
    return f"frees {size(unit.holds)}"
