"""Draws among a row's likeliest tokens: what filters keep is found in a short sorted list, not by passes over
the vocabulary.

Exact where the list holds everything that the filters keep; `lacking` says where it may not, and such a draw
must not be used. Noise is a function of the token's id (see sampling.gumbel), so a draw is the one that the
whole vocabulary would have given.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

WIDTH = 1024  # tokens in the list; finding the largest 1,024 costs no more than the largest 64


@dataclass(frozen=True)
class Filters:
    """Columns (rows, 1): `min_p` as a logarithm, `top_k` of 0 for none, `top_p` of 1 for none."""

    min_p: mx.array
    top_k: mx.array
    top_p: mx.array
    whole_mass: bool  # whether some row has top_p without top_k: it needs the mass of the vocabulary

    @classmethod
    def of(cls, min_p: Sequence[float], top_k: Sequence[int], top_p: Sequence[float]) -> "Filters":
        return cls(
            mx.array([[math.log(p) if p > 0 else -math.inf] for p in min_p]),
            mx.array([[k] for k in top_k], dtype=mx.int32),
            mx.array([[p] for p in top_p]),
            any(p < 1 and not k for p, k in zip(top_p, top_k, strict=True)),
        )


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens of each row in descending order: `ids` and `values` (rows, WIDTH), -inf for what a
    filter drops; `lacking` (rows,) bool: the filters may keep more than the list holds."""

    ids: mx.array
    values: mx.array
    lacking: mx.array


def likeliest(x: mx.array, filters: Filters) -> Likeliest:
    """The tokens of `x` (rows, vocabulary; scaled logits) that pass min_p, top_k and top_p, in that order."""
    width = min(WIDTH, x.shape[-1])
    ids = mx.argpartition(-x, kth=width - 1, axis=-1)[:, :width] if width < x.shape[-1] else None
    values = x if ids is None else mx.take_along_axis(x, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    ids = order if ids is None else mx.take_along_axis(ids, order, axis=-1)
    values = mx.take_along_axis(values, order, axis=-1)
    largest = values[:, :1]
    threshold = largest + filters.min_p
    kth = mx.take_along_axis(values, mx.clip(filters.top_k - 1, 0, width - 1), axis=-1)
    threshold = mx.where(filters.top_k > 0, mx.maximum(threshold, kth), threshold)
    weights = mx.where(values >= threshold, mx.exp(values - largest), 0.0)
    mass = mx.sum(weights, axis=-1, keepdims=True)
    if filters.whole_mass:
        everything = mx.sum(mx.where(x >= threshold, mx.exp(x - largest), 0.0), axis=-1, keepdims=True)
        mass = mx.where(filters.top_k > 0, mass, everything)
    # A token stays while those before it hold less than top_p of the mass; the first always stays.
    before = mx.cumsum(weights, axis=-1) - weights
    inside = (values >= threshold) & ((before < filters.top_p * mass) | (filters.top_p >= 1))
    least = mx.min(mx.where(inside, values, math.inf), axis=-1, keepdims=True)
    kept = mx.where(values >= mx.minimum(least, largest), values, -math.inf)
    last = kept[:, -1]
    lacking = last > -math.inf if width < x.shape[-1] else mx.zeros(last.shape, dtype=mx.bool_)
    return Likeliest(ids.astype(mx.uint32), kept, lacking)
