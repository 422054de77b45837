"""Tiny model directories as a frontend sees them: tokenizer, template, configs; no weights."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

EOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café 日本語 👩‍🚀 says hello", "hello world"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3, Qwen: every byte has a token, so any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[EOS, START, END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_tokenizer(*, strips: bool = True) -> Tokenizer:
    """BPE with byte fallback and ▁ for spaces as in Llama 2 (`strips`) and Gemma (not)."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += ["▁", *"abcdefghijklmnopqrstuvwxyz.,!?ïé", "he", "ll", "hell", "hello", "▁hello"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prepend = [normalizers.Prepend("▁")] if strips else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_model(
    directory: Path,
    *,
    tokenizer: Tokenizer | None = None,
    chat_template: object = CHAT_TEMPLATE,
    generation: dict[str, Any] | None = None,
    jinja: str | None = None,
    **tokenizer_config: object,
) -> Path:
    """A model directory good enough for a model card; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or byte_level_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"chat_template": chat_template, "eos_token": EOS, **tokenizer_config}
    settings = {k: v for k, v in settings.items() if v is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    if jinja is not None:
        (directory / "chat_template.jinja").write_text(jinja)
    return directory
