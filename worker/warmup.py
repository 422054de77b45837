"""How fast this machine prefills, measured once at load, so that the first chunk is of the right size."""

import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxhost.worker.chunks import MIN_CHUNK, Timing
from mlxhost.worker.kv import RowKV
from mlxhost.worker.kv.kinds import kind_of

_LONG = 128
_PATIENCE_S = 0.25  # a machine that takes longer for MIN_CHUNK tokens is not asked for _LONG
_START_SHARE = 0.2  # of a short chunk, where only that was measured


@dataclass(frozen=True)
class WarmUp:
    """`transient_per_token` bytes are needed beside the caches for each token of a chunk; `kv_scheme` is what
    the caches are made of."""

    timing: Timing
    transient_per_token: int
    kv_scheme: str


def warm_up(model: Any, vocab_size: int) -> WarmUp:
    """Prefill one short chunk and one longer one. Takes about as long as 160 tokens do."""
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    row, short = _timed(model, vocab_size, MIN_CHUNK)
    tokens, timing = (
        MIN_CHUNK,
        Timing(_START_SHARE * short, (1 - _START_SHARE) * short / MIN_CHUNK, MIN_CHUNK),
    )
    if short < _PATIENCE_S:
        del row
        row, long = _timed(model, vocab_size, _LONG)
        tokens, timing = _LONG, _split(short, long)
    transient = mx.get_peak_memory() - before - sum(a.nbytes for a in row.arrays())
    return WarmUp(timing, max(0, transient) // tokens, scheme(row))


def scheme(row: RowKV) -> str:
    """The kinds of layers of a used row, and what each stores."""
    found = set()
    for leaf in row.leaves:
        kind = kind_of(leaf)
        for array in leaf.cache if hasattr(leaf, "cache") else [leaf.keys]:
            if array is not None and kind is not None:
                found.add(f"{kind.name.lower()} {str(array.dtype).removeprefix('mlx.core.')}")
    return ", ".join(sorted(found))


def _split(short: float, long: float) -> Timing:
    """What starting a chunk takes and what a token does, from two chunks; within what can be."""
    token = (long - short) / (_LONG - MIN_CHUNK)
    token = min(max(token, 0.25 * long / _LONG), long / _LONG)
    return Timing(max(0.0, short - MIN_CHUNK * token), token, _LONG)


def _timed(model: Any, vocab_size: int, tokens: int) -> tuple[RowKV, float]:
    row = RowKV.new(model)
    started = time.perf_counter()
    row.run(model, [(7 * i + tokens) % min(vocab_size, 1000) for i in range(tokens)])
    mx.eval(row.arrays())
    return row, time.perf_counter() - started
