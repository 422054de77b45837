"""What changes logits before a draw: logit bias and the three penalties. One graph for all rows.

Penalties look at all of a row's output (and, for repetition, its prompt). The counts stay on the device; each
draw adds the tokens of the one before it, which the host may not have read yet.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class History:
    """What a row has seen so far, as far as the host knows."""

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()


@dataclass(frozen=True)
class Penalty:
    """One row's settings; the defaults change nothing."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def active(self) -> bool:
        return self != NO_PENALTY


NO_PENALTY = Penalty()


class Penalties:
    """Device counts for a batch of rows; rebuilt when rows join or leave."""

    def __init__(self, penalties: Sequence[Penalty], histories: Sequence[History], vocab_size: int) -> None:
        rows = len(penalties)
        self._repetition = mx.array([[p.repetition] for p in penalties])
        self._presence = mx.array([[p.presence] for p in penalties])
        self._frequency = mx.array([[p.frequency] for p in penalties])
        self._rows = mx.arange(rows)
        self._counted = [len(h.output) for h in histories]
        self._first = True
        self._counts = mx.zeros((rows, vocab_size))
        self._prompt = mx.zeros((rows, vocab_size), dtype=mx.bool_)
        for i, (penalty, history) in enumerate(zip(penalties, histories, strict=True)):
            if penalty.active and history.output:
                seen = Counter(history.output)
                self._counts[i, mx.array(list(seen))] = mx.array([float(n) for n in seen.values()])
            if penalty.repetition != 1 and len(history.prompt):
                self._prompt[i, mx.array(sorted(set(history.prompt)))] = True

    def apply(self, logits: mx.array, positions: Sequence[int], last: mx.array) -> mx.array:
        """`logits` (rows, vocabulary) as penalised. `last` (rows,) are the tokens drawn before, of which
        `positions[i]` row i has; one that the host had not read when the counts were made is added now."""
        pending = (
            [min(p - c, 1) for p, c in zip(positions, self._counted, strict=True)] if self._first else None
        )
        added = mx.array(pending, dtype=mx.float32) if pending is not None else mx.ones(last.shape)
        self._first = False
        self._counts = self._counts.at[self._rows, last].add(added)
        produced = self._counts > 0
        # Keskar et al. 2019: divide a positive logit, multiply a negative one.
        factor = mx.where(produced | self._prompt, self._repetition, 1.0)
        logits = mx.where(logits > 0, logits / factor, logits * factor)
        return logits - self._frequency * self._counts - self._presence * produced


def bias_matrix(biases: Sequence[dict[int, float]], vocab_size: int) -> mx.array | None:
    """(rows, vocabulary) to add to the logits; None when no row has a bias."""
    if not any(biases):
        return None
    matrix = mx.zeros((len(biases), vocab_size))
    for i, bias in enumerate(biases):
        if bias:
            matrix[i, mx.array(list(bias))] = mx.array([float(v) for v in bias.values()])
    return matrix
