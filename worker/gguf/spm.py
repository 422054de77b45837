"""SentencePiece BPE with byte fallback (`tokenizer.ggml.model` = llama) from a GGUF's tokens and scores."""

from tokenizers import Tokenizer, decoders, models, normalizers

from mlxhost.worker.gguf.metadata import Metadata
from mlxhost.worker.gguf.vocabulary import Kind, Vocabulary

SPACE = "\u2581"


def sentencepiece_bpe(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer without its special tokens.

    The normalizer and decoder are those of Llama 2's own tokenizer.json: each stretch of text between
    special tokens gets a leading space (when the file asks for it), as llama.cpp does too.
    """
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise metadata.bad(
            "tokenizer.ggml.scores", f"has {len(scores)} entries for {len(vocabulary.tokens)} tokens"
        )
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(vocabulary.tokens)},
            merges=merges_by_score(vocabulary, scores),
            unk_token=vocabulary.text(vocabulary.unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_pieces: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*to_pieces, normalizers.Replace(" ", SPACE)])
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", 1, 0)] if prefix else to_text)
    return tokenizer


def merges_by_score(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens to a third, best score first: SentencePiece joins the pair whose result
    scores highest. Ties are broken as transformers' `generate_merges` does."""
    pieces = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.kinds, strict=True)
        if kind in (Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED)
    }
    found = []
    for token, score in pieces.items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in pieces and right in pieces:
                found.append((score, len(left), len(right), left, right))
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]
