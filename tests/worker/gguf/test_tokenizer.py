"""Tokenizers rebuilt from GGUF metadata against the ones they came from."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from support.tiny_gguf import SPECIAL, TEMPLATE, TEXT, bpe_metadata, tiny_bpe
from tokenizers import Tokenizer

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.metadata import Metadata
from mlxhost.worker.gguf.pretokenizers import PRE_TOKENIZERS
from mlxhost.worker.gguf.tokenizer import TokenizerFiles, tokenizer_files

SAMPLES = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\n\nand\ttabs\t\t",
    "def f(x):\n    return x ** 2  # squared",
    "café naïve 你好 😀👨‍👩‍👧 123,456.78 ½ ² Ⅷ ١٢٣",
    "it's don't we'll I'D <|im_start|>user\nhi<|im_end|> <|im_",
    "a" + " " * 40 + "b",
    "\u0001\u0002\u00ff\ufffd",
    TEXT,
]


def noise(count: int) -> list[str]:
    rng = random.Random(0)
    ranges = [(32, 127), (32, 127), (0x80, 0x2FFF), (0x3000, 0xD7FF), (0x1F300, 0x1FAFF), (10, 11), (32, 33)]
    return [
        "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 40)))
        for _ in range(count)
    ]


def rebuilt(values: dict[str, Any], rows: int = 512) -> tuple[Tokenizer, TokenizerFiles]:
    files = tokenizer_files(Metadata(Path("x.gguf"), values), rows, 256)
    return Tokenizer.from_str(files.tokenizer), files


def test_byte_level_bpe_encodes_and_decodes_as_its_original() -> None:
    """Ids and text are the original's for code, digits, spaces, scripts, emoji and special tokens."""
    original = tiny_bpe()
    tokenizer, _ = rebuilt(bpe_metadata(original))
    for text in SAMPLES + noise(500):
        ids = original.encode(text).ids
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def pieces() -> sentencepiece.SentencePieceProcessor:
    """A small SentencePiece BPE with byte fallback, as Llama 2 has."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n") * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def spm_metadata(pieces: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    count = pieces.get_piece_size()
    kinds = [
        2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
        for i in range(count)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [pieces.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def test_sentencepiece_bpe_encodes_and_decodes_as_sentencepiece(
    pieces: sentencepiece.SentencePieceProcessor,
) -> None:
    """Ids and text are those of the SentencePiece library, bytes of unknown characters included."""
    tokenizer, _ = rebuilt(spm_metadata(pieces))
    for text in SAMPLES + noise(500):
        if "<" in text or "\u2581" in text or "\0" in text:
            continue  # SentencePiece does not look for control tokens in text
        ids = pieces.encode(text)
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids) == pieces.decode(ids) == text


def test_sentencepiece_finds_control_tokens_and_adds_bos(
    pieces: sentencepiece.SentencePieceProcessor,
) -> None:
    """By default a Llama vocabulary begins with <s>, and </s> in text is the token, not its letters."""
    values = spm_metadata(pieces)
    del values["tokenizer.ggml.add_bos_token"]
    tokenizer, files = rebuilt(values)
    ids = tokenizer.encode("the queue</s>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.encode("the", add_special_tokens=False).ids[0] != 1
    assert (files.tokenizer_config["add_bos_token"], files.tokenizer_config["bos_token"]) == (True, "<s>")


def test_without_a_space_prefix_text_starts_as_it_is(
    pieces: sentencepiece.SentencePieceProcessor,
) -> None:
    """add_space_prefix false adds none when encoding and strips none when decoding."""
    tokenizer, _ = rebuilt({**spm_metadata(pieces), "tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.encode("the").tokens[0][0] != "\u2581"
    for text in (" the queue", "the queue"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_added_bos_and_eos_stand_at_the_ends() -> None:
    """add_bos_token and add_eos_token are honoured, and left out when special tokens are not wanted."""
    values = bpe_metadata(tiny_bpe())
    values |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer, _ = rebuilt(values)
    plain = tokenizer.encode("the", add_special_tokens=False).ids
    assert tokenizer.encode("the").ids == [1, *plain, 2]


def test_user_defined_tokens_are_found_but_stay_visible() -> None:
    """A user-defined token is one id in text and is decoded even when special tokens are skipped."""
    values = bpe_metadata(tiny_bpe())
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "<think>"]
    values["tokenizer.ggml.token_type"] = [*values["tokenizer.ggml.token_type"], 4]
    tokenizer, _ = rebuilt(values)
    ids = tokenizer.encode("<think>the<|im_end|>").ids
    assert (ids[0], ids[-1]) == (len(values["tokenizer.ggml.tokens"]) - 1, 2)
    assert tokenizer.decode(ids) == "<think>the"


def test_configs_name_the_special_tokens_and_the_template() -> None:
    """tokenizer_config.json and generation_config.json hold what the metadata says, and no nulls."""
    _, files = rebuilt(bpe_metadata(tiny_bpe()))
    assert files.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert files.tokenizer_config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "add_bos_token": False,
        "add_eos_token": False,
        "chat_template": TEMPLATE,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
    }


def test_every_id_that_ends_a_turn_ends_a_completion() -> None:
    """The end-of-turn id counts beside the end-of-text id, told by its key or by its text."""
    values = bpe_metadata(tiny_bpe()) | {"tokenizer.ggml.eos_token_id": 0}
    assert rebuilt(values)[1].generation_config["eos_token_id"] == [0, 2]
    values |= {"tokenizer.ggml.eot_token_id": 1}
    assert rebuilt(values)[1].generation_config["eos_token_id"] == [0, 1, 2]


def test_the_byte_alphabet_round_trips_under_every_pre_tokenizer() -> None:
    """Each table entry builds, and cuts text without losing any of it."""
    values = bpe_metadata(tiny_bpe())
    for name in PRE_TOKENIZERS:
        tokenizer, _ = rebuilt(values | {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False})
        for text in SAMPLES:
            if PRE_TOKENIZERS[name].nfc and not text.isascii():
                continue
            ids = tokenizer.encode(text).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text, name


@pytest.mark.parametrize(
    ("name", "text", "cut"),
    [
        ("gpt-2", "it's 1234  ok", ["it", "'s", " 1234", " ", " ok"]),
        ("smollm", "it's 1234  ok", ["it", "'s", " ", "1", "2", "3", "4", " ", " ok"]),
        ("llama-bpe", "IT'S 1234 (x)\n\n", ["IT", "'S", " ", "123", "4", " (", "x", ")\n\n"]),
        ("qwen2", "IT'S 123\n a", ["IT", "'S", " ", "1", "2", "3", "\n", " a"]),
        ("tekken", "helloWorld 12/\n", ["hello", "World", " ", "1", "2", "/\n"]),
        ("gpt-4o", "helloWorld's 1234", ["hello", "World's", " ", "123", "4"]),
        ("seed-coder", "a.\n12", ["a", ".", "\n", "1", "2"]),
        ("deepseek-coder", "x = f(12)\n", ["x", " =", " f", "(", "1", "2", ")", "\n"]),
        ("default", "it's 12 <b>", ["it", "'", "s", " 12", " ", "<", "b", ">"]),
    ],
)
def test_pre_tokenizers_cut_as_the_models_do(name: str, text: str, cut: list[str]) -> None:
    """Contractions, digits, case changes and line breaks are cut as each family's tokenizer.json does."""
    pieces = [text[a:b] for _, (a, b) in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]
    assert pieces == cut


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "unsupported_tokenizer", "'rwkv' is not supported"),
        ({"tokenizer.ggml.pre": "klingon"}, "unsupported_tokenizer", r"'klingon' is not known .*smollm"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "bad_model", "has 'a' twice"),
        ({"tokenizer.ggml.tokens": ["a"] * 600}, "bad_model", "600 tokens, the embedding has 512 rows"),
        ({"tokenizer.ggml.tokens": []}, "bad_model", "0 tokens"),
        ({"tokenizer.ggml.tokens": "abc"}, "bad_model", "should be a list, it is 'abc'"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "bad_model", "'zz qq', which does not join"),
        ({"tokenizer.ggml.merges": ["t"]}, "bad_model", "'t', which does not join"),
        ({"tokenizer.ggml.token_type": [1]}, "bad_model", "1 entries for"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "bad_model", "is 9999, the vocabulary has"),
        ({"tokenizer.chat_template": 7}, "bad_model", "should be a string, it is 7"),
    ],
)  # fmt: skip
def test_a_vocabulary_that_does_not_hang_together_is_refused(
    change: dict[str, Any], code: str, message: str
) -> None:
    """Each fault names the file, the key and the value."""
    with pytest.raises(ModelError, match=message) as caught:
        rebuilt(bpe_metadata(tiny_bpe()) | change)
    assert caught.value.code == code
    assert "x.gguf" in str(caught.value)


def test_special_tokens_are_special() -> None:
    """Control tokens are marked special in tokenizer.json, so that decoding can skip them."""
    _, files = rebuilt(bpe_metadata(tiny_bpe()))
    added = json.loads(files.tokenizer)["added_tokens"]
    assert [(t["content"], t["special"], t["normalized"]) for t in added] == [
        (t, True, False) for t in SPECIAL
    ]
