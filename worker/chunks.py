"""Whose prompt is prefilled next, and how much of it at once. Pure.

The chunk size follows the largest gap wanted between two tokens of a running stream: it is what this
machine prefills in that time, measured as it goes.
"""

from collections.abc import Sequence

from mlxhost.worker.row import Row

MIN_CHUNK = 32
MAX_CHUNK = 2048
_AGING_TOKENS_PER_S = 256.0


def choose(rows: Sequence[Row], now: float) -> Row:
    """The row to prefill next: the shortest remaining prompt, a long wait counting as progress, so that a
    long prompt is not passed over for ever."""
    return min(rows, key=lambda r: r.to_prefill - (now - r.arrived) * _AGING_TOKENS_PER_S)


class ChunkSize:
    """Learns how many tokens fit the gap.

    `seconds` of a chunk are split into a fixed part and a part that grows with its tokens only through the
    ratio seen last, smoothed; the next size moves at most by a factor of 2.
    """

    def __init__(self, max_gap_s: float, first: int = 64) -> None:
        self.max_gap_s = max_gap_s
        self._tokens_per_s = first / max_gap_s

    def next(self, step_s: float) -> int:
        """Tokens for the next chunk when a decode step takes `step_s` of the gap."""
        budget = max(self.max_gap_s - step_s, self.max_gap_s / 4)
        return max(MIN_CHUNK, min(MAX_CHUNK, int(self._tokens_per_s * budget)))

    def learn(self, tokens: int, seconds: float) -> None:
        """Take in what a whole chunk of `tokens` took."""
        if tokens < MIN_CHUNK // 2 or seconds <= 0:
            return
        seen = tokens / seconds
        bounded = min(max(seen, self._tokens_per_s / 2), self._tokens_per_s * 2)
        self._tokens_per_s += 0.5 * (bounded - self._tokens_per_s)
