"""From an ADD to its rows: what can run here, and what is refused with which words. No I/O, no MLX."""

import time
from collections.abc import Sequence
from dataclasses import replace

from mlxhost.wire import data
from mlxhost.worker.admission import Capacity, clamp_max_tokens
from mlxhost.worker.errors import RowError
from mlxhost.worker.events import Arrived
from mlxhost.worker.row import Row
from mlxhost.worker.sampling import MASK64
from mlxhost.worker.sessions import MAX_ID_BYTES


def unsupported(add: data.Add) -> str | None:
    """What `add` asks for that this engine cannot do, if anything."""
    checks = {
        f"task {add.task!r}": add.task != "generate",
        "adapters": bool(add.adapters),
        "attachments": bool(add.attachments),
    }
    return next((name for name, asked in checks.items() if asked), None)


def rows_of(event: Arrived, *, vocab_size: int, eos_ids: Sequence[int], capacity: Capacity) -> list[Row]:
    """The request as rows, one for each choice; the first leads the prefill that all share, and choice i
    draws with the seed of the first plus i. Raises RowError when it cannot run here."""
    add, prompt = event.add, event.prompt
    if len(add.session_id.encode()) > MAX_ID_BYTES:
        raise RowError(data.REJECT_INVALID, f"a session id has at most {MAX_ID_BYTES} bytes")
    if asked := unsupported(add):
        raise RowError(data.REJECT_UNSUPPORTED, f"this worker does not support {asked}")
    if add.n != 1 + len(add.siblings):
        raise RowError(data.REJECT_INVALID, f"n is {add.n} with {len(add.siblings)} sibling handles")
    if not len(prompt):
        raise RowError(data.REJECT_INVALID, "the prompt has no tokens")
    for token in (max(prompt), *add.sampling.logit_bias):
        if not 0 <= token < vocab_size:
            raise RowError(data.REJECT_INVALID, f"token id {token} is outside the vocabulary of {vocab_size}")
    max_tokens = clamp_max_tokens(len(prompt), add.limits.max_tokens, capacity)
    first = Row.of(event.frontend, add, prompt, eos_ids, max_tokens, time.monotonic())
    return [first, *(_sibling(first, i, handle) for i, handle in enumerate(add.siblings, start=1))]


def _sibling(first: Row, index: int, handle: int) -> Row:
    """Choice `index` of the request. Log-probabilities of the prompt come with the first choice only."""
    return replace(
        first,
        key=(first.key[0], handle),
        sampling=replace(first.sampling, seed=(first.sampling.seed + index) & MASK64),
        prompt_top=None,
        prompt_logprobs=[],
        output=[],
        leader=first,
    )
