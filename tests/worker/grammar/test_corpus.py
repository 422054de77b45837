"""A sample of public schemas: `bench/schemas.py` runs all of them."""

from pathlib import Path

import pytest
from support.constrained import judge_all
from support.schemas import corpus

from mlxhost.worker.models.load import load_model

COUNT = 25


@pytest.mark.demo
@pytest.mark.slow
def test_outputs_under_public_schemas_satisfy_them(tiny_models: dict[str, Path]) -> None:
    """Whatever is neither refused nor named as not enforced holds, as an independent validator sees it."""
    directory = tiny_models["llama"]
    loaded = load_model(directory, "float32", expand_quantised=True, on_progress=lambda *_: None)
    every = list(corpus(8192).items())
    sample = dict(every[:: len(every) // COUNT][:COUNT])
    verdicts = judge_all(loaded, directory, sample, max_tokens=300, deadline_s=250)
    assert {name: v for name, v in verdicts.items() if v.kind == "invalid"} == {}
    assert sum(v.kind == "valid" for v in verdicts.values()) > COUNT // 3
