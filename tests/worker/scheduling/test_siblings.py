"""Several choices of one request: one prefill, and each choice a row of its own."""

from pathlib import Path

import pytest
from support.engine_driver import FRONTEND, Driver, Result
from support.loading import load

from mlxhost.wire import data
from mlxhost.wire.data import Finish
from mlxhost.worker.events import Arrived
from mlxhost.worker.models.load import LoadedModel

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "qwen3-next")]
PROMPT = [(7 * i) % 400 + 3 for i in range(300)]


@pytest.fixture(params=["llama", "lfm2", *SLOW])
def loaded(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> LoadedModel:
    return load(tiny_models[request.param])


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> LoadedModel:
    return load(tiny_models["llama"])


def add_choices(engine: Driver, n: int, tokens: int = 30, prompt: list[int] = PROMPT, **fields: int) -> None:
    """Handles 0 to n-1, seed 7."""
    for handle in range(n):
        engine.results[handle] = Result()
    add = data.Add(
        0,
        0,
        "r",
        n=n,
        siblings=list(range(1, n)),
        sampling=data.Sampling(temperature=1.0, seed=7),
        limits=data.Limits(max_tokens=tokens, ignore_eos=True),
        **fields,
    )
    engine.inbox.put(Arrived(FRONTEND, add, prompt))


def test_choices_equal_requests_of_their_own_and_share_the_prefill(loaded: LoadedModel) -> None:
    """Choice i draws what a request with seed + i draws; the prompt is run once."""
    engine = Driver(loaded.model, loaded.vocab_size)
    add_choices(engine, 4)
    engine.run()
    apart = Driver(loaded.model, loaded.vocab_size)
    for handle in range(4):
        apart.add(handle, PROMPT, 30, sampling=data.Sampling(temperature=1.0, seed=7 + handle))
    apart.run()
    for handle in range(4):
        result = engine.results[handle]
        assert (result.finish, result.terminals) == (Finish.LENGTH, 1)
        assert result.accepted is not None
        assert result.tokens == apart.results[handle].tokens
    # One prefill is at most so many ticks beside the decode steps; four would be more.
    assert engine.engine.stepper.ticks < apart.engine.stepper.ticks


def test_choices_beyond_the_slots_are_served_too(llama: LoadedModel) -> None:
    """More choices than rows that run together."""
    engine = Driver(llama.model, llama.vocab_size, max_rows=2)
    add_choices(engine, 5, tokens=10)
    engine.run()
    assert all(len(engine.results[h].tokens) == 10 and engine.results[h].terminals == 1 for h in range(5))


def test_the_others_go_on_when_the_first_is_aborted_in_its_prefill(llama: LoadedModel) -> None:
    """The next choice leads from then on."""
    engine = Driver(llama.model, llama.vocab_size)
    add_choices(engine, 3, prompt=PROMPT * 10)
    engine.tick(2)
    assert engine.engine.prefill.rows
    engine.abort(0)
    engine.run()
    assert engine.results[0].finish == Finish.ABORT
    assert [len(engine.results[h].tokens) for h in (1, 2)] == [30, 30]


@pytest.mark.parametrize(("n", "siblings"), [(2, []), (1, [5]), (3, [1])])
def test_a_wrong_count_is_rejected_for_every_handle(llama: LoadedModel, n: int, siblings: list[int]) -> None:
    """n and the sibling handles have to agree; each handle gets its one terminal."""
    engine = Driver(llama.model, llama.vocab_size)
    for handle in (0, *siblings):
        engine.results[handle] = Result()
    engine.inbox.put(Arrived(FRONTEND, data.Add(0, 0, "r", n=n, siblings=siblings), [3, 4]))
    engine.run()
    for handle in (0, *siblings):
        assert engine.results[handle].terminals == 1
        reject = engine.results[handle].reject
        assert reject is not None
        assert reject.code == data.REJECT_INVALID
