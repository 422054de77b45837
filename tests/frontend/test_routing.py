"""Routing policies, as tables."""

import pytest

from mlxhost.frontend.errors import InternalError
from mlxhost.frontend.routing import Candidate, pick


def candidates(*figures: tuple[int, int, int]) -> list[Candidate]:
    """Replicas m/0, m/1... from (in flight, KV tokens, KV capacity)."""
    return [Candidate((f"m/{i}", 1), *f) for i, f in enumerate(figures)]


def picks(policy: str, replicas: list[Candidate], turns: int) -> list[str]:
    """Which replicas successive requests go to while the figures stay the same."""
    return [pick(policy, replicas, turn).key[0] for turn in range(turns)]


@pytest.mark.parametrize(
    ("policy", "figures", "expected"),
    [
        ("round-robin", [(9, 9, 10), (0, 0, 10), (5, 5, 10)], ["m/0", "m/1", "m/2", "m/0"]),
        ("round-robin", [(0, 0, 0)], ["m/0", "m/0"]),
        ("least-in-flight", [(2, 0, 10), (1, 9, 10), (3, 0, 10)], ["m/1", "m/1"]),
        ("least-in-flight", [(1, 0, 10), (1, 0, 10), (2, 0, 10)], ["m/0", "m/1", "m/0", "m/1"]),
        ("minimum-kv-usage", [(0, 50, 100), (9, 60, 1000)], ["m/1", "m/1"]),
        ("minimum-kv-usage", [(3, 50, 100), (1, 500, 1000), (2, 5, 10)], ["m/1", "m/1"]),
        ("minimum-kv-usage", [(1, 50, 100), (1, 500, 1000)], ["m/0", "m/1", "m/0"]),
        ("minimum-kv-usage", [(0, 150, 100), (0, 120, 100)], ["m/1"]),
        ("minimum-kv-usage", [(4, 0, 0), (2, 0, 0)], ["m/1"]),
    ],
)
def test_policies(policy: str, figures: list[tuple[int, int, int]], expected: list[str]) -> None:
    """Each policy takes the least loaded by its own measure, and equals take turns."""
    assert picks(policy, candidates(*figures), len(expected)) == expected


def test_kv_usage_is_a_ratio() -> None:
    """A larger cache may hold more tokens and still be the emptier one."""
    assert picks("minimum-kv-usage", candidates((0, 90, 100), (0, 500, 10_000)), 1) == ["m/1"]


def test_unknown_policy_is_our_fault() -> None:
    """A policy that this frontend does not know is a 500 naming it."""
    with pytest.raises(InternalError, match="by-magic"):
        pick("by-magic", candidates((0, 0, 0)), 0)
