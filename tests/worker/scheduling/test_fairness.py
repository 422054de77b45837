"""The waiting queue: whose turn it is, as tables and as properties."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows import row

from mlxhost.worker.fairness import AGING_S, QUANTUM_TOKENS, FairQueue
from mlxhost.worker.row import Row


def drained(queue: FairQueue, now: float = 0.0) -> list[Row]:
    """Every row in the order of its turn, each charged its prompt and max_tokens as it runs."""
    order = []
    while (first := queue.peek(now)) is not None:
        queue.pop(first)
        queue.charge(first, first.context + first.max_tokens)
        order.append(first)
    return order


def filled(*rows: Row) -> FairQueue:
    queue = FairQueue()
    for each in rows:
        queue.push(each)
    return queue


def test_one_client_is_served_in_order_of_arrival() -> None:
    """Without competitors the queue is a queue."""
    rows = [row(i, 1000, 1000) for i in range(5)]
    assert drained(filled(*rows)) == rows


def test_a_better_priority_goes_first() -> None:
    """Lower numbers run before earlier arrivals."""
    low, high, middle = row(1, priority=5), row(2, priority=-1), row(3, priority=0)
    assert drained(filled(low, high, middle)) == [high, middle, low]


def test_a_row_that_waits_long_enough_counts_as_a_better_priority() -> None:
    """Newcomers of better priority do not keep an old row waiting for ever."""
    old, new = row(1, priority=100, arrived=0.0), row(2, priority=0, arrived=AGING_S)
    assert filled(old, new).peek(AGING_S) is old
    assert filled(old, row(3, priority=0, arrived=1.0)).peek(AGING_S / 2) is not old


def test_a_flood_of_one_client_leaves_another_its_turn() -> None:
    """A request that arrives behind a hundred of another client's is next or next but one."""
    queue = filled(*(row(i, 300, 300, client="flood") for i in range(100)))
    for _ in range(3):
        first = queue.peek(0.0)
        assert first is not None
        queue.pop(first)
        queue.charge(first, 600)
    late = row(999, 300, 300, client="late")
    queue.push(late)
    assert late in drained(queue)[:2]


def test_what_was_computed_while_nobody_waited_is_not_held_against_a_client() -> None:
    """A client that had the worker for itself competes as an equal from then on."""
    alone = [row(i, 10, 10, client="a") for i in range(4)]
    queue = filled(*alone)
    for each in alone[:2]:
        queue.pop(each)
        queue.charge(each, 1_000_000)
    queue.push(row(9, 10, 10, client="b"))
    assert [each.client for each in drained(queue)].index("a") <= 1


def test_a_row_that_comes_back_has_its_old_place() -> None:
    """One that had to leave is before those of its client that came later."""
    first, second = row(1), row(2)
    queue = filled(first, second)
    queue.pop(first)
    queue.push(first)
    assert drained(queue) == [first, second]


def test_forgotten_rows_leave_nothing_behind() -> None:
    """Clients that come and go cost no memory."""
    queue = FairQueue()
    for i in range(1000):
        each = row(i, client=f"client {i}")
        queue.push(each)
        if i % 2:
            queue.pop(each)
        queue.forget(each)
        queue.forget(each)
    assert not vars(queue)["_balance"]
    assert not vars(queue)["_numbers"]
    assert len(queue) == 0


costs = st.integers(min_value=1, max_value=3000)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(costs, min_size=1, max_size=15), min_size=2, max_size=5))
def test_backlogged_clients_get_equal_shares(work: list[list[int]]) -> None:
    """While two clients both wait, what they were given differs by no more than a quantum and a request of
    each."""
    rows = [
        row(100 * c + i, cost, 0, client=str(c)) for c, each in enumerate(work) for i, cost in enumerate(each)
    ]
    order = drained(filled(*rows))
    assert Counter(map(id, order)) == Counter(map(id, rows))
    left = Counter(each.client for each in rows)
    given_to: Counter[str] = Counter()
    largest = max(cost for each in work for cost in each)
    for each in order:
        waiting = [given_to[c] for c in left if left[c]]
        assert max(waiting) - min(waiting) <= 2 * (QUANTUM_TOKENS + largest)
        given_to[each.client] += each.context
        left[each.client] -= 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 5), costs), min_size=1, max_size=30))
def test_nothing_starves(arrivals: list[tuple[int, int, int]]) -> None:
    """However clients and priorities mix with an endless stream of better requests, every row runs."""
    rows = [row(i, cost, 0, priority=p, client=str(c)) for i, (c, p, cost) in enumerate(arrivals)]
    queue, waiting, now = filled(*rows), set(map(id, rows)), 0.0
    for turn in range(40 * len(rows)):
        now += 1.0
        queue.push(row(1000 + turn, 100, 0, priority=-3, arrived=now, client="stream"))
        first = queue.peek(now)
        assert first is not None
        queue.pop(first)
        queue.charge(first, first.context)
        waiting.discard(id(first))
    assert not waiting
