"""Choices of one request that share the prefill of the first."""

from collections.abc import Iterable

from mlxhost.worker.row import Row


def follow(row: Row, leader: Row) -> None:
    """`row` has what its leader has prefilled, and needs it no longer. Caches are values: the copy takes no
    memory until one of the two grows."""
    assert leader.kv is not None
    row.kv, row.prefilled, row.cached_tokens = leader.kv.copy(), leader.prefilled, leader.cached_tokens
    row.leader = None


def orphaned(rows: Iterable[Row], leader: Row) -> None:
    """`leader` left before its prefill was over: the first of `rows` that followed it leads the others."""
    heir = None
    for row in rows:
        if row.leader is leader:
            row.leader = heir
            heir = heir or row
