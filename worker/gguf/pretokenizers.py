"""How byte-level BPE vocabularies cut text before merging, by the name in `tokenizer.ggml.pre`.

The expressions are those of the models' own tokenizer.json files; llama.cpp's src/llama-vocab.cpp says
which names share one. A name that is not here is refused: a wrong cut gives wrong ids in silence.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

# A contraction, a word, numbers, punctuation with line breaks, white space.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED_CODER = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+CONTRACTION|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*CONTRACTION"
    r"|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED.replace("CONTRACTION", "").replace("NUMBER", r"\p{N}")
_GPT4O = _CASED.replace("CONTRACTION", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("NUMBER", r"\p{N}{1,3}")


@dataclass(frozen=True)
class PreTokenizer:
    """`splits` cut in order, each match a piece of its own; `gpt2` then applies GPT-2's expression.

    `whole_words`: a piece that is a token as it stands is not merged up to. `bos` is what the vocabulary
    does when the file does not say. `nfc`: text is normalised first.
    """

    splits: tuple[str, ...] = ()
    gpt2: bool = False
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The tokenizers object; the last step maps bytes to the vocabulary's letters."""
        steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)
        return pre_tokenizers.Sequence([*steps, last]) if steps else last


_GPT2 = PreTokenizer(gpt2=True)
_DIGITS = PreTokenizer((r"\p{N}",), gpt2=True)
_LLAMA_BPE = PreTokenizer((_LLAMA3,), whole_words=True, bos=True)
_QWEN = PreTokenizer((_QWEN2,), nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # What llama.cpp does for files that predate the key.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+",), gpt2=True),
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "trillion": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "minerva-7b": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "pixtral": _LLAMA_BPE,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "megrez": _QWEN,
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}
