"""A model directory with a large vocabulary and no weights: what a frontend needs, for benchmarks."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = "<|endoftext|>"
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}assistant:"
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
_OTHERS = "日本語éüñ–“”👩🚀"


def large_tokenizer(size: int) -> Tokenizer:
    """Byte-level BPE of `size` tokens. After the special one and the 256 bytes come words of 1 to 9 letters,
    most with a leading space; one in fifty is beyond ASCII, one in thirty holds digits and punctuation and
    one in thirty begins with a line break. None of these is empty, part of a character or holds a bracket,
    and none ends in what may begin a stop string, so that each makes one event."""
    rng = random.Random(7)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_of = dict(zip(_byte_order(), alphabet, strict=True))
    tokens = {EOS: 0} | {c: i + 1 for i, c in enumerate(alphabet)}
    while len(tokens) < size:
        if rng.random() < 0.02:
            raw = "".join(rng.choices(_OTHERS, k=rng.randint(1, 3))).encode()
        elif rng.random() < 0.035:
            raw = "".join(rng.choices("0123456789.,;:!?-", k=rng.randint(1, 5))).encode()
        elif rng.random() < 0.035:
            raw = ("\n" + "".join(rng.choices(_LETTERS, k=rng.randint(1, 5)))).encode()
        else:
            word = "".join(rng.choices(_LETTERS, weights=range(26, 0, -1), k=rng.randint(1, 9)))
            raw = (" " * (rng.random() < 0.7) + word).encode()
        tokens.setdefault("".join(bytes_of[b] for b in raw), len(tokens))
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


def _byte_order() -> list[int]:
    """Bytes in the order of the characters that stand for them: printable ones for themselves, the others
    for code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [b for b in range(256) if b not in printable]


def write_directory(directory: Path, size: int) -> Tokenizer:
    """Write the directory; returns its tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = large_tokenizer(size)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": size, "eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"chat_template": TEMPLATE, "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer
