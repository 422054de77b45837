"""The vocabulary of a GGUF file: tokens, their kinds, and the special ones."""

from dataclasses import dataclass
from enum import IntEnum

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.metadata import Metadata


class Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens that end a turn, by text: most files name only one end id, and chat models need the other too.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, and the ids that mean something. `ends` are all ids that end a completion."""

    tokens: list[str]
    kinds: list[int]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    ends: list[int]

    def text(self, token: int | None) -> str | None:
        return None if token is None else self.tokens[token]

    def of_kind(self, *kinds: Kind) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]


def read_vocabulary(metadata: Metadata, rows: int) -> Vocabulary:
    """The vocabulary of a model whose embedding has `rows` rows.

    Raises ModelError("bad_model") when there is none, it holds a token twice or does not fit.
    """
    tokens = metadata.texts("tokenizer.ggml.tokens")
    count = len(tokens)
    if not 0 < count <= rows:
        raise metadata.bad("tokenizer.ggml.tokens", f"has {count} tokens, the embedding has {rows} rows")
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    first_at: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if first_at.setdefault(token, number) != number:
            raise metadata.bad("tokenizer.ggml.tokens", f"has {token!r} twice")
    kinds = [int(Kind.NORMAL)] * count
    if "tokenizer.ggml.token_type" in metadata:
        kinds = metadata.integers("tokenizer.ggml.token_type")
        if len(kinds) != count:
            raise metadata.bad("tokenizer.ggml.token_type", f"has {len(kinds)} entries for {count} tokens")

    def special(name: str) -> int | None:
        return metadata.token_id(f"tokenizer.ggml.{name}_token_id", count)

    eos = special("eos")
    ends = [eos, special("eot"), special("eom")]
    ends += [
        number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == Kind.CONTROL and token in TURN_ENDS
    ]
    return Vocabulary(
        tokens=tokens,
        kinds=kinds,
        bos=special("bos"),
        eos=eos,
        unknown=special("unknown"),
        padding=special("padding"),
        ends=list(dict.fromkeys(end for end in ends if end is not None)),
    )


def chat_template(metadata: Metadata) -> str | None:
    """The file's chat template, if it has one."""
    return metadata.text("tokenizer.chat_template") if "tokenizer.chat_template" in metadata else None


def unsupported(metadata: Metadata, what: str) -> ModelError:
    """An error about a tokenizer that cannot be rebuilt."""
    return ModelError(
        "unsupported_tokenizer",
        f"{metadata.path}: {what}; a model directory with a tokenizer.json works for any tokenizer",
    )
