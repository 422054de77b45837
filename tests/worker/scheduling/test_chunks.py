"""Sizes and turns of prefill chunks, on machines that are a formula."""

import random

import pytest
from support.rows import row

from mlxhost.worker.chunks import MAX_CHUNK, MIN_CHUNK, ChunkSize, Timing, Turns, choose

GAP_S = 0.25


def prefill(size: ChunkSize, tokens: int, machine: tuple[float, float, float], step_s: float) -> list[float]:
    """Seconds of each chunk of one long row, step included, on a machine of (start, token, pair) costs."""
    rng, done, took = random.Random(1), 0, []
    start, token, pair = machine
    while done < tokens:
        n = size.next(step_s, done)
        seconds = (start + token * n + pair * n * (done + n / 2)) * rng.uniform(0.95, 1.05)
        size.learn(n, seconds, done)
        took.append(seconds + step_s)
        done += n
    return took


@pytest.mark.parametrize("machine", [(0.01, 1 / 600, 3e-7), (0.02, 1 / 900, 1e-7), (0.03, 1 / 2000, 5e-8)])
def test_no_chunk_is_longer_than_the_gap_from_the_first_on(machine: tuple[float, float, float]) -> None:
    """With what the warm-up measured, also where attention to a long row costs as much as the rest."""
    size = ChunkSize(GAP_S, Timing(machine[0], machine[1]))
    assert max(prefill(size, 8000, machine, 0.04)) <= GAP_S * 1.1


@pytest.mark.parametrize("off", [0.25, 4.0])
def test_a_wrong_guess_is_corrected_within_a_few_chunks(off: float) -> None:
    """A warm-up that was disturbed costs a handful of chunks."""
    machine = (0.02, 1 / 600, 3e-7)
    size = ChunkSize(GAP_S, Timing(machine[0] * off, machine[1] * off))
    took = prefill(size, 6000, machine, 0.04)
    assert max(took[6:]) <= GAP_S * 1.15


def test_what_was_never_measured_is_approached_in_steps() -> None:
    """A tiny model whose attention costs far more than guessed: chunks grow by doubling, not at a leap."""
    machine = (0.005, 2e-5, 6e-7)
    size = ChunkSize(GAP_S, Timing(machine[0], machine[1]))
    took = prefill(size, 6000, machine, 0.002)
    assert max(took) <= 2 * GAP_S
    assert max(took[5:]) <= 1.15 * GAP_S


def test_chunks_are_no_longer_than_pays() -> None:
    """Where starting a chunk costs little, a chunk is short, and those who wait wait less."""
    cheap = ChunkSize(GAP_S, Timing(0.001, 1e-4, longest=2048))
    dear = ChunkSize(GAP_S, Timing(0.02, 1e-4, longest=2048))
    assert cheap.next(0.0) < dear.next(0.0)
    assert cheap.seconds(cheap.next(0.0)) == pytest.approx(0.05, rel=0.1)


def test_sizes_stay_in_bounds_and_shrink_beside_slow_steps_and_long_rows() -> None:
    """Extremes end at the bounds."""
    size = ChunkSize(GAP_S, Timing(0.05, 1 / 1000))
    assert size.next(0.1) < size.next(0.0)
    assert size.next(0.0, 20_000) < size.next(0.0)
    fast, slow = ChunkSize(GAP_S, Timing(0.01, 1e-6)), ChunkSize(GAP_S, Timing(0.1, 0.5))
    for _ in range(10):
        fast.learn(fast.next(0.0), 0.01)
        slow.learn(slow.next(0.0), 30.0)
    assert fast.next(0.0) == MAX_CHUNK
    assert slow.next(0.0) == MIN_CHUNK


def test_shortest_prefill_first_but_nobody_waits_for_ever() -> None:
    """A short prompt overtakes a long one, until the long one has waited long enough."""
    long, short = row(1, prompt=4000, arrived=0.0), row(2, prompt=100, arrived=10.0)
    assert choose([long, short], now=10.0) is short
    late = row(3, prompt=100, arrived=100.0)
    assert choose([long, late], now=100.0) is long


def test_clients_take_turns() -> None:
    """One client's rows, however many and however old, hold up another's by one chunk at a time."""
    turns = Turns()
    flood = [row(i, prompt=1000, arrived=0.0, client="flood") for i in range(10)]
    for _ in range(5):
        turns.charge(turns.choose(flood, 1.0), 100)
    late = row(99, prompt=1000, arrived=50.0, client="late")
    order = []
    for _ in range(6):
        chosen = turns.choose([*flood, late], 50.0)
        turns.charge(chosen, 100)
        order.append(chosen.client)
    assert order.count("late") == 3
    assert order[0] == "late"
