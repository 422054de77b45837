"""The thread count: within the lease, down fast, up slowly."""

import pytest

from mlxhost.worker.threads import Choice, candidates

FREE = {1: 2.0, 2: 1.3}
CONTENDED = {1: 2.0, 2: 20.0}
EVEN = {1: 2.0, 2: 2.0}
MILD = {1: 2.0, 2: 2.6}


@pytest.mark.parametrize(
    ("current", "limit", "expected"),
    [(1, 1, [1]), (1, 2, [1, 2]), (2, 2, [1, 2]), (4, 16, [2, 4, 8]), (16, 16, [8, 16]), (6, 8, [3, 6, 8])],
)
def test_candidates_are_half_and_double_within_the_lease(
    current: int, limit: int, expected: list[int]
) -> None:
    """Only neighbours are timed, and never more threads than leased."""
    assert candidates(current, limit) == expected


def test_falls_at_once_under_contention() -> None:
    """One probe that collapses is enough."""
    assert Choice(2).decide(CONTENDED) == 1


def test_falls_after_two_mild_losses() -> None:
    """A mild loss may be chance; two in a row are not."""
    choice = Choice(2)
    assert [choice.decide(MILD), choice.decide(MILD)] == [2, 1]
    choice = Choice(2)
    assert [choice.decide(m) for m in (MILD, FREE, MILD)] == [2, 2, 2]


def test_rises_after_several_wins_and_more_of_them_after_each_fall() -> None:
    """Free cores are taken again, more hesitantly the more often they were lost."""
    choice = Choice(2)
    waits = []
    for _ in range(4):
        choice.decide(CONTENDED)
        probes = 1
        while choice.decide(FREE) == 1:
            probes += 1
        waits.append(probes)
    assert waits == [12, 24, 24, 24]


def test_a_long_quiet_time_forgives() -> None:
    """After sixty probes without a fall the next one costs as little as the first."""
    choice = Choice(2)
    choice.decide(CONTENDED)
    for _ in range(100):
        choice.decide(FREE)
    choice.decide(CONTENDED)
    assert [choice.decide(FREE) for _ in range(12)] == [1] * 11 + [2]


def test_collapsing_probes_are_counted_while_they_last() -> None:
    """What makes probes rarer on contended cores, and often again once one goes well."""
    choice = Choice(2)
    counted = []
    for seconds in (CONTENDED, CONTENDED, CONTENDED, FREE):
        choice.decide(seconds)
        counted.append(choice.collapses)
    assert counted == [0, 1, 2, 0]


def test_no_gain_is_no_reason_to_rise() -> None:
    """Equal times leave the setting alone."""
    choice = Choice(2)
    choice.decide(CONTENDED)
    assert {choice.decide(EVEN) for _ in range(50)} == {1}


def test_leases_are_obeyed_at_once() -> None:
    """A smaller lease caps now; a larger one is used now when only the lease was in the way."""
    choice = Choice(4)
    choice.set_limit(1)
    assert choice.threads == 1
    choice.set_limit(4)
    assert choice.threads == 4
    choice.decide({2: 1.0, 4: 9.0})
    choice.set_limit(8)
    assert choice.threads == 2
