"""tokenizer.json, tokenizer_config.json and generation_config.json of a GGUF file."""

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.bpe import byte_level_bpe, pre_tokenizer
from mlxhost.worker.gguf.metadata import Metadata
from mlxhost.worker.gguf.spm import sentencepiece_bpe
from mlxhost.worker.gguf.vocabulary import (
    Kind,
    Vocabulary,
    chat_template,
    read_vocabulary,
    unsupported,
)


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of each file."""

    tokenizer: str
    tokenizer_config: dict[str, Any]
    generation_config: dict[str, Any]


def tokenizer_files(metadata: Metadata, rows: int, context: int) -> TokenizerFiles:
    """Rebuild the tokenizer of a model whose embedding has `rows` rows and whose context is `context`.

    Raises ModelError: "unsupported_tokenizer" for a kind that is not known, "bad_model" for a vocabulary
    that does not hang together.
    """
    model = metadata.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise unsupported(metadata, f"the tokenizer {model!r} is not supported (supported: gpt2, llama)")
    vocabulary = read_vocabulary(metadata, rows)
    build = byte_level_bpe if model == "gpt2" else sentencepiece_bpe
    try:
        tokenizer = build(metadata, vocabulary)
        _add_special_tokens(tokenizer, vocabulary, spm=model == "llama")
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError("bad_model", f"{metadata.path}: the tokenizer cannot be built: {error}") from None
    bos_default = pre_tokenizer(metadata).bos if model == "gpt2" else True
    add_bos = metadata.flag("tokenizer.ggml.add_bos_token", bos_default) and vocabulary.bos is not None
    add_eos = metadata.flag("tokenizer.ggml.add_eos_token", False) and vocabulary.eos is not None
    _add_ends(tokenizer, vocabulary, add_bos, add_eos)
    config = {
        # Loads tokenizer.json as it is; model-specific classes would rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "chat_template": chat_template(metadata),
        "bos_token": vocabulary.text(vocabulary.bos),
        "eos_token": vocabulary.text(vocabulary.eos),
        "pad_token": vocabulary.text(vocabulary.padding),
        "unk_token": vocabulary.text(vocabulary.unknown),
    }
    ends = vocabulary.ends
    ids = {
        "bos_token_id": vocabulary.bos,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": vocabulary.padding,
    }
    return TokenizerFiles(tokenizer.to_str(), _known(config), _known(ids))


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, *, spm: bool) -> None:
    # In a SentencePiece vocabulary the unknown token is found in text as a control token is.
    special = vocabulary.of_kind(Kind.CONTROL, Kind.UNKNOWN) if spm else vocabulary.of_kind(Kind.CONTROL)
    plain = vocabulary.of_kind(Kind.USER_DEFINED)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])


def _add_ends(tokenizer: Tokenizer, vocabulary: Vocabulary, add_bos: bool, add_eos: bool) -> None:
    first = [f"{vocabulary.text(vocabulary.bos)}"] if add_bos else []
    last = [f"{vocabulary.text(vocabulary.eos)}"] if add_eos else []
    if not first and not last:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1", *(f"{t}:1" for t in last)],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(first + last)],
    )


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
