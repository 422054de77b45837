"""The real demo model, fetched once into the user's cache. Only tests marked `demo` may ask for it."""

from functools import cache
from pathlib import Path

from mlxhost.supervisor.pull import fetch
from mlxhost.worker.gguf.launch import ensure_converted


@cache
def demo_gguf() -> Path:
    """The demo model's GGUF."""
    return fetch("demo", lambda phase, done, total: None)


@cache
def demo_directory(dtype: str = "float32") -> Path:
    """The demo model as an MLX directory."""
    gguf = demo_gguf()
    return ensure_converted(gguf, dtype, gguf.parent, lambda done, total: None)
