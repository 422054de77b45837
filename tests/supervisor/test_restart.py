"""Whether and when what died starts again: tables."""

import pytest

from mlxhost.supervisor.restart import (
    FRONTENDS,
    WORKERS,
    Death,
    GiveUp,
    Restart,
    Waiting,
    decide,
    due,
    incident_of,
)

CRASH = Death(was_ready=True, crashed=True, reason="killed by SIGKILL")
LOAD_CRASH = Death(was_ready=False, crashed=True, reason="killed by SIGSEGV")
REFUSAL = Death(was_ready=False, crashed=False, reason="no such architecture")


@pytest.mark.parametrize(
    ("restarts", "delay"),
    [([], 0.5), ([90.0], 1.0), ([90.0, 95.0], 2.0), ([80.0] * 3, 4.0), ([80.0] * 4, 8.0), ([40.0] * 9, 0.5)],
)
def test_wait_doubles_with_each_restart_in_the_window(restarts: list[float], delay: float) -> None:
    """Half a second first, then twice as long each time; restarts older than the window are forgotten."""
    assert decide(CRASH, restarts, 0, now=100.0, chance=0.0, policy=WORKERS) == Restart(
        delay, sum(100.0 - at < 60 for at in restarts) + 1
    )


def test_jitter_lengthens_the_wait_but_the_first_stays_below_a_second() -> None:
    """Jitter never takes the first restart beyond a second, nor any beyond the cap."""
    first = decide(CRASH, [], 0, 100.0, 0.999, WORKERS)
    assert isinstance(first, Restart)
    assert 0.6 < first.delay_s < 1.0
    patient = WORKERS.__class__(max_restarts=50)
    longest = decide(CRASH, [99.0] * 20, 0, 100.0, 0.999, patient)
    assert longest == Restart(30.0, 21)


def test_more_than_five_restarts_in_a_minute_is_the_end() -> None:
    """The sixth death in the window gives up and says so."""
    assert decide(CRASH, [50.0, 60.0, 70.0, 80.0, 90.0], 0, 100.0, 0.5, WORKERS) == GiveUp(
        "died 6 times in 60 s: killed by SIGKILL"
    )


def test_a_refusal_to_load_is_not_tried_again() -> None:
    """What the next try would meet again is not tried."""
    assert decide(REFUSAL, [], 1, 100.0, 0.5, WORKERS) == GiveUp("no such architecture")


@pytest.mark.parametrize(("crashes", "goes_on"), [(1, True), (2, True), (3, False)])
def test_crashes_while_loading_are_tried_a_few_times(crashes: int, goes_on: bool) -> None:
    """A signal during a load may be someone else's fault, but not three times."""
    decision = decide(LOAD_CRASH, [], crashes, 100.0, 0.0, WORKERS)
    assert isinstance(decision, Restart) is goes_on


def test_frontends_come_back_sooner() -> None:
    """Every model waits for a frontend."""
    assert decide(CRASH, [], 0, 100.0, 0.0, FRONTENDS) == Restart(0.1, 1)


@pytest.mark.parametrize(("now", "incident"), [(11.9, 4), (12.0, 4), (12.1, 5)])
def test_deaths_within_two_seconds_are_one_incident(now: float, incident: int) -> None:
    """The window counts from the last death."""
    assert incident_of(now, last_death=10.0, last_incident=4) == incident


@pytest.mark.parametrize(
    ("waiting", "loading", "expected"),
    [
        ([], set(), []),
        ([Waiting("a", 5, 1)], set(), ["a"]),
        ([Waiting("a", 11, 1)], set(), []),
        ([Waiting("a", 6, 1), Waiting("b", 5, 1)], set(), ["b"]),
        ([Waiting("a", 5, 1), Waiting("b", 6, 2)], set(), ["a", "b"]),
        ([Waiting("a", 5, 1), Waiting("b", 6, 2)], {1}, ["b"]),
        ([Waiting("a", 11, 1), Waiting("b", 6, 1)], set(), ["b"]),
    ],
)
def test_one_at_a_time_within_an_incident(
    waiting: list[Waiting], loading: set[int], expected: list[str]
) -> None:
    """Only what is due starts, earliest first, and one for each incident."""
    assert due(waiting, loading, now=10.0) == expected
