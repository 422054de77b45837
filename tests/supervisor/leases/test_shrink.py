"""The ladder that a worker over its lease climbs."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxhost.supervisor.leases.shrink import LIMITS, Limits, Rung, Shrink, step

QUICK = Limits(dict.fromkeys(Rung, 1.0), slack_share=0.0, slack_bytes=10, calm_s=5.0)


def climb(figures: list[int], lease: int = 100, every_s: float = 0.5) -> list[Rung]:
    """The rung after each figure of the kernel, one each half second."""
    standing: Shrink | None = None
    rungs = []
    for tick, holds in enumerate(figures):
        standing = step(standing, holds, lease, 1000.0 + tick * every_s, QUICK)
        rungs.append(standing.rung if standing else Rung.NONE)
    return rungs


def test_a_worker_within_its_lease_is_left_alone() -> None:
    """Figures up to the slack move nothing."""
    assert climb([50, 100, 110, 110, 110]) == [Rung.NONE] * 5


def test_rungs_come_in_order_each_after_its_deadline() -> None:
    """Two looks a rung: clear the cache, drop prefixes, pause, drain, exit; and no further."""
    rungs = climb([200] * 14)
    assert list(dict.fromkeys(rungs)) == list(Rung)
    assert rungs[:4] == [Rung.NONE, Rung.NONE, Rung.CLEAR_CACHE, Rung.CLEAR_CACHE]
    assert rungs[-1] is Rung.EXIT


def test_a_short_peak_is_let_pass() -> None:
    """One figure over the lease, as a prefill may give, orders nothing."""
    assert climb([90, 300, 90, 300, 90]) == [Rung.NONE] * 5


def test_a_worker_that_gave_back_goes_on_after_a_calm() -> None:
    """It stays on its rung until it has been within its lease for the calm time, then it is let go."""
    rungs = climb([200, 200, 200] + [80] * 12)
    assert rungs[2] is Rung.CLEAR_CACHE
    assert rungs[3:13] == [Rung.CLEAR_CACHE] * 10
    assert rungs[13] is Rung.NONE


def test_a_drain_is_not_taken_back() -> None:
    """Once it drains, a low figure does not reopen it: its requests have gone elsewhere."""
    rungs = climb([200] * 9 + [10] * 20)
    assert rungs[8] is Rung.DRAIN
    assert rungs[-1] is Rung.DRAIN


def test_only_what_the_worker_does_itself_is_ordered() -> None:
    """The wire's words are those of the first three rungs."""
    assert [r.order for r in Rung] == ["", "clear_cache", "drop_prefixes", "pause", "", ""]


# A loaded machine is no failure.
ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@ANY
@given(st.lists(st.integers(0, 1 << 36), min_size=1, max_size=60), st.integers(0, 1 << 36))
def test_a_worker_never_skips_a_rung(figures: list[int], lease: int) -> None:
    """Whatever the kernel says, the ladder is climbed one rung at a time, and only over the lease."""
    standing: Shrink | None = None
    for tick, holds in enumerate(figures):
        before = standing.rung if standing else Rung.NONE
        standing = step(standing, holds, lease, float(tick * 3))
        after = standing.rung if standing else Rung.NONE
        assert after <= before + 1
        if after > before:
            assert holds > LIMITS.ceiling(lease)
