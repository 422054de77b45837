"""tokenizer.json -> the bytes of every token id, without the `tokenizers` package.

Special tokens (added tokens marked `special`) have no bytes here, as they have no text in an answer; so a
grammar never admits one by its name. Other added tokens stand for their text.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxhost.worker.grammar.xgr import GrammarError


class _Added(Struct):
    id: int
    content: str
    special: bool = False


class _Model(Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _File(Struct):
    """The part of tokenizer.json that says what tokens stand for."""

    model: _Model
    decoder: dict[str, Any] | None = None
    added_tokens: list[_Added] = []


def read_pieces(path: Path, vocab_size: int) -> list[bytes]:
    """Bytes of each id below `vocab_size` (the width of the model's logits).

    Raises GrammarError when the file cannot be read, or its tokens stand for different bytes in different
    places.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise GrammarError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise GrammarError(f"{path}: {error}") from None
    to_bytes = _decoder(file.decoder)
    if to_bytes is None:
        kind = (file.decoder or {}).get("type", "none")
        raise GrammarError(
            f"constrained output needs a byte-level or SentencePiece tokenizer, and this decoder is {kind!r}"
        )
    vocab = file.model.vocab
    named = vocab.items() if isinstance(vocab, dict) else ((t, i) for i, (t, _) in enumerate(vocab))
    pieces = [b""] * vocab_size
    for token, index in named:
        if 0 <= index < vocab_size:
            pieces[index] = to_bytes(token)
    for added in file.added_tokens:
        if 0 <= added.id < vocab_size:
            pieces[added.id] = b"" if added.special else added.content.encode()
    return pieces


def _decoder(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    """Token -> bytes for tokenizer.json's `decoder`; None when a token's bytes depend on its neighbours."""
    steps = [decoder] if decoder else []
    if decoder and decoder.get("type") == "Sequence":
        steps = decoder.get("decoders") or []
    if len(steps) == 1 and steps[0].get("type") == "ByteLevel":
        return _byte_level
    replacements: list[tuple[str, str]] = []
    fallback = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
            case {"type": "ByteFallback"}:
                fallback = True
            case {"type": "Fuse"} | {"type": "Strip", "content": " ", "stop": 0}:
                pass  # at the start of a text only
            case _:
                return None
    if not steps:
        return None

    def sentencepiece(token: str) -> bytes:
        if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return sentencepiece


def _byte_level_table() -> dict[int, str]:
    """Code point -> the byte it stands for, as a Latin-1 character: the table that GPT-2 introduced, in which
    printable bytes stand for themselves and the other 68 for code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    unused = dict.fromkeys(others, "\uffff")
    return unused | {256 + i: chr(b) for i, b in enumerate(others)}


_TABLE = _byte_level_table()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_TABLE).encode("latin-1")
    except UnicodeEncodeError:  # written in plain text
        return token.encode()
