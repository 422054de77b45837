"""The engine: one thread that owns MLX and runs requests, a tick at a time.

A tick takes in what arrived, admits rows, launches a decode step and emits the one before it, and runs at
most one prefill chunk. Knows token ids only; nothing of text or HTTP. Control calls are for operations.py,
which takes its turn between two ticks.
"""

import logging
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import mlx.core as mx
from msgspec import Struct

from mlxhost.wire import control, data
from mlxhost.wire.data import Finish
from mlxhost.worker.admission import Admission, Capacity
from mlxhost.worker.backend import release_memory
from mlxhost.worker.batch import Batch, Token
from mlxhost.worker.emission import outs
from mlxhost.worker.errors import EngineFailure, RowError
from mlxhost.worker.events import Aborted, Arrived, Event, FrontendGone, Shutdown, Status
from mlxhost.worker.intake import row_of
from mlxhost.worker.kv import RowKV
from mlxhost.worker.modes import STEPPING, Hold, Holds, Mode
from mlxhost.worker.prefill import Prefill
from mlxhost.worker.profile import Profile
from mlxhost.worker.row import Key, Row
from mlxhost.worker.sessions import Sessions
from mlxhost.worker.threads import CpuThreads

log = logging.getLogger(__name__)

_TRIM_AFTER_S = 0.3  # idle time before freed memory goes back to the system
_MAX_FAILURES = 3  # steps in a row that may raise before the worker gives up
_SLEEPING_RETRY_S = 30.0


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
        epoch: int,
        threads: CpuThreads,
        inbox: "SimpleQueue[Event]",
        outlet: Outlet,
    ) -> None:
        self.model = model
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._epoch = epoch
        self.threads = threads
        self._inbox = inbox
        self._outlet = outlet
        self.admission = Admission(capacity)
        self.prefill = Prefill(max_gap_s)
        self.holds = Holds()
        self.sessions = Sessions()
        self.calls: Calls | None = None  # set by who answers them
        self.profile: Profile | None = None
        self.batch = Batch(model, vocab_size)
        self._rows: dict[Key, Row] = {}
        self._last_seq: dict[str, int] = {}
        self.tick = self.generated = self._failures = 0
        self._stop_at: float | None = None

    def run(self) -> None:
        """Tick until a Shutdown has been honoured. Raises EngineFailure when the model cannot go on."""
        while self._stop_at is None or self._rows:
            if not self._has_work and (event := self._wait()) is not None:
                self._on_event(event)
            self.step()

    @property
    def mode(self) -> Mode:
        return self.holds.mode(self.admission.running)

    @property
    def _has_work(self) -> bool:
        """Whether a step would compute something."""
        mode = self.mode
        return bool(self._rows) if mode is Mode.RUNNING else mode is Mode.PAUSING

    def step(self) -> None:
        """One tick: take in what arrived, one decode step, at most one prefill chunk."""
        while (event := self._next_event()) is not None:
            self._on_event(event)
        self._expire()
        if self.mode is Mode.RUNNING:
            self._admit()
        if self.mode in STEPPING:
            self.threads.tune(mx.synchronize)
            if self.profile is not None:
                self.profile.begin()
            self._decode()
            self._prefill()
        self.publish()
        if self.calls is not None:
            self.calls.settle()

    # Events

    def _wait(self) -> Event | None:
        """The next event; freed memory goes back to the system when it is long in coming. None after a
        while when rows stand still, whose deadlines go on."""
        try:
            return self._inbox.get(timeout=_TRIM_AFTER_S)
        except Empty:
            if self._rows:
                return None
            release_memory()
            return self._inbox.get()

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
            case control.Lease():
                self.threads.lease(event.cpu_threads)
            case control.Ctl():
                if self.calls is not None:
                    self.calls.call(event)

    def _on_arrived(self, event: Arrived) -> None:
        add = event.add
        self._last_seq = {**self._last_seq, event.frontend: add.seq}
        try:
            row = self._row(event)
        except RowError as error:
            reject = data.Reject(add.handle, error.code, str(error), error.retry_after_s)
            self._outlet.send(event.frontend, reject)
            return
        self._rows[row.key] = row
        self.admission.enqueue(row)
        if row.session_id:
            self.sessions.started(row.session_id)

    def _row(self, event: Arrived) -> Row:
        """The request as a row. Raises RowError when it cannot run here."""
        if self.holds.asleep:
            raise RowError(data.REJECT_SLEEPING, "the model sleeps until it is woken", _SLEEPING_RETRY_S)
        return row_of(
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
        self.model = None
        self._use_batch(Batch(None, self._vocab_size))
        for row in self.admission.withdraw_all():
            del self._rows[row.key]
            self._end_session(row)
            reject = data.Reject(
                row.key[1], data.REJECT_SLEEPING, "the model was put to sleep", _SLEEPING_RETRY_S
            )
            self._outlet.send(row.key[0], reject)

    def serve(self, model: Any, eos_ids: Sequence[int]) -> None:
        """Run `model`, of the same shape as the one before, from now on. No row may be running."""
        self.model, self._eos_ids = model, eos_ids
        self._use_batch(Batch(model, self._vocab_size))
        self.holds.asleep = False

    def set_profile(self, profile: Profile | None) -> None:
        """Record laps from now on, or no more."""
        self.profile = self.batch.profile = profile

    def rows(self, wanted: Callable[[Row], bool] = lambda _: True) -> list[Row]:
        """Rows that have not ended, waiting ones included."""
        return [row for row in self._rows.values() if wanted(row)]

    def publish(self) -> None:
        """Let the I/O thread have the figures of now."""
        self._outlet.publish(self._status())

    def _use_batch(self, batch: Batch) -> None:
        batch.profile = self.profile
        self.batch = batch

    # A tick's parts

    def _expire(self) -> None:
        """End rows whose deadline passed; all of them when the time to shut down has come."""
        now = time.monotonic()
        late = [row for row in self._rows.values() if row.deadline is not None and now > row.deadline]
        self.end(late, Finish.ABORT, "the deadline passed")
        if self._stop_at is not None and now > self._stop_at:
            self.end(list(self._rows.values()), Finish.ABORT, "the worker is shutting down")

    def _admit(self) -> None:
        while row := self.admission.admit():
            row.kv = RowKV.new(self.model)
            self._outlet.send(row.key[0], data.Accepted(row.key[1], row.cached_tokens, row.max_tokens))
            self.prefill.rows.append(row)
            self._join_if_prefilled(row)

    def _decode(self) -> None:
        if self.batch.idle:
            return
        try:
            drawn = self.batch.advance()
        except Exception as error:
            self._on_failed_step(error)
            return
        self._failures = 0
        self.tick += 1
        emitted: list[tuple[Row, list[Token]]] = []
        for row, token in drawn:
            if row.finish == Finish.RUNNING:
                emitted.append((row, [token] if row.take(token.id) else []))
        self.generated += len(emitted)
        self._emit(emitted)
        if self.profile is not None:
            self.profile.lap("emit", len(emitted))

    def _on_failed_step(self, error: Exception) -> None:
        """The step's rows are lost; the worker lives on unless it happens again and again."""
        log.error("a decode step failed: %s", error, exc_info=error)
        self._failures += 1
        self.end(self.batch.abandon(), Finish.ERROR, f"the decode step failed: {error}")
        if self._failures >= _MAX_FAILURES:
            raise EngineFailure(f"{self._failures} decode steps in a row failed, the last with: {error}")

    def _prefill(self) -> None:
        row = self.prefill.choose(time.monotonic())
        if row is None:
            return
        step_s = 0.0 if self.batch.idle else self.batch.step_s
        try:
            self.prefill.run(row, self.model, step_s, self.profile)
        except Exception as error:
            log.error("a prefill chunk failed: %s", error, exc_info=error)
            self.end([row], Finish.ERROR, f"the prefill failed: {error}")
            return
        self.tick += 1
        self._join_if_prefilled(row)

    def _join_if_prefilled(self, row: Row) -> None:
        if row.to_prefill == 0:
            self.prefill.rows.remove(row)
            self.batch.join(row, int(row.prompt[-1]))

    # Outcomes

    def end(self, rows: Sequence[Row], finish: Finish, detail: str) -> None:
        """End rows wherever they are, with their terminal message."""
        for row in rows:
            row.finish, row.detail = finish, detail
        self._emit([(row, []) for row in rows])

    def _emit(self, rows: Sequence[tuple[Row, list[Token]]]) -> None:
        """Send new tokens and endings, and forget the rows that ended."""
        ended = [row for row, _ in rows if row.finish != Finish.RUNNING]
        for row in ended:
            self._forget(row)
        if not rows:
            return
        status = self._status()
        for frontend, out in outs(rows, self._epoch, self.tick, status):
            self._outlet.send(frontend, out)

    def _forget(self, row: Row) -> None:
        del self._rows[row.key]
        self._end_session(row)
        if row.kv is None:
            self.admission.waiting.remove(row)
            return
        self.admission.release(row)
        if row in self.prefill.rows:
            self.prefill.rows.remove(row)
        self.batch.leave([row])
        row.kv = None

    def _end_session(self, row: Row) -> None:
        if row.session_id:
            prompt_tokens = len(row.prompt) if row.kv is not None else 0
            self.sessions.ended(row.session_id, prompt_tokens, row.produced)

    def _status(self) -> Status:
        return Status(
            running=self.admission.running,
            waiting=len(self.admission.waiting),
            kv_tokens=self.admission.reserved,
            kv_capacity=self.admission.capacity.kv_tokens,
            generated=self.generated,
            tick=self.tick,
            last_seq=self._last_seq,
            mode=self.mode,
        )
