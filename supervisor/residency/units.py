"""The fleet's state as the planner sees it. Pure."""

from collections.abc import Callable, Iterable

from mlxhost.supervisor.leases.shrink import Rung
from mlxhost.supervisor.residency.facts import Phase, Unit
from mlxhost.supervisor.state import ALIVE, WAS_READY, Goal, Model, Replica, State

# Orders to shrink that follow one which was not enough.
_OVERDUE = (Rung.DROP_PREFIXES.order, Rung.PAUSE.order)
# How long a model that was loaded for requests counts as busy though none has reached it yet.
OWED_SECONDS = 5.0


def units(models: Iterable[Model], need: Callable[[Model], int], ttl_s: float, now: float) -> list[Unit]:
    """A unit for each model that has replicas on this machine. `need` tells what one replica needs, `ttl_s`
    the fleet's idle time to live."""
    return [unit(model, need(model), ttl_s, now) for model in models if local(model)]


def local(model: Model) -> list[Replica]:
    """The replicas that run on this machine, if they do."""
    return [r for r in model.replicas if not r.host]


def unit(model: Model, need: int, ttl_s: float, now: float) -> Unit:
    replicas = local(model)
    taking = [r for r in replicas if r.child or r.state in ALIVE or r.state is State.BACKOFF]
    phase = _phase(model, replicas, taking)
    since = max((r.ready_at for r in replicas), default=0.0)
    used = max(model.used_at, since)
    owed = model.owed and model.used_at <= since and now - since < OWED_SECONDS
    # A replica that is down for the moment comes back; of a model that leaves, only what is left counts.
    staying = phase not in (Phase.LEAVING, Phase.ABSENT, Phase.OUT)
    counted = [r for r in replicas if r.state is not State.FAILED] if staying else taking
    running = any(r.in_flight or r.load.running or r.load.waiting for r in taking)
    return Unit(
        model.name,
        phase,
        need=need * len(replicas),
        holds=sum(_holds(r, need) for r in counted),
        busy=running or owed or phase is Phase.LOADING,
        # What the operator has drained stays as it is: it is neither evicted nor served.
        pinned=model.pinned or model.goal is Goal.DRAIN,
        priority=model.spec.priority,
        ttl_s=model.spec.idle_ttl or ttl_s,
        since=since,
        used=now if running else used,
    )


def _holds(replica: Replica, need: int) -> int:
    """What is charged. Under a lease, what a worker takes beyond its need is lent: it is asked back as soon
    as another model needs the room, and counts only when it does not come back."""
    lent = bool(replica.lease.memory_bytes) and replica.lease.shrink not in _OVERDUE
    return need if lent else max(need, replica.held_bytes)


def _phase(model: Model, replicas: list[Replica], taking: list[Replica]) -> Phase:
    if not taking:
        out = model.goal in (Goal.UNLOAD, Goal.DRAIN) or all(r.state is State.FAILED for r in replicas)
        return Phase.OUT if out else Phase.ABSENT
    match model.goal:
        case Goal.STANDBY | Goal.UNLOAD:
            return Phase.LEAVING
        case Goal.HOLD:
            return Phase.HELD
        case _:
            return Phase.RESIDENT if any(r.state in WAS_READY for r in taking) else Phase.LOADING
