"""The engine: one thread that owns MLX and runs requests, a tick at a time.

A tick takes in what arrived, admits rows, launches a decode step and emits the one before it, and runs at
most one prefill chunk. Knows token ids only; nothing of text or HTTP.
"""

import logging
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import mlx.core as mx
from msgspec import Struct

from mlxhost.wire import control, data
from mlxhost.wire.data import Finish
from mlxhost.worker import prefill
from mlxhost.worker.admission import Admission, Capacity, clamp_max_tokens, unsupported
from mlxhost.worker.backend import release_memory
from mlxhost.worker.batch import Batch
from mlxhost.worker.emission import outs
from mlxhost.worker.errors import EngineFailure, RowError
from mlxhost.worker.events import Aborted, Arrived, Event, FrontendGone, Shutdown, Status
from mlxhost.worker.kv import RowKV
from mlxhost.worker.row import Key, Row
from mlxhost.worker.threads import CpuThreads

log = logging.getLogger(__name__)

OPERATIONS = ("flush", "health")
_TRIM_AFTER_S = 0.3  # idle time before freed memory goes back to the system
_MAX_FAILURES = 3  # steps in a row that may raise before the worker gives up


class Outlet(Protocol):
    """Where the engine's messages go; the link implements it."""

    def send(self, frontend: str | None, message: Struct) -> None: ...

    def publish(self, status: Status) -> None: ...


class Engine:
    """Runs one model's requests until told to stop."""

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
        self._model = model
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._epoch = epoch
        self._threads = threads
        self._inbox = inbox
        self._outlet = outlet
        self._admission = Admission(capacity)
        self._chunk_size = prefill.ChunkSize(max_gap_s)
        self._batch = Batch(model, vocab_size)
        self._prefilling: list[Row] = []
        self._rows: dict[Key, Row] = {}
        self._last_seq: dict[str, int] = {}
        self._tick = self._generated = self._failures = 0
        self._stop_at: float | None = None

    def run(self) -> None:
        """Tick until a Shutdown has been honoured. Raises EngineFailure when the model cannot go on."""
        while self._stop_at is None or self._rows:
            if not self._rows:
                self._on_event(self._wait())
            self.step()

    def step(self) -> None:
        """One tick: take in what arrived, one decode step, at most one prefill chunk."""
        while (event := self._next_event()) is not None:
            self._on_event(event)
        self._expire()
        self._admit()
        self._threads.tune(mx.synchronize)
        self._decode()
        self._prefill()
        self._outlet.publish(self._status())

    # Events

    def _wait(self) -> Event:
        """The next event; freed memory goes back to the system when it is long in coming."""
        try:
            return self._inbox.get(timeout=_TRIM_AFTER_S)
        except Empty:
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
                        self._end([row], Finish.ABORT, reason)
            case FrontendGone():
                gone = [row for row in self._rows.values() if row.key[0] == event.frontend]
                self._end(gone, Finish.ABORT, "the frontend is gone")
            case Shutdown():
                self._stop_at = time.monotonic() + event.deadline_s
            case control.Lease():
                self._threads.lease(event.cpu_threads)
            case control.Ctl():
                self._outlet.send(None, self._call(event))

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
        self._admission.enqueue(row)

    def _row(self, event: Arrived) -> Row:
        """The request as a row. Raises RowError when it cannot run here."""
        add, prompt = event.add, event.prompt
        if asked := unsupported(add):
            raise RowError(data.REJECT_UNSUPPORTED, f"this worker does not support {asked}")
        if not len(prompt):
            raise RowError(data.REJECT_INVALID, "the prompt has no tokens")
        if (largest := max(prompt)) >= self._vocab_size:
            raise RowError(
                data.REJECT_INVALID, f"token id {largest} is outside the vocabulary of {self._vocab_size}"
            )
        max_tokens = clamp_max_tokens(len(prompt), add.limits.max_tokens, self._admission.capacity)
        return Row.of(event.frontend, add, prompt, self._eos_ids, max_tokens, time.monotonic())

    def _call(self, call: control.Ctl) -> control.Reply:
        match call.op:
            case "flush":
                # There is no prefix cache yet: nothing is held back, and nothing was lost.
                result = {"durable": True, "flushed": 0, "missing": 0, "entries": 0, "bytes": 0}
                return control.Reply(call.call_id, result=result)
            case "health":
                result = {"tick": self._tick, "running": self._admission.running}
                return control.Reply(call.call_id, result=result)
            case _:
                known = ", ".join(OPERATIONS)
                return control.Reply(
                    call.call_id, "unsupported", f"this worker has no operation {call.op!r}; it has: {known}"
                )

    # A tick's parts

    def _expire(self) -> None:
        """End rows whose deadline passed; all of them when the time to shut down has come."""
        now = time.monotonic()
        late = [row for row in self._rows.values() if row.deadline is not None and now > row.deadline]
        self._end(late, Finish.ABORT, "the deadline passed")
        if self._stop_at is not None and now > self._stop_at:
            self._end(list(self._rows.values()), Finish.ABORT, "the worker is shutting down")

    def _admit(self) -> None:
        while row := self._admission.admit():
            row.kv = RowKV.new(self._model)
            self._outlet.send(row.key[0], data.Accepted(row.key[1], row.cached_tokens, row.max_tokens))
            self._prefilling.append(row)
            self._join_if_prefilled(row)

    def _decode(self) -> None:
        if self._batch.idle:
            return
        try:
            rows, tokens = self._batch.advance()
        except Exception as error:
            self._on_failed_step(error)
            return
        self._failures = 0
        self._tick += 1
        emitted: list[tuple[Row, list[int]]] = []
        for row, token in zip(rows, tokens, strict=True):
            if row.finish == Finish.RUNNING:
                emitted.append((row, [token] if row.take(token) else []))
        self._generated += len(emitted)
        self._emit(emitted)

    def _on_failed_step(self, error: Exception) -> None:
        """The step's rows are lost; the worker lives on unless it happens again and again."""
        log.error("a decode step failed: %s", error, exc_info=error)
        self._failures += 1
        self._end(self._batch.abandon(), Finish.ERROR, f"the decode step failed: {error}")
        if self._failures >= _MAX_FAILURES:
            raise EngineFailure(f"{self._failures} decode steps in a row failed, the last with: {error}")

    def _prefill(self) -> None:
        if not self._prefilling:
            return
        started = time.monotonic()
        row = prefill.choose(self._prefilling, started)
        size = min(row.to_prefill, self._chunk_size.next(self._batch.step_s if not self._batch.idle else 0.0))
        chunk = mx.array(list(row.prompt[row.prefilled : row.prefilled + size]), dtype=mx.uint32)
        assert row.kv is not None
        try:
            # The logits are never evaluated: only what the caches need is computed.
            self._model(chunk[None], cache=row.kv.caches)
            mx.eval(row.kv.arrays())
        except Exception as error:
            log.error("a prefill chunk failed: %s", error, exc_info=error)
            self._end([row], Finish.ERROR, f"the prefill failed: {error}")
            return
        busy_s = self._batch.step_s if not self._batch.idle else 0.0
        self._chunk_size.learn(size, time.monotonic() - started - busy_s)
        row.prefilled += size
        self._tick += 1
        self._join_if_prefilled(row)

    def _join_if_prefilled(self, row: Row) -> None:
        if row.to_prefill == 0:
            self._prefilling.remove(row)
            self._batch.join(row, int(row.prompt[-1]))

    # Outcomes

    def _end(self, rows: Sequence[Row], finish: Finish, detail: str) -> None:
        """End rows wherever they are, with their terminal message."""
        for row in rows:
            row.finish, row.detail = finish, detail
        self._emit([(row, []) for row in rows])

    def _emit(self, rows: Sequence[tuple[Row, list[int]]]) -> None:
        """Send new tokens and endings, and forget the rows that ended."""
        ended = [row for row, _ in rows if row.finish != Finish.RUNNING]
        for row in ended:
            self._forget(row)
        if not rows:
            return
        status = self._status()
        for frontend, out in outs(rows, self._epoch, self._tick, status):
            self._outlet.send(frontend, out)

    def _forget(self, row: Row) -> None:
        del self._rows[row.key]
        if row.kv is None:
            self._admission.waiting.remove(row)
            return
        self._admission.release(row)
        if row in self._prefilling:
            self._prefilling.remove(row)
        self._batch.leave([row])
        row.kv = None

    def _status(self) -> Status:
        return Status(
            running=self._admission.running,
            waiting=len(self._admission.waiting),
            kv_tokens=self._admission.reserved,
            kv_capacity=self._admission.capacity.kv_tokens,
            generated=self._generated,
            tick=self._tick,
            last_seq=self._last_seq,
        )
