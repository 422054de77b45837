"""Grouping rows into packs, as a table."""

import pytest

from mlxhost.worker.kv.plan import EVERYTHING, SINGLE_ROWS, PackRule, plan

GPU = PackRule(2.0, 256)


@pytest.mark.parametrize(
    ("packs", "rows", "rule", "groups"),
    [
        ([], [5, 9], SINGLE_ROWS, [((), (0,)), ((), (1,))]),
        ([], [5, 9, 5000], EVERYTHING, [((), (0, 1, 2))]),
        ([], [10, 500, 600, 5000], GPU, [((), (0, 1)), ((), (2,)), ((), (3,))]),
        ([[300, 310], [4000]], [500], GPU, [((0,), (0,)), ((1,), ())]),
        ([[300, 500], [550, 590]], [], GPU, [((0, 1), ())]),
        ([[300, 500], [900, 1000]], [580], GPU, [((0,), (0,)), ((1,), ())]),
        ([[], [700]], [], GPU, [((1,), ())]),
        ([[90, 100]], [110, 450, 460], PackRule(1.5, 1, 400), [((0,), (0,)), ((), (1,)), ((), (2,))]),
    ],
)
def test_groups(packs: list, rows: list, rule: PackRule, groups: list) -> None:
    """Neighbours in length share a pack while the longest is within the ratio of the shortest."""
    assert [(g.packs, g.rows) for g in plan(packs, rows, rule)] == groups
