"""The prefix cache on the real demo model."""

from pathlib import Path

import pytest
from support.demo import demo_directory
from support.prefix import cached_driver, finish
from support.solo import greedy
from tokenizers import Tokenizer

from mlxhost.worker.models.load import load_model

STORY = "Every morning the baker opens the shop at six and puts the first loaves on the shelf. "


@pytest.mark.demo
@pytest.mark.slow
def test_a_second_turn_equals_a_cold_run(tmp_path: Path) -> None:
    """Restored from RAM, then from disk: the tokens of mlx-lm's own cold run, unless its two best were within
    1e-4 of one another somewhere."""
    directory = demo_directory()
    loaded = load_model(directory, "float32", expand_quantised=True, on_progress=lambda done, total: None)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    base: list[int] = tokenizer.encode(STORY * 20).ids
    driver = cached_driver(loaded, tmp_path)
    driver.add(1, base, 8, limits={"ignore_eos": True})
    finish(driver, 1)
    turn = base + driver.results[1].tokens + tokenizer.encode(" Then he asks: who was here first?").ids
    expected, margin = greedy(loaded.model, turn, 8, frozenset())
    for handle in (2, 3):
        driver.add(handle, turn, 8, limits={"ignore_eos": True})
        finish(driver, handle)
        result = driver.results[handle]
        assert result.cached_tokens >= len(base) - 1
        assert result.tokens == expected or margin < 1e-4
        driver.prefix.sleep()
    driver.close()
