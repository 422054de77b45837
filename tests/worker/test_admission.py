"""Admission, chunk sizes, the ledger and merged OUTs: pure decisions as tables."""

import pytest

from mlxhost.wire import data
from mlxhost.wire.data import Finish, Load, Out
from mlxhost.worker.admission import Admission, Capacity, clamp_max_tokens
from mlxhost.worker.chunks import MAX_CHUNK, MIN_CHUNK, ChunkSize, choose
from mlxhost.worker.errors import RowError
from mlxhost.worker.ledger import Ledger
from mlxhost.worker.merge import merge
from mlxhost.worker.row import Row


def row(handle: int, prompt: int = 10, max_tokens: int = 10, priority: int = 0, arrived: float = 0.0) -> Row:
    add = data.Add(handle, handle, f"r{handle}", priority=priority)
    return Row.of("f", add, [3] * prompt, [], max_tokens, arrived)


@pytest.mark.parametrize(
    ("prompt", "wanted", "expected"),
    [(10, 5, 5), (10, None, 90), (10, 500, 90), (99, None, 1), (99, 7, 1)],
)
def test_max_tokens_is_cut_to_the_room(prompt: int, wanted: int | None, expected: int) -> None:
    """What is asked for, or all there is, but never more than fits."""
    assert clamp_max_tokens(prompt, wanted, Capacity(1000, 100, 4)) == expected


@pytest.mark.parametrize("prompt", [100, 101, 10_000])
def test_a_prompt_without_room_is_refused_with_the_numbers(prompt: int) -> None:
    """The error names the prompt's length and the context's."""
    with pytest.raises(RowError, match=rf"{prompt} tokens .* 100") as caught:
        clamp_max_tokens(prompt, None, Capacity(1000, 100, 4))
    assert caught.value.code == data.REJECT_CONTEXT


def test_kv_capacity_bounds_a_row_like_the_context_does() -> None:
    """A worker with less KV than the model's context offers that much."""
    assert clamp_max_tokens(10, None, Capacity(50, 100, 4)) == 40


def test_reservations_stay_within_capacity_and_in_order() -> None:
    """The first in line is not passed over by a smaller one behind it."""
    admission = Admission(Capacity(50, 100, 10))
    rows = [row(1, 10, 20), row(2, 10, 20), row(3, 1, 1)]
    for r in rows:
        admission.enqueue(r)
    assert admission.admit() is rows[0]
    assert admission.admit() is None
    admission.release(rows[0])
    assert admission.admit() is rows[1]
    assert admission.admit() is rows[2]
    assert (admission.reserved, admission.running) == (32, 2)


def test_chunks_approach_the_gap() -> None:
    """On a machine of 400 tokens a second, chunks settle at what fits 250 ms."""
    size = ChunkSize(0.25)
    for _ in range(30):
        tokens = size.next(0.0)
        size.learn(tokens, tokens / 400)
    assert 90 <= size.next(0.0) <= 110


def test_chunks_shrink_beside_decode_steps_and_stay_in_bounds() -> None:
    """A decode step takes its part of the gap; extremes end at the bounds."""
    size = ChunkSize(0.25, first=1000)
    assert size.next(0.1) < size.next(0.0)
    fast, slow = ChunkSize(0.25), ChunkSize(0.25)
    for _ in range(30):
        fast.learn(fast.next(0.0), 1e-4)
        slow.learn(slow.next(0.0), 60.0)
    assert fast.next(0.0) == MAX_CHUNK
    assert slow.next(0.0) == MIN_CHUNK


def test_shortest_prefill_first_but_nobody_waits_for_ever() -> None:
    """A short prompt overtakes a long one, until the long one has waited long enough."""
    long, short = row(1, prompt=4000, arrived=0.0), row(2, prompt=100, arrived=10.0)
    assert choose([long, short], now=10.0) is short
    late = row(3, prompt=100, arrived=100.0)
    assert choose([long, late], now=100.0) is long


def test_ledger_lets_one_terminal_through() -> None:
    """The second terminal of a row, and one of an unknown row, are told apart."""
    ledger = Ledger()
    ledger.open("f", data.Add(1, 1, "a"), limit=8)
    assert ledger.close("f", 1)
    assert not ledger.close("f", 1)
    assert not ledger.close("g", 1)


@pytest.mark.parametrize(
    ("add", "code"),
    [
        (data.Add(1, 2, "b"), data.REJECT_DUPLICATE),
        (data.Add(2, 2, "a"), data.REJECT_DUPLICATE),
        (data.Add(3, 2, "c"), data.REJECT_QUEUE_FULL),
    ],
)
def test_ledger_refuses_duplicates_and_overflow(add: data.Add, code: str) -> None:
    """The same handle, the same request id, and one row too many."""
    ledger = Ledger()
    ledger.open("f", data.Add(1, 1, "a"), limit=8)
    with pytest.raises(RowError) as caught:
        ledger.open("f", add, limit=1 if code == data.REJECT_QUEUE_FULL else 8)
    assert caught.value.code == code


def test_merged_outs_say_the_same_as_the_two() -> None:
    """Tokens in order for each row, endings and usage kept, the newer load."""
    older = Out(
        1, 5, Load(tick=5), [7, 8], [1, 1], [70, 80], [0, int(Finish.STOP)], ["", "eos"], [3, 4], [9, 2]
    )
    newer = Out(1, 6, Load(tick=6), [9, 7], [2, 1], [90, 91, 71], [0, 0])
    both = merge(older, newer)
    assert both.handles == [7, 8, 9]
    assert both.counts == [2, 1, 2]
    assert both.tokens == [70, 71, 80, 90, 91]
    assert both.finish == [0, int(Finish.STOP), 0]
    assert both.detail == ["", "eos", ""]
    assert both.completion_tokens == [9, 2, 0]
    assert (both.step, both.load.tick) == (6, 6)
