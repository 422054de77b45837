"""Contexts into KV caches, a chunk at a time, so that running streams never wait long. Engine thread only."""

import time
from collections.abc import Callable, Collection
from typing import Any

import mlx.core as mx

from mlxhost.worker.chunks import ChunkSize, Timing, Turns
from mlxhost.worker.logprobs import prompt_entries
from mlxhost.worker.profile import Profile
from mlxhost.worker.row import Row

_LOGITS_CHUNK = 128  # tokens whose logits over the whole vocabulary are held at once


class Prefill:
    """Admitted rows whose context is not in their caches yet. Each has a whole RowKV of its own."""

    def __init__(self, max_gap_s: float, timing: Timing | None = None) -> None:
        self.rows: list[Row] = []
        self.chunk_size = ChunkSize(max_gap_s, timing)
        self._turns = Turns()

    def choose(self, now: float, but: Collection[Row] = ()) -> Row | None:
        """The row whose chunk is next, none of `but`; one that shares another's prefill waits for that."""
        rows = [row for row in self.rows if row.leader is None and row not in but]
        return self._turns.choose(rows, now) if rows else None

    def run(
        self,
        row: Row,
        model: Any,
        step_s: float,
        profile: Profile | None,
        shorten: Callable[[Row, int], int] = lambda _, size: size,
    ) -> None:
        """One chunk of `row` through `model`, between decode steps of `step_s` seconds (0: nobody decodes);
        `shorten` may make it end earlier.

        Raises whatever the model raises; the row's caches are of no use then.
        """
        started = time.monotonic()
        done = row.prefilled
        size = min(row.to_prefill, self.chunk_size.next(step_s, done))
        if row.prompt_top is not None:
            size = min(size, _LOGITS_CHUNK)
        size = shorten(row, size)
        assert row.kv is not None
        logits = row.kv.run(model, row.tokens(done, done + size))
        if row.prompt_top is not None:
            targets = row.prompt[done + 1 : done + size + 1]
            row.prompt_logprobs += prompt_entries(logits[: len(targets)], targets, row.prompt_top)
        # Otherwise the logits are never evaluated: only what the caches need is computed.
        mx.eval(row.kv.arrays())
        self.chunk_size.learn(size, time.monotonic() - started, done)
        self._turns.charge(row, size)
        if profile is not None:
            profile.lap("prefill", size)
        row.prefilled += size
