"""Ids to text: the stream's concatenation is the whole decode, and no character comes in parts."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.frontend_models import EOS, byte_level_tokenizer, sentencepiece_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlxhost.frontend.text.detokenizer import PieceTable, StreamDetokenizer, TableDetokenizer

TEXTS = [
    "hello world",
    "naïve café — 日本語テスト",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🎉",
    "  leading and  double  spaces\n\ttabs\r\n",
    "a\0b\x7f",
    "\ufffd replacement itself \ufffd",
]

BYTE_LEVEL = byte_level_tokenizer()
LLAMA2 = sentencepiece_tokenizer()
GEMMA = sentencepiece_tokenizer(strips=False)


def table(tokenizer: Tokenizer) -> PieceTable:
    decoder: dict[str, Any] | None = json.loads(tokenizer.to_str())["decoder"]
    return PieceTable(tokenizer, decoder)


def stream(pieces: PieceTable, ids: list[int], size: int = 1, **options: bool) -> list[str]:
    """What each push of `size` ids gave, and what was left at the end."""
    detokenizer = pieces.detokenizer(**options)
    parts = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*parts, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA2, GEMMA], ids=["bytes", "llama2", "gemma"])
@pytest.mark.parametrize("size", [1, 3])
def test_stream_equals_whole_decode(tokenizer: Tokenizer, text: str, size: int) -> None:
    """Pushed one by one or several at a time, the parts add up to tokenizer.decode of all ids."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    parts = stream(table(tokenizer), ids, size)
    assert "".join(parts) == tokenizer.decode(ids)
    assert isinstance(table(tokenizer).detokenizer(), TableDetokenizer)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA2], ids=["bytes", "llama2"])
def test_characters_come_whole(tokenizer: Tokenizer) -> None:
    """While an emoji's bytes arrive one by one nothing is shown; then the whole emoji is."""
    ids = tokenizer.encode("x🎉", add_special_tokens=False).ids
    parts = stream(table(tokenizer), ids)
    assert [p for p in parts if p] == ["x", "🎉"]


@settings(max_examples=200)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=40))
def test_any_byte_level_ids_decode_alike(ids: list[int]) -> None:
    """Random ids, whose bytes are mostly no UTF-8, special and unknown ones included, decode as a whole
    decode does."""
    assert "".join(stream(table(BYTE_LEVEL), ids)) == BYTE_LEVEL.decode(ids)


def test_incomplete_character_at_the_end_is_not_lost() -> None:
    """An answer cut inside a character shows U+FFFD for it, as a whole decode does."""
    ids = BYTE_LEVEL.encode("ok 🎉", add_special_tokens=False).ids[:-1]
    parts = stream(table(BYTE_LEVEL), ids)
    assert parts[-1] == "\ufffd"
    assert "".join(parts) == BYTE_LEVEL.decode(ids)


def test_special_tokens_are_skipped() -> None:
    """Special tokens have no text, wherever they stand."""
    eos = BYTE_LEVEL.token_to_id(EOS)
    hello = BYTE_LEVEL.encode("hello", add_special_tokens=False).ids
    assert "".join(stream(table(BYTE_LEVEL), [eos, *hello, eos, *hello])) == "hellohello"


def test_first_space_goes_only_at_the_start_of_a_text() -> None:
    """Llama 2's decoder drops one leading space; an answer that continues a text keeps it."""
    ids = [LLAMA2.token_to_id("▁hello")]
    assert "".join(stream(table(LLAMA2), ids)) == "hello"
    assert "".join(stream(table(LLAMA2), ids, at_start=False)) == " hello"
    assert "".join(stream(table(GEMMA), ids)) == " hello"


def test_broken_byte_tokens_show_one_replacement_each_part() -> None:
    """Byte tokens that are no UTF-8 do not raise and do not hide what follows."""
    ids = [LLAMA2.token_to_id("<0xE6>"), LLAMA2.token_to_id("<0x97>"), LLAMA2.token_to_id("he")]
    assert "".join(stream(table(LLAMA2), ids)) == "\ufffdhe"


def word_piece() -> Tokenizer:
    """A tokenizer whose decoder looks at neighbours."""
    tokens = ["[UNK]", "hello", "##s", "world", ","]
    tokenizer = Tokenizer(models.WordPiece(vocab={t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def test_other_decoders_stream_too() -> None:
    """A decoder that no table can stand for goes through DecodeStream, with the same text."""
    tokenizer = word_piece()
    ids = tokenizer.encode("hellos world, hello").ids
    assert isinstance(table(tokenizer).detokenizer(), StreamDetokenizer)
    assert "".join(stream(table(tokenizer), ids)) == tokenizer.decode(ids)


def test_metaspace_decoder_is_read() -> None:
    """A Metaspace decoder becomes a table as well."""
    tokens = ["▁he", "llo", "▁you", "<unk>"]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    assert isinstance(table(tokenizer).detokenizer(), TableDetokenizer)
    assert "".join(stream(table(tokenizer), [0, 1, 2])) == tokenizer.decode([0, 1, 2]) == "hello you"
