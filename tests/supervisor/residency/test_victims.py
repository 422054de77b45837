"""Which models go: a table, and a search of all sets to compare with."""

from collections import Counter
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxhost.supervisor.residency.facts import Phase, Unit
from mlxhost.supervisor.residency.victims import choose


def unit(name: str, holds: int, used: float, priority: int = 0) -> Unit:
    return Unit(name, Phase.RESIDENT, holds, holds, used=used, priority=priority)


@pytest.mark.parametrize(
    ("candidates", "room", "count", "gone"),
    [
        ([], 0, 0, ""),
        ([], 1, 0, None),
        ([unit("a", 4, 1)], 5, 0, None),
        ([unit("a", 4, 1)], 4, 2, None),
        ([unit("a", 4, 1), unit("b", 4, 2)], 4, 0, "a"),
        ([unit("a", 4, 2), unit("b", 4, 1)], 4, 0, "b"),
        ([unit("a", 2, 1), unit("b", 2, 2), unit("c", 4, 9)], 4, 0, "c"),  # one, though used last
        ([unit("a", 2, 1), unit("b", 2, 2), unit("c", 2, 3)], 3, 0, "ab"),
        ([unit("a", 4, 1, -1), unit("b", 4, 9, 0)], 4, 0, "b"),  # what matters less goes first
        ([unit("a", 4, 1, -1), unit("b", 2, 2), unit("c", 2, 3)], 4, 0, "bc"),  # even two for one
        ([unit("a", 4, 1, -1), unit("b", 2, 2), unit("c", 2, 3)], 5, 0, "ab"),
        ([unit("a", 4, 2), unit("b", 4, 1)], 0, 1, "b"),  # a place, not bytes
        ([unit("a", 4, 2), unit("b", 4, 1), unit("c", 9, 0)], 1, 2, "bc"),
    ],
)
def test_who_goes(candidates: list[Unit], room: int, count: int, gone: str | None) -> None:
    """What matters least, then the fewest, then what was unused for longest."""
    chosen = choose(candidates, room, count)
    assert (chosen if chosen is None else "".join(sorted(u.name for u in chosen))) == gone


UNITS = st.lists(
    st.builds(unit, st.just("x"), st.integers(0, 9), st.integers(0, 5), st.integers(-1, 1)), max_size=6
)


@given(UNITS, st.integers(-2, 30), st.integers(0, 4))
def test_no_other_set_is_better(units: list[Unit], room: int, count: int) -> None:
    """Of all sets that free enough, none takes fewer of the models that matter, or models used less
    recently."""
    units = [unit(f"m{i}", u.holds, u.used, u.priority) for i, u in enumerate(units)]
    sets = chain.from_iterable(combinations(units, k) for k in range(len(units) + 1))
    enough = [s for s in sets if sum(u.holds for u in s) >= room and len(s) >= count]
    chosen = choose(units, room, count)
    if chosen is None:
        assert not enough
        return

    def cost(these: tuple[Unit, ...]) -> tuple[list[int], list[float]]:
        taken = Counter(u.priority for u in these)
        return [taken[p] for p in (-1, 0, 1)], sorted((u.used for u in these), reverse=True)

    assert cost(tuple(chosen)) == min(map(cost, enough))
