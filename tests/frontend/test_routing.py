"""Routing policies, as tables over columns."""

import pytest

from mlxhost.frontend.columns import Columns
from mlxhost.frontend.errors import InternalError
from mlxhost.frontend.routing import NONE, pick, within_bound
from mlxhost.wire.policies import ROUTINGS

Figures = tuple[int, int, int]


def columns(*figures: Figures | None, limit: int = 0) -> Columns:
    """Replicas from (in flight, KV tokens, KV capacity); None is one that may not be chosen."""
    made = Columns(len(figures))
    for position, known in enumerate(figures):
        made.place(position, limit)
        if known is not None:
            made.set_usable(position, True)
            made.report(position, *known)
    return made


def picks(policy: str, replicas: Columns, turns: int, low: int = 0, high: int | None = None) -> list[int]:
    """Where successive requests go while the figures stay the same."""
    chosen, start = [], 0
    for _ in range(turns):
        chosen.append(pick(policy, replicas, low, len(replicas) if high is None else high, start))
        start = chosen[-1] + 1
    return chosen


@pytest.mark.parametrize(
    ("policy", "figures", "expected"),
    [
        ("round-robin", [(9, 9, 10), (0, 0, 10), (5, 5, 10)], [0, 1, 2, 0]),
        ("round-robin", [(0, 0, 0)], [0, 0]),
        ("round-robin", [None, (9, 0, 0), None, (0, 0, 0)], [1, 3, 1]),
        ("least-in-flight", [(2, 0, 10), (1, 9, 10), (3, 0, 10)], [1, 1]),
        ("least-in-flight", [(1, 0, 10), (1, 0, 10), (2, 0, 10)], [0, 1, 0, 1]),
        ("least-in-flight", [None, (5, 0, 10), (7, 0, 10), None, (5, 0, 10)], [1, 4, 1, 4]),
        ("minimum-kv-usage", [(0, 50, 100), (9, 60, 1000)], [1, 1]),
        ("minimum-kv-usage", [(3, 50, 100), (1, 500, 1000), (2, 5, 10)], [1, 1]),
        ("minimum-kv-usage", [(1, 50, 100), (1, 500, 1000)], [0, 1, 0]),
        ("minimum-kv-usage", [(0, 150, 100), (0, 120, 100)], [1]),
        ("minimum-kv-usage", [(4, 0, 0), (2, 0, 0)], [1]),
        ("minimum-kv-usage", [None, (4, 90, 100), None], [1, 1]),
        ("prefix-affinity", [(2, 0, 10), (1, 0, 10)], [1, 1]),
        ("bootstrap-room", [(2, 0, 10), (1, 0, 10)], [1, 1]),
    ],
)
def test_policies(policy: str, figures: list[Figures | None], expected: list[int]) -> None:
    """Each policy takes the least loaded by its own measure, equals take turns, closed ones get nothing."""
    assert picks(policy, columns(*figures), len(expected)) == expected


def test_kv_usage_is_a_ratio() -> None:
    """A larger cache may hold more tokens and still be the emptier one."""
    assert picks("minimum-kv-usage", columns((0, 90, 100), (0, 500, 10_000)), 1) == [1]


def test_kv_usage_counts_what_was_just_dispatched() -> None:
    """A replica whose report is old has the credit of what was sent to it since."""
    replicas = columns((0, 0, 100), (0, 10, 100))
    assert picks("minimum-kv-usage", replicas, 1) == [0]
    replicas.credit(0, 1, 20)
    assert picks("minimum-kv-usage", replicas, 1) == [1]
    replicas.credit(0, -1, -20)
    assert picks("minimum-kv-usage", replicas, 1) == [0]


@pytest.mark.parametrize("policy", ROUTINGS)
def test_no_replica(policy: str) -> None:
    """Nothing usable, or nothing at all, is NONE under every policy."""
    assert pick(policy, columns(None, None), 0, 2, 1) == NONE
    assert pick(policy, columns(), 0, 0, 0) == NONE


@pytest.mark.parametrize("policy", ROUTINGS)
def test_full_replicas_come_last(policy: str) -> None:
    """A replica whose queue is full is chosen only when all are, and then the least loaded of them is."""
    replicas = columns((4, 0, 100), (3, 90, 100), (4, 0, 100), limit=4)
    assert picks(policy, replicas, 2) == [1, 1]
    replicas.credit(1, 2, 0)
    assert picks(policy, replicas, 1)[0] in (0, 1, 2)
    assert not replicas.open.any()


@pytest.mark.parametrize("policy", ROUTINGS)
def test_subset(policy: str) -> None:
    """Only positions of the subset are chosen, in turn, however busy they are."""
    replicas = columns((0, 0, 100), (7, 70, 100), (7, 70, 100), (0, 0, 100))
    assert picks(policy, replicas, 4, low=1, high=3) == [1, 2, 1, 2]


@pytest.mark.parametrize("policy", ROUTINGS)
def test_equals_get_equal_shares(policy: str) -> None:
    """Over many requests, equally loaded replicas get the same number, wherever the first turn was."""
    chosen = picks(policy, columns(*[(1, 10, 100)] * 5), 50)
    assert [chosen.count(i) for i in range(5)] == [10] * 5


@pytest.mark.parametrize(
    ("figures", "position", "expected"),
    [
        ([3, 0, 0], 0, True),  # light load: the floor
        ([4, 0, 0], 0, False),
        ([10, 10, 10], 0, True),  # 11 <= 1.25 * 31 / 3
        ([12, 10, 10], 0, True),  # 13 <= 1.25 * 33 / 3
        ([15, 10, 10], 0, False),
    ],
)
def test_bounded_load(figures: list[int], position: int, expected: bool) -> None:
    """Affinity holds up to 1.25 times the mean load, or four rows."""
    replicas = columns(*[(rows, 0, 100) for rows in figures])
    assert within_bound(replicas, position, 0, 3) == expected


def test_bounded_load_of_a_subset_is_measured_within_it() -> None:
    """The mean is that of the replicas which the client may use."""
    replicas = columns((100, 0, 0), (8, 0, 0), (2, 0, 0))
    assert within_bound(replicas, 1, 0, 3)
    assert not within_bound(replicas, 1, 1, 3)


def test_unknown_policy_is_our_fault() -> None:
    """A policy that this frontend does not know is a 500 naming it."""
    with pytest.raises(InternalError, match="by-magic"):
        pick("by-magic", columns((0, 0, 0)), 0, 1, 0)
