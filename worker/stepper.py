"""What the engine computes in a tick: who is admitted, who must leave, one decode step, one prefill chunk.

Engine thread only. It knows rows and memory; what came of them goes to `Outcomes`. Nothing a model raises
passes beyond the rows that it concerns: a failed step's rows begin again one by one, and only those that
fail alone, too, end with the error.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mlxhost.wire.data import Finish
from mlxhost.worker.admission import Admission
from mlxhost.worker.backend import release_memory
from mlxhost.worker.batch import Batch, Token
from mlxhost.worker.cache.prefix import PrefixCache
from mlxhost.worker.device import Alone, Device
from mlxhost.worker.errors import EngineFailure
from mlxhost.worker.kv import RowKV, StepShape
from mlxhost.worker.prefill import Prefill
from mlxhost.worker.profile import Profile
from mlxhost.worker.row import Row
from mlxhost.worker.siblings import follow, orphaned

log = logging.getLogger(__name__)

# The worker gives up after so many failed steps that no row explained by failing alone, too...
_MAX_FAILURES = 3
_FORGOTTEN_AFTER = 256  # ...with fewer ticks than this between one and the next


class Outcomes(Protocol):
    """What the stepper tells of its rows; the engine implements it."""

    def accept(self, row: Row) -> None: ...

    def emit(self, rows: Sequence[tuple[Row, list[Token]]]) -> None: ...

    def end(self, rows: Sequence[Row], finish: Finish, detail: str) -> None: ...


class Stepper:
    """Runs the rows of one model."""

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        admission: Admission,
        prefill: Prefill,
        outcomes: Outcomes,
        shape: StepShape | None = None,
    ) -> None:
        self.admission, self.prefill = admission, prefill
        self._vocab_size, self._outcomes = vocab_size, outcomes
        self._shape = shape or StepShape()
        self.profile: Profile | None = None
        self.jumps = True  # rows run ahead over what their grammars force
        self.device: Device = Alone()  # with whom prefill chunks take turns
        self.prefix = PrefixCache()  # off, until the worker sets one
        self.serve(model)
        self.ticks = self.generated = 0
        self.preemptions = 0  # rows that left for want of memory
        self.yields = 0  # rows that left for another client, or a better priority
        self.failed_steps = 0
        self._failures = self._failed_at = 0

    def serve(self, model: Any) -> None:
        """Run `model` (None: none) from now on. No row may be running."""
        self.model = model
        self.batch = Batch(model, self._vocab_size, self._shape)
        self.batch.jumps = self.jumps
        self.batch.profile = self.profile

    def set_profile(self, profile: Profile | None) -> None:
        """Record laps from now on, or no more."""
        self.profile = self.batch.profile = profile

    def admit(self, *, only_begun: bool) -> None:
        """Let rows begin, or go on, as far as there is room; with `only_begun` none that has not begun."""
        while choice := self.admission.choose(time.monotonic(), only_begun=only_begun):
            for victim in choice.making_way:
                if self._set_aside(victim):
                    victim.yields += 1
                    self.yields += 1
            if not self.admission.fits(choice.row):
                return  # one that was to make way could not be set aside
            self._begin(choice.row)

    def step(self) -> None:
        """One decode step and at most one prefill chunk."""
        if self.profile is not None:
            self.profile.begin()
        self._make_room()
        self._decode()
        self._prefill()
        self.prefix.pump(busy=not self.batch.idle or bool(self.prefill.rows))

    def set_all_aside(self) -> None:
        """Every running row leaves, until rows are admitted again."""
        for row in self.admission.rows:
            if self._set_aside(row):
                row.preemptions += 1
                self.preemptions += 1

    def drop(self, row: Row) -> None:
        """Forget a row that has ended, wherever it was."""
        self.admission.release(row)
        self._leave(row, self.prefix.drop if row.finish == Finish.ERROR else self.prefix.ended)

    # Coming and going

    def _begin(self, row: Row) -> None:
        self.admission.admit(row)
        row.kv = RowKV.new(self.model)
        if not row.accepted:
            row.cached_tokens = self.prefix.likely(row)
        self._outcomes.accept(row)
        if row.leader not in self.prefill.rows:
            row.leader = None
        self.prefill.rows.append(row)
        self._join_if_prefilled(row)

    def _leave(self, row: Row, record: Callable[[Row], object]) -> None:
        """`record` sees the row once its caches are whole, before they go."""
        if row in self.prefill.rows:
            self.prefill.rows.remove(row)
            orphaned(self.prefill.rows, row)
        self.batch.leave([row])
        self._record(record, row)
        row.kv = None

    def _record(self, record: Callable[[Row], object], row: Row) -> None:
        """What goes wrong with records costs only them."""
        try:
            record(row)
        except Exception as error:
            log.error("the prefix cache failed: %s", error, exc_info=error)
            self.prefix.drop(row)

    def _make_room(self) -> None:
        """Before a step: rows leave until the others have room for it."""
        while row := self.admission.overflowing():
            if self._set_aside(row):
                row.preemptions += 1
                self.preemptions += 1

    def _set_aside(self, row: Row) -> bool:
        """`row` leaves and waits until it can go on; False when it ended instead, with its last token."""
        if row.finish != Finish.RUNNING:
            return False
        if row in self.batch.rows:
            self._take(self.batch.drain)
            if row.finish != Finish.RUNNING or row not in self.batch.rows:
                return False
        self._leave(row, self.prefix.save_row)
        row.rewind()
        self.admission.set_aside(row)
        return True

    # Computing

    def _decode(self) -> None:
        if not self.batch.idle:
            self._take(self.batch.advance)
            self.device.stepped()

    def _take(self, advance: Callable[[], list[tuple[Row, Token]]]) -> None:
        """Emit what `advance` brings; when it raises, its rows begin again."""
        try:
            drawn = advance()
        except Exception as error:
            self._on_failed_step(error)
            return
        self.ticks += 1
        emitted: dict[int, tuple[Row, list[Token]]] = {}
        for row, token in drawn:
            if row.finish == Finish.RUNNING:
                emitted.setdefault(id(row), (row, []))[1].extend(self._taken(row, token)[1])
        self._outcomes.emit(list(emitted.values()))
        if self.profile is not None:
            self.profile.lap("emit", len(emitted))
        undone, self.batch.undone = self.batch.undone, []
        for row in undone:
            self._begin_again(row)
            self._join_if_prefilled(row)

    def _taken(self, row: Row, token: Token) -> tuple[Row, list[Token]]:
        self.generated += 1
        self.admission.waiting.charge(row, 1)
        return row, [token] if row.take(token.id) else []

    def _prefill(self) -> None:
        row = self._next_to_prefill()
        if row is None:
            self.device.withdraw()
            return
        if not self.device.may_run(wait=self.batch.idle):
            return
        # The step in flight is done before the chunk is, and its tokens need not wait for it.
        if not self.batch.idle:
            self._take(self.batch.drain)
        step_s = self.batch.step_s if self.batch.rows else 0.0
        try:
            self.prefill.run(row, self.model, step_s, self.profile, self.prefix.chunk)
        except Exception as error:
            log.error("a prefill chunk failed: %s", error, exc_info=error)
            self._outcomes.end([row], Finish.ERROR, f"the prefill failed: {error}")
            release_memory()
            return
        finally:
            self.device.ran()
        self.ticks += 1
        self._record(self.prefix.passed, row)
        self._join_if_prefilled(row)

    def _next_to_prefill(self) -> Row | None:
        """The row whose chunk is next, with what the prefix cache has of its context in its caches. None
        when there is none, or the rest of this tick is due to the rows that decode."""
        waiting: list[Row] = []  # for the disk
        while row := self.prefill.choose(time.monotonic(), waiting):
            before = row.prefilled
            try:
                restored = self.prefix.begin(row, self.model)
            except Exception as error:
                log.error("a restore failed: %s", error, exc_info=error)
                self._outcomes.end([row], Finish.ERROR, f"the prefix cache failed: {error}")
                return None
            if not restored:
                waiting.append(row)
                continue
            if row.to_prefill and (self.batch.idle or row.prefilled == before):
                return row
            self._join_if_prefilled(row)
            return None
        if waiting and self.batch.idle:
            self.prefix.wait()
        return None

    def _join_if_prefilled(self, row: Row) -> None:
        if row.leader is not None or row.to_prefill:
            return
        followers = [r for r in self.prefill.rows if r.leader is row]
        for follower in followers:
            follow(follower, row)
        for each in (row, *followers):
            self.prefill.rows.remove(each)
            each.prompt_top = None  # all of them are known
            if not each.suspect or self._runs_alone(each):
                self.batch.join(each, each.next_input)

    # Isolation

    def _on_failed_step(self, error: Exception) -> None:
        """Nobody knows whose fault it was, nor what the caches hold: the rows begin again, each alone
        first."""
        log.error("a decode step failed: %s", error, exc_info=error)
        forgotten = self.ticks - self._failed_at > _FORGOTTEN_AFTER
        self._failures, self._failed_at = (1 if forgotten else self._failures + 1), self.ticks
        self.failed_steps += 1
        rows = [row for row in self.batch.abandon() if row.finish == Finish.RUNNING]
        if self._failures >= _MAX_FAILURES:
            self._outcomes.end(rows, Finish.ERROR, f"the decode step failed: {error}")
            raise EngineFailure(f"{self._failures} decode steps failed, the last with: {error}")
        for row in rows:
            row.suspect = True
            self._begin_again(row)
        release_memory()
        for row in rows:
            self._join_if_prefilled(row)

    def _begin_again(self, row: Row) -> None:
        """Its caches are of no use: they are made anew from its tokens. It has left the batch."""
        self.prefix.drop(row)
        row.rewind()
        row.kv = RowKV.new(self.model)
        self.prefill.rows.append(row)

    def _runs_alone(self, row: Row) -> bool:
        """Run one step of `row` by itself; False when it ended, with the error or by its token."""
        alone = Batch(self.model, self._vocab_size, replace(self._shape, narrow=False))
        alone.jumps = False  # one step, one token
        alone.join(row, row.next_input)
        try:
            alone.advance()
            drawn = alone.drain()
            alone.leave([row])
        except Exception as error:
            log.error("request %s fails alone, too: %s", row.request_id, error)
            self._failures = 0
            self._outcomes.end([row], Finish.ERROR, f"the decode step failed: {error}")
            return False
        row.suspect = False
        self._outcomes.emit([self._taken(row, token) for _, token in drawn])
        return row.finish == Finish.RUNNING
