"""The clamp of max_tokens, the ledger and merged OUTs: pure decisions as tables."""

import pytest

from mlxhost.wire import data
from mlxhost.wire.data import Finish, Load, Out
from mlxhost.worker.admission import Capacity, clamp_max_tokens
from mlxhost.worker.errors import RowError
from mlxhost.worker.kvcost import KVCost
from mlxhost.worker.ledger import Ledger
from mlxhost.worker.merge import merge


def capacity(kv_tokens: int, max_model_len: int, max_rows: int) -> Capacity:
    """At one byte a token."""
    return Capacity(kv_tokens, max_model_len, max_rows, KVCost(1, step=1))


@pytest.mark.parametrize(
    ("prompt", "wanted", "expected"),
    [(10, 5, 5), (10, None, 90), (10, 500, 90), (99, None, 1), (99, 7, 1)],
)
def test_max_tokens_is_cut_to_the_room(prompt: int, wanted: int | None, expected: int) -> None:
    """What is asked for, or all there is, but never more than fits."""
    assert clamp_max_tokens(prompt, wanted, capacity(1000, 100, 4)) == expected


@pytest.mark.parametrize("prompt", [100, 101, 10_000])
def test_a_prompt_without_room_is_refused_with_the_numbers(prompt: int) -> None:
    """The error names the prompt's length and the context's."""
    with pytest.raises(RowError, match=rf"{prompt} tokens .* 100") as caught:
        clamp_max_tokens(prompt, None, capacity(1000, 100, 4))
    assert caught.value.code == data.REJECT_CONTEXT


def test_kv_capacity_bounds_a_row_like_the_context_does() -> None:
    """A worker with less KV than the model's context offers that much."""
    assert clamp_max_tokens(10, None, capacity(50, 100, 4)) == 40


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


def test_a_request_of_several_choices_opens_all_of_its_rows() -> None:
    """Each choice has its own terminal; a handle that is taken, or named twice, refuses the request whole."""
    ledger = Ledger()
    ledger.open("f", data.Add(1, 1, "a", n=3, siblings=[2, 3]), limit=3)
    assert len(ledger) == 3
    for add in (data.Add(4, 2, "b", n=2, siblings=[3]), data.Add(5, 2, "c", n=2, siblings=[5])):
        with pytest.raises(RowError):
            ledger.open("f", add, limit=8)
    with pytest.raises(RowError, match="already"):
        ledger.open("f", data.Add(6, 2, "d", n=2, siblings=[7]), limit=4)
    assert len(ledger) == 3
    assert all(ledger.close("f", handle) for handle in (1, 2, 3))


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
