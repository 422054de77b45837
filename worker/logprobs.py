"""Log-probabilities of the model's own distribution (before temperature, penalties and filters).

Only what was asked for leaves the device: the chosen token's and the largest few of each row.
"""

from collections.abc import Sequence

import mlx.core as mx

TopEntries = list[tuple[int, float]]


def gather(logits: mx.array, tokens: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """For `logits` (rows, vocabulary) and the `tokens` (rows,) chosen: their log-probabilities (rows,), and
    the ids and log-probabilities (rows, top) of the largest, in descending order."""
    logits = logits.astype(mx.float32)
    normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, tokens.astype(mx.int32)[:, None], axis=-1) - normaliser
    if not top:
        empty = mx.zeros((logits.shape[0], 0))
        return chosen[:, 0], empty.astype(mx.int32), empty
    ids = mx.argpartition(-logits, kth=top - 1, axis=-1)[:, :top]
    values = mx.take_along_axis(logits, ids, axis=-1) - normaliser
    order = mx.argsort(-values, axis=-1)
    return (
        chosen[:, 0],
        mx.take_along_axis(ids, order, axis=-1).astype(mx.int32),
        mx.take_along_axis(values, order, axis=-1),
    )


def prompt_entries(logits: mx.array, targets: Sequence[int], top: int) -> list[TopEntries]:
    """For each position of a prompt chunk: the token that really came next first, then the `top` largest.

    `logits` (tokens, vocabulary) at the positions before `targets`.
    """
    chosen, ids, values = gather(logits, mx.array(list(targets), dtype=mx.uint32), top)
    mx.eval(chosen, ids, values)
    rows = zip(targets, _floats(chosen), _rows(ids), _rows(values), strict=True)
    return [[(t, c), *zip(map(int, i), v, strict=True)] for t, c, i, v in rows]


def _floats(array: mx.array) -> list[float]:
    values: list[float] = array.tolist()  # type: ignore[assignment]
    return values


def _rows(array: mx.array) -> list[list[float]]:
    values: list[list[float]] = array.tolist()  # type: ignore[assignment]
    return values
