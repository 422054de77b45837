"""Jump-forward: several tokens of a row in one step where its grammar leaves only one text.

The forced text, spelt in the longest tokens, is a guess at what the model would draw: a grammar forces
characters, and a model may spell them otherwise. So the guess is fed and checked: each position is drawn
under its own mask, with the row's own noise, and kept as far as the draws agree. What comes out is token for
token what single steps would have given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxhost.worker.grammar import flat
from mlxhost.worker.grammar.masks import forbid
from mlxhost.worker.grammar.xgr import new_masks
from mlxhost.worker.row import Row

MIN_SPAN = 2  # forced tokens that make a jump worth its while
MAX_SPAN = 16  # a row's in one step
MAX_TOKENS = 64  # of all rows in one step


@dataclass(frozen=True)
class Plan:
    """One step: each row's newest token and the guess that follows it."""

    newest: Sequence[int]
    guesses: Sequence[Sequence[int]]

    @property
    def tokens(self) -> list[list[int]]:
        """What each row is fed."""
        return [[first, *guess] for first, guess in zip(self.newest, self.guesses, strict=True)]

    def agreed(self, drawn: Sequence[int]) -> list[list[int]]:
        """The draws of each row that hold, out of those at all positions: up to the first that is not what
        was guessed, that one included."""
        kept, at = [], 0
        for guess in self.guesses:
            own = drawn[at : at + len(guess) + 1]
            at += len(guess) + 1
            right = next((i for i, token in enumerate(guess) if own[i] != token), len(guess))
            kept.append(list(own[: right + 1]))
        return kept


def plan(rows: Sequence[Row], unread: Mapping[int, int]) -> Plan | None:
    """The step that jumps for all `rows`, None where none can or it does not pay. `unread` are the tokens, by
    `id(row)`, that rows have drawn and not been given yet; grammars follow them."""
    newest = [unread.get(id(row), row.next_input) for row in rows]
    guesses: list[list[int]] = []
    left = MAX_TOKENS - len(rows)
    for row, token in zip(rows, newest, strict=True):
        guess: list[int] = []
        constraint = row.constraint
        if constraint is not None:
            constraint.follow(row.output, token if row.launched > len(row.output) else None)
            room = min(MAX_SPAN, row.max_tokens - row.launched - 1, left)
            if constraint.jumps_pay and room > 0:
                guess = constraint.forced()[:room]
                left -= len(guess)
        guesses.append(guess)
    if max(map(len, guesses), default=0) < MIN_SPAN:
        return None
    if not all(row.kv is not None and flat.can_run(row.kv) for row in rows):
        return None
    return Plan(newest, guesses)


def allowed_tokens(rows: Sequence[Row], planned: Plan, width: int) -> mx.array:
    """(all tokens, width) bool: what may be drawn behind each token of the plan."""
    masks = new_masks(sum(map(len, planned.tokens)), width)
    at = 0
    for row, guess in zip(rows, planned.guesses, strict=True):
        if row.constraint is None:
            masks[at : at + 1] = -1
        else:
            row.constraint.fill_along(guess, masks, at)
        for i in range(len(guess) + 1):
            if row.launched + i < row.min_tokens and not forbid(masks, at + i, row.stop_ids):
                row.min_tokens = 0
        at += len(guess) + 1
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :width]
    return mx.array(bits.view(np.bool_))
