"""Drawing the next token of every row in one vectorised graph, on the device.

Order, as in the field's engines: temperature, min_p, top_k, top_p, then one draw. Each filter comes down to a
threshold on the scaled logits, so no vocabulary is ever sorted:
  min_p  keeps p >= min_p * p_max           <=>  x >= x_max + ln(min_p)
  top_k  keeps the k largest                <=>  x >= k-th largest (by partition)
  top_p  keeps the smallest set of mass p   <=>  x >= t, t found by bisection on the mass above t

The draw is Gumbel-max: argmax(x + g) is distributed as softmax(x) (Gumbel 1954; Maddison et al. 2014). The
noise g is a hash of (seed, position, token id), so a draw depends on nothing else: not on the batch, its
order, a restart or a preemption.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxhost.wire.data import Sampling

# Bisection halves an interval of at most this many nats (weights below e^-40 are zero in float32 terms)...
_SPAN = 40.0
# ...this often, to 40 / 2^26 = 6e-7 nats, the resolution of a float32 logit.
_ROUNDS = 26

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class RowSampling:
    """One row's sampling, with its seed settled."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int

    @classmethod
    def of(cls, sampling: Sampling) -> "RowSampling":
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        return cls(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, seed & _MASK64)

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0.0


class Sampler:
    """The rows' sampling parameters as device columns; rebuilt only when rows join or leave."""

    def __init__(self, rows: Sequence[RowSampling], vocab_size: int) -> None:
        self._rows = rows
        self._all_greedy = all(r.greedy for r in rows)
        if self._all_greedy:
            return
        self._some_greedy = any(r.greedy for r in rows)
        self._greedy = mx.array([r.greedy for r in rows])
        self._inverse_temperature = _column([1.0 if r.greedy else 1.0 / r.temperature for r in rows])
        drawn = [r for r in rows if not r.greedy]
        self._min_p = None
        if any(r.min_p > 0 for r in drawn):
            self._min_p = _column([math.log(r.min_p) if r.min_p > 0 else -math.inf for r in rows])
        self._top_k = 0
        if any(0 < r.top_k < vocab_size for r in drawn):
            ks = [r.top_k if 0 < r.top_k < vocab_size and not r.greedy else 0 for r in rows]
            self._top_k = max(ks)
            # The k-th largest stands at index top_k - k of the ascending largest; k = 0 keeps everything.
            self._kth = mx.array([[self._top_k - k if k else 0] for k in ks], dtype=mx.int32)
            self._has_k = mx.array([[k > 0] for k in ks])
        self._top_p = None
        if any(r.top_p < 1 for r in drawn):
            self._top_p = _column([r.top_p for r in rows])
        self._ids = mx.arange(vocab_size, dtype=mx.uint32)[None]

    def draw(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """The next token of each row: (rows,) uint32 from `logits` (rows, vocabulary).

        `positions[i]` is how many tokens row i has produced before this one.
        """
        greedy = mx.argmax(logits, axis=-1).astype(mx.uint32)
        if self._all_greedy:
            return greedy
        x = logits.astype(mx.float32) * self._inverse_temperature
        kept = self._filter(x)
        keys = mx.array(
            [_key(r.seed, p) for r, p in zip(self._rows, positions, strict=True)], dtype=mx.uint32
        )
        drawn = mx.argmax(kept + gumbel(keys, self._ids), axis=-1).astype(mx.uint32)
        return mx.where(self._greedy, greedy, drawn) if self._some_greedy else drawn

    def _filter(self, x: mx.array) -> mx.array:
        """`x` with -inf where a filter drops the token."""
        if self._min_p is None and not self._top_k and self._top_p is None:
            return x
        largest = mx.max(x, axis=-1, keepdims=True)
        threshold = mx.full(largest.shape, -math.inf)
        if self._min_p is not None:
            threshold = largest + self._min_p
        if self._top_k:
            top = mx.sort(mx.topk(x, self._top_k, axis=-1), axis=-1)
            kth = mx.take_along_axis(top, self._kth, axis=-1)
            threshold = mx.where(self._has_k, mx.maximum(threshold, kth), threshold)
        kept = mx.where(x >= threshold, x, -math.inf)
        if self._top_p is not None:
            nucleus = _nucleus_threshold(kept - largest, self._top_p) + largest
            kept = mx.where((kept >= nucleus) | (kept == largest), kept, -math.inf)
        return kept


def gumbel(keys: mx.array, ids: mx.array) -> mx.array:
    """Gumbel noise (rows, n) float32 for `keys` (rows, 2) uint32 and token `ids` (1, n) uint32.

    Two rounds of a 32-bit mixing function (lowbias32, Wellons 2018) over the id and both key halves. The
    uniform is taken small where the noise is large, so the upper tail is exact to 2^-32.
    """
    h = _mix(ids ^ keys[:, :1])
    h = _mix(h + keys[:, 1:])
    u = (h.astype(mx.float32) + 0.5) * (1.0 / 4294967296.0)
    # At u = 1 (rounding) the exponential is infinite and the noise -inf: that token just is not drawn.
    return -mx.log(-mx.log1p(-u))


def _mix(x: mx.array) -> mx.array:
    x = x ^ (x >> 16)
    x = x * mx.array(0x7FEB352D, dtype=mx.uint32)
    x = x ^ (x >> 15)
    x = x * mx.array(0x846CA68B, dtype=mx.uint32)
    return x ^ (x >> 16)


def _nucleus_threshold(x: mx.array, top_p: mx.array) -> mx.array:
    """The largest t (rows, 1) for which the tokens with x >= t hold at least `top_p` of the mass.

    `x` has its maximum at 0; -inf entries have no mass.
    """
    weights = mx.exp(x)
    wanted = top_p * mx.sum(weights, axis=-1, keepdims=True)
    low = mx.full(top_p.shape, -_SPAN)
    high = mx.zeros(top_p.shape)
    for _ in range(_ROUNDS):
        middle = (low + high) * 0.5
        mass = mx.sum(mx.where(x >= middle, weights, 0.0), axis=-1, keepdims=True)
        enough = mass >= wanted
        low = mx.where(enough, middle, low)
        high = mx.where(enough, high, middle)
    return low


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _key(seed: int, position: int) -> list[int]:
    """Two 32-bit halves of a 64-bit mix (splitmix64, Steele et al. 2014) of seed and position."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return [z & 0xFFFFFFFF, z >> 32]
