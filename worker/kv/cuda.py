"""Attention over packs on CUDA: one query a row, over that row's span of a padded array.

MLX's own decode kernels take no array mask; with one, attention falls back to matrix products over the whole
array. This kernel takes each row's first slot and count instead, so that padding is never read. Two passes
over the keys are avoided by a running maximum (Milakov and Gimelshein 2018); long rows are split over blocks
and joined by a second kernel (flash decoding, Dao et al. 2023).
"""

from functools import cache
from typing import Any

import mlx.core as mx

_THREADS = 256
_HEAD_DIMS = (32, 64, 128, 256)
_MAX_GROUP = 8  # query heads that share a kv head, kept in registers
_BLOCKS = 264  # blocks that keep the GPU busy: two for each of some 132 multiprocessors
_LEAST_SPLIT = 512  # slots below which a row is not split

_HEADER = "#define INF __int_as_float(0x7f800000)\n"
_ATTEND = """
  constexpr int VEC = 8;                // elements that a lane reads at once
  constexpr int LANES = D / VEC;        // lanes that share a key
  constexpr int SLOTS = 32 / LANES;     // keys that a warp reads at once
  constexpr int WARPS = THREADS / 32;
  constexpr int KEYS = WARPS * SLOTS;
  struct alignas(16) Vec { T v[VEC]; };

  const int row = blockIdx.z, kv_head = blockIdx.y, split = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sub = lane % LANES, slot = lane / LANES;
  const int room = k_shape[2];
  const int start = spans[2 * row], count = spans[2 * row + 1];
  const int share = (count + SPLITS - 1) / SPLITS;
  const int first = split * share;
  const int last = min(count, first + share);
  const T* keys = k + row * k_strides[0] + kv_head * k_strides[1] + sub * VEC;
  const T* values = v + row * v_strides[0] + kv_head * v_strides[1] + sub * VEC;

  float query[G][VEC], sum[G][VEC], largest[G], weight[G];
  for (int g = 0; g < G; ++g) {
    const T* source = q + row * q_strides[0] + (kv_head * G + g) * q_strides[1] + sub * VEC;
    largest[g] = -INF;
    weight[g] = 0;
    for (int i = 0; i < VEC; ++i) {
      query[g][i] = static_cast<float>(source[i]) * scale[0] * 1.44269504f;
      sum[g][i] = 0;
    }
  }
  for (int base = first; base < last; base += KEYS * UNROLL) {
    Vec key[UNROLL], value[UNROLL];
    bool inside[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int at = base + u * KEYS + warp * SLOTS + slot;
      inside[u] = at < last;
      int where = start + (inside[u] ? at : first);
      where = where >= room ? where - room : where;
      key[u] = *reinterpret_cast<const Vec*>(keys + where * k_strides[2]);
      value[u] = *reinterpret_cast<const Vec*>(values + where * v_strides[2]);
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float score[UNROLL];
      float top = largest[g];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        float dot = 0;
#pragma unroll
        for (int i = 0; i < VEC; ++i) dot += query[g][i] * static_cast<float>(key[u].v[i]);
#pragma unroll
        for (int apart = LANES / 2; apart > 0; apart /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, apart);
        score[u] = inside[u] ? dot : -INF;
        top = fmaxf(top, score[u]);
      }
      const float reference = top == -INF ? 0.0f : top;
      const float fade = exp2f(largest[g] - reference);
      largest[g] = top;
      weight[g] *= fade;
#pragma unroll
      for (int i = 0; i < VEC; ++i) sum[g][i] *= fade;
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const float p = exp2f(score[u] - reference);
        weight[g] += p;
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum[g][i] += p * static_cast<float>(value[u].v[i]);
      }
    }
  }
  __shared__ float sums[WARPS][D];
  __shared__ float tops[WARPS], weights[WARPS];
  for (int g = 0; g < G; ++g) {
    // The keys of a warp's slots, then the warps of the block.
    float top = largest[g];
    for (int apart = LANES; apart < 32; apart *= 2)
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, apart));
    const float reference = top == -INF ? 0.0f : top;
    const float fade = exp2f(largest[g] - reference);
    float total = weight[g] * fade;
    for (int apart = LANES; apart < 32; apart *= 2) total += __shfl_xor_sync(0xffffffffu, total, apart);
    for (int i = 0; i < VEC; ++i) {
      float s = sum[g][i] * fade;
      for (int apart = LANES; apart < 32; apart *= 2) s += __shfl_xor_sync(0xffffffffu, s, apart);
      if (slot == 0) sums[warp][sub * VEC + i] = s;
    }
    if (lane == 0) {
      tops[warp] = top;
      weights[warp] = total;
    }
    __syncthreads();
    const int d = threadIdx.x;
    if (d < D) {
      float all = -INF;
      for (int w = 0; w < WARPS; ++w) all = fmaxf(all, tops[w]);
      const float base = all == -INF ? 0.0f : all;
      float out_sum = 0, out_weight = 0;
      for (int w = 0; w < WARPS; ++w) {
        const float f = exp2f(tops[w] - base);
        out_sum += sums[w][d] * f;
        out_weight += weights[w] * f;
      }
      const int head = (row * gridDim.y + kv_head) * G + g;
      STORE
    }
    __syncthreads();
  }
"""
_STORE_WHOLE = "out[head * D + d] = static_cast<T>(out_sum / out_weight);"
_STORE_SPLIT = """
      partial[(head * SPLITS + split) * D + d] = out_sum;
      if (d == 0) {
        norm[(head * SPLITS + split) * 2] = all;
        norm[(head * SPLITS + split) * 2 + 1] = out_weight;
      }
"""
_JOIN = """
  const int head = blockIdx.y, d = threadIdx.x;
  float all = -INF;
  for (int s = 0; s < SPLITS; ++s) all = fmaxf(all, norm[(head * SPLITS + s) * 2]);
  float sum = 0, weight = 0;
  for (int s = 0; s < SPLITS; ++s) {
    const float f = exp2f(norm[(head * SPLITS + s) * 2] - all);
    sum += partial[(head * SPLITS + s) * D + d] * f;
    weight += norm[(head * SPLITS + s) * 2 + 1] * f;
  }
  out[head * D + d] = static_cast<T>(sum / weight);
"""


class CudaSpanAttention:
    """See views.SpanAttention."""

    def applies(self, queries: mx.array, keys: mx.array, values: mx.array) -> bool:
        dim = queries.shape[3]
        return (
            queries.shape[2] == 1
            and dim in _HEAD_DIMS
            and values.shape[3] == dim
            and queries.shape[1] // keys.shape[1] <= _MAX_GROUP
            and queries.dtype == keys.dtype == values.dtype
            and queries.dtype in (mx.float32, mx.float16, mx.bfloat16)
        )

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, spans: mx.array, scale: float
    ) -> mx.array:
        """`queries` (rows, heads, 1, D), `keys` and `values` (rows, kv heads, slots, D), `spans` (rows, 2);
        the result has the queries' shape and dtype."""
        rows, heads, _, dim = queries.shape
        kv_heads, slots = keys.shape[1], keys.shape[2]
        splits = _splits(rows * kv_heads, slots)
        group = heads // kv_heads
        template = [
            ("T", queries.dtype),
            ("D", dim),
            ("G", group),
            ("THREADS", _THREADS),
            ("SPLITS", splits),
            ("UNROLL", 4 if group <= 4 else 2),
        ]
        launch: dict[str, Any] = {
            "inputs": [queries, keys, values, spans, _constant(scale)],
            "template": template,
            "grid": (_THREADS * splits, kv_heads, rows),
            "threadgroup": (_THREADS, 1, 1),
        }
        if splits == 1:
            whole: mx.array = _whole()(
                **launch, output_shapes=[queries.shape], output_dtypes=[queries.dtype]
            )[0]
            return whole
        partial, norm = _split()(
            **launch,
            output_shapes=[(rows, heads, splits, dim), (rows, heads, splits, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        joined: mx.array = _join()(
            inputs=[partial, norm],
            template=[("T", queries.dtype), ("D", dim), ("SPLITS", splits)],
            grid=(dim, rows * heads, 1),
            threadgroup=(dim, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[queries.dtype],
        )[0]
        return joined


def _splits(blocks: int, slots: int) -> int:
    """Over how many blocks a row's kv head is spread: a power of two, each kind being compiled."""
    splits = 1
    while blocks * splits * 2 <= _BLOCKS and slots > _LEAST_SPLIT * splits and splits < 32:
        splits *= 2
    return splits


@cache
def _constant(value: float) -> mx.array:
    return mx.array([value], dtype=mx.float32)


@cache
def _whole() -> Any:
    return mx.fast.cuda_kernel(
        name="mlxhost_span_attention",
        input_names=["q", "k", "v", "spans", "scale"],
        output_names=["out"],
        source=_ATTEND.replace("STORE", _STORE_WHOLE),
        header=_HEADER,
        ensure_row_contiguous=False,
    )


@cache
def _split() -> Any:
    return mx.fast.cuda_kernel(
        name="mlxhost_span_attention_split",
        input_names=["q", "k", "v", "spans", "scale"],
        output_names=["partial", "norm"],
        source=_ATTEND.replace("STORE", _STORE_SPLIT),
        header=_HEADER,
        ensure_row_contiguous=False,
    )


@cache
def _join() -> Any:
    return mx.fast.cuda_kernel(
        name="mlxhost_span_attention_join",
        input_names=["partial", "norm"],
        output_names=["out"],
        source=_JOIN,
        header=_HEADER,
    )
