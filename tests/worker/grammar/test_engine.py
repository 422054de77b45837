"""Constrained rows in a real engine, beside others."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import mlx.core as mx
import pytest
from support.engine_driver import Driver, Result
from tokenizers import Tokenizer

from mlxhost.wire import data
from mlxhost.worker.card import model_card
from mlxhost.worker.models.load import LoadedModel, load_model

PROMPT = list(range(40, 60))
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Lisbon", "Köln", "東京"]},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "rain": {"type": "boolean"},
    },
    "required": ["city", "days", "rain"],
}
JSON = data.Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def directory(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


@pytest.fixture(scope="module")
def loaded(directory: Path) -> LoadedModel:
    return load_model(directory, "float32", expand_quantised=True, on_progress=lambda *_: None)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def shared(loaded: LoadedModel, directory: Path) -> Iterator[Driver]:
    """One engine for all tests, because its compiler process takes a while to start."""
    made = Driver(loaded.model, loaded.vocab_size, model_card(directory).eos_ids, grammars_of=directory)
    yield made
    made.grammars.close()


@pytest.fixture
def driver(shared: Driver) -> Driver:
    shared.results.clear()
    return shared


def add(driver: Driver, handle: int, grammar: data.Grammar | None, *, seed: int = 0, **fields: Any) -> None:
    sampling = fields.pop("sampling", data.Sampling(temperature=1.0, seed=seed))
    driver.add(handle, PROMPT, fields.pop("max_tokens", 600), grammar=grammar, sampling=sampling, **fields)


def settle(driver: Driver) -> None:
    """Until every request has ended."""
    until(driver, lambda: all(result.terminals for result in driver.results.values()))


def until(driver: Driver, condition: Any, timeout_s: float = 60.0) -> None:
    """Tick until `condition()` holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come about"
        driver.tick()
        time.sleep(0.001)


def test_outputs_satisfy_their_grammars(driver: Driver, tokenizer: Tokenizer) -> None:
    """Every kind, all in one batch with a free row, judged by independent validators."""
    grammars = [
        JSON,
        data.Grammar("json_object"),
        data.Grammar("regex", r"[a-c]{3}-\d{2}"),
        data.Grammar("ebnf", 'root ::= "<" [a-z]? root? ">"'),
        data.Grammar("choice", '["yes", "no", "maybe é"]'),
        None,
    ]
    for handle, grammar in enumerate(grammars):
        add(driver, handle, grammar, seed=handle, max_tokens=100)
    settle(driver)
    texts = {h: tokenizer.decode(r.tokens) for h, r in driver.results.items()}
    finished = {h for h, r in driver.results.items() if r.finish is data.Finish.STOP}
    assert {2, 4} <= finished
    if 0 in finished:
        jsonschema.validate(json.loads(texts[0]), SCHEMA)
    if 1 in finished:  # a random model may write a string without end
        assert isinstance(json.loads(texts[1]), dict)
    assert re.fullmatch(r"[a-c]{3}-\d{2}", texts[2])
    if 3 in finished:
        assert texts[3].count("<") == texts[3].count(">")
    assert texts[4] in ("yes", "no", "maybe é")
    assert all(r.terminals == 1 for r in driver.results.values())


@pytest.mark.parametrize(
    "sampling",
    [
        data.Sampling(temperature=0.0),
        data.Sampling(temperature=1.3, seed=5, top_k=3),
        data.Sampling(temperature=1.0, seed=5, top_p=0.5, min_p=0.1),
        data.Sampling(
            temperature=1.0, seed=5, repetition_penalty=1.5, presence_penalty=1, frequency_penalty=1
        ),
        data.Sampling(temperature=1.0, seed=5, xtc_probability=1.0, xtc_threshold=0.01),
        data.Sampling(temperature=1.0, seed=5, logit_bias=dict.fromkeys(range(3, 200), 50.0)),
        data.Sampling(temperature=1.0, seed=5, logprobs=True, top_logprobs=2),
    ],
    ids=["greedy", "top-k", "top-p", "penalties", "xtc", "bias", "logprobs"],
)
def test_masks_hold_under_every_sampler(
    driver: Driver, tokenizer: Tokenizer, sampling: data.Sampling
) -> None:
    """No filter, penalty or bias lets a forbidden token through; log-probabilities are those of the model."""
    add(driver, 1, JSON, sampling=sampling)
    settle(driver)
    result = driver.results[1]
    assert result.finish is data.Finish.STOP
    jsonschema.validate(json.loads(tokenizer.decode(result.tokens)), SCHEMA)
    if sampling.logprobs:
        assert len(result.logprobs) == len(result.tokens)
        assert all(value <= 0 for value in result.logprobs)


def test_a_constrained_row_draws_the_same_whatever_runs_beside_it(driver: Driver) -> None:
    """Seeded draws under a mask depend on seed and position only."""
    add(driver, 1, JSON, seed=11)
    until(driver, lambda: driver.results[1].terminals)
    for handle in range(2, 8):
        add(driver, handle, JSON if handle % 2 else None, seed=handle, max_tokens=60)
    add(driver, 8, JSON, seed=11)
    settle(driver)
    assert driver.results[8].tokens == driver.results[1].tokens


def test_free_rows_are_not_touched_by_others_masks(driver: Driver) -> None:
    """A row without a grammar writes what it writes alone."""
    add(driver, 1, None, seed=3, max_tokens=40)
    until(driver, lambda: driver.results[1].terminals)
    add(driver, 2, JSON, seed=4)
    add(driver, 3, None, seed=3, max_tokens=40)
    settle(driver)
    assert driver.results[3].tokens == driver.results[1].tokens


@pytest.mark.parametrize("limits", [{"ignore_eos": True}, {"min_tokens": 50}])
def test_the_end_of_the_grammar_ends_the_row(
    driver: Driver, tokenizer: Tokenizer, limits: dict[str, Any]
) -> None:
    """Whatever min_tokens and ignore_eos say: nothing may follow."""
    add(driver, 1, data.Grammar("choice", '["yes"]'), limits=limits)
    settle(driver)
    assert driver.results[1].finish is data.Finish.STOP
    assert tokenizer.decode(driver.results[1].tokens) == "yes"


def test_min_tokens_delays_an_end_that_may_wait(driver: Driver, tokenizer: Tokenizer) -> None:
    """Where the grammar allows more, it goes on until min_tokens."""
    add(driver, 1, data.Grammar("regex", "[ab]*"), limits={"min_tokens": 20}, max_tokens=30)
    settle(driver)
    assert len(driver.results[1].tokens) >= 20
    assert set(tokenizer.decode(driver.results[1].tokens)) <= set("ab")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (data.Grammar("regex", "[a-"), "Unclosed"),
        (data.Grammar("json_schema", '{"type": "array", "uniqueItems": true}', True), "uniqueItems at #"),
        (data.Grammar("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', True), "oneOf"),
        (data.Grammar("regex", "a" * 2_000_000), "2000000 bytes"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_reason(driver: Driver, grammar: data.Grammar, reason: str) -> None:
    """Exactly once, nothing stays reserved, and the next request is served."""
    add(driver, 1, grammar)
    add(driver, 2, JSON)
    settle(driver)
    reject = driver.results[1].reject
    assert reject is not None
    assert reject.code == data.REJECT_GRAMMAR
    assert reason in reject.message
    assert (driver.results[1].terminals, driver.results[2].finish) == (1, data.Finish.STOP)
    assert (driver.status.running, driver.status.waiting, driver.status.kv_tokens) == (0, 0, 0)


def test_what_is_not_enforced_travels_with_accepted(driver: Driver) -> None:
    """A schema that is not strict is served, with a warning."""
    add(driver, 1, data.Grammar("json_schema", '{"type": "array", "uniqueItems": true, "maxItems": 2}'))
    settle(driver)
    accepted = driver.results[1].accepted
    assert accepted is not None
    assert accepted.warning == "uniqueItems at #"


def test_a_model_without_an_end_refuses_grammars(
    loaded: LoadedModel, directory: Path, tmp_path: Path
) -> None:
    """Constrained output ends by an end-of-sequence id; without one the reason is said."""
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        text = (directory / name).read_text()
        (tmp_path / name).write_text(re.sub(r'"eos_token_id": \[[^]]*\]', '"eos_token_id": null', text))
    made = Driver(loaded.model, loaded.vocab_size, grammars_of=tmp_path)
    add(made, 1, JSON)
    made.run()
    reject = made.results[1].reject
    assert reject is not None
    assert "end-of-sequence" in reject.message


def test_a_row_set_aside_goes_on_exactly(driver: Driver, loaded: LoadedModel, directory: Path) -> None:
    """Preempted rows come back to their place in the grammar."""
    for handle in range(4):
        add(driver, handle, JSON, seed=handle)
    settle(driver)
    need = max(len(r.tokens) for r in driver.results.values()) + len(PROMPT) + 1
    small = Driver(
        loaded.model,
        loaded.vocab_size,
        model_card(directory).eos_ids,
        grammars_of=directory,
        kv_tokens=2 * need,
    )
    for handle in range(4):
        add(small, handle, JSON, seed=handle, max_tokens=need - len(PROMPT))
    small.run()
    small.grammars.close()
    for handle in range(4):
        assert small.results[handle].tokens == driver.results[handle].tokens


def test_choices_of_one_request_share_the_grammar_not_the_place(driver: Driver, tokenizer: Tokenizer) -> None:
    """n > 1: each draws its own output, all of them valid; a bad grammar refuses each once."""
    for first, grammar in ((1, data.Grammar("regex", "[ab]{8}")), (3, data.Grammar("regex", "["))):
        driver.results[first + 1] = Result()
        add(driver, first, grammar, seed=1, n=2, siblings=[first + 1])
    settle(driver)
    texts = [tokenizer.decode(driver.results[handle].tokens) for handle in (1, 2)]
    assert all(re.fullmatch("[ab]{8}", text) for text in texts)
    assert texts[0] != texts[1]
    assert [driver.results[handle].terminals for handle in (3, 4)] == [1, 1]
    assert all(driver.results[handle].reject is not None for handle in (3, 4))


def test_logits_are_not_read_by_the_host(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks go up; of the vocabulary nothing comes down."""
    vocabulary = driver.engine.batch._vocab_size
    read: list[int] = []
    tolist = mx.array.tolist

    def watched(array: mx.array) -> Any:
        read.append(array.size)
        return tolist(array)

    monkeypatch.setattr(mx.array, "tolist", watched)
    add(driver, 1, JSON)
    settle(driver)
    assert read
    assert max(read) < vocabulary
