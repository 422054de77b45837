"""Token ids back to text, incrementally: no character is split, lost or shown before it is whole.

Most tokenizers turn an id into the same bytes wherever it stands, so a table of bytes and an incremental
UTF-8 decoder give exactly what decoding the whole answer at once would give, at well under a microsecond
a token. That covers byte-level BPE and SentencePiece with byte fallback. Anything else goes through
`tokenizers`' own DecodeStream.

One stated difference: when SentencePiece byte tokens do not form valid UTF-8, decoding the whole shows
one U+FFFD for every byte of the run, also for those that had been shown as characters before the run
went bad; a stream shows one for each broken part only.
"""

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One answer's way from ids to text."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; characters still incomplete are kept for later."""

    def finish(self) -> str:
        """What was kept, once no more ids come; an incomplete character becomes U+FFFD."""


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte, the table GPT-2 introduced: printable bytes stand for themselves, the other 68
    for code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()
# For str.translate: every character below 256 is there, and those that stand for no byte cannot be encoded.
_LATIN = dict.fromkeys(range(256), "\uffff") | {ord(c): chr(b) for c, b in _ALPHABET.items()}


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_LATIN).encode("latin-1")
    except UnicodeEncodeError:  # an added token written in plain text
        return token.encode()


class _SentencePiece:
    """Token -> bytes by the decoder steps found in tokenizer.json."""

    def __init__(self) -> None:
        self.replacements: list[tuple[str, str]] = []
        self.byte_fallback = False

    def __call__(self, token: str) -> bytes:
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode()


class PieceTable:
    """Bytes of each token id of one tokenizer, looked up once per id. Special tokens have none.

    `texts` holds the pieces that are whole characters as text, for those who have no broken one before them.
    `strips_space` tells that the tokenizer drops one space at the very start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self._special = {
            i for i, token in tokenizer.get_added_tokens_decoder().items() if getattr(token, "special", False)
        }
        self.texts: dict[int, str] = {}
        self._broken: dict[int, bytes] = {}  # pieces that begin or end inside a character
        self._to_bytes, self.strips_space = _read_decoder(decoder)

    def detokenizer(self, *, at_start: bool = True) -> Detokenizer:
        """A fresh one. `at_start` False when the text continues another, so that its first space stays."""
        if self._to_bytes is None:
            return StreamDetokenizer(self._tokenizer)
        return TableDetokenizer(self, strip=at_start and self.strips_space)

    def piece(self, token_id: int) -> bytes:
        """Bytes of one token."""
        text = self.texts.get(token_id)
        if text is not None:
            return text.encode()
        found = self._broken.get(token_id)
        return self._look_up(token_id) if found is None else found

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        piece = b""
        if token is not None and token_id not in self._special and self._to_bytes is not None:
            piece = self._to_bytes(token)
        try:
            self.texts[token_id] = piece.decode()
        except UnicodeDecodeError:
            self._broken[token_id] = piece
        return piece


class TableDetokenizer:
    """By table and incremental UTF-8 decoder."""

    def __init__(self, table: PieceTable, *, strip: bool) -> None:
        self._piece = table.piece
        self._text = table.texts.get
        self._decoder = _Utf8Decoder("replace")
        self._strip = strip
        self._clean = not strip  # nothing is held back, so whole characters may pass as they are

    def push(self, ids: Sequence[int]) -> str:
        if self._clean and len(ids) == 1:
            text = self._text(ids[0])
            if text is not None:
                return text
        data = b"".join(map(self._piece, ids))
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        text = self._decoder.decode(data)
        self._clean = not self._strip and not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class StreamDetokenizer:
    """By tokenizers' DecodeStream, for decoders whose output depends on the neighbours.

    `_pending` are the ids whose text has not been shown, for `finish`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        parts = []
        for token_id in ids:
            self._pending.append(token_id)
            try:
                text = self._stream.step(self._tokenizer, token_id)
            except Exception:  # tokenizers raises a bare Exception when a prefix changes under it
                text = self._tokenizer.decode(self._pending)
                self._stream = DecodeStream(skip_special_tokens=True)
            if text:
                parts.append(text)
                self._pending.clear()
        return "".join(parts)

    def finish(self) -> str:
        pending, self._pending = self._pending, []
        return self._tokenizer.decode(pending) if pending else ""


def _read_decoder(decoder: dict[str, Any] | None) -> tuple[Any, bool]:
    """(token -> bytes, drops a leading space) for tokenizer.json's `decoder`; (None, False) when its
    output for a token depends on more than the token."""
    steps = [decoder] if decoder else []
    if decoder and decoder.get("type") == "Sequence":
        steps = decoder.get("decoders") or []
    if len(steps) == 1 and steps[0].get("type") == "ByteLevel":
        return _byte_level, False
    pieces = _SentencePiece()
    fused = strips = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                pieces.replacements.append((old, new))
            case {"type": "ByteFallback"}:
                pieces.byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fused:
                strips = start == 1
            case {"type": "Metaspace", "replacement": str(old)}:
                pieces.replacements.append((old, " "))
                strips = step.get("prepend_scheme", "always") != "never"
            case _:
                return None, False
    return (pieces, strips) if steps else (None, False)
