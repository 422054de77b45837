"""Rows for tests of pure decisions: no model, no tokens but their number."""

from mlxhost.wire import data
from mlxhost.worker.row import Row


def row(
    handle: int,
    prompt: int = 10,
    max_tokens: int = 10,
    *,
    priority: int = 0,
    arrived: float = 0.0,
    client: str = "",
) -> Row:
    """A row of `prompt` tokens that has just arrived."""
    add = data.Add(handle, handle, f"r{handle}", priority=priority, client=client)
    return Row.of("f", add, [3] * prompt, [], max_tokens, arrived)
