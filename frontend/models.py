"""The table of served models, as the last FLEET told it: names, states, who may take a request."""

from collections.abc import Iterator
from pathlib import PurePath

from mlxhost.frontend.errors import ModelNotFound, ModelNotReady, ShuttingDown, Unavailable
from mlxhost.frontend.routing import ReplicaKey
from mlxhost.wire.control import Fleet, FleetModel, FleetReplica

READY = "ready"
ABSENT = "absent"  # no process, by no one's will
# States in which the process that `epoch` names is alive; its running rows go on.
LIVE_STATES = frozenset(
    {"starting", "loading", "ready", "draining", "drained", "pausing", "paused", "sleeping", "reloading"}
)

# States of a model that end by themselves, or by asking for it: requests may wait.
PASSING_STATES = frozenset({ABSENT, "starting", "loading", "backoff", "draining", "drained"})

# What to tell clients of a model none of whose replicas is ready: the first state found decides.
# Seconds to wait, and whether retrying can help without anyone acting.
_WAITS: dict[str, tuple[float, bool]] = {
    "loading": (5.0, True),
    "starting": (5.0, True),
    "backoff": (5.0, True),
    "reloading": (5.0, True),
    ABSENT: (5.0, True),
    "pausing": (10.0, True),
    "paused": (10.0, True),
    "draining": (10.0, True),
    "sleeping": (30.0, True),
    "drained": (30.0, True),
    "unloaded": (30.0, False),
    "failed": (30.0, False),
}


class ModelTable:
    """Looks models up by any of their names."""

    def __init__(self) -> None:
        self.fleet = Fleet(version=0, frontends=[], models=[])
        self._known = False  # no FLEET yet, so nothing can be said about any name
        self._by_name: dict[str, FleetModel] = {}
        self._lengths: dict[str, int] = {}

    def update(self, fleet: Fleet) -> None:
        """Take over a newer FLEET. A model's own name beats another's alias, an alias a directory name."""
        self.fleet, self._known = fleet, True
        self._by_name = {}
        self._lengths = {model.name: max_model_len(model) for model in fleet.models}
        for model in fleet.models:
            self._by_name.setdefault(model.name, model)
        for model in fleet.models:
            for alias in model.aliases:
                self._by_name.setdefault(alias, model)
        for model in fleet.models:
            if model.card is not None:
                self._by_name.setdefault(PurePath(model.card.directory).name, model)

    def resolve(self, name: str) -> FleetModel:
        """The model of that name, alias or directory name. Raises ModelNotFound, or Unavailable before the
        first FLEET."""
        if not self._known:
            raise Unavailable("the server is starting", "starting")
        model = self._by_name.get(name)
        if model is None:
            raise ModelNotFound(name, [m.name for m in self.fleet.models])
        return model

    def current(self, name: str) -> FleetModel:
        """Like `resolve`, for a request about to be sent. Raises ModelNotReady unless a replica is ready,
        and ShuttingDown once admission has stopped."""
        if not self.fleet.accepting:
            raise ShuttingDown
        model = self.resolve(name)
        if model.card is None or not any(r.state == READY for r in model.replicas):
            raise not_ready(model)
        return model

    def max_model_len(self, model: FleetModel) -> int:
        """`max_model_len` of a model of the present fleet, without a look at each replica."""
        return self._lengths.get(model.name, 0)

    def live_replicas(self) -> Iterator[tuple[FleetModel, FleetReplica]]:
        """Every replica whose process is alive, ready or not."""
        for model in self.fleet.models:
            for replica in model.replicas:
                if replica.state in LIVE_STATES:
                    yield model, replica


def replica_key(replica: FleetReplica) -> ReplicaKey:
    """What identifies one spawn of a replica."""
    return replica.slot, replica.epoch


def state_of(model: FleetModel) -> str:
    """One word for the whole model: ready when any replica is, else the most hopeful state."""
    states = {r.state for r in model.replicas}
    if READY in states:
        return READY
    return next((s for s in _WAITS if s in states), "unloaded")


def max_model_len(model: FleetModel) -> int:
    """Context that every ready replica offers, in tokens; 0 while none is ready."""
    return min((r.max_model_len for r in model.replicas if r.state == READY), default=0)


def not_ready(model: FleetModel) -> ModelNotReady:
    """Why the model cannot take a request now."""
    state = state_of(model)
    wait, retryable = _WAITS.get(state, (1.0, True))
    return ModelNotReady(model.name, state, model.reason, wait, retryable)
