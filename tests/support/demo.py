"""The real demo model, fetched once into the user's cache. Only tests marked `demo` may ask for it."""

from functools import cache
from pathlib import Path

from mlxhost.supervisor.pull import fetch
from mlxhost.worker.gguf.launch import ensure_converted


def _quiet(phase: str, done: int, total: int) -> None:
    """Progress nobody looks at."""


@cache
def demo_gguf() -> Path:
    """The demo model's GGUF."""
    return fetch("demo", _quiet)


@cache
def demo_directory(dtype: str = "float32") -> Path:
    """The demo model as an MLX directory."""
    gguf = demo_gguf()
    return ensure_converted(gguf, dtype, gguf.parent, _quiet)
