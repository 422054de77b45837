"""Spans joined by plain copies and by MLX."""

import mlx.core as mx
import pytest

from mlxhost.worker.cache.join import _concatenated, _copied


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.uint32])
@pytest.mark.parametrize("heads", [1, 3])
def test_copies_equal_concatenation(dtype: mx.Dtype, heads: int) -> None:
    """Both ways give the same bytes, whole spans and a part of the last, with zeros behind."""
    spans = [(mx.random.normal((2, heads, n, 4)) * 100).astype(dtype) for n in (8, 8, 5)]
    ours, theirs = _copied(spans, [8, 8, 3], 24), _concatenated(spans, [8, 8, 3], 24)
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) == ((1, heads, 24, 4), dtype)
        assert mx.array_equal(a, b).item()


def test_results_are_independent_of_spans() -> None:
    """Writing to a result changes no record."""
    span = mx.ones((2, 1, 4, 4))
    first, second = _copied([span], [4], 4)
    first[...] = 5.0
    mx.eval(first)
    assert mx.all(span == 1).item()
    assert mx.all(second == 1).item()
