"""One model in one process: loading, continuous batching, sampling, KV cache, memory.

Knows token ids and the wire; nothing of HTTP or of the text of prompts.
"""
