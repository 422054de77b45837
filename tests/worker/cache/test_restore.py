"""What a restored prefix gives, against a cold run of the same request."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.engine_driver import Driver, Result
from support.prefix import cached_driver, finish
from support.tiny_models import FAMILIES

from mlxhost.wire.data import Finish
from mlxhost.worker.cache.keys import model_fingerprint
from mlxhost.worker.models.load import LoadedModel, load_model


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def loaded(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> LoadedModel:
    """One family after the other: full attention, sliding window, MoE, hybrid, convolution, SSM."""
    return load(tiny_models[request.param])


def load(directory: Path) -> LoadedModel:
    return load_model(directory, "float32", expand_quantised=True, on_progress=lambda done, total: None)


def ids(loaded: LoadedModel, count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(loaded.vocab_size) for _ in range(count)]


def cold(loaded: LoadedModel, prompt: Sequence[int], tokens: int = 12, **fields: Any) -> list[int]:
    """The answer of an engine without a cache."""
    driver = Driver(loaded.model, loaded.vocab_size)
    driver.add(1, prompt, tokens, **fields)
    driver.run()
    return driver.results[1].tokens


def ask(driver: Driver, handle: int, prompt: Sequence[int], tokens: int = 12, **fields: Any) -> Result:
    """The answer of `driver`, which goes on living."""
    driver.add(handle, prompt, tokens, **fields)
    finish(driver, handle)
    return driver.results[handle]


@pytest.mark.slow
def test_turns_repeats_and_forks_equal_cold_runs(loaded: LoadedModel, tmp_path: Path) -> None:
    """A second turn, the same prompt again, and forks at block ends and inside blocks: the same tokens as
    without a cache, from more cached tokens than the shared whole blocks where the layers allow it."""
    driver = cached_driver(loaded, tmp_path)
    base = ids(loaded, 600, 1)
    first = ask(driver, 1, base)
    assert first.tokens == cold(loaded, base)
    turn = base + first.tokens + ids(loaded, 64, 2)
    prompts = [
        (turn, 599 + 12),  # all that was in the caches when the first turn ended
        (base, 599),
        (base[:512] + ids(loaded, 200, 3), 0),
        (base[:512] + ids(loaded, 200, 4), 512),  # a recurrent layer has a checkpoint here by now
    ]
    for handle, (prompt, cached) in enumerate(prompts, start=2):
        result = ask(driver, handle, prompt)
        assert result.tokens == cold(loaded, prompt)
        assert result.cached_tokens >= cached
    driver.close()


def test_a_restart_restores_from_disk(loaded: LoadedModel, tmp_path: Path) -> None:
    """Records that another process wrote give the same tokens; so do those that this one let go of."""
    base = ids(loaded, 600, 1)
    driver = cached_driver(loaded, tmp_path)
    first = ask(driver, 1, base)
    assert driver.prefix.flush_now(30)
    driver.close()
    again = cached_driver(loaded, tmp_path)
    turn = base + first.tokens + ids(loaded, 64, 2)
    result = ask(again, 1, turn)
    assert result.cached_tokens >= 599
    assert result.tokens == cold(loaded, turn)
    again.prefix.sleep()
    repeated = ask(again, 2, turn)
    assert repeated.tokens == result.tokens
    assert repeated.cached_tokens == len(turn) - 1
    again.close()


@pytest.mark.slow
def test_concurrent_rows_profit_from_the_first(loaded: LoadedModel, tmp_path: Path) -> None:
    """Eight prompts that arrive together and share 520 tokens: all but the first two start from records, and
    each gives what it gives alone."""
    driver = cached_driver(loaded, tmp_path)
    shared = ids(loaded, 520, 1)
    prompts = {h: shared + ids(loaded, 40, 10 + h) for h in range(1, 9)}
    for handle, prompt in prompts.items():
        driver.add(handle, prompt, 6)
    finish(driver, *prompts)
    cached = sorted(driver.results[h].cached_tokens for h in prompts)
    assert all(c >= 512 for c in cached[2:])
    assert cached[0] == 0
    for handle, prompt in prompts.items():
        assert driver.results[handle].tokens == cold(loaded, prompt, 6)
    driver.close()


def test_a_preempted_row_goes_on_from_its_records(loaded: LoadedModel, tmp_path: Path) -> None:
    """A row that makes way in the middle of its answer comes back without computing its past again."""
    driver = cached_driver(loaded, tmp_path)
    prompt = ids(loaded, 300, 1)
    driver.add(1, prompt, 40)
    stepper = driver.engine.stepper
    driver.until(lambda: len(driver.results[1].tokens) >= 10)
    row = driver.engine.rows()[0]
    restored = driver.prefix.usage.restored_tokens
    assert stepper._set_aside(row)
    held = row.context - 1
    finish(driver, 1)
    assert driver.prefix.usage.restored_tokens - restored == held
    assert driver.results[1].tokens == cold(loaded, prompt, 40)
    driver.close()


@pytest.fixture(scope="module")
def llama(tiny_models: dict[str, Path]) -> LoadedModel:
    """Full attention."""
    return load(tiny_models["llama"])


def test_salts_do_not_share(llama: LoadedModel, tmp_path: Path) -> None:
    """The same prompt under another salt finds nothing, under its own everything."""
    driver = cached_driver(llama, tmp_path)
    base = ids(llama, 400, 1)
    salts = ["", "a", "b", "a", ""]
    cached = [ask(driver, i, base, 4, cache_salt=s).cached_tokens for i, s in enumerate(salts)]
    assert cached == [0, 0, 0, 399, 399]
    driver.close()


def test_usage_says_what_was_restored(llama: LoadedModel, tmp_path: Path) -> None:
    """cached_tokens of the answer, the load's cached tokens and the figures agree."""
    driver = cached_driver(llama, tmp_path)
    base = ids(llama, 400, 1)
    ask(driver, 1, base, 4)
    second = ask(driver, 2, base, 4)
    usage = driver.prefix.usage
    assert second.cached_tokens == 399
    assert (usage.queries, usage.hits, usage.restored_tokens, usage.queried_tokens) == (2, 1, 399, 798)
    assert second.accepted is not None
    assert second.accepted.cached_tokens == 399
    assert driver.status.load().cached_tokens == driver.prefix.tokens >= 400
    driver.close()


def test_prompt_logprobs_are_computed_whatever_is_cached(llama: LoadedModel, tmp_path: Path) -> None:
    """A row that wants its prompt's log-probabilities restores nothing, and gets all of them."""
    from mlxhost.wire.data import Sampling

    driver = cached_driver(llama, tmp_path)
    base = ids(llama, 300, 1)
    ask(driver, 1, base, 4)
    result = ask(driver, 2, base, 4, sampling=Sampling(temperature=0.0, prompt_logprobs=0))
    assert result.cached_tokens == 0
    assert len(result.prompt_logprobs) == 299
    driver.close()


def test_a_failed_row_leaves_no_records_of_its_end(llama: LoadedModel, tmp_path: Path) -> None:
    """What a row that ended with an error had in its caches is not kept; an aborted one's is."""
    driver = cached_driver(llama, tmp_path)
    base = ids(llama, 300, 1)
    for handle, outcome in ((1, Finish.ERROR), (2, Finish.ABORT)):
        driver.add(handle, base, 100)
        driver.until(lambda handle=handle: len(driver.results[handle].tokens) >= 20)
        driver.engine.end(driver.engine.rows(), outcome, "test")
        held = driver.prefix.tokens
        assert (held > 310) == (outcome is Finish.ABORT)
    driver.close()


def test_a_cache_too_small_for_one_row_changes_no_token(llama: LoadedModel, tmp_path: Path) -> None:
    """With room for a single block in RAM everything goes by way of the disk."""
    driver = cached_driver(llama, tmp_path, ram_bytes=300_000)
    base = ids(llama, 1500, 1)
    first = ask(driver, 1, base)
    turn = base + first.tokens + ids(llama, 30, 2)
    second = ask(driver, 2, turn)
    assert second.tokens == cold(llama, turn)
    assert second.cached_tokens > 1000
    assert driver.prefix.store is not None
    assert driver.prefix.store.ram_bytes <= 300_000
    driver.close()


def test_other_weights_get_no_more_room_than_the_lease_leaves(llama: LoadedModel, tmp_path: Path) -> None:
    """The cap of now holds for the records of new weights; the same weights keep theirs."""
    driver = cached_driver(llama, tmp_path)
    ask(driver, 1, ids(llama, 600, 1))
    driver.prefix.shrink(1 << 20)
    kept = driver.prefix.store
    driver.prefix.rebase(model_fingerprint(tmp_path, "float32"))
    assert driver.prefix.store is kept
    driver.prefix.rebase("another")
    assert driver.prefix.store is not None
    assert (driver.prefix.store.ram_cap, driver.prefix.tokens) == (1 << 20, 0)
    driver.close()


def test_a_session_keeps_its_records_until_it_is_closed(llama: LoadedModel, tmp_path: Path) -> None:
    """Other prompts push out what no session holds; after the close they push out that, too."""
    driver = cached_driver(llama, tmp_path, ram_bytes=1 << 20, disk_bytes=0)
    base = ids(llama, 300, 1)
    ask(driver, 1, base, 4, session_id="s")
    for i in range(10, 14):
        ask(driver, i, ids(llama, 600, i), 4)
    assert ask(driver, 2, base, 4, session_id="s").cached_tokens == 299
    driver.engine.sessions.close("s")
    driver.prefix.unpin_session("s")
    for i in range(20, 24):
        ask(driver, i, ids(llama, 600, i), 4)
    assert ask(driver, 3, base, 4).cached_tokens == 0
    driver.close()


def test_damaged_records_cost_a_computation_and_no_token(llama: LoadedModel, tmp_path: Path) -> None:
    """Every file with a flipped byte: nothing is restored, and the tokens are those of a cold run."""
    base = ids(llama, 600, 1)
    driver = cached_driver(llama, tmp_path)
    ask(driver, 1, base, 4)
    assert driver.prefix.flush_now(30)
    driver.close()
    paths = list((tmp_path / "kv").glob("*/*.safetensors"))
    assert len(paths) >= 3
    for path in paths:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 4
        path.write_bytes(raw)
    again = cached_driver(llama, tmp_path)
    result = ask(again, 1, base, 4)
    assert result.cached_tokens == 0
    assert result.tokens == cold(llama, base, 4)
    again.close()


def test_other_weights_find_nothing(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """A model of the same shape with other weights shares a directory and no record."""
    from support.tiny_models import build

    ours, theirs = load(tiny_models["llama"]), load(build("llama", tmp_path / "other", seed=5))
    base = ids(ours, 600, 1)
    driver = cached_driver(ours, tmp_path, directory=tiny_models["llama"])
    ask(driver, 1, base, 4)
    assert driver.prefix.flush_now(30)
    driver.close()
    other = cached_driver(theirs, tmp_path, directory=tmp_path / "other")
    result = ask(other, 1, base, 4)
    assert (result.cached_tokens, result.tokens) == (0, cold(theirs, base, 4))
    other.close()
