"""The engine: one thread that owns MLX and runs requests, a tick at a time.

A tick takes in what arrived and ends what is late; stepper.py computes; this file sends what came of it.
Knows token ids only; nothing of text or HTTP. Control calls are for operations.py, which takes its turn
between two ticks.
"""

import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import mlx.core as mx
from msgspec import Struct

from mlxhost.wire import control, data
from mlxhost.wire.control import MemoryUse
from mlxhost.wire.data import Finish
from mlxhost.worker.admission import Admission, Capacity
from mlxhost.worker.backend import release_memory
from mlxhost.worker.batch import Batch, Token
from mlxhost.worker.chunks import Timing
from mlxhost.worker.emission import outs
from mlxhost.worker.errors import RowError
from mlxhost.worker.events import Aborted, Arrived, Event, FrontendGone, GrammarDone, Shutdown, Status
from mlxhost.worker.grammar.waiting import Grammars
from mlxhost.worker.intake import rows_of
from mlxhost.worker.kv import StepShape
from mlxhost.worker.memory import Memory
from mlxhost.worker.modes import STEPPING, Hold, Holds, Mode
from mlxhost.worker.prefill import Prefill
from mlxhost.worker.profile import Profile
from mlxhost.worker.row import Key, Row
from mlxhost.worker.sessions import Sessions
from mlxhost.worker.stepper import Stepper
from mlxhost.worker.threads import CpuThreads

_TRIM_AFTER_S = 0.3  # idle time before freed memory goes back to the system
_SLEEPING_RETRY_S = 30.0
_USE_S = 0.1  # how old the memory's figures may be while rows run
_EXIT_S = 0.5  # of a shutdown's time, for what comes after the engine


class Outlet(Protocol):
    """Where the engine's messages go; the link implements it."""

    def send(self, frontend: str | None, message: Struct) -> None: ...

    def publish(self, status: Status) -> None: ...


class Calls(Protocol):
    """Control calls, taken between two ticks."""

    def call(self, ctl: control.Ctl) -> None: ...

    def settle(self) -> None: ...

    def end(self) -> None: ...


class Engine:
    """Runs one model's requests until told to stop. `model` None: it sleeps until `serve`."""

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        capacity: Capacity,
        max_gap_s: float,
        timing: Timing | None = None,
        epoch: int,
        threads: CpuThreads,
        inbox: "SimpleQueue[Event]",
        outlet: Outlet,
        grammars: Grammars,
        shape: StepShape | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._epoch = epoch
        self.threads = threads
        self._inbox = inbox
        self._outlet = outlet
        self._grammars = grammars
        self.admission = Admission(capacity)
        self.prefill = Prefill(max_gap_s, timing)
        self.stepper = Stepper(model, vocab_size, self.admission, self.prefill, self, shape)
        self.holds = Holds()
        self.sessions = Sessions()
        self.calls: Calls | None = None  # set by who answers them
        self.memory: Memory | None = None  # set by who knows the model's costs
        self._use, self._use_until = MemoryUse(), 0.0
        self._rows: dict[Key, Row] = {}
        self._last_seq: dict[str, int] = {}
        self._stop_at: float | None = None
        self._idle_since: float | None = None
        self._trimmed = False

    @property
    def model(self) -> Any:
        return self.stepper.model

    @property
    def batch(self) -> Batch:
        return self.stepper.batch

    @property
    def profile(self) -> Profile | None:
        return self.stepper.profile

    def run(self) -> None:
        """Tick until a Shutdown has been honoured. Raises EngineFailure when the model cannot go on."""
        while self._stop_at is None or self._rows:
            if not self._has_work and (event := self._wait()) is not None:
                self._on_event(event)
            self.step()
        self._grammars.close()
        self.stepper.prefix.close(self._stop_at - time.monotonic() - _EXIT_S)

    @property
    def mode(self) -> Mode:
        return self.holds.mode(self.admission.running)

    @property
    def _has_work(self) -> bool:
        """Whether a step would compute something."""
        mode = self.mode
        if mode is Mode.RUNNING:
            return len(self._rows) > len(self._grammars)
        return mode is Mode.PAUSING

    def step(self) -> None:
        """One tick: take in what arrived, one decode step, at most one prefill chunk."""
        while (event := self._next_event()) is not None:
            self._on_event(event)
        self._expire()
        mode = self.mode
        if mode in STEPPING:
            self.stepper.admit(only_begun=mode is Mode.PAUSING)
            self.threads.tune(mx.synchronize)
            self.stepper.step()
        self._publish_step()
        if self.calls is not None:
            self.calls.settle()

    # Events

    def _wait(self) -> Event | None:
        """The next event, if it comes before something else is to be done: rows that stand still have
        deadlines, the prefix cache has files to write, and freed memory is to go back to the system."""
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        due = [self.stepper.prefix.pump(busy=False)]
        if self._rows:
            due.append(_TRIM_AFTER_S)
        elif not self._trimmed:
            due.append(self._idle_since + _TRIM_AFTER_S - now)
        try:
            event = self._inbox.get(timeout=min((max(0.0, d) for d in due if d is not None), default=None))
        except Empty:
            if not self._rows and not self._trimmed and time.monotonic() > self._idle_since + _TRIM_AFTER_S:
                release_memory()
                self._trimmed = True
            return None
        self._idle_since, self._trimmed = None, False
        return event

    def _next_event(self) -> Event | None:
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    def _on_event(self, event: Event) -> None:
        match event:
            case Arrived():
                self._on_arrived(event)
            case Aborted():
                for handle, reason in event.rows:
                    if row := self._rows.get((event.frontend, handle)):
                        self.end([row], Finish.ABORT, reason)
            case FrontendGone():
                gone = [row for row in self._rows.values() if row.key[0] == event.frontend]
                self.end(gone, Finish.ABORT, "the frontend is gone")
            case Shutdown():
                self._stop_at = time.monotonic() + event.deadline_s
                self.hold(Hold.NONE)  # what is admitted may finish
                if self.calls is not None:
                    self.calls.end()
            case GrammarDone():
                for row, error in self._grammars.take(event):
                    if error is None:
                        self.admission.enqueue(row)
                    else:
                        self._refuse(row, error)
            case control.Lease():
                self.threads.lease(event.cpu_threads)
                self.stepper.device.weigh(event.weight)
                if self.memory is not None:
                    self.memory.obey(event)
            case control.Ctl():
                if self.calls is not None:
                    self.calls.call(event)

    def _on_arrived(self, event: Arrived) -> None:
        add = event.add
        self._last_seq = {**self._last_seq, event.frontend: add.seq}
        try:
            rows = self._rows_of(event)
        except RowError as error:
            for handle in (add.handle, *add.siblings):
                reject = data.Reject(handle, error.code, str(error), error.retry_after_s)
                self._outlet.send(event.frontend, reject)
            return
        for row in rows:
            self._rows[row.key] = row
            if row.session_id:
                self.sessions.started(row.session_id)
            try:
                if not self._grammars.hold(row):
                    self.admission.enqueue(row)
            except RowError as error:
                self._refuse(row, error)

    def _rows_of(self, event: Arrived) -> list[Row]:
        """The request's rows. Raises RowError when it cannot run here."""
        if self.holds.asleep:
            raise RowError(data.REJECT_SLEEPING, "the model sleeps until it is woken", _SLEEPING_RETRY_S)
        return rows_of(
            event, vocab_size=self._vocab_size, eos_ids=self._eos_ids, capacity=self.admission.capacity
        )

    # What operations may do, between two ticks

    def hold(self, hold: Hold) -> None:
        """Pause so, or (NONE) go on."""
        if self.holds.hold is Hold.FREEZE and hold is not Hold.FREEZE:
            self.batch.thaw()
        self.holds.hold = hold

    def let_go(self) -> None:
        """Fall asleep: forget the model and refuse what waits. No row may be running."""
        self.holds.asleep = True
        self.stepper.serve(None)
        asleep = RowError(data.REJECT_SLEEPING, "the model was put to sleep", _SLEEPING_RETRY_S)
        for row in [*self.admission.waiting, *self._grammars.rows()]:
            if not self._grammars.drop(row):
                self.admission.release(row)
            self._refuse(row, asleep)

    def serve(self, model: Any, card: control.ModelCard) -> None:
        """Run `model`, of the same shape as the one before, from now on. No row may be running."""
        self._eos_ids = card.eos_ids
        self._grammars.use(card, self._vocab_size)
        self.stepper.serve(model)
        self.holds.asleep = False

    def set_profile(self, profile: Profile | None) -> None:
        """Record laps from now on, or no more."""
        self.stepper.set_profile(profile)

    def rows(self, wanted: Callable[[Row], bool] = lambda _: True) -> list[Row]:
        """Rows that have not ended, waiting ones included."""
        return [row for row in self._rows.values() if wanted(row)]

    def publish(self) -> None:
        """Let the I/O thread have the figures of now."""
        self._use = self.memory.use() if self.memory else MemoryUse()
        self._use_until = time.monotonic() + _USE_S
        self._outlet.publish(self._status(self._use))

    def _publish_step(self) -> None:
        """As `publish`; between steps, what the memory is used for may be a little old."""
        if self._has_work and time.monotonic() < self._use_until:
            self._outlet.publish(self._status(self._use))
        else:
            self.publish()

    def _expire(self) -> None:
        """End rows whose deadline passed; all of them when the time to shut down has come."""
        now = time.monotonic()
        late = [row for row in self._rows.values() if row.deadline is not None and now > row.deadline]
        self.end(late, Finish.ABORT, "the deadline passed")
        if self._stop_at is not None and now > self._stop_at:
            self.end(list(self._rows.values()), Finish.ABORT, "the worker is shutting down")

    # Outcomes

    def accept(self, row: Row) -> None:
        """The row runs, for the first time or again."""
        if not row.accepted:
            row.accepted = True
            self._outlet.send(
                row.key[0], data.Accepted(row.key[1], row.cached_tokens, row.max_tokens, row.warning)
            )

    def end(self, rows: Sequence[Row], finish: Finish, detail: str) -> None:
        """End rows wherever they are, with their terminal message."""
        for row in rows:
            row.finish, row.detail = finish, detail
        self.emit([(row, []) for row in rows])

    def emit(self, rows: Sequence[tuple[Row, list[Token]]]) -> None:
        """Send new tokens and endings, and forget the rows that ended."""
        for row, _ in rows:
            if row.finish != Finish.RUNNING:
                del self._rows[row.key]
                self._end_session(row)
                if not self._grammars.drop(row):
                    self.stepper.drop(row)
        if not rows:
            return
        status = self._status()
        for frontend, out in outs(rows, self._epoch, self.stepper.ticks, status):
            self._outlet.send(frontend, out)

    def _refuse(self, row: Row, error: RowError) -> None:
        """End a row that has not begun, with the reason."""
        del self._rows[row.key]
        self._end_session(row)
        reject = data.Reject(row.key[1], error.code, str(error), error.retry_after_s)
        self._outlet.send(row.key[0], reject)

    def _end_session(self, row: Row) -> None:
        if row.session_id:
            self.sessions.ended(row.session_id, len(row.prompt) if row.begun else 0, row.produced)
            if row.session_id not in self.sessions:
                row.session_id = ""  # closed meanwhile: nothing is kept for it

    def _status(self, memory: MemoryUse | None = None) -> Status:
        return Status(
            running=self.admission.running,
            waiting=self.admission.queued,
            compiling=len(self._grammars),
            kv_tokens=self.admission.reserved_tokens,
            kv_capacity=self.admission.capacity.kv_tokens,
            cached_tokens=self.stepper.prefix.tokens,
            generated=self.stepper.generated,
            tick=self.stepper.ticks,
            last_seq=self._last_seq,
            mode=self.mode,
            memory=memory or MemoryUse(),
        )
