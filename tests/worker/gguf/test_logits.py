"""A converted GGUF computes what the same weights in MLX's own form compute."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from mlx.utils import tree_flatten
from support.tiny_architectures import TINY, WINDOW

from mlxhost.worker.gguf.convert import convert
from mlxhost.worker.gguf.repack import LAYOUTS
from mlxhost.worker.models.load import load_model
from mlxhost.worker.selftest import self_test


def converted(source: Path, *, keep: bool = False) -> Path:
    directory = source.parent / "converted"
    convert(source, directory, "float32", lambda done, total: None, keep_quantised=keep)
    return directory


def loaded(directory: Path, *, expand: bool = True) -> nn.Module:
    model: nn.Module = load_model(
        directory, "float32", expand_quantised=expand, on_progress=lambda done, total: None
    ).model
    return model


def logits(model: nn.Module) -> mx.array:
    """Of a prompt longer than the sliding window and the original context, and of four tokens behind it."""
    ids = (mx.arange(3 * WINDOW) * 7 + 3) % 300
    cache = model.make_cache() if hasattr(model, "make_cache") else make_cache(model)
    steps = [model(ids[None], cache=cache)[0]]
    steps += [model(mx.array([[token]]), cache=cache)[0] for token in (5, 9, 250, 17)]
    return mx.concatenate(steps)


def make_cache(model: nn.Module) -> list[object]:
    from mlx_lm.models.cache import KVCache

    return [KVCache() for _ in model.layers]


@pytest.mark.parametrize("family", TINY)
def test_logits_equal_those_of_the_same_weights_in_mlx_form(tmp_path: Path, family: str) -> None:
    """Every architecture and variant: the same logits to the last bit, through prefill and cached steps,
    and the load-time self-test passes."""
    directory, source = TINY[family].write(tmp_path)
    ours, theirs = loaded(converted(source)), loaded(directory)
    found, wanted = logits(ours), logits(theirs)
    assert mx.array_equal(found, wanted).item()
    assert float(mx.std(wanted).item()) > 0.01
    self_test(ours, wanted.shape[-1], "float32")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3moe", "gemma3 with all keys"])
@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_K, Q.Q6_K], ids=lambda kind: kind.name)
def test_quantised_files_give_the_logits_of_their_dequantised_values(
    tmp_path: Path, family: str, kind: Q
) -> None:
    """Expanded while converting, or kept and expanded while loading (which stacks of experts are not): bit
    for bit the same logits. Kept to the end: quantised layers, and logits that differ by rounding only."""
    directory, source = TINY[family].write(tmp_path, kind)
    wanted = logits(loaded(directory))
    assert mx.array_equal(logits(loaded(converted(source))), wanted).item()
    kept = source.parent / "kept"
    convert(source, kept, "float32", lambda done, total: None, keep_quantised=True)
    expanded = logits(loaded(kept))
    assert mx.array_equal(expanded, wanted).item() or family == "qwen3moe"
    np.testing.assert_allclose(np.array(expanded), np.array(wanted), atol=2e-3, rtol=2e-3)
    model = loaded(kept, expand=False)
    quantised = [
        name for name, module in model.named_modules() if type(module).__name__.startswith("Quantized")
    ]
    assert bool(quantised) == (kind in LAYOUTS)
    np.testing.assert_allclose(np.array(logits(model)), np.array(wanted), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_kept_blocks_hold_the_files_values(tmp_path: Path, kind: Q) -> None:
    """Each kind that MLX has a layout for: MLX's own dequantisation of what was written gives the file's
    values to the last bit, and every layer says how it is laid out."""
    directory, source = TINY["qwen3moe"].write(tmp_path, kind)
    wanted = dict(tree_flatten(loaded(directory).parameters()))
    model = loaded(converted(source, keep=True), expand=False)
    checked = 0
    for name, module in model.named_modules():
        if not type(module).__name__.startswith("Quantized"):
            continue
        values = mx.dequantize(
            module.weight,
            module.scales,
            module.get("biases"),
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )
        assert mx.array_equal(values.astype(mx.float32), wanted[f"{name}.weight"]).item(), name
        checked += 1
    assert checked == 2 * 8 + (kind != Q.MXFP4)
