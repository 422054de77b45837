"""What a step produced, as one OUT for each frontend."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from mlxhost.wire.data import Finish, Out
from mlxhost.worker.batch import Token
from mlxhost.worker.events import Status
from mlxhost.worker.row import Row

ValueT = TypeVar("ValueT")


def outs(
    rows: Sequence[tuple[Row, list[Token]]], epoch: int, step: int, status: Status
) -> Iterator[tuple[str, Out]]:
    """(frontend, OUT) for `rows`, each with its new tokens. Prompt log-probabilities that a row still holds
    go along, once."""
    by_frontend: dict[str, list[tuple[Row, list[Token]]]] = {}
    for entry in rows:
        by_frontend.setdefault(entry[0].key[0], []).append(entry)
    for frontend, entries in by_frontend.items():
        own = [row for row, _ in entries]
        prompts = [row.take_prompt_logprobs() for row in own]
        ended = any(row.finish != Finish.RUNNING for row in own)
        yield (
            frontend,
            Out(
                epoch=epoch,
                step=step,
                load=status.load(frontend),
                handles=[row.key[1] for row in own],
                counts=[len(tokens) for _, tokens in entries],
                tokens=[token.id for _, tokens in entries for token in tokens],
                finish=[int(row.finish) for row in own],
                detail=[row.detail for row in own] if any(row.detail for row in own) else [],
                prompt_tokens=[len(row.prompt) for row in own] if ended else [],
                completion_tokens=[row.produced for row in own] if ended else [],
                cached_tokens=[row.cached_tokens for row in own] if ended else [],
                logprobs=_column(entries, lambda row, t: t.logprob if row.sampling.logprobs else None),
                top_logprobs=_column(entries, lambda row, t: t.top if row.sampling.top_logprobs else None),
                prompt_logprobs=prompts if any(prompts) else [],
            ),
        )


def _column(
    entries: Sequence[tuple[Row, list[Token]]], value: Callable[[Row, Token], ValueT | None]
) -> list[list[ValueT]]:
    """A per-token column; empty when no row has anything in it."""
    column = [[v for t in tokens if (v := value(row, t)) is not None] for row, tokens in entries]
    return column if any(column) else []
