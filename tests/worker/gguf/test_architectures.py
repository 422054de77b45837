"""The config that a GGUF's metadata becomes, and what is refused."""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray
from support.tiny_gguf import HEAD_DIM, TinyLlama

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.architectures import plan
from mlxhost.worker.gguf.header import read_header


def config_of(tmp_path: Path, tiny: TinyLlama) -> dict[str, Any]:
    tiny.write(tmp_path / "tiny.gguf")
    return plan(read_header(tmp_path / "tiny.gguf")).config


def test_llama_config_holds_the_metadata(tmp_path: Path) -> None:
    """Sizes, epsilon (as it was written, not its float32 expansion) and defaults arrive."""
    config = config_of(tmp_path, TinyLlama(metadata={"llama.rope.freq_base": 100000.0}))
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": config["vocab_size"],
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }
    assert 300 < config["vocab_size"] <= 400


@pytest.mark.parametrize(
    ("metadata", "code", "message"),
    [
        ({"general.architecture": "mamba"}, "unsupported_architecture", r"'mamba' .*supported: gemma3"),
        ({"general.type": "adapter"}, "bad_model", "type 'adapter'"),
        ({"llama.expert_count": 8}, "bad_model", "expert_used_count is missing"),
        ({"llama.logit_scale": 0.5}, "unsupported_architecture", "logit_scale"),
        ({"llama.attention.causal": False}, "unsupported_architecture", "not causal"),
        ({"llama.rope.dimension_count": 8}, "unsupported_architecture", "dimension_count differs"),
        ({"llama.embedding_length": None}, "bad_model", "embedding_length is missing"),
        ({"llama.embedding_length": 0}, "bad_model", "positive integer, it is 0"),
        ({"llama.embedding_length": "big"}, "bad_model", "positive integer, it is 'big'"),
        ({"llama.block_count": 3}, "bad_model", r"blk\.2\.attn_norm\.weight is missing"),
        ({"llama.block_count": 1}, "unsupported_architecture", r"blk\.1\.attn_k\.weight is not part"),
        ({"llama.attention.head_count": 3}, "bad_model", "does not divide 64"),
        ({"llama.attention.head_count_kv": 3}, "bad_model", "does not fit 4 heads"),
        ({"llama.feed_forward_length": 128}, "bad_model", r"ffn_gate\.weight has the shape \[96, 64\]"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "bad_model", "epsilon is nan"),
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
            "unsupported_architecture",
            "'longrope'",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    tmp_path: Path, metadata: dict[str, Any], code: str, message: str
) -> None:
    """Each wrong key gives its own error, with the value and what is supported."""
    with pytest.raises(ModelError, match=message) as caught:
        config_of(tmp_path, TinyLlama(metadata=metadata))
    assert caught.value.code == code
    assert str(tmp_path / "tiny.gguf") in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
)
def test_rope_scaling_keys_become_an_entry(
    tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Linear (both spellings) and yarn scaling arrive."""
    assert config_of(tmp_path, TinyLlama(metadata=metadata))["rope_scaling"] == expected


def llama3_divisors(factor: float, context: int, theta: float) -> NDArray[np.float32]:
    """What llama.cpp's converter writes for Llama 3.1 (LlamaModel.generate_extra_tensors)."""
    out = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * theta ** (i / HEAD_DIM)
        if wavelength < context / 4:
            out.append(1.0)
        elif wavelength > context:
            out.append(factor)
        else:
            smooth = (context / wavelength - 1) / 3
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize(("factor", "context"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
def test_frequency_factors_become_llama3_scaling(tmp_path: Path, factor: float, context: int) -> None:
    """The parameters found give MLX's rope the very frequencies that the file's factors give."""
    from mlx_lm.models.rope_utils import initialize_rope

    divisors = llama3_divisors(factor, context, 500000.0)
    config = config_of(
        tmp_path,
        TinyLlama(metadata={"llama.rope.freq_base": 500000.0}, tensors={"rope_freqs.weight": divisors}),
    )
    scaling = config["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", factor)
    assert scaling["original_max_position_embeddings"] == context
    rope = initialize_rope(HEAD_DIM, 500000.0, False, scaling, 131072)
    wanted = 500000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM) * divisors
    assert mx.allclose(rope._freqs, mx.array(wanted.astype(np.float32)), rtol=1e-3).item()


def test_other_frequency_factors_are_refused(tmp_path: Path) -> None:
    """Factors that no llama3 parameters give are an error, not a guess."""
    factors = np.linspace(1, 7, HEAD_DIM // 2, dtype=np.float32)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight are not those of Llama 3"):
        config_of(tmp_path, TinyLlama(tensors={"rope_freqs.weight": factors}))
