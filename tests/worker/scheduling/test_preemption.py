"""Rows that leave for want of memory, or for another, and come back: as if nothing had happened."""

from pathlib import Path

import mlx.core as mx
import pytest
from support import solo
from support.engine_driver import Driver
from support.loading import load

from mlxhost.wire import data
from mlxhost.wire.data import Finish
from mlxhost.worker import admission
from mlxhost.worker.kvcost import KVCost
from mlxhost.worker.models.load import LoadedModel

MARGIN = 1e-4
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "qwen3-next")]
FAMILIES = ["llama", "lfm2", *SLOW]


@pytest.fixture(params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> LoadedModel:
    return load(tiny_models[request.param])


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> LoadedModel:
    return load(tiny_models["llama"])


@pytest.fixture(autouse=True)
def _small_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows outgrow what they were admitted with after few tokens."""
    monkeypatch.setattr(admission, "GROWTH_TOKENS", 16)


def driver(loaded: LoadedModel, **options: int) -> Driver:
    return Driver(loaded.model, loaded.vocab_size, **options)


def prompt(handle: int, tokens: int = 40) -> list[int]:
    return [(7 * i + 13 * handle) % 400 + 3 for i in range(tokens)]


def test_preempted_greedy_rows_equal_solo_rows(loaded: LoadedModel) -> None:
    """Three rows outgrow the memory; each gives what it gives alone, with one pause and one terminal."""
    engine = driver(loaded, kv_tokens=200)
    for handle in range(3):
        engine.add(handle, prompt(handle), 80)
    engine.run()
    assert engine.engine.stepper.preemptions >= 1
    for handle in range(3):
        result = engine.results[handle]
        assert (len(result.tokens), result.finish, result.terminals) == (80, Finish.LENGTH, 1)
        assert sum(isinstance(m, data.Accepted) and m.handle == handle for m in engine.messages) == 1
        expected, margin = solo.greedy(loaded.model, prompt(handle), 80, frozenset())
        if margin > MARGIN:
            assert result.tokens == expected


def test_preempted_seeded_rows_draw_the_same(llama: LoadedModel) -> None:
    """Seeds, penalties and min_tokens included: the draws are those of rows that nothing disturbed."""
    settings = [
        data.Sampling(temperature=0.9, seed=1),
        data.Sampling(temperature=1.2, top_p=0.9, seed=2, frequency_penalty=0.3, repetition_penalty=1.1),
        data.Sampling(temperature=0.8, top_k=30, seed=3, presence_penalty=0.5),
    ]

    def run(kv_tokens: int) -> Driver:
        engine = driver(llama, kv_tokens=kv_tokens)
        for handle, sampling in enumerate(settings):
            engine.add(handle, prompt(handle), 90, sampling=sampling, limits={"min_tokens": 70})
        engine.run()
        return engine

    undisturbed, tight = run(100_000), run(200)
    assert undisturbed.engine.stepper.preemptions == 0
    assert tight.engine.stepper.preemptions >= 1
    for handle in range(len(settings)):
        assert tight.results[handle].tokens == undisturbed.results[handle].tokens


def test_prompt_logprobs_of_a_preempted_row_come_once(llama: LoadedModel) -> None:
    """Also when it leaves in the middle of its prompt."""
    engine = driver(llama, max_rows=1)
    asked = data.Sampling(temperature=0.0, prompt_logprobs=1, logprobs=True)
    engine.add(0, prompt(0, 700), 30, sampling=asked, priority=1)
    engine.tick(2)
    assert engine.engine.prefill.rows
    engine.add(1, prompt(1), 5)
    engine.run()
    assert engine.engine.stepper.yields == 1
    assert len(engine.results[0].prompt_logprobs) == 699
    assert len(engine.results[0].logprobs) == len(engine.results[0].tokens) == 30


def test_the_oldest_row_of_the_best_priority_is_never_disturbed(llama: LoadedModel) -> None:
    """It gets a token at every step (a step is read in the tick after it, or in its own), whatever leaves
    around it."""
    engine = driver(llama, kv_tokens=260)
    for handle in range(5):
        engine.add(handle, prompt(handle), 100)
    seen = 0
    for _ in range(2000):
        engine.tick(2)
        first = engine.results[0]
        if first.terminals:
            break
        if seen:
            assert len(first.tokens) > seen
        seen = len(first.tokens)
    assert engine.results[0].terminals == 1
    assert engine.engine.stepper.preemptions >= 1
    engine.run()


def test_after_exhaustion_the_worker_is_at_its_baseline(llama: LoadedModel) -> None:
    """Nothing is held back and nothing stays refused: memory, reservations and service are as before."""
    mx.clear_cache()
    before = mx.get_active_memory()
    engine = driver(llama, kv_tokens=200)
    for handle in range(8):
        engine.add(handle, prompt(handle), 60)
    engine.tick(50)
    engine.abort(*range(0, 8, 3))
    while any(not r.terminals for r in engine.results.values()):
        engine.tick()
    status = engine.status
    assert (status.running, status.waiting, status.kv_tokens) == (0, 0, 0)
    mx.clear_cache()
    assert mx.get_active_memory() - before < 64 * 1024
    engine.add(99, prompt(99), 20)
    engine.run()
    assert len(engine.results[99].tokens) == 20


def test_rows_that_had_to_leave_end_like_others(llama: LoadedModel) -> None:
    """Abort and deadline reach a row that waits for its memory."""
    engine = driver(llama, kv_tokens=200)
    for handle in range(2):
        engine.add(handle, prompt(handle), 120)
    while not engine.engine.stepper.preemptions:
        engine.tick()
    assert engine.status.running == 2
    assert engine.status.waiting == 0
    engine.abort(1)
    engine.tick()
    assert engine.results[1].finish == Finish.ABORT
    assert engine.results[1].completion_tokens == len(engine.results[1].tokens) > 0
    engine.run()
    assert engine.results[0].finish == Finish.LENGTH


def test_a_flood_of_one_client_leaves_another_its_start(llama: LoadedModel) -> None:
    """With every slot taken and a queue behind, another client's request runs within a few ticks, and the
    flood is served whole."""
    engine = driver(llama, max_rows=4)
    for handle in range(12):
        engine.add(handle, prompt(handle), 40, client="flood")
    engine.tick(20)
    engine.add(99, prompt(99), 3, client="other")
    ticks = 0
    while not engine.results[99].tokens:
        engine.tick()
        ticks += 1
    assert ticks <= 6
    engine.run()
    assert engine.engine.stepper.yields == 1
    for handle in range(12):
        expected, margin = solo.greedy(llama.model, prompt(handle), 40, frozenset())
        if margin > MARGIN:
            assert engine.results[handle].tokens == expected


def test_less_memory_than_a_row_was_promised_stops_nothing(llama: LoadedModel) -> None:
    """After the capacity has shrunk rows run one by one, and new prompts are measured by what there is."""
    engine = driver(llama, kv_tokens=600)
    for handle in range(3):
        engine.add(handle, prompt(handle), 100)
    engine.tick(40)
    shrunk = engine.engine.admission.capacity
    engine.engine.admission.capacity = type(shrunk)(100, shrunk.max_model_len, 16, KVCost(1, step=1))
    engine.add(7, prompt(7, 200), 5)
    engine.run()
    assert [len(engine.results[h].tokens) for h in range(3)] == [100] * 3
    reject = engine.results[7].reject
    assert reject is not None
    assert reject.code == data.REJECT_CONTEXT
    assert "100" in reject.message
