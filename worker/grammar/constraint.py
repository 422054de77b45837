"""One row's place in its grammar. Kept with the row, also while it is preempted."""

import time
from collections.abc import Sequence

from mlxhost.worker.grammar.xgr import Compiled, Mask, Matcher

# CPU seconds. A step of a grammar is microseconds to a few milliseconds; one that is so ambiguous that it
# takes longer than this would hold up every other row.
MAX_STEP_S = 1.0

_TRIED = 24  # guessed tokens after which a row's record counts
_PAYS = 0.4  # the share of them that has to be right


class Constraint:
    """Follows a row's output token by token. `failure` says why it could not, and then the row must end."""

    def __init__(self, compiled: Compiled, stop_ids: Sequence[int]) -> None:
        self._matcher = Matcher(compiled, list(stop_ids))
        self._followed: list[int] = []
        self.failure = ""
        self._guessed = self._agreed = 0

    def follow(self, output: Sequence[int], newest: int | None = None) -> None:
        """Be where `output`, and `newest` behind it, leads: usually one token on, or one back after a step
        that was thrown away."""
        if self.failure:
            return
        followed = self._followed
        back = 0
        while len(followed) > len(output) or (followed and followed[-1] != output[len(followed) - 1]):
            if len(followed) == len(output) + 1 and followed[-1] == newest:
                return  # there already
            followed.pop()
            back += 1
        if back:
            self._matcher.rewind(back)
        for token in output[len(followed) :]:
            self._accept(token)
        if newest is not None:
            self._accept(newest)

    def _accept(self, token: int) -> None:
        if not self.open:
            return
        started = time.thread_time()
        if self._matcher.accept(token):
            self._followed.append(token)
            self._took(time.thread_time() - started)
        else:
            self.failure = f"token {token} does not fit the grammar at position {len(self._followed)}"

    def _took(self, seconds: float) -> None:
        if seconds > MAX_STEP_S:
            self.failure = f"the grammar is too ambiguous: one step took {seconds:.1f} s"

    @property
    def open(self) -> bool:
        """Whether a token may still follow."""
        return not self.failure and not self._matcher.ended

    def fill(self, masks: Mask, row: int) -> None:
        """Write what may follow; everything when nothing is to follow any more."""
        if self.open:
            started = time.thread_time()
            self._matcher.fill(masks, row)
            self._took(time.thread_time() - started)
        else:
            masks[row] = -1

    def fill_along(self, guess: Sequence[int], masks: Mask, row: int) -> None:
        """Write what may follow after each token of `guess`, into as many masks and one more. `guess` must
        fit the grammar."""
        self.fill(masks, row)
        for i, token in enumerate(guess, start=1):
            self._matcher.accept(token)
            self.fill(masks, row + i)
        if guess:
            self._matcher.rewind(len(guess))

    def forced(self) -> list[int]:
        """Tokens that spell the only text that can follow."""
        return self._matcher.forced() if self.open else []

    def learn(self, guessed: int, agreed: int) -> None:
        """Note how a guess at forced tokens went."""
        self._guessed += guessed
        self._agreed += agreed

    @property
    def jumps_pay(self) -> bool:
        """Whether the model spells forced text as guessed, often enough."""
        return self._guessed < _TRIED or self._agreed >= _PAYS * self._guessed
