"""Drawing the next token of every row in one vectorised graph, on the device.

Order, as in the field's engines: logit bias, penalties, temperature, min_p, top_k, top_p, XTC, then one draw.
Each filter comes down to a threshold on the scaled logits, so no vocabulary is ever sorted:
  min_p  keeps p >= min_p * p_max           <=>  x >= x_max + ln(min_p)
  top_k  keeps the k largest                <=>  x >= k-th largest (by partition)
  top_p  keeps the smallest set of mass p   <=>  x >= t, t found by bisection on the mass above t
Rows with a filter can be drawn in a list of their likeliest tokens instead (narrow.py), which on a CPU is
several times cheaper; `Drawn.lacking` tells where that list was too short for the draw to stand.

The draw is Gumbel-max: argmax(x + g) is distributed as softmax(x) (Gumbel 1954; Maddison et al. 2014). The
noise g is a hash of (seed, position, token id), so a draw depends on nothing else: not on the batch, its
order, a restart or a preemption.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlxhost.wire.data import Sampling
from mlxhost.worker.logprobs import gather
from mlxhost.worker.narrow import WIDTH, Filters, likeliest
from mlxhost.worker.penalties import NO_PENALTY, History, Penalties, Penalty, bias_matrix

# Bisection halves an interval of at most this many nats (weights below e^-40 are zero in float32 terms)...
_SPAN = 40.0
# ...this often, to 40 / 2^26 = 6e-7 nats, the resolution of a float32 logit.
_ROUNDS = 26

# Colder than this only the largest logit is ever drawn, and scaled logits come to overflow a float32.
_GREEDY_BELOW = 1e-6

MASK64 = (1 << 64) - 1
_XTC_SALT = 0x585443  # so that XTC's chance and the draw's noise differ


@dataclass(frozen=True)
class Drawn:
    """One draw: `tokens` (rows,) uint32; where a row asked for them, log-probabilities `chosen` (rows,), and
    `top_ids` and `top` (rows, n) of the n largest."""

    tokens: mx.array
    chosen: mx.array | None = None
    top_ids: mx.array | None = None
    top: mx.array | None = None
    lacking: mx.array | None = None  # (rows,) bool: where true, the token must not be used

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate."""
        every = (self.tokens, self.chosen, self.top_ids, self.top, self.lacking)
        return [a for a in every if a is not None]


@dataclass(frozen=True)
class RowSampling:
    """One row's sampling, with its seed settled."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    penalty: Penalty = NO_PENALTY
    bias: Mapping[int, float] = field(default_factory=dict)
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logprobs: bool = False
    top_logprobs: int = 0
    wide: bool = False  # its filters have kept more than a list of likeliest tokens holds

    @classmethod
    def of(cls, sampling: Sampling) -> "RowSampling":
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        return cls(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed & MASK64,
            penalty=Penalty(
                sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
            ),
            bias=sampling.logit_bias,
            xtc_probability=sampling.xtc_probability,
            xtc_threshold=sampling.xtc_threshold,
            logprobs=sampling.logprobs or sampling.top_logprobs > 0,
            top_logprobs=sampling.top_logprobs,
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def narrow(self) -> bool:
        """Whether a list of the likeliest tokens may hold all that its filters keep."""
        filtered = self.min_p > 0 or self.top_p < 1 or self.top_k > 0
        return self.greedy or (filtered and self.top_k < WIDTH and not self.wide)


class Sampler:
    """The rows' sampling parameters as device columns; rebuilt only when rows join or leave."""

    def __init__(
        self,
        rows: Sequence[RowSampling],
        vocab_size: int,
        histories: Sequence[History] = (),
        *,
        narrow: bool = False,
    ) -> None:
        """`histories` holds one entry a row, or none when no row has produced or penalises anything. With
        `narrow`, draws may be `lacking`."""
        self._rows = rows
        self._penalties = None
        if any(r.penalty.active for r in rows):
            known = histories or [History()] * len(rows)
            self._penalties = Penalties([r.penalty for r in rows], known, vocab_size)
        self._bias = bias_matrix([dict(r.bias) for r in rows], vocab_size)
        self._top_logprobs = max((r.top_logprobs for r in rows), default=0)
        self._logprobs = any(r.logprobs for r in rows)
        self._all_greedy = all(r.greedy for r in rows)
        if self._all_greedy:
            return
        self._some_greedy = any(r.greedy for r in rows)
        self._greedy = mx.array([r.greedy for r in rows])
        self._inverse_temperature = _column([1.0 if r.greedy else 1.0 / r.temperature for r in rows])
        drawn = [r for r in rows if not r.greedy]
        self._filters = None
        if narrow and all(r.narrow for r in rows):
            # Greedy rows keep one token.
            self._filters = Filters.of(
                [0.0 if r.greedy else r.min_p for r in rows],
                [1 if r.greedy else max(r.top_k, 0) for r in rows],
                [1.0 if r.greedy else r.top_p for r in rows],
            )
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
        self._xtc = any(r.xtc_probability > 0 for r in drawn)
        self._ids = mx.arange(vocab_size, dtype=mx.uint32)[None]

    def draw(
        self,
        raw: mx.array,
        positions: Sequence[int],
        last: mx.array | None = None,
        banned: Sequence[tuple[int, Sequence[int]]] = (),
        allowed: mx.array | None = None,
    ) -> Drawn:
        """The next token of each row, from the model's logits `raw` (rows, vocabulary).

        `positions[i]` is how many tokens row i has produced before this one; `last` (rows,) is the newest of
        them, needed where a row has penalties. `banned` are (row, ids) that must not be drawn, and `allowed`
        (rows, vocabulary) bool says what may.
        """
        logits = raw if allowed is None else mx.where(allowed, raw, -math.inf)
        if banned:
            logits = mx.array(logits)
            for row, ids in banned:
                logits[row, mx.array(list(ids))] = -math.inf
        if self._bias is not None:
            logits = logits + self._bias
        if self._penalties is not None:
            assert last is not None
            logits = self._penalties.apply(logits, positions, last)
        tokens, lacking = self._choose(logits, positions)
        if not self._logprobs:
            return Drawn(tokens, lacking=lacking)
        return Drawn(tokens, *gather(raw, tokens, self._top_logprobs), lacking=lacking)

    def _choose(self, logits: mx.array, positions: Sequence[int]) -> tuple[mx.array, mx.array | None]:
        """The tokens, and where they do not stand."""
        greedy = mx.argmax(logits, axis=-1).astype(mx.uint32)
        if self._all_greedy:
            return greedy, None
        x = logits.astype(mx.float32) * self._inverse_temperature
        if self._filters is not None:
            drawn, lacking = self._choose_narrow(x, positions, self._filters)
            if self._some_greedy:
                drawn, lacking = mx.where(self._greedy, greedy, drawn), lacking & ~self._greedy
            return drawn, lacking
        kept = self._filter(x)
        if self._xtc:
            kept = self._exclude_top_choices(kept, positions)
        drawn = mx.argmax(kept + gumbel(self._keys(positions), self._ids), axis=-1).astype(mx.uint32)
        return (mx.where(self._greedy, greedy, drawn) if self._some_greedy else drawn), None

    def _choose_narrow(
        self, x: mx.array, positions: Sequence[int], filters: Filters
    ) -> tuple[mx.array, mx.array]:
        found = likeliest(x, filters)
        kept = self._exclude_top_choices(found.values, positions) if self._xtc else found.values
        best = mx.argmax(kept + gumbel(self._keys(positions), found.ids), axis=-1, keepdims=True)
        return mx.take_along_axis(found.ids, best, axis=-1)[:, 0], found.lacking

    def _keys(self, positions: Sequence[int]) -> mx.array:
        pairs = zip(self._rows, positions, strict=True)
        return mx.array([_key(row.seed, position) for row, position in pairs], dtype=mx.uint32)

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

    def _exclude_top_choices(self, x: mx.array, positions: Sequence[int]) -> mx.array:
        """XTC (p-e-w 2024): by chance, drop every token above the threshold but the least likely of them. The
        chance is a hash of seed and position, like the draw."""
        rows = zip(self._rows, positions, strict=True)
        chance = [_uniform(r.seed ^ _XTC_SALT, p) < r.xtc_probability for r, p in rows]
        threshold = _column([r.xtc_threshold for r in self._rows])
        p = mx.softmax(x, axis=-1)
        above = p >= threshold
        least = mx.min(mx.where(above, p, math.inf), axis=-1, keepdims=True)
        several = mx.sum(above, axis=-1, keepdims=True) >= 2
        return mx.where(mx.array(chance)[:, None] & several & above & (p > least), -math.inf, x)


def gumbel(keys: mx.array, ids: mx.array) -> mx.array:
    """Gumbel noise (rows, n) float32 for `keys` (rows, 2) uint32 and token `ids` (1 or rows, n) uint32.

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


def _uniform(seed: int, position: int) -> float:
    """In [0, 1), from the same hash as the noise."""
    return _key(seed, position)[1] / 4294967296.0


def _key(seed: int, position: int) -> list[int]:
    """Two 32-bit halves of a 64-bit mix (splitmix64, Steele et al. 2014) of seed and position."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    z ^= z >> 31
    return [z & 0xFFFFFFFF, z >> 32]
