"""A GGUF file to an MLX model directory: weights, config, tokenizer, chat template.

The conversion runs in a process of its own (`python -I -m mlxhost.worker.gguf`), which `launch` starts and
watches; only that process imports numpy, gguf and tokenizers. Knows nothing of the wire or of serving.
"""
