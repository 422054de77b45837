"""Full searches for garbage wait until nobody does."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from mlxhost.frontend import garbage
from mlxhost.frontend.garbage import Garbage


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def searches() -> Iterator[Garbage]:
    before = gc.get_threshold()
    yield Garbage()
    gc.unfreeze()
    gc.set_threshold(*before)


def old_cycle() -> "weakref.ref[Cycle]":
    """Garbage that has outlived the young generations."""
    cycle = Cycle()
    gc.collect()
    return weakref.ref(cycle)


def test_garbage_waits_for_requests(searches: Garbage) -> None:
    """With requests in flight it stays, without it goes, and idle seconds after that search nothing."""
    cycle = old_cycle()
    searches.tick(3)
    kept = [[i] for i in range(50_000)]  # enough for searches of the young
    assert len(kept) == 50_000
    assert cycle() is not None
    searches.tick(0)
    assert cycle() is None
    later = old_cycle()
    searches.tick(0)
    assert later() is not None


def test_garbage_does_not_wait_for_ever(searches: Garbage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend that is never idle searches now and then."""
    cycle = old_cycle()
    monkeypatch.setattr(garbage, "OVERDUE_S", 0.0)
    searches.tick(3)
    assert cycle() is None
