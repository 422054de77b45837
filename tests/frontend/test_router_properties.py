"""Whatever happens to a fleet, the router's columns tell the truth and its choices are allowed."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxhost.frontend.columns import CLOSED
from mlxhost.frontend.errors import ReplicaNotReady
from mlxhost.frontend.hints import Hints
from mlxhost.frontend.replica import Replica
from mlxhost.frontend.router import Router
from mlxhost.wire.control import Fleet, FleetFrontend, FleetModel, FleetReplica
from mlxhost.wire.data import Load
from mlxhost.wire.policies import ROUTINGS

SIZE = 4
STATES = ("starting", "loading", "ready", "draining", "drained", "backoff", "failed", "unloaded")
ALIVE = ("starting", "loading", "ready", "draining", "drained")
PROMPTS = [bytes([n]) * 256 * 3 for n in range(3)] + [b"\1" * 256 + b"\2" * 512, b"short"]

positions = st.integers(0, SIZE - 1)
hints = st.one_of(
    st.just(Hints()),
    st.builds(Hints, session=st.sampled_from(["a", "b", "c"])),
    st.builds(Hints, replica=positions),
    st.builds(Hints, room=st.integers(0, 99)),
    st.tuples(positions, positions).map(lambda b: Hints(first=min(b), last=max(b))),
    st.tuples(positions, positions).map(lambda b: Hints(first=min(b), last=max(b), session="a")),
)


@dataclass
class Seat:
    """What the test itself knows of a replica."""

    epoch: int = 1
    state: str = "ready"
    seq: int = 0
    sent: dict[int, int] = field(default_factory=dict)  # seq -> tokens that the worker has not reported
    load: Load = field(default_factory=Load)


class Fleets(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(ordinal=1)
        self.seats = [Seat() for _ in range(SIZE)]
        self.replicas = [self.spawn(i) for i in range(SIZE)]
        self.policy, self.frontends = "round-robin", 1
        self.publish()

    def spawn(self, position: int) -> Replica:
        return Replica((f"m/{position}", self.seats[position].epoch), "m")

    @property
    def model(self) -> FleetModel:
        listed = [FleetReplica(f"m/{i}", i, s.epoch, s.state) for i, s in enumerate(self.seats)]
        return FleetModel("m", [], listed, self.policy)

    def publish(self) -> None:
        frontends = [FleetFrontend(f"frontend/{i}", 1, "x") for i in range(self.frontends)]
        live = {r.key: r for r, s in zip(self.replicas, self.seats, strict=True) if s.state in ALIVE}
        self.router.update(Fleet(1, frontends, [self.model]), live)

    def usable(self, position: int) -> bool:
        return self.seats[position].state == "ready" and self.replicas[position].connected

    @rule(position=positions, state=st.sampled_from(STATES))
    def fleet_says(self, position: int, state: str) -> None:
        self.seats[position].state = state
        self.publish()

    @rule(position=positions)
    def dies_and_returns(self, position: int) -> None:
        self.seats[position] = Seat(self.seats[position].epoch + 1)
        self.replicas[position] = self.spawn(position)
        self.publish()

    @rule(policy=st.sampled_from(ROUTINGS), frontends=st.integers(1, 3))
    def settings_change(self, policy: str, frontends: int) -> None:
        self.policy, self.frontends = policy, frontends
        self.publish()

    @rule(position=positions, connected=st.booleans())
    def link_changes(self, position: int, connected: bool) -> None:
        self.replicas[position].set_state(connected=connected)

    @rule(position=positions, rows=st.integers(0, 50), kv=st.integers(0, 5000), share=st.floats(0, 1))
    def worker_reports(self, position: int, rows: int, kv: int, share: float) -> None:
        seat = self.seats[position]
        seen = int(seat.seq * share)
        seat.sent = {seq: tokens for seq, tokens in seat.sent.items() if seq > seen}
        seat.load = Load(rows, 0, kv, 1000, last_seq=seen)
        self.replicas[position].take_load(seat.load)

    @rule(position=positions, share=st.floats(0, 1))
    def row_ends(self, position: int, share: float) -> None:
        seat = self.seats[position]
        if seat.seq:
            seq = 1 + int(share * (seat.seq - 1))
            seat.sent.pop(seq, None)
            self.replicas[position].settle(seq)

    @rule(asked=hints, prompt=st.sampled_from(PROMPTS))
    def request_comes(self, asked: Hints, prompt: bytes) -> None:
        if self.policy == "bootstrap-room" and asked.room is None and asked.replica is None:
            return
        allowed = range(asked.first, SIZE if asked.last is None else asked.last + 1)
        if asked.replica is not None:
            allowed = range(asked.replica, asked.replica + 1)
        elif asked.room is not None:
            allowed = range(asked.room % SIZE, asked.room % SIZE + 1)
        possible = [p for p in allowed if self.usable(p)]
        try:
            assert self.router.can_route(self.model, asked) == bool(possible)
        except ReplicaNotReady:
            assert not possible
        replica = self.router.choose(self.model, asked, prompt)
        assert (replica is not None) == bool(possible)
        if replica is None:
            return
        assert replica.position in possible
        assert replica is self.replicas[replica.position]
        seat = self.seats[replica.position]
        seat.seq += 1
        seat.sent[seat.seq] = 7
        replica.add_pending(seat.seq, 7)
        self.router.sent(self.model, replica, asked, prompt)

    @invariant()
    def columns_tell_the_truth(self) -> None:
        total = count = 0
        for position, (seat, replica) in enumerate(zip(self.seats, self.replicas, strict=True)):
            columns = replica.columns
            if columns is None:
                assert seat.state not in ALIVE
                continue
            assert columns.usable[position] == self.usable(position)
            assert columns.credit_rows[position] == len(seat.sent) >= 0
            assert columns.credit_kv[position] == sum(seat.sent.values()) >= 0
            assert columns.in_flight(position) == seat.load.running + len(seat.sent)
            assert columns.kv_tokens(position) == seat.load.kv_tokens + sum(seat.sent.values())
            assert (columns.rows_cost[position] < CLOSED) == self.usable(position)
            if self.usable(position):
                total, count = total + columns.in_flight(position), count + 1
        assert self.router.usable("m") == count
        for columns in {id(r.columns): r.columns for r in self.replicas if r.columns}.values():
            assert (columns.in_flight_total, columns.usable_count) == (total, count)


TestFleets = Fleets.TestCase
TestFleets.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
