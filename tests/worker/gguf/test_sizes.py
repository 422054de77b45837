"""The supervisor's estimate, from the header alone, against what the worker loads."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q
from support.tiny_architectures import TINY

from mlxhost.supervisor.estimate.estimate import sizer
from mlxhost.worker.gguf.convert import convert
from mlxhost.worker.models.load import load_model

KINDS = (Q.F32, Q.Q5_1, Q.Q6_K, Q.Q8_0, Q.MXFP4)
CASES = [(family, Q.Q4_K, True) for family in TINY]
CASES += [("qwen3", kind, keep) for kind in KINDS for keep in (True, False)]


@pytest.mark.parametrize(
    ("family", "kind", "keep"), CASES, ids=lambda value: str(getattr(value, "name", value))
)
def test_the_estimate_of_weights_is_exact(tmp_path: Path, family: str, kind: Q, keep: bool) -> None:
    """To the byte, for every architecture and for kinds that MLX has a layout for or not."""
    _, source = TINY[family].write(tmp_path, kind)
    estimated = sizer(source, "bfloat16", "cpu", "keep" if keep else "expand").weights
    convert(source, tmp_path / "out", "bfloat16", lambda done, total: None, keep_quantised=keep)
    loaded = load_model(
        tmp_path / "out", "bfloat16", expand_quantised=not keep, on_progress=lambda done, total: None
    )
    assert estimated == loaded.weights_bytes
