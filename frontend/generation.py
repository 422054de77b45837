"""One request's answer: rows of token ids in, text of each choice out."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mlxhost.frontend.dispatch import Dispatcher
from mlxhost.frontend.errors import Aborted, WorkerLost
from mlxhost.frontend.rows import Call, Row
from mlxhost.frontend.text.detokenizer import PieceTable
from mlxhost.frontend.text.stops import StopMatcher
from mlxhost.wire.data import Finish

# Once one row of several is admitted, how long the others may still be refused before headers go out.
# Refusals come at once; rows that merely queue must not hold back those that run.
REFUSAL_WINDOW_S = 1.0


class Reason(StrEnum):
    """Why a choice ended, in every API's terms."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Ending:
    """What ends a choice's text, beside the model's own end and max_tokens."""

    stops: Sequence[str] = ()
    include: bool = False  # keep the stop string, or the text of the stop id, in the answer
    min_tokens: int = 0  # stop strings are looked for in later tokens only
    stop_ids: frozenset[int] = frozenset()  # ids that end it, end-of-sequence included
    at_start: bool = True  # the answer starts a text, so a tokenizer's leading space goes


@dataclass(slots=True)
class Piece:
    """What is new in one choice. `reason` is set in its last piece."""

    index: int
    text: str
    ids: list[int]
    reason: Reason | None = None
    anew: bool = False  # the choice was started anew: what came before is void


class Choice:
    """The text side of one row."""

    def __init__(self, row: Row, pieces: PieceTable, ending: Ending) -> None:
        self.row = row
        self.index = row.index
        self.reason: Reason | None = None
        self._ending, self._pieces = ending, pieces
        self._begin()

    def _begin(self) -> None:
        ending = self._ending
        self._attempt = self.row.attempt
        self.completion_tokens = 0
        self._detokenizer = self._pieces.detokenizer(at_start=ending.at_start)
        self._matcher = StopMatcher(ending.stops, include=ending.include) if ending.stops else None

    def advance(self) -> Piece:
        """Take what the row received since the last call."""
        anew = self._attempt != self.row.attempt
        ids = self.row.take()
        ended = self.row.finish is not Finish.RUNNING
        shown = ids[:-1] if ended and self._drops_last(ids) else ids
        text, taken = self.extend(shown)
        if self.reason is not None:
            ids = taken
        else:
            self.completion_tokens += len(ids) - len(shown)
        if ended and self.reason is None:
            text += self._rest()
        if ended and self.reason is None:
            self.reason = Reason.LENGTH if self.row.finish is Finish.LENGTH else Reason.STOP
            if self.row.completion_tokens is not None:
                self.completion_tokens = self.row.completion_tokens
        return Piece(self.index, text, ids, self.reason, anew)

    def extend(self, ids: list[int]) -> tuple[str, list[int]]:
        """(text, ids that count) of new ids of the answer. A stop string sets `reason`, and what comes after
        it does not count."""
        if self._attempt != self.row.attempt:
            self._begin()
        if self._matcher is None:
            text = self._detokenizer.push(ids)
        else:
            text, kept = self._match(self._matcher, ids)
            if kept < len(ids):
                ids = ids[:kept]
        self.completion_tokens += len(ids)
        return text, ids

    def _match(self, matcher: StopMatcher, ids: Sequence[int]) -> tuple[str, int]:
        """(text, how many ids it took): token by token, so that a match ends the count where it falls."""
        parts = []
        for position, token_id in enumerate(ids):
            text = self._detokenizer.push((token_id,))
            if self.completion_tokens + position < self._ending.min_tokens:
                parts.append(text)
                continue
            text, matched = matcher.push(text)
            parts.append(text)
            if matched:
                self.reason = Reason.STOP
                return "".join(parts), position + 1
        return "".join(parts), len(ids)

    def _rest(self) -> str:
        """What the detokenizer and the matcher still hold when the row ends."""
        text = self._detokenizer.finish()
        if self._matcher is None:
            return text
        text, matched = self._matcher.push(text)
        if matched:
            self.reason = Reason.STOP
            return text
        return text + self._matcher.flush()

    def _drops_last(self, ids: Sequence[int]) -> bool:
        """Whether the last id is the one that stopped the row, which is no part of the answer."""
        ending = self._ending
        return (
            self.row.finish is Finish.STOP and bool(ids) and not ending.include and ids[-1] in ending.stop_ids
        )


@dataclass(frozen=True)
class Usage:
    """Token counts of a whole request."""

    prompt: int
    completion: int
    cached: int


@dataclass
class Generation:
    """The choices of one request while they run. Close it whatever happens, so that no row is left."""

    dispatcher: Dispatcher
    call: Call
    choices: list[Choice]
    prompts: Sequence[int]  # tokens of each distinct prompt
    _open: int = field(init=False)
    _last: list[Piece] = field(init=False, default_factory=list)  # last pieces that `push` made

    def __post_init__(self) -> None:
        self._open = len(self.choices)

    async def accepted(self) -> None:
        """Return once the request is admitted. Raises the typed error of any row refused or lost."""
        window_ends: float | None = None
        while not all(r.accepted or r.ended for r in self.call.rows):
            left = None if window_ends is None else window_ends - time.monotonic()
            if left is not None and left <= 0:
                break
            await self.call.news(left)
            self._raise_error()
            if window_ends is None and any(r.accepted for r in self.call.rows):
                window_ends = time.monotonic() + REFUSAL_WINDOW_S
        self._raise_error()
        for row in self.call.rows:
            if row.tokens or row.ended:
                self.call.touch(row)  # what came meanwhile is still to be read

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What is new, each time something is, until every choice has ended. Raises the typed error of a
        row that fails."""
        while self._open:
            rows = await self.call.news()
            self._raise_error()
            news, self._last = self._last, []
            news += [self._advance(self.choices[row.index]) for row in rows if self._runs(row)]
            yield [piece for piece in news if piece.text or piece.ids or piece.reason or piece.anew]

    def push(self, row: Row, ids: list[int]) -> str:
        """The text of a running row's new ids. A last piece is kept for `pieces` instead, which wakes up."""
        choice = self.choices[row.index]
        text, ids = choice.extend(ids)
        if choice.reason is None:
            return text
        self._last.append(Piece(choice.index, text, ids, choice.reason))
        self._close(choice)
        self.call.touch(row)
        return ""

    def usage(self) -> Usage:
        """Counts so far. A prompt counts once however many choices it has."""
        first_choices = self.choices[:: len(self.choices) // len(self.prompts)]
        return Usage(
            prompt=sum(self.prompts),
            completion=sum(c.completion_tokens for c in self.choices),
            cached=sum(c.row.cached_tokens for c in first_choices),
        )

    def close(self, reason: str = "the client went away") -> None:
        """Stop whatever still runs."""
        self.dispatcher.abort(self.call, reason)

    def _runs(self, row: Row) -> bool:
        return self.choices[row.index].reason is None

    def _advance(self, choice: Choice) -> Piece:
        piece = choice.advance()
        if piece.reason is not None:
            self._close(choice)
        return piece

    def _close(self, choice: Choice) -> None:
        self._open -= 1
        self.dispatcher.abort_row(choice.row, "stop string")

    def _raise_error(self) -> None:
        """Raise the first row's error. Pieces not yet taken are lost with it."""
        for row in self.call.rows:
            if row.error is not None and self.choices[row.index].reason is None:
                if isinstance(row.error, WorkerLost | Aborted):
                    raise row.error.after(sum(r.received for r in self.call.rows))
                raise row.error
