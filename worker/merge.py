"""Two OUTs of one frontend into one that says the same: what a slow reader gets. Lossless and bounded."""

from typing import TypeVar

from mlxhost.wire.data import Finish, Out

ValueT = TypeVar("ValueT")
EntryT = TypeVar("EntryT")


def merge(older: Out, newer: Out) -> Out:
    """One OUT with the tokens of both, row by row, in order of first appearance.

    A row that had ended in `older` must not appear in `newer`.
    """
    order = list(dict.fromkeys((*older.handles, *newer.handles)))
    tokens: dict[int, list[int]] = {handle: [] for handle in order}
    for out in (older, newer):
        at = 0
        for handle, count in zip(out.handles, out.counts, strict=True):
            tokens[handle] += out.tokens[at : at + count]
            at += count

    def latest(column: str, default: ValueT) -> list[ValueT]:
        """The newest value of a column for each row; empty when neither OUT has the column."""
        values: dict[int, ValueT] = {}
        for out in (older, newer):
            values.update(zip(out.handles, getattr(out, column), strict=False))
        return [values.get(handle, default) for handle in order] if values else []

    def joined(column: str) -> list[list[EntryT]]:
        """Both OUTs' entries of a per-token column, row by row; empty when neither has the column."""
        values: dict[int, list[EntryT]] = {handle: [] for handle in order}
        for out in (older, newer):
            for handle, entries in zip(out.handles, getattr(out, column), strict=False):
                values[handle] += entries
        return [values[handle] for handle in order] if any(values.values()) else []

    return Out(
        epoch=newer.epoch,
        step=newer.step,
        load=newer.load,
        handles=order,
        counts=[len(tokens[handle]) for handle in order],
        tokens=[token for handle in order for token in tokens[handle]],
        finish=latest("finish", int(Finish.RUNNING)),
        detail=latest("detail", ""),
        prompt_tokens=latest("prompt_tokens", 0),
        completion_tokens=latest("completion_tokens", 0),
        cached_tokens=latest("cached_tokens", 0),
        logprobs=joined("logprobs"),
        top_logprobs=joined("top_logprobs"),
        prompt_logprobs=joined("prompt_logprobs"),
    )
