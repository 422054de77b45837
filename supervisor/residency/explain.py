"""Decisions in words, and the same decisions made again. Pure.

A log holds whole inputs, so `replay` asks the planner of this version the same question and says where it
answers differently.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlxhost.supervisor.console import size
from mlxhost.supervisor.residency.decisions import Decision
from mlxhost.supervisor.residency.facts import AnyAction, Evict, Hold, Phase, Unit
from mlxhost.supervisor.residency.plan import plan
from mlxhost.supervisor.table import table

HEADER = ("MODEL", "STANDS", "NEEDS", "CHARGED", "IDLE", "PINNED", "PRIORITY", "WAITS")


def decision_lines(decision: Decision, model: str = "") -> Iterator[str]:
    """What was decided, and over what: one line an action, then the fleet as the planner saw it."""
    at = time.strftime("%H:%M:%S", time.localtime(decision.at))
    for action in decision.actions:
        if not model or model in (action.model, getattr(action, "wanted_by", "")):
            yield f"{at} {action_text(action)}"
    charged = sum(u.holds for u in decision.units)
    there = ", ".join(_standing(u, decision.now) for u in decision.units if u.phase is not Phase.ABSENT)
    yield f"         {size(charged)} of {size(decision.budget.bytes)} charged: {there or 'nothing resident'}"


def action_text(action: AnyAction) -> str:
    verb = type(action).__name__.lower()
    made = f" for {action.wanted_by}" if isinstance(action, Evict | Hold) and action.wanted_by else ""
    return f"{verb} {action.model}{made}: {action.reason}"


def _standing(unit: Unit, now: float) -> str:
    words = [size(unit.holds), unit.phase.value]
    if unit.phase in (Phase.RESIDENT, Phase.HELD):
        words.append("busy" if unit.busy else f"idle {max(0.0, now - unit.used):.1f} s")
    if unit.pinned:
        words.append("pinned")
    return f"{unit.name} ({', '.join(words)})"


def replay(decision: Decision) -> list[str]:
    """What the planner decides now about the same inputs, where that differs."""
    again = plan(decision.units, decision.budget, decision.wishes, decision.now)
    return [
        *(f"then: {action_text(a)}" for a in decision.actions if a not in again),
        *(f"now:  {action_text(a)}" for a in again if a not in decision.actions),
    ]


def replay_lines(decisions: Iterable[Decision], model: str = "") -> Iterator[str]:
    """Every decision, how the planner would decide now, and a verdict."""
    count = differing = 0
    for decision in decisions:
        if model and not decision.concerns(model):
            continue
        count += 1
        yield from decision_lines(decision, model)
        if differences := replay(decision):
            differing += 1
            yield from (f"         {line}" for line in differences)
    same = "all the same" if not differing else f"{differing} of them differ"
    yield f"{count} decisions replayed: {same}"


def now_lines(status: dict[str, Any]) -> list[str]:
    """Where every model stands, as a table under the budget."""
    most = f", at most {status['max_resident']} models" if status["max_resident"] else ""
    head = (
        f"{size(status['charged_bytes'])} of a budget of {size(status['budget_bytes'])} charged{most} "
        f"(working set {size(status['working_set_bytes'])})"
    )
    rows: Sequence[tuple[str, ...]] = [
        (
            name,
            model["phase"],
            f"{size(model['need_bytes'])} {'measured' if model['measured'] else 'estimated'}",
            size(model["charged_bytes"]) if model["charged_bytes"] else "-",
            f"{model['idle_s']:.1f} s" if model["idle_s"] is not None else "-",
            "yes" if model["pinned"] else "-",
            str(model["priority"]),
            f"{model['wanted_s']:.1f} s" if model["wanted_s"] is not None else "-",
        )
        for name, model in status["models"].items()
    ]
    return [head, *table([HEADER, *rows])]
