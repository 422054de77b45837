"""The bounded part of the fuzz run; `make fuzz` is the whole one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz.mutations import Fuzzer
from fuzz.run import fuzz_decode
from fuzz.targets import FrontendTarget, SupervisorTarget, Target, WorkerTarget

FRAMES = 4_000
GROWTH_BYTES = 80_000_000  # of a process that has just started; mostly what its first requests load


@pytest.mark.parametrize("name", ["worker", "frontend", "supervisor"])
def test_live_process_survives(
    name: str, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Thousands of broken, hostile and oversize messages: no crash, each dropped one counted, no traceback,
    bounded memory, and the same service afterwards."""
    base = tmp_path_factory.mktemp("f")
    makers: dict[str, Callable[[], Target]] = {
        "worker": lambda: WorkerTarget(tiny_models["llama"], base),
        "frontend": FrontendTarget,
        "supervisor": lambda: SupervisorTarget(tiny_models["llama"], base),
    }
    with makers[name]() as target:
        target.serves()
        before = target.memory()
        target.attack(Fuzzer(2), FRAMES)
        target.settle()
        target.serves()
        assert target.counted()
        assert target.memory() - before < GROWTH_BYTES


def test_decoder_raises_nothing_but_decode_error() -> None:
    """Every mutation ends in a message or a DecodeError; most are refused, some still mean something."""
    outcomes = fuzz_decode(30_000, seed=3)
    assert outcomes["refused"] > outcomes["decoded"] > 1_000


def test_every_kind_of_mutation_is_made() -> None:
    """The fuzzer repeats itself for a seed and leaves no kind out."""
    one, two = Fuzzer(5), Fuzzer(5)
    assert [one.next() for _ in range(500)] == [two.next() for _ in range(500)]
    assert len(one.made) == 13
