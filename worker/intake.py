"""From an ADD to a row: what can run here, and what is refused with which words. No I/O, no MLX."""

import time
from collections.abc import Sequence

from mlxhost.wire import data
from mlxhost.worker.admission import Capacity, clamp_max_tokens
from mlxhost.worker.errors import RowError
from mlxhost.worker.events import Arrived
from mlxhost.worker.row import Row
from mlxhost.worker.sessions import MAX_ID_BYTES


def unsupported(add: data.Add) -> str | None:
    """What `add` asks for that this engine cannot do, if anything."""
    checks = {
        f"task {add.task!r}": add.task != "generate",
        "n > 1 in one message": add.n != 1 or bool(add.siblings),
        "grammar": add.grammar is not None,
        "adapters": bool(add.adapters),
        "attachments": bool(add.attachments),
    }
    return next((name for name, asked in checks.items() if asked), None)


def row_of(event: Arrived, *, vocab_size: int, eos_ids: Sequence[int], capacity: Capacity) -> Row:
    """The request as a row. Raises RowError when it cannot run here."""
    add, prompt = event.add, event.prompt
    if len(add.session_id.encode()) > MAX_ID_BYTES:
        raise RowError(data.REJECT_INVALID, f"a session id has at most {MAX_ID_BYTES} bytes")
    if asked := unsupported(add):
        raise RowError(data.REJECT_UNSUPPORTED, f"this worker does not support {asked}")
    if not len(prompt):
        raise RowError(data.REJECT_INVALID, "the prompt has no tokens")
    for token in (max(prompt), *add.sampling.logit_bias):
        if not 0 <= token < vocab_size:
            raise RowError(data.REJECT_INVALID, f"token id {token} is outside the vocabulary of {vocab_size}")
    max_tokens = clamp_max_tokens(len(prompt), add.limits.max_tokens, capacity)
    return Row.of(event.frontend, add, prompt, eos_ids, max_tokens, time.monotonic())
