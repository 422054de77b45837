"""The budget shared among workers: a table of cases, and what holds whatever is asked."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxhost.supervisor.leases.grant import Grant, Tenant, grant

MIB = 1 << 20


def worker(slot: str, **needs: int) -> Tenant:
    """A worker of 100 MiB before its cache, which wants 50 and can use 400."""
    known = {"process": 40, "weights": 50, "transient": 10, "kv_wanted": 50, "kv_useful": 400} | needs
    importance = known.pop("importance", 0)
    return Tenant(slot, **{name: value * MIB for name, value in known.items()}, importance=importance)


def caches(grants: dict[str, Grant]) -> dict[str, int]:
    return {slot: granted.kv // MIB for slot, granted in grants.items()}


@pytest.mark.parametrize(
    ("budget", "tenants", "expected"),
    [
        (1000, [worker("a")], {"a": 400}),  # no more than it can fill
        (300, [worker("a")], {"a": 200}),
        (400, [worker("a"), worker("b")], {"a": 100, "b": 100}),
        (400, [worker("a", kv_useful=60), worker("b")], {"a": 60, "b": 140}),  # what one leaves, others get
        (240, [worker("a"), worker("b")], {"a": 20, "b": 20}),  # less than a serving context, shared
        (240, [worker("a", kv_wanted=10), worker("b")], {"a": 10, "b": 30}),
    ],
)
def test_caches_share_what_the_bases_leave(
    budget: int, tenants: list[Tenant], expected: dict[str, int]
) -> None:
    """Every worker gets its base; the rest is shared evenly, none getting more than it can use."""
    assert caches(grant(budget * MIB, tenants)) == expected


def test_the_less_important_goes_short_when_bases_do_not_fit() -> None:
    """With room for one base and a half, the more important worker has all of its own."""
    grants = grant(150 * MIB, [worker("a", importance=1), worker("b", importance=0)])
    assert grants["b"].total == 100 * MIB
    assert grants["a"].total == 50 * MIB


def test_a_model_that_plans_its_own_memory_gets_what_is_left() -> None:
    """It has no use that could be told beforehand, so the rest of the budget is its."""
    own = Tenant("a", MIB, 10 * MIB, 0, 0, 0, plans_own_memory=True)
    assert grant(1000 * MIB, [own])["a"].total == 1000 * MIB


# A loaded machine is no failure.
ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

sizes = st.integers(0, 1 << 40)
tenants = st.lists(
    st.builds(
        Tenant,
        slot=st.text("abcdefgh", min_size=1, max_size=3),
        process=sizes,
        weights=sizes,
        transient=sizes,
        kv_wanted=sizes,
        kv_useful=sizes,
        plans_own_memory=st.booleans(),
        importance=st.integers(-2, 2),
    ),
    max_size=8,
    unique_by=lambda t: t.slot,
)


@ANY
@given(st.integers(-5, 1 << 42), tenants)
def test_leases_stay_within_the_budget(budget: int, asked: list[Tenant]) -> None:
    """Whatever is asked, all leases together are at most the budget, and none is negative."""
    grants = grant(budget, asked)
    assert grants.keys() == {t.slot for t in asked}
    assert sum(g.total for g in grants.values()) <= max(0, budget)
    assert all(g.total >= 0 and g.kv >= 0 and g.memory >= 1 for g in grants.values())


@ANY
@given(st.integers(0, 1 << 42), tenants)
def test_bases_come_before_caches(budget: int, asked: list[Tenant]) -> None:
    """Nobody has a cache while somebody of the same or higher importance lacks part of its base."""
    grants = grant(budget, asked)
    short = [t for t in asked if grants[t.slot].total - grants[t.slot].kv < t.base]
    assert not short or all(g.kv == 0 for g in grants.values())


@ANY
@given(st.integers(0, 1 << 42), tenants, st.integers(0, 1 << 30))
def test_more_budget_takes_from_nobody(budget: int, asked: list[Tenant], more: int) -> None:
    """A larger budget leaves every worker's lease at least as large."""
    before, after = grant(budget, asked), grant(budget + more, asked)
    assert all(after[slot].total >= before[slot].total for slot in before)
