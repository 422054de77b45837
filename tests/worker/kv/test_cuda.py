"""The CUDA attention kernel against attention with a mask; runs where there is a CUDA device."""

import mlx.core as mx
import pytest

from mlxhost.worker.kv.cuda import CudaSpanAttention
from mlxhost.worker.kv.merged import Spans

pytestmark = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (16, 2)], ids=["mha", "gqa4", "gqa8"])
@pytest.mark.parametrize("slots", [3, 300, 5000])
def test_spans_give_what_a_mask_gives(slots: int, heads: tuple[int, int], dim: int, dtype: mx.Dtype) -> None:
    """Rows that begin anywhere, short ones, whole ones and ones that go round the end."""
    spans = Spans((0, slots - 1, 1, slots // 2), (slots, 1, slots - 1, slots - 1), slots)
    n, kv = heads
    keys = [mx.random.key(i) for i in range(3)]
    q = mx.random.normal((4, n, 1, dim), key=keys[0]).astype(dtype)
    room = slots + 13
    k = mx.random.normal((4, kv, room, dim), key=keys[1]).astype(dtype)[..., :slots, :]
    v = mx.random.normal((4, kv, room, dim), key=keys[2]).astype(dtype)[..., :slots, :]
    pairs = mx.array([list(pair) for pair in zip(spans.starts, spans.counts, strict=True)], dtype=mx.int32)
    kernel = CudaSpanAttention()
    assert kernel.applies(q, k, v)
    wide = (a.astype(mx.float32) for a in (q, k, v))
    expected = mx.fast.scaled_dot_product_attention(*wide, scale=0.3, mask=spans.mask())
    got = kernel(q, k, v, pairs, 0.3).astype(mx.float32)
    assert mx.max(mx.abs(got - expected)).item() < (2e-2 if dtype == mx.bfloat16 else 1e-3)
