"""Before a model serves: run a few rows alone and together, and compare.

Warms the kernels that MLX compiles at first use, measures what a token costs in KV bytes, and finds out how
far the architecture lets rows be computed together without influencing one another.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxhost.worker.kv import Batching, PackRule, RowKV, StepCaches, StepShape
from mlxhost.worker.kvcost import KVCost, measure

log = logging.getLogger(__name__)

_LENGTHS = (37, 11, 24)
_STEPS = 2
# Largest difference of a logit, relative to the logits' own spread, for rounding alone.
_TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}


@dataclass(frozen=True)
class Tested:
    """What a row costs and how rows may be computed together; `notes` are for the operator."""

    cost: KVCost
    shape: StepShape
    notes: tuple[str, ...] = ()


def self_test(model: Any, vocab_size: int, dtype: str, shape: StepShape | None = None) -> Tested:
    """The best batching, of `shape` or less, with which rows give what they give alone.

    A model whose rows can only be computed one at a time is served so, and `notes` says why.
    """
    shape = shape or StepShape()
    rows = [_prefilled(model, vocab_size, n) for n in _LENGTHS]
    inputs = [mx.array([[3 + s], [5 + s], [7 + s]], dtype=mx.uint32) % vocab_size for s in range(_STEPS)]
    alone = [_decode_alone(model, row.copy(), [i[at] for i in inputs]) for at, row in enumerate(rows)]
    apart = mx.concatenate(alone, axis=1)
    mx.eval(apart)
    cost = measure(rows[0])
    reasons = []
    for batching in (Batching.PACKS, Batching.PADDED):
        # A floor of 1, so that these short rows are grouped as longer ones would be.
        tried = replace(shape, batching=batching, rule=PackRule(shape.rule.ratio, 1))
        try:
            together = _decode_together(model, [row.copy() for row in rows], inputs, tried)
            spread = mx.maximum(mx.max(apart) - mx.min(apart), 1e-6)
            worst: Any = mx.max(mx.abs(together - apart)) / spread
            difference = float(worst.item())
        except Exception as error:  # whatever a model does with caches it was not written for
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if difference <= _TOLERANCE[dtype]:
            return Tested(cost, replace(shape, batching=batching))
        reasons.append(f"rows differ by {difference:.3g} of the logits' spread (allowed {_TOLERANCE[dtype]})")
    name = type(model).__module__.rpartition(".")[2]
    log.warning("%s: rows in packs: %s; in a padded batch: %s", name, *reasons)
    note = f"the architecture {name} does not batch ({reasons[-1]}); its rows are computed one at a time"
    return Tested(cost, replace(shape, batching=Batching.ALONE), (note,))


def _prefilled(model: Any, vocab_size: int, tokens: int) -> RowKV:
    row = RowKV.new(model)
    row.run(model, [(7 * i + tokens) % min(vocab_size, 1000) for i in range(tokens)])
    mx.eval(row.arrays())
    return row


def _decode_alone(model: Any, row: RowKV, inputs: Sequence[mx.array]) -> mx.array:
    """(steps, 1, vocabulary) float32 logits of one row."""
    steps = [model(token[None], cache=row.caches)[:, -1] for token in inputs]
    return mx.stack(steps).astype(mx.float32)


def _decode_together(
    model: Any, rows: Sequence[RowKV], inputs: Sequence[mx.array], shape: StepShape
) -> mx.array:
    """(steps, rows, vocabulary) float32 logits of all rows, in the order of `rows`."""
    caches = StepCaches(shape).composed(rows)
    order = [next(i for i, row in enumerate(rows) if row is placed) for placed in caches.rows]
    back = mx.array([order.index(i) for i in range(len(order))])
    logits = []
    for tokens in inputs:
        logits.append(model(tokens[mx.array(order)], cache=caches.views())[:, -1][back])
        caches.stepped()
    together = mx.stack(logits).astype(mx.float32)
    mx.eval(together)
    return together
