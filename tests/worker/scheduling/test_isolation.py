"""What a model raises costs the rows that it concerns, and no other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import solo
from support.engine_driver import Driver
from support.loading import load

from mlxhost.wire import data
from mlxhost.wire.data import Finish
from mlxhost.worker.cache.prefix import PrefixCache
from mlxhost.worker.errors import EngineFailure
from mlxhost.worker.models.load import LoadedModel
from mlxhost.worker.row import Row

POISON = 401
MARGIN = 1e-4


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> LoadedModel:
    return load(tiny_models["llama"])


class Fragile:
    """A model that raises where `fails` says so of the ids (rows, tokens) it is given."""

    def __init__(self, model: Any, fails: Callable[[mx.array], bool]) -> None:
        self.model, self.fails = model, fails
        self.layers = model.layers
        self.calls = 0

    def make_cache(self) -> list[Any]:
        return self.model.make_cache()

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        self.calls += 1
        logits = self.model(ids, cache=cache)  # the caches have moved on when it fails
        if self.fails(ids):
            raise RuntimeError("poisoned")
        return logits


def has_poison(ids: mx.array) -> bool:
    return bool(mx.any(ids == POISON).item())


def prompt(handle: int, tokens: int = 30) -> list[int]:
    return [(7 * i + 13 * handle) % 400 + 3 for i in range(tokens)]


def assert_undisturbed(engine: Driver, llama: LoadedModel, handles: range, tokens: int) -> None:
    for handle in handles:
        result = engine.results[handle]
        assert (result.finish, result.terminals) == (Finish.LENGTH, 1), result.detail
        expected, margin = solo.greedy(llama.model, prompt(handle), tokens, frozenset())
        if margin > MARGIN:
            assert result.tokens == expected


def test_only_the_poison_row_fails_in_a_step(llama: LoadedModel) -> None:
    """A row whose token makes the whole step raise ends with the error; the others go on exactly."""
    engine = Driver(Fragile(llama.model, has_poison), llama.vocab_size)
    for handle in range(4):
        engine.add(handle, prompt(handle), 60)
    engine.tick(20)
    engine.add(9, [*prompt(9), POISON], 60)  # its last token is its first input in the batch
    engine.run()
    assert engine.results[9].finish == Finish.ERROR
    assert "poisoned" in engine.results[9].detail
    assert engine.results[9].terminals == 1
    assert_undisturbed(engine, llama, range(4), 60)
    assert engine.engine.stepper.failed_steps == 1


def test_only_the_poison_row_fails_in_a_prefill(llama: LoadedModel) -> None:
    """A chunk that raises ends its row and disturbs nobody's step."""
    engine = Driver(Fragile(llama.model, has_poison), llama.vocab_size)
    engine.add(0, prompt(0), 60)
    engine.tick(10)
    engine.add(9, [3, POISON, *prompt(9)], 60)
    engine.run()
    assert engine.results[9].finish == Finish.ERROR
    assert_undisturbed(engine, llama, range(1), 60)
    assert engine.engine.stepper.failed_steps == 0


def test_several_poison_rows_fail_alone(llama: LoadedModel) -> None:
    """However many there are in one step."""
    engine = Driver(Fragile(llama.model, has_poison), llama.vocab_size)
    for handle in range(3):
        engine.add(handle, prompt(handle), 40)
    for handle in range(10, 15):
        engine.add(handle, [POISON], 40)
    engine.run()
    assert all(engine.results[handle].finish == Finish.ERROR for handle in range(10, 15))
    assert_undisturbed(engine, llama, range(3), 40)


def test_a_step_that_failed_by_chance_costs_nobody_anything(llama: LoadedModel) -> None:
    """Seeded and greedy rows begin again where they were and draw what they would have drawn."""
    settings = [data.Sampling(temperature=0.0), data.Sampling(temperature=1.1, seed=5, frequency_penalty=0.2)]

    def run(fail_at: int) -> Driver:
        model = Fragile(llama.model, lambda ids: ids.shape[1] == 1 and model.calls == fail_at)
        engine = Driver(model, llama.vocab_size)
        for handle, sampling in enumerate(settings):
            engine.add(handle, prompt(handle), 50, sampling=sampling)
        engine.run()
        return engine

    undisturbed = run(-1)
    for fail_at in (4, 20, 37):
        disturbed = run(fail_at)
        assert disturbed.engine.stepper.failed_steps == 1
        for handle in range(len(settings)):
            assert disturbed.results[handle].tokens == undisturbed.results[handle].tokens
            assert disturbed.results[handle].finish == Finish.LENGTH


def test_a_row_that_only_fails_to_be_sampled_fails_alone(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for what is raised after the forward."""
    from mlxhost.worker.batch import Sampler

    real = Sampler.draw

    def draw(self: Any, raw: mx.array, *args: Any, **options: Any) -> Any:
        if any(row.top_k == 77 for row in self._rows):
            raise ValueError("cannot draw")
        return real(self, raw, *args, **options)

    monkeypatch.setattr(Sampler, "draw", draw)
    engine = Driver(llama.model, llama.vocab_size)
    for handle in range(3):
        engine.add(handle, prompt(handle), 40)
    engine.tick(10)
    engine.add(9, prompt(9), 40, sampling=data.Sampling(temperature=1.0, top_k=77))
    engine.run()
    assert engine.results[9].finish == Finish.ERROR
    assert "cannot draw" in engine.results[9].detail
    assert_undisturbed(engine, llama, range(3), 40)


def test_a_model_that_fails_whenever_rows_run_together_ends_the_worker(llama: LoadedModel) -> None:
    """An engine that gets nowhere says so instead of trying for ever."""
    model = Fragile(llama.model, lambda ids: ids.shape[0] > 1)
    engine = Driver(model, llama.vocab_size)
    for handle in range(3):
        engine.add(handle, prompt(handle), 40)
    with pytest.raises(EngineFailure, match="poisoned"):
        engine.run()


def test_a_prefix_cache_that_fails_costs_only_what_it_would_have_saved(llama: LoadedModel) -> None:
    """Records that cannot be made are none; a restore that raises fails the row that asked for it."""

    class Broken(PrefixCache):
        def passed(self, row: Row) -> None:
            raise OSError("no records")

        def ended(self, row: Row) -> None:
            raise OSError("no records")

        def begin(self, row: Row, model: Any) -> bool:
            if row.prompt[0] == POISON:
                raise OSError("no restore")
            return True

    engine = Driver(llama.model, llama.vocab_size)
    engine.engine.stepper.prefix = Broken()
    for handle in range(2):
        engine.add(handle, prompt(handle), 30)
    engine.add(9, [POISON, *prompt(9)], 30)
    engine.run()
    assert_undisturbed(engine, llama, range(2), 30)
    assert engine.results[9].finish == Finish.ERROR
    assert "no restore" in engine.results[9].detail
