"""Whose prompt is prefilled next, and how much of it at once. Pure.

Clients take turns, a chunk at a time, so that one's prompts do not hold up another's; of one client's rows
the shortest remaining prompt is first. The size of a chunk follows the largest gap wanted between two tokens
of a running stream, by a model of this machine that is measured as it goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mlxhost.worker.row import Row

MIN_CHUNK = 32
MAX_CHUNK = 2048
_AGING_TOKENS_PER_S = 256.0
_MEMORY = 0.85  # weight of what was learned before, at each chunk
_PRIOR = 0.02  # weight of the shape known at the start, against one chunk
_LEAST = (float(MIN_CHUNK), 1.0, 1e-3)  # the guess is no surer than this, in costs of a token
_ATTENTION = 2e-4  # cost of a pair of tokens in that of a token, until it is measured
_WORTH = 8.0  # a chunk is long enough once its tokens take so many times what starting it does...
_SHORT_S = 0.05  # ...and this long


@dataclass(frozen=True)
class Timing:
    """Seconds that a chunk takes to start, and for each token of a short row; `longest` is how many tokens
    the longest chunk had from which this is known."""

    start_s: float
    token_s: float
    longest: int = 128


def choose(rows: Sequence[Row], now: float) -> Row:
    """The row to prefill next: the shortest remaining prompt, a long wait counting as progress, so that a
    long prompt is not passed over for ever."""
    return min(rows, key=lambda r: r.to_prefill - (now - r.arrived) * _AGING_TOKENS_PER_S)


class Turns:
    """Prefilled tokens of each client that has rows in prefill; the one with the fewest is next."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}

    def choose(self, rows: Sequence[Row], now: float) -> Row:
        """The row to prefill next, of `rows` that may be."""
        clients = dict.fromkeys(row.client for row in rows)
        present = [self._tokens[c] for c in clients if c in self._tokens]
        start = min(present, default=0.0) - 1.0  # a newcomer's first chunk is next
        self._tokens = {c: self._tokens.get(c, start) for c in clients}
        turn = min(clients, key=lambda c: self._tokens[c])
        return choose([row for row in rows if row.client == turn], now)

    def charge(self, row: Row, tokens: int) -> None:
        """`tokens` of `row` were prefilled."""
        self._tokens[row.client] = self._tokens.get(row.client, 0.0) + tokens


class ChunkSize:
    """Knows how long a chunk of n tokens takes at the end of a row that has m:  a + b*n + c*n*(m + n/2).

    a is the cost of starting (the weights are read once), b that of a token, c that of attending from one
    token to another. What was measured at the start is the guess to begin with; every chunk corrects it, by
    least squares in which old chunks fade.
    """

    def __init__(self, max_gap_s: float, timing: Timing | None = None) -> None:
        self.max_gap_s = max_gap_s
        timing = timing or Timing(0.0, max_gap_s / 64)
        self._guess = [timing.start_s, timing.token_s, timing.token_s * _ATTENTION]
        self._model = list(self._guess)
        self._longest = timing.longest  # chunk ever measured; the model says little of much longer ones
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._seen = [0.0] * 3

    def next(self, step_s: float, length: int = 0) -> int:
        """Tokens for the next chunk of a row that has `length`, when a decode step takes `step_s` of the gap.

        Not more than fits the gap, and not more than makes starting a chunk cheap: the longer it is, the
        longer everybody else waits.
        """
        start, token, pair = self._model
        budget = max(self.max_gap_s - step_s, self.max_gap_s / 4)
        budget = min(budget, max(_SHORT_S, (1 + _WORTH) * start))
        fits = _positive_root(pair / 2, token + pair * length, start - budget)
        return max(MIN_CHUNK, min(MAX_CHUNK, 2 * self._longest, int(fits)))

    def seconds(self, tokens: int, length: int = 0) -> float:
        """What a chunk of `tokens` of a row that has `length` should take."""
        return sum(m * f for m, f in zip(self._model, _features(tokens, length), strict=True))

    def learn(self, tokens: int, seconds: float, length: int = 0) -> None:
        """Take in what a chunk took. One that took far longer or shorter than expected counts as four
        times or half of that, because a machine stumbles now and then."""
        if tokens < MIN_CHUNK // 2 or seconds <= 0:
            return
        expected = self.seconds(tokens, length)
        bounded = min(max(seconds, expected / 2), expected * 4)
        self._longest = max(self._longest, tokens)
        # Relative errors count, so that short chunks weigh as much as long ones.
        x = [f / bounded for f in _features(tokens, length)]
        for i in range(3):
            self._seen[i] = _MEMORY * self._seen[i] + x[i]
            for j in range(3):
                self._moments[i][j] = _MEMORY * self._moments[i][j] + x[i] * x[j]
        self._model = self._solve()

    def _solve(self) -> list[float]:
        """The model that fits best, pulled a little towards the first guess at the speed seen."""
        guess = self._guess
        along = sum(self._moments[i][j] * guess[i] * guess[j] for i in range(3) for j in range(3))
        scale = sum(s * g for s, g in zip(self._seen, guess, strict=True)) / along
        guess = [g * scale for g in guess]
        pull = [_PRIOR / max(g, guess[1] * least) ** 2 for g, least in zip(guess, _LEAST, strict=True)]
        matrix = [[*row] for row in self._moments]
        right = [*self._seen]
        for i in range(3):
            matrix[i][i] += pull[i]
            right[i] += pull[i] * guess[i]
        solved = _solved(matrix, right)
        return [max(0.0, solved[0]), max(solved[1], guess[1] / 10), max(solved[2], guess[2] / 10)]


def _features(tokens: int, length: int) -> list[float]:
    return [1.0, float(tokens), tokens * (length + tokens / 2)]


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x with matrix @ x = right, for a positive definite matrix (Gaussian elimination, in place)."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
            right[j] -= factor * right[i]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (right[i] - sum(matrix[i][j] * x[j] for j in range(i + 1, size))) / matrix[i][i]
    return x


def _positive_root(square: float, linear: float, constant: float) -> float:
    """The n > 0 with square*n^2 + linear*n + constant = 0; 0 when there is none."""
    if constant >= 0:
        return 0.0
    if square * -constant < 1e-9 * linear * linear:
        return -constant / linear
    return float((-linear + (linear * linear - 4 * square * constant) ** 0.5) / (2 * square))
