"""Byte-level BPE (`tokenizer.ggml.model` = gpt2) from a GGUF's tokens and merges."""

from tokenizers import Tokenizer, decoders, models, normalizers

from mlxhost.worker.gguf.metadata import Metadata
from mlxhost.worker.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from mlxhost.worker.gguf.vocabulary import Vocabulary, unsupported


def pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    """The pre-tokenizer that the file names; "default" when it names none.

    Raises ModelError("unsupported_tokenizer") for a name that is not known.
    """
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise unsupported(
            metadata,
            f"the pre-tokenizer {name!r} is not known (known: {', '.join(sorted(PRE_TOKENIZERS))})",
        )
    return PRE_TOKENIZERS[name]


def byte_level_bpe(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer without its special tokens. Raises ModelError when a merge does not fit."""
    pre = pre_tokenizer(metadata)
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = [_halves(metadata, merge, ids) for merge in metadata.texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _halves(metadata: Metadata, merge: str, ids: dict[str, int]) -> tuple[str, str]:
    # The space between the halves is the first one after a first character, which may be a space itself.
    middle = merge.find(" ", 1)
    left, right = merge[:middle], merge[middle + 1 :]
    if middle < 0 or left not in ids or right not in ids or left + right not in ids:
        raise metadata.bad("tokenizer.ggml.merges", f"has {merge!r}, which does not join two tokens to one")
    return left, right
