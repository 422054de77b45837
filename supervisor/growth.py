"""Whether there is room for the replicas that a changed configuration adds to a model that serves."""

from mlxhost.supervisor.config.diff import Differences
from mlxhost.supervisor.console import size
from mlxhost.supervisor.core import Core
from mlxhost.supervisor.settings import Settings
from mlxhost.supervisor.state import Goal, Model


def too_large(core: Core, found: Differences, after: Settings) -> str:
    """Why there can never be as many as `after` asks for, whatever makes room; empty if that is not so."""
    for spec in after.models:
        model, count = core.state.models.get(spec.name), spec.replicas
        if model and "replicas" in found.live.get(spec.name, ()) and _more(model, count):
            need, _, budget = _room_for(core, model)
            if need * count > budget:
                needed = f"{count} replicas of {model.name} need {size(need * count)}"
                return f"{needed}, and the whole budget is {size(budget)}"
    return ""


def crowded(core: Core, model: Model, count: int) -> bool:
    """Whether others must make room before `model` can have `count` replicas. The planner sees to that, for a
    model as a whole, so it is to be loaded anew."""
    need, free, _ = _room_for(core, model)
    more = _more(model, count)
    return more > 0 and more * need > free


def _more(model: Model, count: int) -> int:
    """How many processes `count` replicas add; none for one that is not to serve."""
    if model.goal not in (Goal.SERVE, Goal.HOLD):
        return 0
    return max(0, count - sum(not r.host and not r.retiring for r in model.replicas))


def _room_for(core: Core, model: Model) -> tuple[int, int, int]:
    return core.residency.room_for(model) if core.residency else (0, 0, 0)
