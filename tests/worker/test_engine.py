"""The engine against the same model run alone, and its promises to callers."""

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import solo
from support.engine_driver import Driver
from support.loading import load
from support.tiny_models import FAMILIES

from mlxhost.wire import data
from mlxhost.wire.data import Finish
from mlxhost.worker import narrow, sampling
from mlxhost.worker.kv import PackRule, StepShape
from mlxhost.worker.models.load import LoadedModel
from mlxhost.worker.stepper import Stepper

MARGIN = 1e-4  # below this distance of the two best logits, rounding may pick either


@pytest.fixture(params=[*FAMILIES, "llama-4bit"])
def loaded(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> LoadedModel:
    return load(tiny_models[request.param])


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> LoadedModel:
    return load(tiny_models["llama"])


def driver(loaded: LoadedModel, **options: Any) -> Driver:
    return Driver(loaded.model, loaded.vocab_size, **options)


# How rows are laid out on a CPU, and on a GPU (here with packs that few rows fit and that all rows fit).
SHAPES = {
    "single rows": StepShape(),
    "packs by length": StepShape(rule=PackRule(1.5, 16)),
    "one pack": StepShape(rule=PackRule(100.0)),
}


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 400) for _ in range(rng.choice([1, 2, 5, 40, 97, 150]))] for _ in range(count)]


def assert_like_solo(loaded: LoadedModel, engine: Driver, rows: list[list[int]], tokens: int) -> None:
    for handle, prompt in enumerate(rows):
        expected, margin = solo.greedy(loaded.model, prompt, tokens, frozenset())
        if margin > MARGIN:
            assert engine.results[handle].tokens == expected, f"row {handle}, margin {margin}"


def test_concurrent_rows_equal_solo_rows(loaded: LoadedModel) -> None:
    """Ten greedy requests of different lengths at once give what each gives alone."""
    engine, rows = driver(loaded), prompts(10)
    for handle, prompt in enumerate(rows):
        engine.add(handle, prompt, 40)
    engine.run()
    assert_like_solo(loaded, engine, rows, 40)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_that_join_and_leave_at_any_step_equal_solo_rows(loaded: LoadedModel, shape: StepShape) -> None:
    """Requests that arrive in the middle and end at different times do not disturb one another."""
    engine, rows = driver(loaded, shape=shape), prompts(8, seed=2)
    for handle, prompt in enumerate(rows):
        engine.add(handle, prompt, 10 + 5 * handle)
        engine.tick(3)
    engine.run()
    for handle, prompt in enumerate(rows):
        expected, margin = solo.greedy(loaded.model, prompt, 10 + 5 * handle, frozenset())
        if margin > MARGIN:
            assert engine.results[handle].tokens == expected


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sliding_window_rows_run_past_the_window(tiny_models: dict[str, Path], shape: StepShape) -> None:
    """Rows several windows long, prompt and output, equal solo rows."""
    loaded = load(tiny_models["gemma3"])
    engine = driver(loaded, shape=shape)
    rows = [[(7 * i + k) % 400 + 3 for i in range(20 + 60 * k)] for k in range(4)]
    for handle, prompt in enumerate(rows):
        engine.add(handle, prompt, 100)
    engine.run()
    assert_like_solo(loaded, engine, rows, 100)


def test_seeded_rows_draw_the_same_alone_and_in_any_company(llama: LoadedModel) -> None:
    """A seed gives the same tokens alone, in a batch, and in a batch in another order."""
    settings = [
        data.Sampling(temperature=0.9, seed=11),
        data.Sampling(temperature=1.3, top_k=20, seed=12),
        data.Sampling(temperature=0.8, top_p=0.9, seed=13),
        data.Sampling(temperature=1.0, min_p=0.05, top_p=0.95, top_k=50, seed=14),
        data.Sampling(temperature=0.0),
    ]
    rows = prompts(len(settings), seed=3)

    def run(order: list[int]) -> dict[int, list[int]]:
        engine = driver(llama)
        for handle in order:
            engine.add(handle, rows[handle], 30, sampling=settings[handle])
        engine.run()
        return {handle: engine.results[handle].tokens for handle in order}

    together = run([0, 1, 2, 3, 4])
    assert run([4, 2, 0, 3, 1]) == together
    for handle in range(len(settings)):
        assert run([handle])[handle] == together[handle]


@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_a_draw_that_did_not_stand_is_made_again(
    family: str, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose filters keep more than the list of likeliest tokens holds give what whole-vocabulary draws
    give, in company and to the last token."""
    loaded = load(tiny_models[family])
    settings = [data.Sampling(temperature=1.0 + 0.3 * i, top_p=0.6 + 0.1 * i, seed=i) for i in range(4)]
    rows = prompts(4, seed=9)

    def run(shape: StepShape) -> list[list[int]]:
        engine = driver(loaded, shape=shape)
        for handle, prompt in enumerate(rows):
            engine.add(handle, prompt, 30, sampling=settings[handle])
        engine.run()
        return [engine.results[handle].tokens for handle in range(4)]

    expected = run(StepShape())
    begun_again = []
    begin_again = Stepper._begin_again
    monkeypatch.setattr(
        Stepper, "_begin_again", lambda self, row: (begun_again.append(row), begin_again(self, row))
    )
    monkeypatch.setattr(narrow, "WIDTH", 16)
    monkeypatch.setattr(sampling, "WIDTH", 16)
    assert run(StepShape(narrow=True)) == expected
    assert begun_again


def test_a_draw_that_did_not_stand_costs_no_token_beside_a_prefill(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where the draw is read with no step behind it, as it is before another row's chunk."""
    wide = data.Sampling(temperature=1.5, top_p=0.99, seed=11)
    prompt, long = list(range(40, 60)), [(7 * i) % 400 + 3 for i in range(1500)]
    undisturbed = driver(llama)
    undisturbed.add(1, prompt, 20, sampling=wide)
    undisturbed.run()
    monkeypatch.setattr(narrow, "WIDTH", 16)
    monkeypatch.setattr(sampling, "WIDTH", 16)
    engine = driver(llama, shape=StepShape(narrow=True))
    engine.add(1, prompt, 20, sampling=wide)
    engine.tick()
    engine.add(2, long, 4)
    engine.tick(300)
    assert engine.results[1].finish == Finish.LENGTH
    assert engine.results[1].tokens == undisturbed.results[1].tokens


def test_unset_seeds_differ(llama: LoadedModel) -> None:
    """Two sampled requests without a seed do not give the same output."""
    engine = driver(llama)
    for handle in range(2):
        engine.add(handle, [5, 6, 7], 30, sampling=data.Sampling(temperature=1.5))
    engine.run()
    assert engine.results[0].tokens != engine.results[1].tokens


def test_stop_id_ends_the_row_and_is_not_sent(llama: LoadedModel) -> None:
    """The id that stops a row is counted but not part of the output."""
    free, _ = solo.greedy(llama.model, [9, 8, 7], 20, frozenset())
    stop = free[5]
    engine = driver(llama)
    engine.add(0, [9, 8, 7], 20, limits={"stop_ids": [stop]})
    engine.run()
    result = engine.results[0]
    assert result.tokens == free[: free.index(stop)]
    assert result.finish == Finish.STOP
    assert result.completion_tokens == len(result.tokens) + 1


def test_min_tokens_keeps_stop_ids_away(llama: LoadedModel) -> None:
    """No stop id is produced before min_tokens tokens are."""
    free, _ = solo.greedy(llama.model, [9, 8, 7], 20, frozenset())
    engine = driver(llama)
    engine.add(0, [9, 8, 7], 20, limits={"stop_ids": [free[0], free[1]], "min_tokens": 12})
    engine.run()
    assert len(engine.results[0].tokens) >= 12
    assert not {free[0], free[1]} & set(engine.results[0].tokens[:12])


def test_max_tokens_is_clamped_to_the_room_left(llama: LoadedModel) -> None:
    """A request for more than the context holds is cut to what fits and told so in ACCEPTED."""
    engine = driver(llama, max_model_len=50)
    engine.add(0, list(range(3, 43)), 1000)
    engine.add(1, list(range(3, 43)), None)
    engine.run()
    for handle in (0, 1):
        accepted = engine.results[handle].accepted
        assert accepted is not None
        assert accepted.max_tokens == 10
        assert len(engine.results[handle].tokens) == 10
        assert engine.results[handle].finish == Finish.LENGTH


@pytest.mark.parametrize(
    ("prompt", "fields", "code"),
    [
        (list(range(3, 53)), {}, data.REJECT_CONTEXT),
        ([], {}, data.REJECT_INVALID),
        ([3, 100_000], {}, data.REJECT_INVALID),
        ([3], {"task": "embed"}, data.REJECT_UNSUPPORTED),
        ([3], {"sampling": data.Sampling(logit_bias={100_000: 1.0})}, data.REJECT_INVALID),
        ([3], {"sampling": data.Sampling(logit_bias={-1: 1.0})}, data.REJECT_INVALID),
    ],
)
def test_what_cannot_run_is_rejected(llama: LoadedModel, prompt: list[int], fields: dict, code: str) -> None:
    """A request that cannot run gets one REJECT that says why, and the next one runs."""
    engine = driver(llama, max_model_len=50)
    engine.add(0, prompt, 5, **fields)
    engine.add(1, [3, 4], 5)
    engine.run()
    assert engine.results[0].reject is not None
    assert engine.results[0].reject.code == code
    assert len(engine.results[1].tokens) == 5


def test_aborts_free_rows_wherever_they_are(llama: LoadedModel) -> None:
    """Waiting, prefilling and decoding rows all end at the next step with one terminal message."""
    engine = driver(llama, max_rows=2)
    engine.add(0, [3, 4, 5], 500)
    engine.tick(5)
    engine.add(1, [3] * 3000, 500)
    engine.add(2, [3, 4], 500)
    engine.tick(1)
    engine.abort(0, 1, 2, 99)
    engine.tick(1)
    for handle in range(3):
        assert engine.results[handle].finish == Finish.ABORT
        assert engine.results[handle].terminals == 1
    assert engine.status.kv_tokens == 0
    assert not engine.status.busy


def test_rows_beyond_the_kv_capacity_wait(llama: LoadedModel) -> None:
    """Reservations never exceed the capacity, and everything is served in the end."""
    engine = driver(llama, kv_tokens=100)
    for handle in range(6):
        engine.add(handle, [3] * 10, 30)
    engine.tick(1)
    assert engine.status.running == 2
    assert engine.status.waiting == 4
    assert engine.status.kv_tokens <= 100
    engine.run()
    assert all(len(r.tokens) == 30 and r.terminals == 1 for r in engine.results.values())


def test_priority_goes_first(llama: LoadedModel) -> None:
    """With one slot, the request of lower priority number runs before an earlier one."""
    engine = driver(llama, max_rows=1)
    for handle, priority in ((0, 0), (1, 5), (2, 1)):
        engine.add(handle, [3, 4], 3, priority=priority)
    engine.run()
    accepted = [m.handle for m in engine.messages if isinstance(m, data.Accepted)]
    assert accepted == [0, 2, 1]


def test_running_rows_get_tokens_while_a_long_prompt_prefills(llama: LoadedModel) -> None:
    """A long prompt is cut into chunks, with a decode step of the running row before each."""
    engine = driver(llama)
    engine.add(0, [3, 4], 1000)
    engine.tick(3)
    engine.add(1, [5] * 4000, 1)
    before = len(engine.results[0].tokens)
    ticks = 0
    while engine.results[1].terminals == 0:
        engine.tick(1)
        ticks += 1
    assert ticks > 2
    assert len(engine.results[0].tokens) - before >= ticks - 1


def test_a_short_prompt_overtakes_a_long_one(llama: LoadedModel) -> None:
    """The shortest remaining prefill goes first."""
    engine = driver(llama)
    engine.add(0, [5] * 4000, 1)
    engine.tick(1)
    engine.add(1, [6] * 20, 1)
    while not engine.results[1].terminals:
        engine.tick(1)
    assert engine.results[0].terminals == 0


def test_kv_memory_is_freed_when_rows_end(llama: LoadedModel) -> None:
    """After the last row, MLX holds what it held before the first."""
    mx.clear_cache()
    before = mx.get_active_memory()
    engine = driver(llama)
    for handle in range(4):
        engine.add(handle, [5] * 1000, 20)
    engine.run()
    mx.clear_cache()
    assert mx.get_active_memory() - before < 64 * 1024


def test_logprobs_are_the_models_own(llama: LoadedModel) -> None:
    """Chosen, top and prompt log-probabilities, in a batch with rows that want none, equal those computed
    from the model's logits in one plain forward."""
    prompt = [(5 * i) % 300 + 3 for i in range(200)]
    engine = driver(llama)
    engine.add(0, [8, 9], 12)
    asked = data.Sampling(temperature=0.0, logprobs=True, top_logprobs=4, prompt_logprobs=2)
    engine.add(1, prompt, 12, sampling=asked)
    engine.run()
    result = engine.results[1]
    whole = llama.model(mx.array([prompt + result.tokens], dtype=mx.uint32))[0].astype(mx.float32)
    reference = whole - mx.logsumexp(whole, axis=-1, keepdims=True)
    assert not engine.results[0].logprobs
    assert len(result.logprobs) == len(result.top_logprobs) == 12
    for i, token in enumerate(result.tokens):
        row = reference[len(prompt) - 1 + i]
        assert result.logprobs[i] == pytest.approx(row[token].item(), abs=1e-4)
        assert [v for _, v in result.top_logprobs[i]] == pytest.approx(
            sorted(row.tolist(), reverse=True)[:4], abs=1e-4
        )
    assert len(result.prompt_logprobs) == len(prompt) - 1
    for i, entries in enumerate(result.prompt_logprobs):
        row = reference[i]
        assert entries[0] == (prompt[i + 1], pytest.approx(row[prompt[i + 1]].item(), abs=1e-4))
        assert [v for _, v in entries[1:]] == pytest.approx(sorted(row.tolist(), reverse=True)[:2], abs=1e-4)


def test_penalised_rows_draw_the_same_alone_and_in_any_company(llama: LoadedModel) -> None:
    """Joins and leaves around it do not change what a penalised row has counted."""
    settings = data.Sampling(temperature=0.8, seed=3, repetition_penalty=1.2, frequency_penalty=0.4)
    alone = driver(llama)
    alone.add(0, [5, 6, 7], 60, sampling=settings)
    alone.run()
    together = driver(llama)
    together.add(0, [5, 6, 7], 60, sampling=settings)
    for handle in range(1, 9):
        together.tick(5)
        together.add(handle, [7 * handle] * 5, 3 + handle)
    together.run()
    assert together.results[0].tokens == alone.results[0].tokens
