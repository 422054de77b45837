"""The planner: a table of situations."""

from collections.abc import Sequence
from typing import Any

import pytest

from mlxhost.supervisor.residency.facts import Budget, Phase, Unit, Wait, Wish
from mlxhost.supervisor.residency.plan import plan

NOW = 1000.0
BUDGET = Budget(10, min_resident_s=10, idle_s=1, patience_s=5)


def absent(name: str, need: int, **more: Any) -> Unit:
    return Unit(name, Phase.ABSENT, need, **more)


def resident(name: str, holds: int, *, age: float = 100, idle: float = 50, **more: Any) -> Unit:
    phase = more.pop("phase", Phase.RESIDENT)
    return Unit(name, phase, holds, holds, since=NOW - age, used=NOW - idle, **more)


def wish(model: str, waited: float = 0, **more: Any) -> Wish:
    return Wish(model, NOW - waited, **more)


def told(fleet: Sequence[Unit], wishes: Sequence[Wish], budget: Budget = BUDGET) -> list[str]:
    """`load a`, `evict b for a`... in alphabetical order."""
    lines = []
    for action in plan(fleet, budget, wishes, NOW):
        verb = type(action).__name__.lower()
        what = getattr(action, "code", "") or getattr(action, "wanted_by", "")
        lines.append(f"{verb} {action.model}" + (f" for {what}" if what else ""))
    return sorted(lines)


A4, B4 = absent("a", 4), absent("b", 4)
TWO = Budget(100, max_resident=2, min_resident_s=10, idle_s=1, patience_s=5)


@pytest.mark.parametrize(
    ("fleet", "wishes", "lines"),
    [
        # nothing to do
        ([], [], []),
        ([absent("a", 4), resident("b", 4)], [], []),
        ([resident("a", 4)], [wish("a")], []),
        ([resident("a", 4, phase=Phase.LOADING)], [wish("a")], []),
        # there is room
        ([A4], [wish("a")], ["load a"]),
        ([A4, B4], [wish("a"), wish("b")], ["load a", "load b"]),
        (
            [A4, B4, absent("c", 4)],
            [wish("a", 3), wish("b", 2), wish("c", 1)],
            ["load a", "load b", "wait c"],
        ),
        # it never fits
        ([absent("a", 11), resident("b", 4)], [wish("a")], ["refuse a for too_large"]),
        ([absent("a", 8), resident("b", 4, pinned=True)], [wish("a")], ["refuse a for pinned"]),
        (
            [absent("a", 8), resident("b", 4, pinned=True), resident("c", 2)],
            [wish("a")],
            ["refuse a for pinned"],
        ),
        ([Unit("a", Phase.OUT, 4)], [wish("a")], ["refuse a for out"]),
        # idle models make room
        ([absent("a", 8), resident("b", 4)], [wish("a")], ["evict b for a", "wait a"]),
        (
            [absent("a", 6), resident("b", 4, idle=9), resident("c", 4, idle=8)],
            [wish("a")],
            ["evict b for a", "wait a"],
        ),
        (
            [absent("a", 9), resident("b", 4), resident("c", 4)],
            [wish("a")],
            ["evict b for a", "evict c for a", "wait a"],
        ),
        (
            [absent("a", 6), resident("b", 4, busy=True), resident("c", 4)],
            [wish("a")],
            ["evict c for a", "wait a"],
        ),
        (
            [absent("a", 6), resident("b", 4, pinned=True), resident("c", 4)],
            [wish("a")],
            ["evict c for a", "wait a"],
        ),
        # just loaded: idle long enough, or not
        ([absent("a", 8), resident("b", 4, age=2, idle=2)], [wish("a")], ["evict b for a", "wait a"]),
        ([absent("a", 8), resident("b", 4, age=2, idle=0.5)], [wish("a")], ["wait a"]),
        ([absent("a", 8), resident("b", 4, age=20, idle=0)], [wish("a")], ["evict b for a", "wait a"]),
        # all of it, or nothing: what does not free enough is not evicted
        ([absent("a", 9), resident("b", 4, busy=True), resident("c", 4)], [wish("a")], ["wait a"]),
        # busy ones are held once there was patience, and they have had their time
        ([absent("a", 8), resident("b", 4, busy=True)], [wish("a", 4)], ["wait a"]),
        ([absent("a", 8), resident("b", 4, busy=True)], [wish("a", 6)], ["hold b for a", "wait a"]),
        ([absent("a", 8), resident("b", 4, busy=True, age=6)], [wish("a", 6)], ["wait a"]),
        ([absent("a", 8), resident("b", 4, busy=True, pinned=True)], [wish("a", 6)], ["refuse a for pinned"]),
        ([absent("a", 8), resident("b", 4, busy=True, phase=Phase.HELD)], [wish("a", 6)], ["wait a"]),
        (
            [absent("a", 8), resident("b", 4, phase=Phase.HELD, idle=0)],
            [wish("a", 6)],
            ["evict b for a", "wait a"],
        ),
        ([absent("a", 4), resident("b", 4, phase=Phase.HELD)], [], ["release b"]),
        ([absent("a", 4), resident("b", 4, phase=Phase.HELD)], [wish("a")], ["load a", "release b"]),
        # memory on its way out is waited for, and not taken twice
        ([absent("a", 8), resident("b", 4, phase=Phase.LEAVING)], [wish("a")], ["wait a"]),
        ([resident("b", 4, phase=Phase.LEAVING)], [wish("b")], ["wait b"]),
        (
            [absent("a", 8), resident("b", 4, phase=Phase.LEAVING), absent("c", 4)],
            [wish("a", 9), wish("c")],
            ["wait a", "wait c"],
        ),
        # a later wish that fits passes one that waits for a busy model
        (
            [absent("a", 8), resident("b", 4, busy=True), absent("c", 2)],
            [wish("a", 4), wish("c")],
            ["load c", "wait a"],
        ),
        # but not once a model is held for it
        (
            [absent("a", 10), resident("b", 4, busy=True), absent("c", 2)],
            [wish("a", 9), wish("c")],
            ["hold b for a", "wait a", "wait c"],
        ),
        # at the start: what fits, nothing is evicted
        (
            [A4, B4, absent("c", 4)],
            [wish(m, preload=True) for m in "abc"],
            ["load a", "load b", "refuse c for no_room"],
        ),
        # idle time to live
        ([resident("a", 4, idle=50, ttl_s=40)], [], ["evict a"]),
        ([resident("a", 4, idle=30, ttl_s=40)], [], []),
        (
            [
                resident("a", 4, idle=50, ttl_s=40, busy=True),
                resident("b", 4, idle=50, ttl_s=40, pinned=True),
            ],
            [],
            [],
        ),
        # what grew beyond the budget
        ([resident("a", 6, idle=9), resident("b", 6, idle=8)], [], ["evict a"]),
        ([resident("a", 6, busy=True), resident("b", 6, busy=True)], [], []),
        ([resident("a", 12)], [], []),
    ],
)
def test_what_is_done(fleet: list[Unit], wishes: list[Wish], lines: list[str]) -> None:
    """Each line: the fleet, the wishes, and exactly what follows."""
    assert told(fleet, wishes) == lines


@pytest.mark.parametrize(
    ("fleet", "wishes", "lines"),
    [
        ([A4, B4, absent("c", 4)], [wish("a", 2), wish("b", 1), wish("c")], ["load a", "load b", "wait c"]),
        ([A4, resident("b", 4), resident("c", 4, idle=60)], [wish("a")], ["evict c for a", "wait a"]),
        (
            [A4, resident("b", 4, pinned=True), resident("c", 4, pinned=True)],
            [wish("a")],
            ["refuse a for pinned"],
        ),
        ([A4, resident("b", 4), resident("c", 4, phase=Phase.LEAVING)], [wish("a")], ["wait a"]),
    ],
)
def test_how_many_may_be_resident(fleet: list[Unit], wishes: list[Wish], lines: list[str]) -> None:
    """With room for all, the number of models is a limit of its own."""
    assert told(fleet, wishes, TWO) == lines


def test_the_important_model_goes_first_and_goes_last() -> None:
    """Of wishes that came together the important model's is granted; of victims it is the last."""
    fleet = [absent("a", 8, priority=1), absent("b", 8, priority=0)]
    assert told(fleet, [wish("a", 1), wish("b", 0.5)]) == ["load b", "wait a"]
    fleet = [A4, resident("b", 5, priority=-1, idle=90), resident("c", 5, idle=2)]
    assert told(fleet, [wish("a")]) == ["evict c for a", "wait a"]


def test_a_wait_tells_when_time_alone_changes_it() -> None:
    """A model just loaded may go once it is idle for long enough; a busy one may be held later."""
    (wait,) = plan([absent("a", 8), resident("b", 4, age=2, idle=0.25)], BUDGET, [wish("a")], NOW)
    assert isinstance(wait, Wait)
    assert wait.until == NOW + 0.75
    (wait,) = plan([absent("a", 8), resident("b", 4, age=2, busy=True)], BUDGET, [wish("a", 1)], NOW)
    assert isinstance(wait, Wait)
    assert wait.until == NOW + 8


def test_a_refusal_tells_the_numbers() -> None:
    """What it needs, what there is, and the way out."""
    (refusal,) = plan([absent("a", 12_000_000_000)], Budget(10_000_000_000), [wish("a")], NOW)
    assert "needs 12 GB, and the whole budget is 10 GB" in refusal.reason
    assert "--budget" in refusal.reason
    pinned = [absent("a", 8), resident("b", 4, pinned=True)]
    (refusal,) = plan(pinned, BUDGET, [wish("a")], NOW)
    assert refusal.reason == (
        "needs 8 B, and b (pinned or drained) keep 4 B of the budget of 10 B; "
        "`mlxhost ctl unpin MODEL` or `ctl unload MODEL` makes room"
    )
