"""The rows that decode together: a register of last tokens on the device, and one step in flight.

`advance` starts a step for all rows from tokens that are still on the device, then reads the step launched
before it. The host is one step behind the device, so building the next graph costs no time.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from mlxhost.wire.data import Finish
from mlxhost.worker.kv import RowKV, StepCaches, StepShape
from mlxhost.worker.logprobs import TopEntries
from mlxhost.worker.penalties import History
from mlxhost.worker.profile import Profile
from mlxhost.worker.row import Row
from mlxhost.worker.sampling import Drawn, Sampler

# Cache fields that no step reads would otherwise keep growing their graph.
_SETTLE_EVERY = 256
# Steps after a jump in which another is expected, and how often one is looked for after that.
_JUMPS_EXPECTED = 4
_LOOKS_EVERY = 8


@dataclass(frozen=True)
class Step:
    """A launched step; what it drew belongs to `rows`, in order."""

    rows: tuple[Row, ...]
    drawn: Drawn
    launched: float

    def ids(self) -> dict[int, int]:
        """Wait for it: `id(row)` -> what it drew."""
        tokens: list[int] = self.drawn.tokens.tolist()  # type: ignore[assignment]
        return dict(zip(map(id, self.rows), tokens, strict=True))


@dataclass(frozen=True, slots=True)
class Token:
    """What a step gave one row, with log-probabilities where the row wants them."""

    id: int
    logprob: float = 0.0
    top: TopEntries = field(default_factory=list)


class Batch:
    """Decode batch of one model. Rows join and leave between steps."""

    def __init__(self, model: Any, vocab_size: int, shape: StepShape | None = None) -> None:
        self._model = model
        self._shape = shape or StepShape()
        self._vocab_size = vocab_size
        self.rows: list[Row] = []
        self._register = mx.array([], dtype=mx.uint32)
        self._caches = StepCaches(self._shape)
        self._sampler = Sampler([], vocab_size)
        self._changed = False
        self._steps = 0
        self._in_flight: Step | None = None
        self.jumps = True  # run ahead over forced text
        self._quiet = 0  # steps since the last jump
        self.undone: list[Row] = []  # rows that left because a draw of theirs did not stand: to begin again
        self._void: set[int] = set()  # of them, those in the step in flight
        self.step_s = 0.0  # smoothed seconds from a step's launch to its tokens
        self.profile: Profile | None = None

    @property
    def idle(self) -> bool:
        return not self.rows and self._in_flight is None

    def join(self, row: Row, token: int) -> None:
        """Add a prefilled row whose next input is `token`."""
        self.rows.append(row)
        self._register = mx.concatenate([self._register, mx.array([token], dtype=mx.uint32)])
        self._changed = True

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows, whose `kv` is whole again; a step in flight still computes them, and its result for
        them is ignored: `kv` holds what was fed, the newest token that was read included."""
        gone = set(map(id, rows))
        keep = [i for i, row in enumerate(self.rows) if id(row) not in gone]
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in keep]
        self._register = self._register[mx.array(keep, dtype=mx.int32)] if keep else self._register[:0]
        self._changed = True
        for row in rows:
            if row.kv is not None:
                row.kv.release()
        if not self.rows:
            self._caches = self._caches.composed([])  # let go of the last row's KV now

    def launch(self) -> Step | None:
        """Start one step for every row that still has a token to produce; None when there is none."""
        self.leave([row for row in self.rows if row.launched >= row.max_tokens])
        if not self.rows:
            return None
        if self._changed:
            self._compose()
            histories = [History(row.prompt, row.output) for row in self.rows]
            # Grammars follow a draw at once, so theirs have to stand.
            narrow = self._shape.narrow and not any(row.constraint is not None for row in self.rows)
            settings = [row.sampling for row in self.rows]
            self._sampler = Sampler(settings, self._vocab_size, histories, narrow=narrow)
            self._changed = False
        logits = self._model(self._register[:, None], cache=self._caches.views())[:, -1]
        self._caches.stepped()
        if self.profile is not None:
            self.profile.lap("launch", len(self.rows))
        positions = [row.launched for row in self.rows]
        allowed = self._allowed(logits)
        drawn = self._sampler.draw(logits, positions, self._register, self._early_stops(), allowed)
        self._register = drawn.tokens
        mx.async_eval(*drawn.arrays())
        if self.profile is not None:
            self.profile.lap("sample", len(self.rows))
        for row in self.rows:
            row.launched += 1
        self._steps += 1
        if self._steps % _SETTLE_EVERY == 0:
            mx.eval(self._caches.arrays())
        return Step(tuple(self.rows), drawn, time.monotonic())

    def advance(self) -> list[tuple[Row, Token]]:
        """Launch the next step, then read the one before it: its rows and their tokens (empty at first).

        Rows that ended while the step was in flight are still in it; the caller skips them.
        """
        if self.jumps and (jumped := self._jump()) is not None:
            return jumped
        before, self._in_flight = self._in_flight, self.launch()
        return self._take(before)

    def _jump(self) -> list[tuple[Row, Token]] | None:
        """Read the step in flight and take one in which rows run ahead over what their grammars force; None,
        and nothing changed, when there is no such step. Waiting for the step in flight costs the time to
        build a graph, so it is done only while jumps come about."""
        if not any(row.constraint is not None for row in self.rows):
            return None
        from mlxhost.worker.grammar import flat, jump

        if self._in_flight is not None and self._in_flight.drawn.lacking is not None:
            return None
        self._quiet += 1
        if self._quiet > _JUMPS_EXPECTED and self._quiet % _LOOKS_EVERY:
            return None
        unread = {} if self._in_flight is None else self._in_flight.ids()
        rows = [row for row in self.rows if row.launched < row.max_tokens]
        planned = jump.plan(rows, unread)
        if planned is None:
            return None
        self._quiet = 0
        before = self.drain()
        self.leave([row for row in self.rows if row.launched >= row.max_tokens])
        kvs = [row.kv for row in rows if row.kv is not None]
        tokens, positions, owners = planned.tokens, [], []
        for row, own in zip(rows, tokens, strict=True):
            positions += [row.launched + i for i in range(len(own))]
            owners += [(row, own[: i + 1]) for i in range(len(own))]
        logits = flat.run(self._model, kvs, tokens)
        mx.async_eval(logits)
        histories = [History(row.prompt, _behind(row, own)) for row, own in owners]
        sampler = Sampler([row.sampling for row, _ in owners], self._vocab_size, histories)
        last = mx.array([own[-1] for _, own in owners], dtype=mx.uint32)
        allowed = jump.allowed_tokens(rows, planned, logits.shape[-1])
        drawn = sampler.draw(logits, positions, last, (), allowed)
        mx.async_eval(*drawn.arrays())
        read = _read(Step(tuple(row for row, _ in owners), drawn, time.monotonic()))
        kept = planned.agreed([token.id for token in read])
        at = 0
        for row, kv, own, right in zip(rows, kvs, tokens, kept, strict=True):
            flat.take_back(kv, len(own) - len(right))
            row.launched += len(right)
            if row.constraint is not None and len(own) > 1:
                row.constraint.learn(len(own) - 1, len(right) - 1)
            before += [(row, token) for token in read[at : at + len(right)]]
            at += len(own)
        self._register = mx.array([own[-1] for own in kept], dtype=mx.uint32)
        self._changed = True
        return before

    def drain(self) -> list[tuple[Row, Token]]:
        """Read the step in flight and launch no other: every row's caches then hold all but its newest
        token."""
        before, self._in_flight = self._in_flight, None
        return self._take(before)

    def kv_of(self, row: Row) -> RowKV:
        """The caches of a running row, whole, as of now: to be read at once and not kept or changed."""
        assert row.kv is not None
        return self._caches.content(row.kv)

    def thaw(self) -> None:
        """Go on after a standstill, whose time is not that of the step in flight."""
        if self._in_flight is not None:
            self._in_flight = replace(self._in_flight, launched=time.monotonic())

    def abandon(self) -> list[Row]:
        """Forget every row and the step in flight (after an error); the rows that were lost."""
        in_step = self._in_flight.rows if self._in_flight else ()
        lost = list({id(r): r for r in (*in_step, *self.rows)}.values())
        self._in_flight = None
        self._void.clear()
        self.leave(self.rows)
        return lost

    def _take(self, before: Step | None) -> list[tuple[Row, Token]]:
        if before is None:
            return []
        tokens = _read(before)
        if self.profile is not None:
            self.profile.lap("wait", len(before.rows))
        took = time.monotonic() - before.launched
        self.step_s = took if self.step_s == 0 else 0.8 * self.step_s + 0.2 * took
        void, self._void = self._void, set()
        lacking: Any = [False] * len(tokens)
        if before.drawn.lacking is not None:
            lacking = before.drawn.lacking.tolist()
        taken = []
        for row, token, undone in zip(before.rows, tokens, lacking, strict=True):
            if id(row) in void or row.finish != Finish.RUNNING:
                continue
            if not undone:
                taken.append((row, token))
                continue
            # What it drew was fed already: only its tokens so far are still right.
            self.leave([row])
            row.sampling = replace(row.sampling, wide=True)
            self.undone.append(row)
            if self._in_flight is not None:
                self._void.add(id(row))
        return taken

    def _allowed(self, logits: mx.array) -> mx.array | None:
        """What the rows may draw; None when none of them is constrained. Their grammars follow the step in
        flight, and find what comes next, while the forward runs."""
        if not any(row.constraint is not None for row in self.rows):
            return None
        from mlxhost.worker.grammar.masks import allowed_tokens  # loads numpy

        mx.async_eval(logits)
        unread = {} if self._in_flight is None else self._in_flight.ids()
        return allowed_tokens(self.rows, unread, logits.shape[-1])

    def _compose(self) -> None:
        """Lay out the present rows, in the order in which they are stored."""
        by_kv = {id(row.kv): i for i, row in enumerate(self.rows)}
        apart = self._shape.jumps_apart and any(row.constraint is not None for row in self.rows)
        rows = [row.kv for row in self.rows if row.kv is not None]
        self._caches = self._caches.composed(rows, apart=apart)
        order = [by_kv[id(kv)] for kv in self._caches.rows]
        if order != list(range(len(order))):
            self.rows = [self.rows[i] for i in order]
            self._register = self._register[mx.array(order, dtype=mx.int32)]

    def _early_stops(self) -> list[tuple[int, list[int]]]:
        """(row, stop ids) of rows that have not produced min_tokens yet."""
        return [
            (i, sorted(row.stop_ids))
            for i, row in enumerate(self.rows)
            if row.launched < row.min_tokens and row.stop_ids
        ]


def _behind(row: Row, fed: Sequence[int]) -> list[int]:
    """A row's output with what it is fed behind it; the first of that may be its newest token."""
    return [*row.output, *fed] if row.launched > len(row.output) else [*row.output, *fed[1:]]


def _read(step: Step) -> list[Token]:
    """Wait for a step and bring its results to the host."""
    drawn = step.drawn
    ids: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]
    if drawn.chosen is None or drawn.top_ids is None or drawn.top is None:
        return [Token(i) for i in ids]
    chosen: list[float] = drawn.chosen.tolist()  # type: ignore[assignment]
    top_ids: list[list[int]] = drawn.top_ids.tolist()  # type: ignore[assignment]
    top: list[list[float]] = drawn.top.tolist()  # type: ignore[assignment]
    return [
        Token(ids[i], chosen[i], list(zip(top_ids[i], top[i], strict=True))[: row.sampling.top_logprobs])
        for i, row in enumerate(step.rows)
    ]
