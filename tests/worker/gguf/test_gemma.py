"""The real Gemma 3 270M (base), from its Q4_K_M file through a worker process."""

from pathlib import Path

import pytest
from support.gemma import gemma_gguf
from support.worker_harness import WorkerProcess
from tokenizers import Tokenizer

from mlxhost.worker.gguf.launch import ensure_converted

pytestmark = [pytest.mark.demo, pytest.mark.slow]

# Prompts, their tokens, and the twelve tokens that llama.cpp v0.5.0 goes on with, greedily, after the file's
# values were written out as float32 (its quantised products round the activations to eight bits). The two
# best logits of any step are at least 0.13 apart.
CONTINUED = {
    "Once upon a time there was a little girl who": (
        [2, 14946, 3324, 496, 990, 993, 691, 496, 2268, 3953, 1015],
        [9312, 531, 1441, 607, 1116, 64134, 236761, 2625, 9312, 531, 1441, 607],
    ),
    "def fibonacci(n):\n    ": (
        [2, 2063, 10779, 78113, 236769, 236749, 1473, 107, 140],
        [584, 538, 1251, 236743, 236771, 236787, 107, 144, 2060, 236743, 236771, 107],
    ),
    "The three primary colours are": (
        [2, 818, 1806, 5905, 22640, 659],
        [2604, 236764, 7070, 532, 3730, 236761, 108, 818, 1806, 5905, 22640, 659],
    ),
}


@pytest.mark.timeout(600)
def test_gemma_continues_as_llama_cpp_does(tmp_path: Path) -> None:
    """Three prompts in one batch: tokenized alike and continued alike, token for token, by a worker that
    announces both of Gemma's ends."""
    source = gemma_gguf()
    directory = ensure_converted(source, "float32", source.parent, lambda done, total: None)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    with WorkerProcess(tmp_path, directory, dtype="float32") as worker:
        assert sorted(worker.ready.card.eos_ids) == [1, 106]
        for handle, (text, (prompt, _)) in enumerate(CONTINUED.items()):
            assert tokenizer.encode(text).ids == prompt
            worker.add(handle, prompt, max_tokens=12)
        found = worker.collect(set(range(len(CONTINUED))), timeout_s=300)
    for handle, (text, (_, wanted)) in enumerate(CONTINUED.items()):
        assert found[handle][0] == wanted, (text, tokenizer.decode(found[handle][0]))
