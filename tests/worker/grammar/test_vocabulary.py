"""The bytes of tokens, from tokenizer.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlxhost.worker.grammar.vocabulary import read_pieces
from mlxhost.worker.grammar.xgr import GrammarError

SENTENCEPIECE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def write(directory: Path, vocab: Any, decoder: Any, added: Any = ()) -> Path:
    path = directory / "tokenizer.json"
    content = {"model": {"type": "BPE", "vocab": vocab}, "decoder": decoder, "added_tokens": list(added)}
    path.write_text(json.dumps(content))
    return path


def test_byte_level_pieces_spell_what_the_tokenizer_decodes(tiny_models: dict[str, Path]) -> None:
    """Any text's ids give its bytes back; special tokens have none; ids beyond the tokenizer have none."""
    path = tiny_models["llama"] / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    pieces = read_pieces(path, tokenizer.get_vocab_size() + 3)
    for text in ('{"city": "Köln"}', "東京 🙂\n\ttab", "plain words", "<|im_end|> not special"):
        ids = tokenizer.encode(text).ids
        spelt = b"".join(pieces[i] for i in ids).decode()
        assert spelt == tokenizer.decode(ids)
    assert pieces[tokenizer.token_to_id("<|im_end|>")] == b""
    assert pieces[-3:] == [b""] * 3


def test_sentencepiece_pieces(tmp_path: Path) -> None:
    """Blanks, byte tokens, and a vocabulary as a list with scores."""
    vocab = [["<unk>", 0.0], ["▁the", -1.0], ["<0x0A>", -2.0], ["<0xFF>", -2.0], ["東", -3.0]]
    added = [
        {"id": 0, "content": "<unk>", "special": True},
        {"id": 5, "content": "<tool> ", "special": False},
    ]
    pieces = read_pieces(write(tmp_path, vocab, SENTENCEPIECE, added), 6)
    assert pieces == [b"", b" the", b"\n", b"\xff", "東".encode(), b"<tool> "]


def test_a_vocabulary_larger_than_the_model_is_cut(tmp_path: Path) -> None:
    """Ids that the logits do not have cannot be drawn."""
    path = write(tmp_path, {"a": 0, "b": 1, "c": 2}, {"type": "ByteLevel"}, [{"id": 3, "content": "x"}])
    assert read_pieces(path, 2) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("decoder", "named"), [({"type": "WordPiece", "prefix": "##"}, "WordPiece"), (None, "none")]
)
def test_tokens_without_bytes_of_their_own_are_refused(tmp_path: Path, decoder: Any, named: str) -> None:
    """With the decoder's name."""
    with pytest.raises(GrammarError, match=named):
        read_pieces(write(tmp_path, {"a": 0}, decoder), 1)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    """Its path is in the message."""
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": 5}')
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        read_pieces(path, 1)
