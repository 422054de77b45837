"""What this frontend knows of one spawn of a replica."""

import itertools
from dataclasses import dataclass, field

from mlxhost.frontend.columns import Columns
from mlxhost.frontend.remote import Route
from mlxhost.frontend.routing import ReplicaKey
from mlxhost.frontend.rows import Row
from mlxhost.wire import data


@dataclass(slots=True, eq=False)
class Replica:
    """Its rows, and its load, which it writes into the columns of its model once a FLEET has listed it."""

    key: ReplicaKey
    model: str = ""  # empty until a FLEET lists it
    connected: bool = False  # it has said hello on the data socket, and can be reached
    route: Route | None = None  # where it said so last
    ready: bool = False  # what FLEET says
    load: data.Load = field(default_factory=data.Load)
    pending: dict[int, int] = field(default_factory=dict)  # KV tokens by seq, of ADDs newer than `load`
    rows: dict[int, Row] = field(default_factory=dict)
    unsent_aborts: list[tuple[int, str]] = field(default_factory=list)
    seq: int = 0
    heard: float = 0.0  # monotonic time of its last message
    idle_ticks: int = 0
    columns: Columns | None = None
    position: int = 0

    def seat(self, columns: Columns, position: int, limit: int) -> None:
        """Take a place among the model's replicas; `limit` is the number of rows it takes before it refuses
        (0: not known)."""
        self.columns, self.position = columns, position
        columns.place(position, limit)
        columns.credit(position, len(self.pending), sum(self.pending.values()))
        self._report()

    def leave(self) -> None:
        """The process is gone; whoever comes next to its place is not its business."""
        if self.columns is not None:
            self.columns.set_usable(self.position, False)
            self.columns = None

    def set_state(self, *, ready: bool | None = None, connected: bool | None = None) -> None:
        """What FLEET or the data link says."""
        self.ready = self.ready if ready is None else ready
        self.connected = self.connected if connected is None else connected
        if self.columns is not None:
            self.columns.set_usable(self.position, self.ready and self.connected)

    def take_load(self, load: data.Load) -> None:
        """Remember a newer report; what it includes is no longer pending."""
        self.load = load
        if self.pending:
            for seq in list(itertools.takewhile(lambda s: s <= load.last_seq, self.pending)):
                self.settle(seq)
        self._report()

    def add_pending(self, seq: int, tokens: int) -> None:
        """An ADD was sent."""
        self.pending[seq] = tokens
        if self.columns is not None:
            self.columns.credit(self.position, 1, tokens)

    def settle(self, seq: int) -> None:
        """An ADD is part of the report, or has ended; harmless when it was settled before."""
        tokens = self.pending.pop(seq, None)
        if tokens is not None and self.columns is not None:
            self.columns.credit(self.position, -1, -tokens)

    def _report(self) -> None:
        if self.columns is not None:
            load = self.load
            self.columns.report(self.position, load.running + load.waiting, load.kv_tokens, load.kv_capacity)
