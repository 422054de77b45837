"""A worker that is told what to do with a GGUF's quantised weights."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q
from support.tiny_architectures import TINY
from support.worker_harness import WorkerProcess

PROMPT = [3, 17, 250, 9, 41, 8]


def served(folder: Path, source: Path, quantised: str) -> tuple[list[int], int]:
    """(greedy tokens, bytes of weights) of a worker on `source`."""
    folder.mkdir()
    with WorkerProcess(folder, source, dtype="float32", quantised=quantised) as worker:
        worker.add(1, PROMPT, max_tokens=6)
        tokens, _ = worker.collect({1})[1]
        return tokens, worker.ready.weights_bytes


@pytest.mark.slow
def test_kept_weights_take_less_memory_and_give_the_same_tokens(tmp_path: Path) -> None:
    """keep: under half of the float32 bytes; expand, and auto on a CPU: all of them. The same tokens."""
    _, source = TINY["qwen3"].write(tmp_path / "model", Q.Q4_0)
    found = {how: served(tmp_path / how, source, how) for how in ("keep", "expand", "auto")}
    tokens, bytes_ = zip(*found.values(), strict=True)
    assert tokens[0] == tokens[1] == tokens[2]
    assert bytes_[0] < 0.5 * bytes_[1]
    assert bytes_[1] == bytes_[2]
