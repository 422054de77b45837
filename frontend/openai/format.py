"""Answers in the OpenAI shapes: whole bodies and stream chunks, for chat and for plain completions."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mlxhost.frontend.generation import Piece, Reason, Usage
from mlxhost.frontend.http.sse import event

_encode = msgspec.json.Encoder().encode
_HOLE = "\0"  # where a delta's text goes, in an event made beforehand


class Answer(Struct):
    """What every body and chunk of one request repeats, and how it wants them."""

    id: str
    created: int
    model: str
    token_ids: bool  # return_token_ids
    prompt_ids: Sequence[Sequence[int]]  # of each prompt
    echoes: Sequence[str]  # text to put before the answers to each prompt
    n: int  # choices a prompt


class Whole(Struct):
    """One finished choice."""

    text: str
    ids: list[int]
    reason: Reason


class Format(Protocol):
    """A dialect of answers."""

    prefix: str  # of response ids

    def __init__(self, answer: Answer) -> None: ...

    def opening(self) -> bytes:
        """Events before any text."""

    def piece(self, piece: Piece) -> bytes:
        """Events for what is new in a choice."""

    def delta(self, index: int, text: str) -> bytes:
        """The event for new text of a choice that goes on; empty without text. Tells no token ids."""

    def usage(self, usage: Usage) -> bytes:
        """The event that carries only token counts."""

    def whole(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""


class _Chunk(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: dict[str, Any] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class _Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _ChatDeltaChoice(Struct):
    index: int
    delta: _Delta
    logprobs: None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class _ChatMessage(Struct):
    role: str
    content: str
    refusal: None = None


class _ChatChoice(Struct):
    index: int
    message: _ChatMessage
    finish_reason: str
    logprobs: None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class _TextChoice(Struct):
    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    prefix = "chatcmpl-"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._deltas = [
            _around(self._chunk([_ChatDeltaChoice(i, _Delta(content=_HOLE))])) for i in range(answer.n)
        ]

    def opening(self) -> bytes:
        # The role comes first and alone, once for each choice.
        role = _Delta(role="assistant", content="")
        chunks = [self._chunk([_ChatDeltaChoice(i, role)]) for i in range(self._answer.n)]
        if self._answer.token_ids:
            chunks[0].prompt_token_ids = self._answer.prompt_ids[0]
        return b"".join(event(_encode(c)) for c in chunks)

    def delta(self, index: int, text: str) -> bytes:
        if not text:
            return b""
        head, tail = self._deltas[index]
        return head + _encode(text) + tail

    def piece(self, piece: Piece) -> bytes:
        if self._answer.token_ids and piece.ids:
            choice = _ChatDeltaChoice(piece.index, _Delta(content=piece.text), token_ids=piece.ids)
            out = event(_encode(self._chunk([choice])))
        else:
            out = self.delta(piece.index, piece.text)
        if piece.reason is not None:
            last = _ChatDeltaChoice(piece.index, _Delta(), finish_reason=piece.reason)
            out += event(_encode(self._chunk([last])))
        return out

    def usage(self, usage: Usage) -> bytes:
        chunk = self._chunk([])
        chunk.usage = usage_object(usage)
        return event(_encode(chunk))

    def whole(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        answer = self._answer
        body = _Chunk(
            answer.id,
            "chat.completion",
            answer.created,
            answer.model,
            [
                _ChatChoice(i, _ChatMessage("assistant", c.text), c.reason, token_ids=self._ids(c.ids))
                for i, c in enumerate(choices)
            ],
            usage_object(usage),
            answer.prompt_ids[0] if answer.token_ids else UNSET,
        )
        return _encode(body)

    def _chunk(self, choices: list[Any]) -> _Chunk:
        answer = self._answer
        return _Chunk(answer.id, "chat.completion.chunk", answer.created, answer.model, choices)

    def _ids(self, ids: list[int]) -> list[int] | UnsetType:
        return ids if self._answer.token_ids else UNSET


class CompletionFormat:
    """text_completion."""

    prefix = "cmpl-"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        choices = len(answer.prompt_ids) * answer.n
        self._deltas = [_around(self._body([_TextChoice(i, _HOLE)])) for i in range(choices)]

    def opening(self) -> bytes:
        answer = self._answer
        out = b""
        for index in range(len(answer.prompt_ids) * answer.n):
            echo = answer.echoes[index // answer.n]
            if echo or answer.token_ids:
                choice = _TextChoice(index, echo, prompt_token_ids=self._prompt_ids(index))
                out += event(_encode(self._body([choice])))
        return out

    def delta(self, index: int, text: str) -> bytes:
        if not text:
            return b""
        head, tail = self._deltas[index]
        return head + _encode(text) + tail

    def piece(self, piece: Piece) -> bytes:
        if not (piece.text or piece.reason or (piece.ids and self._answer.token_ids)):
            return b""
        choice = _TextChoice(
            piece.index, piece.text, finish_reason=piece.reason, token_ids=self._ids(piece.ids)
        )
        return event(_encode(self._body([choice])))

    def usage(self, usage: Usage) -> bytes:
        body = self._body([])
        body.usage = usage_object(usage)
        return event(_encode(body))

    def whole(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        body = self._body(
            [
                _TextChoice(
                    i,
                    self._answer.echoes[i // self._answer.n] + c.text,
                    finish_reason=c.reason,
                    token_ids=self._ids(c.ids),
                    prompt_token_ids=self._prompt_ids(i),
                )
                for i, c in enumerate(choices)
            ]
        )
        body.usage = usage_object(usage)
        return _encode(body)

    def _body(self, choices: list[Any]) -> _Chunk:
        answer = self._answer
        return _Chunk(answer.id, "text_completion", answer.created, answer.model, choices)

    def _ids(self, ids: list[int]) -> list[int] | UnsetType:
        return ids if self._answer.token_ids else UNSET

    def _prompt_ids(self, index: int) -> Sequence[int] | UnsetType:
        return self._answer.prompt_ids[index // self._answer.n] if self._answer.token_ids else UNSET


def _around(chunk: _Chunk) -> tuple[bytes, bytes]:
    """The event of a chunk whose text is _HOLE, before and after the text."""
    head, _, tail = event(_encode(chunk)).rpartition(_encode(_HOLE))
    return head, tail


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts as the API has them."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
