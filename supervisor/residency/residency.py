"""Carries out what the planner says: the one part of the supervisor that starts a model that is absent and
ends one that is to make room.

It keeps the wishes, asks the planner at every change that may matter, moves the goals of models (lifecycle
takes the steps towards them), and writes down every decision.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from mlxhost.supervisor.core import Core
from mlxhost.supervisor.errors import UserError
from mlxhost.supervisor.home import home
from mlxhost.supervisor.lifecycle import Lifecycle
from mlxhost.supervisor.residency.budget import budget_bytes, ram_bytes, working_set
from mlxhost.supervisor.residency.decisions import FILE_NAME, DecisionLog, decision
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
)
from mlxhost.supervisor.residency.plan import plan
from mlxhost.supervisor.residency.preload import chosen, order
from mlxhost.supervisor.residency.sizes import Sizes
from mlxhost.supervisor.residency.units import units
from mlxhost.supervisor.residency.wishes import KEEP_SECONDS, Wishes
from mlxhost.supervisor.state import Goal, Model, Replica

# While nobody waits, only idle time and growth can call for anything.
CALM_SECONDS = 1.0
# Several changes of one moment are looked at together.
COALESCE_SECONDS = 0.002
# `ctl load` without waiting: how long its wish stands.
OPERATOR_SECONDS = 3600.0


class Residency:
    def __init__(self, core: Core, lifecycle: Lifecycle) -> None:
        self._core, self._lifecycle = core, lifecycle
        self.sizes = Sizes(lambda: core.settings)
        self.wishes = Wishes()
        self.log = DecisionLog(home() / FILE_NAME, lambda text: core.events.event("", text, "warning"))
        self._ram = ram_bytes()
        self._kick = asyncio.Event()
        self._logged: set[tuple[str, float]] = set()  # waits that are in the log

    # --- what others ask

    def start(self) -> None:
        """Load what is to be there from the start. Raises UserError when what was asked for does not fit."""
        state, settings = self._core.state, self._core.settings
        wanted = chosen([m.spec for m in state.models.values()], settings.preload)
        now = time.monotonic()
        # One after the other, so that the order in which they were given decides what fits.
        for spec in order([spec for spec, _ in wanted]):
            self.wishes.ask(spec.name, now, preload=True)
            self.review()
        refused = {}
        for spec, must in wanted:
            if (known := self.wishes.find(spec.name)) and known.refused:
                refused[spec.name] = known.refused.reason
                if must:
                    raise UserError(f"--preload {spec.name}: {known.refused.reason}")
            self.wishes.drop(spec.name)
        if refused and len(refused) == len(state.models):
            raise UserError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
        for name, reason in refused.items():
            self._core.events.event("", f"{name} is not loaded now: {reason}", "warning")

    def want(self, model: Model, keep_s: float = OPERATOR_SECONDS) -> None:
        """Make `model` resident as soon as the rules allow it."""
        self.wishes.ask(model.name, time.monotonic(), keep_s)
        self.review()

    def forget(self, model: Model) -> None:
        """Nobody wants `model` any more."""
        self.wishes.drop(model.name)

    def room_for(self, model: Model) -> tuple[int, int, int]:
        """Bytes: what a replica of `model` needs, what is free, and the whole budget."""
        budget = self.budget().bytes
        held = sum(unit.holds for unit in self.units(time.monotonic()))
        return self.sizes.replica(model, budget), budget - held, budget

    def refusal(self, model: Model) -> Refuse | None:
        """Why the last wish for `model` cannot be granted, if so."""
        known = self.wishes.find(model.name)
        return known.refused if known else None

    def waiting(self, model: Model) -> str:
        """Why a wish for `model` is not granted yet, if one is open."""
        known = self.wishes.find(model.name)
        return known.waiting if known else ""

    def pin(self, model: Model, pinned: bool) -> None:
        model.pinned = pinned
        self.review()

    def learn(self, replica: Replica) -> None:
        """`replica` is ready: its own figures replace the estimate."""
        self.sizes.learn(replica)
        self._kick.set()

    # --- deciding

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.review()
            await asyncio.sleep(COALESCE_SECONDS)
            if self.wishes.pending():
                await self._core.changes.next(self._core.timing.tick_s)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CALM_SECONDS):
                        await self._kick.wait()
            self._kick.clear()

    def budget(self) -> Budget:
        timing, settings = self._core.timing, self._core.settings
        return Budget(
            budget_bytes(settings.budget, self.working_set()),
            settings.max_resident,
            timing.min_resident_s,
            timing.idle_s,
            timing.patience_s,
        )

    def working_set(self) -> int:
        told = [r.ready.device_working_set for r in self._core.state.replicas() if r.ready and not r.host]
        return working_set(told, self._ram)

    def units(self, now: float) -> list[Unit]:
        budget = budget_bytes(self._core.settings.budget, self.working_set())
        ttl_s = self._core.settings.idle_ttl
        return units(self._core.state.models.values(), lambda m: self.sizes.replica(m, budget), ttl_s, now)

    def review(self) -> None:
        """Ask the planner, and do what it says."""
        state = self._core.state
        if not state.accepting:
            return
        now = time.monotonic()
        self.wishes.expire(now)
        fleet, budget = self.units(now), self.budget()
        known = {u.name: u for u in fleet}
        for wish in self.wishes.pending():
            if wish.model not in known or known[wish.model].phase is Phase.RESIDENT:
                self.wishes.drop(wish.model)
        wishes = self.wishes.pending()
        actions = plan(fleet, budget, wishes, now)
        if self._is_news(actions):
            self.log.add(decision(state.name, now, budget, fleet, wishes, actions))
        for action in actions:
            self._do(state.models[action.model], action)

    def _is_news(self, actions: Sequence[AnyAction]) -> bool:
        """Whether there is more than waiting that is in the log already."""
        news = False
        for action in actions:
            known = self.wishes.find(action.model)
            key = (action.model, known.wish.since if known else 0.0)
            news |= not isinstance(action, Wait) or key not in self._logged
            self._logged.add(key)
        if len(self._logged) > 10_000:
            self._logged.clear()
        return news

    def _do(self, model: Model, action: AnyAction) -> None:
        known = self.wishes.find(model.name)
        match action:
            case Load():
                model.owed = known is not None and not known.wish.preload
                self._aim(model, Goal.SERVE, f"loading {model.name}: {action.reason}")
            case Evict():
                made = f" for {action.wanted_by}" if action.wanted_by else ""
                self._aim(model, Goal.STANDBY, f"unloading {model.name}{made}: {action.reason}")
            case Hold():
                self._aim(model, Goal.HOLD, f"holding {model.name} for {action.wanted_by}: {action.reason}")
            case Release():
                self._aim(model, Goal.SERVE, f"{model.name} takes requests again: {action.reason}")
            case Refuse():
                if known:
                    known.refused = action
                    known.keep_until = time.monotonic() + KEEP_SECONDS
                self._core.changes.notify()
            case Wait():
                if known and known.waiting != action.reason:
                    known.waiting = action.reason
                    self._core.changes.notify()

    def _aim(self, model: Model, goal: Goal, event: str) -> None:
        if self._core.serving:
            self._core.events.event("", event)
        model.goal = goal
        self._core.changed()
        self._lifecycle.pursue(model)

    # --- telling

    def status(self) -> dict[str, Any]:
        """For `ctl status`. Sizes in bytes, times in seconds."""
        now = time.monotonic()
        fleet, budget = self.units(now), self.budget()
        return {
            "budget_bytes": budget.bytes,
            "working_set_bytes": self.working_set(),
            "charged_bytes": sum(u.holds for u in fleet),
            "max_resident": budget.max_resident,
            "resident": sum(u.phase in (Phase.RESIDENT, Phase.HELD) for u in fleet),
            "models": {u.name: self._model_status(u, now) for u in fleet},
        }

    def _model_status(self, unit: Unit, now: float) -> dict[str, Any]:
        model = self._core.state.models[unit.name]
        known = self.wishes.find(unit.name)
        return {
            "phase": unit.phase.value,
            "need_bytes": unit.need,
            "measured": self.sizes.is_measured(model),
            "charged_bytes": unit.holds,
            "pinned": model.pinned,
            "priority": unit.priority,
            "idle_ttl_s": unit.ttl_s,
            "idle_s": round(now - unit.used, 1) if unit.phase is Phase.RESIDENT else None,
            "wanted_s": round(now - known.wish.since, 1) if known and not known.refused else None,
            "waiting": known.waiting if known else "",
            "refused": known.refused.reason if known and known.refused else "",
        }
