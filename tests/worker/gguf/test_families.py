"""What the architectures beside llama refuse, and the odd spellings that they take."""

from pathlib import Path
from typing import Any

import pytest
from support.tiny_architectures import TINY

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.architectures import ARCHITECTURES, plan
from mlxhost.worker.gguf.header import read_header


def config_of(tmp_path: Path, family: str, changes: dict[str, Any]) -> dict[str, Any]:
    _, source = TINY[family].write(tmp_path, changes=changes)
    return plan(read_header(source)).config


def test_every_architecture_has_a_tiny_model() -> None:
    """None is supported that the logits test does not try."""
    assert {tiny.architecture for tiny in TINY.values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize(
    ("family", "changes", "code", "message"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "unsupported_architecture", "softcapping is 30"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "unsupported_architecture", "softcapping is 50"),
        ("gemma3", {"attention.sliding_window": "wide"}, "bad_model", "positive integer, it is 'wide'"),
        ("gemma3", {"attention.sliding_window_pattern": 0}, "bad_model", "pattern is 0"),
        ("gemma3", {"attention.sliding_window_pattern": 7}, "unsupported_architecture", "one in 7 would"),
        (
            "gemma3",
            {"attention.sliding_window_pattern": [True, False, True, True, False, True]},
            "unsupported_architecture",
            "follow no period",
        ),
        (
            "gemma3",
            {"attention.sliding_window_pattern": [True, False]},
            "unsupported_architecture",
            "follow no period",
        ),
        (
            "qwen2",
            {"attention.key_length": 32, "attention.value_length": 32},
            "unsupported_architecture",
            "are not the hidden size 256",
        ),
        ("qwen2", {"rope.dimension_count": 16}, "unsupported_architecture", "differs from the head size"),
        ("qwen3", {"expert_count": 8}, "unsupported_architecture", "mixture of 8 experts"),
        ("qwen3", {"attention.causal": False}, "unsupported_architecture", "not causal"),
        ("qwen3moe", {"expert_count": None}, "bad_model", "expert_count is missing"),
        ("qwen3moe", {"expert_used_count": 5}, "bad_model", "is 5 of 4 experts"),
        ("qwen3moe", {"expert_count": 5}, "bad_model", r"gate_inp\.weight has the shape \[4, 256\]"),
        ("qwen3moe", {"expert_weights_scale": 2.5}, "unsupported_architecture", "weights_scale is set"),
        ("qwen3moe", {"expert_shared_count": 1}, "unsupported_architecture", "shared experts"),
        ("mixtral", {"expert_used_count": 5}, "bad_model", "is 5 of 4 experts"),
        ("mixtral", {"rope.scale_linear": 2.0}, "unsupported_architecture", "together with rope scaling"),
        (
            "mixtral",
            {"attention.key_length": 32, "attention.value_length": 32},
            "unsupported_architecture",
            "heads whose size 32",
        ),
        ("mistral3", {"attention.temperature_scale": 0.1}, "unsupported_architecture", "without rope scal"),
        ("ministral", {"attention.temperature_scale": 0.0}, "unsupported_architecture", "multiplier with"),
        ("llama", {"rope.scaling.yarn_log_multiplier": 1.0}, "unsupported_architecture", "multiplier is 1"),
    ],
)  # fmt: skip
def test_what_would_be_served_wrong_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], code: str, message: str
) -> None:
    """Each key that asks for another computation, or does not fit the tensors, is named with its value."""
    with pytest.raises(ModelError, match=message) as caught:
        config_of(tmp_path, family, changes)
    assert caught.value.code == code


def test_a_window_pattern_may_be_a_list(tmp_path: Path) -> None:
    """Which layers slide, one by one, means the same as the period."""
    slides = [True, True, False, True, True, False]
    config = config_of(tmp_path, "gemma3", {"attention.sliding_window_pattern": slides})
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (16, 3)


def test_defaults_stand_in_for_absent_keys(tmp_path: Path) -> None:
    """No key-value heads: as many as heads. No theta: 10,000. As llama.cpp has it."""
    with pytest.raises(
        ModelError, match=r"attn_k\.weight has the shape \[256, 256\], .* asks for \[512, 256\]"
    ):
        config_of(tmp_path / "a", "qwen3", {"attention.head_count_kv": None})
    assert config_of(tmp_path / "b", "qwen3", {"rope.freq_base": None})["rope_theta"] == 10_000.0
