"""Jumping over forced text: fewer steps, the same tokens."""

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.engine_driver import Driver
from tokenizers import Tokenizer

from mlxhost.wire import data
from mlxhost.worker.batch import Batch, Token
from mlxhost.worker.card import model_card
from mlxhost.worker.grammar import flat
from mlxhost.worker.grammar.jump import Plan
from mlxhost.worker.kv import RowKV
from mlxhost.worker.models.load import LoadedModel, load_model
from mlxhost.worker.row import Row

PROMPTS = [list(range(40, 40 + n)) for n in (20, 7, 33, 12)]
SCHEMA = {
    "type": "object",
    "properties": {
        "a_long_name_of_a_property": {"enum": ["one of two long values", "two of two long values"]},
        "another_long_name": {"type": "boolean"},
        "nested_object_with_a_name": {
            "type": "object",
            "properties": {"capital_of_france": {"const": "Paris is the capital of France"}},
            "required": ["capital_of_france"],
        },
    },
    "required": ["a_long_name_of_a_property", "another_long_name", "nested_object_with_a_name"],
}
GRAMMAR = data.Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def loaded(tiny_models: dict[str, Path]) -> LoadedModel:
    return load_model(tiny_models["llama"], "float32", expand_quantised=True, on_progress=lambda *_: None)


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel, tiny_models: dict[str, Path]) -> Driver:
    directory = tiny_models["llama"]
    return Driver(loaded.model, loaded.vocab_size, model_card(directory).eos_ids, grammars_of=directory)


def outputs(
    driver: Driver, samplings: Sequence[data.Sampling], *, jumps: bool, max_tokens: int = 300
) -> tuple[list[list[int]], int, Driver]:
    """Tokens of a constrained row for each sampling beside one free row, and the steps that took."""
    driver.results.clear()
    driver.engine.batch.jumps = jumps
    before = driver.engine.stepper.ticks
    for handle, sampling in enumerate(samplings):
        driver.add(handle, PROMPTS[handle], max_tokens, grammar=GRAMMAR, sampling=sampling)
    driver.add(
        99, PROMPTS[0], 30, sampling=data.Sampling(temperature=1.0, seed=3), limits={"ignore_eos": True}
    )
    end = time.monotonic() + 60
    while not all(result.terminals for result in driver.results.values()):
        assert time.monotonic() < end
        driver.tick()
    assert all(result.terminals == 1 for result in driver.results.values())
    tokens = [driver.results[handle].tokens for handle in [*range(len(samplings)), 99]]
    return tokens, driver.engine.stepper.ticks - before, driver


@pytest.mark.parametrize(
    "samplings",
    [
        [data.Sampling(temperature=0.0)],
        [data.Sampling(temperature=1.0, seed=i) for i in range(4)],
        [
            data.Sampling(temperature=1.0, seed=5, repetition_penalty=1.2, presence_penalty=0.3),
            data.Sampling(temperature=0.7, seed=6, top_k=20, frequency_penalty=0.5),
            data.Sampling(temperature=1.0, seed=7, top_p=0.9, xtc_probability=0.5),
            data.Sampling(temperature=0.0, logprobs=True, top_logprobs=3),
        ],
    ],
    ids=["greedy", "seeded", "mixed"],
)
def test_jumping_changes_no_token(engine: Driver, samplings: list[data.Sampling]) -> None:
    """Each row, the free one beside them included, writes what it writes step by step."""
    stepwise, _, _ = outputs(engine, samplings, jumps=False)
    logprobs = {h: r.logprobs for h, r in engine.results.items()}
    jumped, _, _ = outputs(engine, samplings, jumps=True)
    assert jumped == stepwise
    for handle, result in engine.results.items():
        assert len(result.logprobs) == len(logprobs[handle])
        assert np.allclose(result.logprobs, logprobs[handle], atol=1e-4)


def test_a_model_that_spells_as_guessed_takes_fewer_steps(
    engine: Driver, tiny_models: dict[str, Path]
) -> None:
    """A bias towards the longest tokens stands for a trained model."""
    tokenizer = Tokenizer.from_file(str(tiny_models["llama"] / "tokenizer.json"))
    bias = {i: 3.0 * len(t) for t, i in tokenizer.get_vocab().items()}
    samplings = [data.Sampling(temperature=1.0, seed=i, logit_bias=bias) for i in range(2)]
    stepwise, many, _ = outputs(engine, samplings, jumps=False)
    jumped, few, _ = outputs(engine, samplings, jumps=True)
    assert jumped == stepwise
    assert few < 0.7 * many
    for tokens in jumped[:-1]:
        assert json.loads(tokenizer.decode(tokens))["nested_object_with_a_name"]


@pytest.mark.parametrize("limit", [5, 6, 7, 8, 9, 10])
def test_a_jump_stops_at_max_tokens(engine: Driver, limit: int) -> None:
    """Not one token more, wherever the limit falls."""
    samplings = [data.Sampling(temperature=1.0, seed=i) for i in range(3)]
    stepwise, _, _ = outputs(engine, samplings, jumps=False, max_tokens=limit)
    jumped, _, _ = outputs(engine, samplings, jumps=True, max_tokens=limit)
    assert jumped == stepwise
    assert all(len(tokens) == limit for tokens in jumped[:-1])


@pytest.mark.parametrize("fail_at", [5, 13, 14])
def test_a_row_that_begins_again_after_a_failed_step_loses_no_forced_text(
    engine: Driver, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    """The step that it runs alone first gives its tokens to the output, whatever its grammar forces."""
    samplings = [data.Sampling(temperature=1.0, seed=i) for i in range(3)]
    undisturbed, _, _ = outputs(engine, samplings, jumps=True)
    advance, calls = Batch.advance, itertools.count(1)

    def failing(batch: Batch) -> list[tuple[Row, Token]]:
        if batch is engine.engine.batch and next(calls) == fail_at:
            raise RuntimeError("by chance")
        return advance(batch)

    monkeypatch.setattr(Batch, "advance", failing)
    failed = engine.engine.stepper.failed_steps
    assert outputs(engine, samplings, jumps=True)[0] == undisturbed
    assert engine.engine.stepper.failed_steps == failed + 1


def test_draws_are_kept_as_far_as_they_agree() -> None:
    """The first that is not what was guessed is kept, what follows it is not."""
    planned = Plan([1, 2, 3], [[10, 11], [], [30, 31, 32]])
    assert planned.tokens == [[1, 10, 11], [2], [3, 30, 31, 32]]
    assert planned.agreed([10, 11, 5, 6, 30, 7, 8, 9]) == [[10, 11, 5], [6], [30, 7]]
    assert planned.agreed([9, 9, 9, 6, 30, 31, 32, 33]) == [[9], [6], [30, 31, 32, 33]]


@pytest.mark.parametrize("counts", [[3], [1, 4, 2]])
def test_rows_of_different_counts_run_as_they_would_alone(loaded: LoadedModel, counts: list[int]) -> None:
    """Logits of each token, and the caches after some are taken back, are those of single steps."""
    model = loaded.model
    rows, alone = [RowKV.new(model) for _ in counts], [RowKV.new(model) for _ in counts]
    fed = [list(range(60 + i, 60 + i + n)) for i, n in enumerate(counts)]
    for pair in zip(rows, alone, PROMPTS, strict=False):
        for kv in pair[:2]:
            mx.eval(kv.run(model, pair[2]))
    together = flat.run(model, rows, fed)
    expected = mx.concatenate([kv.run(model, own) for kv, own in zip(alone, fed, strict=True)])
    assert mx.allclose(together, expected, atol=1e-4).item()
    assert all(flat.can_run(row) for row in rows)
    for row in rows:
        before = row.length
        flat.take_back(row, 1)
        assert row.length == before - 1


def test_rings_do_not_jump(tiny_models: dict[str, Path]) -> None:
    """What a sliding window has overwritten cannot be taken back, so such rows go step by step."""
    made = load_model(tiny_models["gemma3"], "float32", expand_quantised=True, on_progress=lambda *_: None)
    assert not flat.can_run(RowKV.new(made.model))
