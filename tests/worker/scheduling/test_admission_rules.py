"""Who is admitted, who leaves, who makes way: the pure scheduler, as tables and played to the end."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows import row

from mlxhost.worker.admission import GROWTH_TOKENS, Admission, Capacity
from mlxhost.worker.kvcost import KVCost
from mlxhost.worker.row import Row

TOKENS = KVCost(1, step=1)  # a byte is a token


def admission(kv_tokens: int, max_rows: int = 16) -> Admission:
    return Admission(Capacity(kv_tokens, 1 << 20, max_rows, TOKENS))


def admit_all(scheduler: Admission, now: float = 0.0) -> list[Row]:
    """What is admitted without anyone having to make way."""
    admitted = []
    while (choice := scheduler.choose(now)) is not None and not choice.making_way:
        scheduler.admit(choice.row)
        admitted.append(choice.row)
    return admitted


def test_a_row_without_max_tokens_does_not_keep_others_out() -> None:
    """Rows that might fill the whole memory run side by side as long as there is room to grow."""
    scheduler = admission(2000)
    rows = [row(i, 100, 1900) for i in range(8)]
    for each in rows:
        scheduler.enqueue(each)
    assert admit_all(scheduler) == rows[: 2000 // (100 + GROWTH_TOKENS)]


def test_nobody_slips_past_the_first_in_line() -> None:
    """A small row behind one that does not fit waits, too."""
    scheduler = admission(1000)
    for each in (row(1, 500, 100), row(2, 500, 100), row(3, 1, 1)):
        scheduler.enqueue(each)
    assert [each.key[1] for each in admit_all(scheduler)] == [1]


def test_the_youngest_of_the_lowest_priority_leaves() -> None:
    """When rows have grown into all there is."""
    scheduler = admission(1200)
    rows = [row(1, 100, 900, arrived=1), row(2, 100, 900, arrived=2, priority=1), row(3, 100, 900, arrived=3)]
    for each in rows:
        scheduler.enqueue(each)
    admit_all(scheduler)
    assert scheduler.overflowing() is None
    for each in rows:
        each.launched = 310
    assert scheduler.overflowing() is rows[1]


def test_a_row_that_left_needs_twice_the_growth() -> None:
    """It comes back when it can stay longer than before."""
    scheduler = admission(100 + GROWTH_TOKENS + 100 + 2 * GROWTH_TOKENS - 1)
    first, second = row(1, 100, 5000), row(2, 100, 5000)
    for each in (first, second):
        scheduler.enqueue(each)
    assert admit_all(scheduler) == [first, second]
    scheduler.set_aside(second)
    second.preemptions += 1
    assert admit_all(scheduler, 1.0) == []
    assert scheduler.running == 2
    assert scheduler.queued == 0
    scheduler.release(first)
    assert admit_all(scheduler, 1.0) == [second]


def test_a_client_that_holds_every_slot_makes_way_for_another() -> None:
    """Its youngest row leaves for a client that has two rows fewer, and no row leaves for its own client."""
    scheduler = admission(1 << 20, max_rows=3)
    rows = [row(i, client="a", arrived=i) for i in range(3)]
    for each in (*rows, row(3, client="a", arrived=3)):
        scheduler.enqueue(each)
    admit_all(scheduler)
    assert scheduler.choose(1.0) is None
    other = row(4, client="b", arrived=4)
    scheduler.enqueue(other)
    choice = scheduler.choose(1.0)
    assert choice is not None
    assert (choice.row, choice.making_way) == (other, (rows[2],))


def test_a_better_priority_drives_out_a_worse_one() -> None:
    """But only so often the same row."""
    scheduler = admission(1 << 20, max_rows=1)
    low, high = row(1, priority=5), row(2, priority=0)
    scheduler.enqueue(low)
    admit_all(scheduler)
    scheduler.enqueue(high)
    choice = scheduler.choose(1.0)
    assert choice is not None
    assert choice.making_way == (low,)
    low.yields = 100
    assert scheduler.choose(2.0) is None


def test_a_lone_row_runs_on_after_the_memory_has_shrunk() -> None:
    """It was promised its tokens, and nobody else can use what it lacks."""
    scheduler = admission(1000)
    each = row(1, 500, 400)
    scheduler.enqueue(each)
    admit_all(scheduler)
    each.launched = 300
    scheduler.capacity = Capacity(100, 1 << 20, 16, TOKENS)
    assert scheduler.overflowing() is None
    scheduler.set_aside(each)
    assert admit_all(scheduler, 1.0) == [each]


sizes = st.tuples(st.integers(1, 200), st.integers(1, 700), st.integers(0, 2), st.sampled_from("abc"))


@settings(max_examples=50, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=14), st.integers(1000, 2500), st.integers(1, 6))
def test_every_row_ends_and_memory_is_never_exceeded(
    requests: list[tuple[int, int, int, str]], kv_tokens: int, max_rows: int
) -> None:
    """Played to the end, whatever leaves and comes back: no livelock, no overrun, a bounded number of
    departures, nothing left behind."""
    scheduler = admission(kv_tokens, max_rows)
    waiting = [
        row(i, p, m, priority=q, client=c, arrived=i * 0.01) for i, (p, m, q, c) in enumerate(requests)
    ]
    running: list[Row] = []
    ended, now = 0, 0.0
    steps = sum(m for _, m, _, _ in requests) * 8 + 1000
    for step in range(steps):
        if waiting and step % 7 == 0:
            scheduler.enqueue(waiting.pop(0))
        now += 0.05
        while (choice := scheduler.choose(now)) is not None:
            for victim in choice.making_way:
                running.remove(victim)
                victim.yields += 1
                scheduler.set_aside(victim)
            scheduler.admit(choice.row)
            running.append(choice.row)
        while (victim := scheduler.overflowing()) is not None:
            running.remove(victim)
            victim.preemptions += 1
            scheduler.set_aside(victim)
        assert len(running) <= max_rows
        assert sum(each.held(1) for each in running) <= kv_tokens
        for each in list(running):
            each.launched += 1
            scheduler.waiting.charge(each, 1)
            if each.launched >= each.max_tokens:
                running.remove(each)
                scheduler.release(each)
                ended += 1
        if ended == len(requests):
            break
    assert ended == len(requests)
    assert (scheduler.running, scheduler.queued, scheduler.reserved) == (0, 0, 0)
