"""What the I/O thread tells the engine thread, and what it may read of it. Plain values over a queue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxhost.wire.control import Ctl, Init, Lease, MemoryUse, Refused
from mlxhost.wire.data import Add, Load
from mlxhost.worker.modes import Mode

if TYPE_CHECKING:  # loads numpy
    from mlxhost.worker.grammar.compiler import Key, Outcome


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request; `prompt` is a view of its token ids."""

    frontend: str
    add: Add
    prompt: Sequence[int]


@dataclass(frozen=True, slots=True)
class Aborted:
    """Rows that their frontend no longer wants."""

    frontend: str
    rows: Sequence[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class FrontendGone:
    """Nobody reads this frontend's rows any more."""

    frontend: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish what runs within `deadline_s`, then end."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class GrammarDone:
    """A grammar that rows wait for is compiled, or cannot be."""

    key: "Key"
    outcome: "Outcome"


Event = Arrived | Aborted | FrontendGone | Shutdown | GrammarDone | Lease | Ctl | Init | Refused


@dataclass(frozen=True, slots=True)
class Status:
    """The engine's figures after a step, replaced whole by the engine and read by the I/O thread."""

    running: int = 0
    waiting: int = 0
    compiling: int = 0  # rows that wait for their grammar, which the engine does not work on
    kv_tokens: int = 0
    kv_capacity: int = 0
    cached_tokens: int = 0
    generated: int = 0  # tokens since the start
    tick: int = 0
    last_seq: Mapping[str, int] = field(default_factory=dict)
    mode: Mode = Mode.RUNNING
    memory: MemoryUse = field(default_factory=MemoryUse)

    @property
    def busy(self) -> bool:
        """Whether the engine steps. A paused one does not, whatever waits in it."""
        if self.mode is Mode.RUNNING:
            return self.running > 0 or self.waiting > 0
        return self.mode is Mode.PAUSING and self.running > 0

    def load(self, frontend: str = "", tokens_per_s: float = 0.0) -> Load:
        """These figures as the wire carries them to one frontend."""
        return Load(
            running=self.running,
            waiting=self.waiting + self.compiling,
            kv_tokens=self.kv_tokens,
            kv_capacity=self.kv_capacity,
            cached_tokens=self.cached_tokens,
            tokens_per_s=tokens_per_s,
            last_seq=self.last_seq.get(frontend, 0),
            tick=self.tick,
        )
