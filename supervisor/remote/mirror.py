"""A machine's report as replicas of the fleet."""

import time
from collections.abc import Collection
from pathlib import Path

from mlxhost.supervisor.console import printable
from mlxhost.supervisor.errors import UsageError
from mlxhost.supervisor.modelspec import Model as ModelSpec
from mlxhost.supervisor.modelspec import check_name
from mlxhost.supervisor.state import WAS_READY, FleetState, Goal, Model, Replica, State
from mlxhost.wire.control import HostReplica, ModelCard
from mlxhost.wire.curve import HOST_MARK

# Stands for the directory of a model that has none on this machine.
ELSEWHERE = Path("(on another machine)")
MAX_REPLICAS = 256


def state_here(
    reported: State, goal: Goal, *, leaving: bool, in_flight: int, settled: bool, matches: bool
) -> State:
    """The state in which the fleet holds a replica of another machine. Pure.

    What is ready there may be closed here: by `ctl drain`, or because the machine is leaving. `settled`: its
    figures are later than that; `matches`: it has the same tokenizer and template as the model's others.
    """
    if reported not in WAS_READY:
        return reported
    if not matches:
        return State.FAILED
    if reported is State.READY and goal not in (Goal.DRAIN, Goal.UNLOAD) and not leaving:
        return State.READY
    return State.DRAINED if settled and in_flight == 0 else State.DRAINING


def apply(state: FleetState, host: str, reports: Collection[HostReplica], *, leaving: bool) -> list[str]:
    """Make the fleet's replicas of `host` those of its report. Returns what a user should read of it."""
    news = []
    valid = {r.slot: r for r in list(reports)[:MAX_REPLICAS] if _valid(r, host)}
    for report in valid.values():
        replica = _find(state, host, report)
        if replica is None:
            news.append(f"{printable(report.slot)}: the name of another replica of this fleet; left out")
        else:
            news += _update(replica, report, leaving=leaving)
    forget(state, [r for r in state.replicas() if r.host == host and r.slot not in valid])
    return news


def forget(state: FleetState, replicas: Collection[Replica]) -> None:
    """Take replicas of other machines off the list, and models that were only there."""
    for replica in replicas:
        replica.model.replicas.remove(replica)
    for name, model in list(state.models.items()):
        if model.spec.path == ELSEWHERE and not model.replicas:
            del state.models[name]


def lose(replica: Replica, reason: str) -> None:
    """Its machine is not heard: nothing is known of it, and what it ran is over."""
    replica.state, replica.reason = State.BACKOFF, reason
    replica.ready = replica.progress = replica.beat = None


def _valid(report: HostReplica, host: str) -> bool:
    """A slot of this machine, `host:model/index`, and a state that a replica may have."""
    head, _, index = report.slot.rpartition("/")
    try:
        check_name(report.model)
    except UsageError:
        return False
    return head == f"{host}{HOST_MARK}{report.model}" and index.isdigit() and report.state in set(State)


def _find(state: FleetState, host: str, report: HostReplica) -> Replica | None:
    """The replica that `report` is about, made when it is new; None when its slot is another's."""
    if (known := state.member(report.slot)) is not None:
        return known if isinstance(known, Replica) and known.host == host else None
    model = state.models.get(report.model)
    if model is None:
        spec = ModelSpec(report.model, ELSEWHERE, 0, tuple(report.aliases))
        made = Model(spec=spec, routing=state.routing, created=int(time.time()))
        model = state.models[report.model] = made
    index = max((r.index for r in model.replicas), default=-1) + 1
    replica = Replica(slot=report.slot, role="worker", model=model, index=index, host=host)
    model.replicas.append(replica)
    return replica


def _update(replica: Replica, report: HostReplica, *, leaving: bool) -> list[str]:
    now, before = time.monotonic(), replica.state
    if replica.epoch != report.epoch:
        replica.epoch, replica.spawned_at = report.epoch, now
        replica.total_restarts += before is not State.UNLOADED
    replica.heard_at = replica.beat_at = now
    if report.beat and (not report.beat.busy or report.beat.load.tick != replica.load.tick):
        replica.tick_at = now
    replica.ready, replica.beat, replica.progress = report.ready, report.beat, report.progress
    matches = report.ready is None or _card_agrees(replica, report.ready.card)
    replica.state = state_here(
        State(report.state),
        replica.model.goal,
        leaving=leaving,
        in_flight=replica.in_flight,
        settled=now >= replica.quiet_after,
        matches=matches,
    )
    replica.reason = printable(report.reason) if matches else _difference(replica)
    if replica.state is before:
        return []
    why = f": {replica.reason}" if replica.reason and replica.state is not State.READY else ""
    return [f"{replica.slot}: {replica.state.value}{why}"]


def _card_agrees(replica: Replica, card: ModelCard) -> bool:
    """Whether the replica can serve beside the model's others; the first one decides what the model is."""
    model = replica.model
    if model.card is None or not any(r.state in WAS_READY for r in model.replicas if r is not replica):
        model.card = model.card if model.card and model.card.key == card.key else card
    return model.card.key == card.key


def _difference(replica: Replica) -> str:
    mine = {f.name: f.sha256 for f in replica.model.card.files} if replica.model.card else {}
    its = {f.name: f.sha256 for f in replica.ready.card.files} if replica.ready else {}
    names = ", ".join(sorted(n for n in mine.keys() | its.keys() if mine.get(n) != its.get(n)))
    return f"its files differ from those of the model {replica.model.name} here ({names})"
