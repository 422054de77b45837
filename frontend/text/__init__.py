"""Text to token ids and back: chat templates, tokenizers, incremental detokenizing, stop strings."""
