"""Weights of a converted GGUF against what went in."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from mlx.utils import tree_flatten
from numpy.typing import NDArray
from safetensors import safe_open
from support.tiny_gguf import HEAD_DIM, TinyLlama

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf import tensors, weights
from mlxhost.worker.gguf.architectures import plan
from mlxhost.worker.gguf.convert import convert
from mlxhost.worker.gguf.header import read_header


def converted(
    tmp_path: Path, tiny: TinyLlama, dtype: str = "float32"
) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    expected = tiny.write(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "out", dtype, lambda done, total: None)
    return tmp_path / "out", expected


@pytest.mark.parametrize(
    "kind", [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0], ids=lambda kind: kind.name
)
def test_each_quantisation_gives_its_own_values_in_half_split_order(tmp_path: Path, kind: Q) -> None:
    """Every weight equals the dequantised one exactly, q and k back in Hugging Face's row order."""
    directory, expected = converted(tmp_path, TinyLlama(kind))
    with safe_open(directory / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(file.get_tensor(name), values, err_msg=name)


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K], ids=lambda kind: kind.name)
def test_k_quants_give_their_own_values(tmp_path: Path, kind: Q) -> None:
    """The 256-wide block formats are read as well."""
    directory, expected = converted(tmp_path, TinyLlama(kind, hidden=256, layers=1))
    with safe_open(directory / "model.safetensors", "np") as file:
        for name, values in expected.items():
            np.testing.assert_array_equal(file.get_tensor(name), values, err_msg=name)


def test_small_chunks_and_shards_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows read a head at a time and files of 40 kB hold the same values, and the index finds them."""
    monkeypatch.setattr(tensors, "CHUNK_BYTES", HEAD_DIM * 64 * 4)
    expected = TinyLlama(Q.Q4_0, tied=False).write(tmp_path / "tiny.gguf")
    planned = plan(read_header(tmp_path / "tiny.gguf")).tensors
    written = weights.outputs(planned, "float32", keep_quantised=False)
    weights.write_weights(
        tmp_path / "tiny.gguf", written, tmp_path, "float32", lambda done, total: None, 40_000
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in expected.values())
    for name, values in expected.items():
        with safe_open(tmp_path / index["weight_map"][name], "np") as file:
            np.testing.assert_array_equal(file.get_tensor(name), values, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_as_mlx_does(tmp_path: Path, dtype: str) -> None:
    """bfloat16 and float16 weights equal MLX's own cast of the float32 ones."""
    directory, expected = converted(tmp_path, TinyLlama(), dtype)
    found = mx.load(str(directory / "model.safetensors"))
    assert isinstance(found, dict)
    for name, values in expected.items():
        wanted = mx.array(values).astype(getattr(mx, dtype))
        assert found[name].dtype == wanted.dtype
        assert mx.array_equal(found[name], wanted).item(), name


def test_values_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    """A weight of 1e6 is not turned into infinity; the message names the tensor."""
    norm = np.full(64, 1e6, np.float32)
    with pytest.raises(ModelError, match=r"output_norm\.weight does not fit float16; choose bfloat16"):
        converted(tmp_path, TinyLlama(tensors={"output_norm.weight": norm}), "float16")
    assert not (tmp_path / "out").exists()


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """A NaN in the file is named, not served."""
    norm = np.full(64, np.nan, np.float32)
    with pytest.raises(ModelError, match=r"output_norm\.weight holds values that are not finite"):
        converted(tmp_path, TinyLlama(tensors={"output_norm.weight": norm}))


def test_biases_and_output_head_are_kept(tmp_path: Path) -> None:
    """Biases arrive un-permuted, one that the file leaves out is zero, an own output head unties."""
    directory, expected = converted(
        tmp_path, TinyLlama(Q.Q8_0, tied=False, biases=("attn_q", "attn_k", "attn_v", "ffn_up"))
    )
    config = json.loads((directory / "config.json").read_text())
    assert (config["attention_bias"], config["mlp_bias"], config["tie_word_embeddings"]) == (
        True,
        True,
        False,
    )
    with safe_open(directory / "model.safetensors", "np") as file:
        for name, values in expected.items():
            np.testing.assert_array_equal(file.get_tensor(name), values, err_msg=name)
        assert not file.get_tensor("model.layers.0.self_attn.o_proj.bias").any()
        assert not file.get_tensor("model.layers.1.mlp.down_proj.bias").any()


@pytest.mark.parametrize("biases", [(), ("attn_q", "ffn_gate")])
def test_the_model_class_takes_every_weight(tmp_path: Path, biases: tuple[str, ...]) -> None:
    """mlx-lm's llama, built from the config, has exactly these parameters in these shapes."""
    directory, _ = converted(tmp_path, TinyLlama(Q.Q8_0, tied=not biases, biases=biases))
    model = llama(directory)
    ids = mx.array([[1, 5, 9]])
    assert model(ids).shape[:2] == (1, 3)
    assert len(tree_flatten(model.parameters())) > 10


def llama(directory: Path) -> nn.Module:
    """The model in `directory`, loaded strictly."""
    from mlx_lm.models.llama import Model, ModelArgs

    model = Model(ModelArgs.from_dict(json.loads((directory / "config.json").read_text())))
    model.load_weights(str(directory / "model.safetensors"), strict=True)
    return model
