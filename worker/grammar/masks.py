"""What every row of a batch may draw next, filled on the host while the forward runs."""

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlxhost.worker.grammar.xgr import Mask, new_masks
from mlxhost.worker.row import Row


def allowed_tokens(rows: Sequence[Row], unread: Mapping[int, int], width: int) -> mx.array:
    """(rows, width) bool: what may be drawn. `unread` are the tokens, by `id(row)`, that a row has drawn and
    not been given yet; `width` is that of the logits.

    A row whose grammar has come to its end gives up its min_tokens.
    """
    masks = new_masks(len(rows), width)
    for i, row in enumerate(rows):
        constraint = row.constraint
        if constraint is None:
            masks[i] = -1
            continue
        constraint.follow(row.output, unread.get(id(row)) if row.launched > len(row.output) else None)
        constraint.fill(masks, i)
        if row.launched < row.min_tokens and not forbid(masks, i, row.stop_ids):
            row.min_tokens = 0
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :width]
    return mx.array(bits.view(np.bool_))


def forbid(masks: Mask, row: int, ids: frozenset[int]) -> bool:
    """Take `ids` out of a mask where something else stays; whether it does."""
    words = masks[row].view(np.uint32).copy()
    for token in ids:
        if token < len(words) * 32:
            words[token >> 5] &= ~np.uint32(1 << (token & 31))
    if not words.any():
        return False
    masks[row] = words.view(np.int32)
    return True
