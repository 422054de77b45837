"""Spans of keys or values one after another, for each layer, with room to grow: most of a restore's time."""

from collections.abc import Sequence
from math import prod

import mlx.core as mx


def joined(spans: Sequence[mx.array], takes: Sequence[int], room: int) -> list[mx.array]:
    """For each of the stacked leaves an array (1, heads, room, ...): the first `takes[i]` tokens of every
    span (leaves, heads, tokens, ...), then zeros. No result shares memory with a span or another result."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return _copied(spans, takes, room)
    return _concatenated(spans, takes, room)


def _concatenated(spans: Sequence[mx.array], takes: Sequence[int], room: int) -> list[mx.array]:
    leaves, heads, _, *rest = spans[0].shape
    spare = mx.zeros((heads, room - sum(takes), *rest), spans[0].dtype)
    return [
        mx.concatenate([*(s[j, :, :n] for s, n in zip(spans, takes, strict=True)), spare], axis=1)[None]
        for j in range(leaves)
    ]


def _copied(spans: Sequence[mx.array], takes: Sequence[int], room: int) -> list[mx.array]:
    """The same with plain copies of memory: MLX concatenates on a CPU at half that speed."""
    leaves, heads, _, *rest = spans[0].shape
    dtype = spans[0].dtype
    token = prod(rest) * dtype.size
    sources = [memoryview(mx.contiguous(s).view(mx.uint8)).cast("B") for s in spans]  # type: ignore[arg-type]
    shape = (1, heads, room, *rest[:-1], rest[-1] * dtype.size)
    results = [mx.zeros(shape, mx.uint8) for _ in range(leaves)]
    mx.eval(results)
    for leaf, result in enumerate(results):
        target = memoryview(result).cast("B")  # type: ignore[arg-type]
        for head in range(heads):
            at = head * room * token
            for span, source, take in zip(spans, sources, takes, strict=True):
                begin = (leaf * heads + head) * span.shape[2] * token
                target[at : at + take * token] = source[begin : begin + take * token]
                at += take * token
    return [result.view(dtype) for result in results]
