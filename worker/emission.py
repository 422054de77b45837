"""What a step produced, as one OUT for each frontend."""

from collections.abc import Iterator, Sequence

from mlxhost.wire.data import Finish, Out
from mlxhost.worker.events import Status
from mlxhost.worker.row import Row


def outs(
    rows: Sequence[tuple[Row, list[int]]], epoch: int, step: int, status: Status
) -> Iterator[tuple[str, Out]]:
    """(frontend, OUT) for `rows`, each with its new tokens."""
    by_frontend: dict[str, list[tuple[Row, list[int]]]] = {}
    for entry in rows:
        by_frontend.setdefault(entry[0].key[0], []).append(entry)
    for frontend, entries in by_frontend.items():
        own = [row for row, _ in entries]
        ended = any(row.finish != Finish.RUNNING for row in own)
        yield (
            frontend,
            Out(
                epoch=epoch,
                step=step,
                load=status.load(frontend),
                handles=[row.key[1] for row in own],
                counts=[len(tokens) for _, tokens in entries],
                tokens=[token for _, tokens in entries for token in tokens],
                finish=[int(row.finish) for row in own],
                detail=[row.detail for row in own] if any(row.detail for row in own) else [],
                prompt_tokens=[len(row.prompt) for row in own] if ended else [],
                completion_tokens=[row.produced for row in own] if ended else [],
                cached_tokens=[row.cached_tokens for row in own] if ended else [],
            ),
        )
