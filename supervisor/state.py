"""The state of a fleet. Plain data with one owner: only the supervisor's event loop changes it."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from mlxhost.supervisor.modelspec import Model as ModelSpec
from mlxhost.wire.control import FleetFrontend, Heartbeat, Lease, ModelCard, Progress, Ready
from mlxhost.wire.data import Load

if TYPE_CHECKING:
    from mlxhost.supervisor.child import Child


class State(StrEnum):
    """Where a process stands; the values are those of the FLEET message."""

    STARTING = "starting"  # spawned, no HELLO yet
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # takes nothing new, finishes what runs
    DRAINED = "drained"
    UNLOADED = "unloaded"  # no process, because someone asked
    BACKOFF = "backoff"  # no process; a restart is due
    FAILED = "failed"  # no process, and none without `ctl load`


class Goal(StrEnum):
    """What is wanted of a model: by the operator, or to make room for another one (see residency)."""

    SERVE = "serve"
    DRAIN = "drain"
    UNLOAD = "unload"
    HOLD = "hold"  # takes nothing new, until it is idle and unloaded, or its room is not needed any more
    STANDBY = "standby"  # no process until somebody asks for the model


RUNNING = "running"  # the mode of a worker that steps (see the heartbeat)
RELOADING = "reloading"
PAUSED = frozenset({"pausing", "paused"})
ALIVE = frozenset({State.STARTING, State.LOADING, State.READY, State.DRAINING, State.DRAINED})
WAS_READY = frozenset({State.READY, State.DRAINING, State.DRAINED})
SETTLED = frozenset({State.READY, State.DRAINED, State.UNLOADED, State.FAILED})


@dataclass(slots=True, kw_only=True)
class Member:
    """One slot of the fleet and the process in it, if any. Times are time.monotonic()."""

    slot: str
    role: str  # worker, frontend
    host: str = ""  # the machine it runs on, when that is another one; then `child` is None
    state: State = State.UNLOADED
    epoch: int = 0  # of the living process, or of the next one
    token: str = ""
    child: "Child | None" = None
    greeted: bool = False
    spawned_at: float = 0.0
    heard_at: float = 0.0  # last message of any kind
    beat: Heartbeat | None = None
    beat_at: float = 0.0
    disconnected_at: float = 0.0  # when its control connection closed; 0: it is open
    restarts: list[float] = field(default_factory=list)
    total_restarts: int = 0
    load_crashes: int = 0
    restart_at: float = 0.0
    incident: int = 0
    was_ready: bool = False  # the process that died last had been
    kill_reason: str = ""  # why the supervisor itself killed the process
    held_bytes: int = 0  # memory, as the kernel counts it (see supervisor.leases.truth)
    load_timed_out: bool = False  # it was killed for taking too long to get ready
    kill_at: float = 0.0  # when SIGKILL follows; 0: not decided
    stopping: bool = False  # STOP was sent: the exit to come is wanted
    dead_message: str = ""  # what the process said in DEAD
    reason: str = ""  # why it is not serving
    last_lines: list[str] = field(default_factory=list)  # of the last process that died

    @property
    def load(self) -> Load:
        return self.beat.load if self.beat else Load()

    @property
    def mode(self) -> str:
        return self.beat.mode if self.beat else RUNNING

    @property
    def in_flight(self) -> int:
        return self.beat.in_flight if self.beat else 0


@dataclass(slots=True, kw_only=True)
class Replica(Member):
    """One copy of a model: today one process."""

    model: "Model"
    index: int
    ready: Ready | None = None
    progress: Progress | None = None
    progress_at: float = 0.0
    phase_since: float = 0.0
    ready_at: float = 0.0
    tick_at: float = 0.0  # when the engine's tick last advanced, or the worker was last idle
    threads: int = 1
    lease: Lease = field(default_factory=Lease)  # of memory; the threads are beside it
    quiet_after: float = 0.0  # a drain believes only heartbeats later than this
    retiring: bool = False  # it is to end, whatever its model's goal, and leave the fleet

    @property
    def goal(self) -> Goal:
        return Goal.UNLOAD if self.retiring else self.model.goal

    flushing: int = 0  # the epoch of the process that is making its cache durable before it ends
    held_before: int = 0  # held_bytes of the process that ended last
    available_before: int = 0  # memory that was available before that process was ended


@dataclass(slots=True, kw_only=True)
class Frontend(Member):
    endpoint: str = ""  # of its data ROUTER
    remote_endpoint: str = ""  # the same for workers on other machines


@dataclass(slots=True, kw_only=True, eq=False)
class Model:
    spec: ModelSpec
    routing: str  # policy
    goal: Goal = Goal.SERVE
    replicas: list[Replica] = field(default_factory=list)
    card: ModelCard | None = None
    created: int = 0  # unix time
    pinned: bool = False  # never evicted
    used_at: float = 0.0  # when it was last seen with a request; time.monotonic()
    owed: bool = False  # it was loaded for requests that are still to reach it

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(slots=True, kw_only=True)
class FleetState:
    name: str
    url: str
    routing: str  # policy of models that are yet to come
    models: dict[str, Model]
    frontends: list[Frontend]
    accepting: bool = True
    version: int = 0
    started_at: float = field(default_factory=time.monotonic)
    bad_messages: int = 0
    last_death: float = float("-inf")
    last_incident: int = 0
    joined: str = ""  # the endpoint of the fleet that this machine's workers serve, when that is another one
    joined_frontends: list[FleetFrontend] = field(default_factory=list)  # as that fleet tells them

    def replicas(self) -> Iterator[Replica]:
        return itertools.chain.from_iterable(m.replicas for m in self.models.values())

    def members(self) -> Iterator[Member]:
        return itertools.chain(self.frontends, self.replicas())

    def local(self) -> Iterator[Member]:
        """Members whose processes are this supervisor's own."""
        return (m for m in self.members() if not m.host)

    def requests_possible(self) -> bool:
        """Whether any request can have been let in."""
        return bool(self.joined_frontends) or any(f.state in WAS_READY for f in self.frontends)

    def member(self, slot: str) -> Member | None:
        return next((m for m in self.members() if m.slot == slot), None)

    def find_model(self, name: str) -> Model | None:
        """By name, else by alias."""
        if name in self.models:
            return self.models[name]
        return next((m for m in self.models.values() if name in m.spec.aliases), None)


def new_fleet(
    *, name: str, url: str, routing: str, models: tuple[ModelSpec, ...], frontends: int
) -> FleetState:
    """A fleet with nothing running yet."""
    return FleetState(
        name=name,
        url=url,
        routing=routing,
        models={spec.name: new_model(spec, routing) for spec in models},
        frontends=[Frontend(slot=f"frontend/{i}", role="frontend") for i in range(frontends)],
    )


def new_model(spec: ModelSpec, routing: str) -> Model:
    """A model that nothing runs of yet. `routing` is the fleet's policy, for a model without its own."""
    model = Model(
        spec=spec,
        routing=spec.routing or routing,
        goal=Goal.STANDBY,
        created=int(time.time()),
        pinned=spec.pin,
    )
    model.replicas = [
        Replica(slot=f"{spec.name}/{i}", role="worker", model=model, index=i) for i in range(spec.replicas)
    ]
    return model
