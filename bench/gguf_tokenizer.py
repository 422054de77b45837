"""The tokenizer rebuilt from a GGUF against another program's, on some 1,800 texts.

python bench/gguf_tokenizer.py FILE.gguf -- COMMAND...

COMMAND reads a JSON list of texts and prints a JSON list of lists of ids, special tokens found in text and
none added: a few lines around llama.cpp's `llama_tokenize`, tiktoken or SentencePiece. Prints how many texts
differ and the first of them; exit 1 when any does.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

from mlxhost.worker.gguf.header import read_header
from mlxhost.worker.gguf.tokenizer import tokenizer_files

CHOSEN = [
    *("", " ", "  ", "   x", "Hello, world!", "\t" * 12 + "x", "a" + " " * 40 + "b", "a" + "\n" * 40 + "b"),
    *("  two  spaces\n\n\nand\ttabs\t\t", "\r\n\r\nx\r\n", "\u3000\u00a0\u2003x", "a\u200bb\u200dc"),
    *("it's don't we'll I'D I'Ve", "ABCdefGHI aBcD", "1234567890 3.14159 0xdeadbeef", "'''\"\"\"``` ~~~ ---"),
    *("café naïve 你好 😀👨‍👩‍👧 123,456.78 ½ ² Ⅷ ١٢٣", "e\u0301 \u1112\u1161\u11ab ﬁ Å", "Ünïcödé ÀÉÎ ß ẞ"),
    *("Привет, мир! Как дела?", "مرحبا بالعالم", "हिन्दी में पाठ", "ไทย ภาษา", "日本語のテキスト、カタカナ。"),
    *(
        "한국어 텍스트",
        "🇩🇪🇫🇷👍🏽",
        "\u0001\u0002\u00ff\ufffd",
        "\u2581\u2581x \u2581",
        "<td><tr></table><b>x</b>",
    ),
    *("<start_of_turn>user\nhi<end_of_turn>\n", "<|im_start|>user\nhi<|im_end|>\n", "[INST] hi [/INST]"),
]
RANGES = [(32, 127)] * 3 + [(0x80, 0x2FFF), (0x3000, 0xD7FF), (0x1F300, 0x1FAFF), (9, 11), (32, 33), (48, 58)]


def texts() -> list[str]:
    """Chosen ones, 1,500 of noise, and this project's documents and programs in pieces."""
    rng = random.Random(0)
    noise = [
        "".join(chr(rng.randrange(*rng.choice(RANGES))) for _ in range(rng.randrange(1, 40)))
        for _ in range(1500)
    ]
    root = Path(__file__).parents[1]
    files = [*sorted(root.glob("docs/*.md"))[:12], *sorted(root.glob("worker/**/*.py"))[:40]]
    pieces = [
        text[i : i + 600] for text in map(Path.read_text, files) for i in range(0, min(len(text), 6000), 600)
    ]
    return CHOSEN + noise + pieces


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    metadata = read_header(args.source).metadata
    files = tokenizer_files(metadata, len(metadata.texts("tokenizer.ggml.tokens")), 4096)
    tokenizer = Tokenizer.from_str(files.tokenizer)
    asked = texts()
    done = subprocess.run(
        args.command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True
    )
    wanted = json.loads(done.stdout)
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in asked]
    differing = [i for i, ids in enumerate(found) if ids != wanted[i]]
    sys.stdout.write(f"{len(asked)} texts, {len(differing)} differ\n")
    for i in differing[:5]:
        sys.stdout.write(f"{asked[i]!r}\n  ours   {found[i]}\n  theirs {wanted[i]}\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
