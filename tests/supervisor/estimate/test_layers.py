"""What layers keep, beside the caches that mlx-lm's models make."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import FAMILIES, build

from mlxhost.supervisor.errors import ModelError
from mlxhost.supervisor.estimate.estimate import estimate
from mlxhost.supervisor.estimate.fields import Fields, Unsized
from mlxhost.supervisor.estimate.layers import Layer, layers_of
from mlxhost.worker.kv import RowKV
from mlxhost.worker.kvcost import measure
from mlxhost.worker.models.load import load_model

LLAMA = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


def layers(**config: Any) -> list[Layer]:
    return layers_of(Fields(Path("config.json"), config))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_a_family_cost_what_its_caches_hold(family: str, tmp_path: Path) -> None:
    """Bytes a token, windows and states are those of a row in the worker."""
    path = build(family, tmp_path)
    model = load_model(path, "float32", expand_quantised=True, on_progress=lambda *_: None).model
    row = RowKV.new(model)
    row.run(model, [1, 2, 3])
    cost, expected = measure(row), estimate(path, context=1024)
    assert expected.kv_bytes_per_token == cost.per_token
    windows = sum(min(window, 1024) * each for window, each in cost.windows)
    assert expected.kv_fixed_bytes == windows + cost.per_row


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama"}, [Layer(32)] * 3),
        ({"model_type": "llama", "head_dim": 16}, [Layer(64)] * 3),
        ({"model_type": "gpt2", "num_key_value_heads": None}, [Layer(128)] * 3),
        (
            {"model_type": "x", "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
            | {"sliding_window": 128},
            [Layer(32), Layer(32, 128), Layer(32, 128)],
        ),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 12, "qk_rope_head_dim": 4}, [Layer(16)] * 3),
        (
            {"model_type": "deepseek_v2", "kv_lora_rank": 12, "qk_rope_head_dim": 4}
            | {"qk_nope_head_dim": 4, "v_head_dim": 8},
            [Layer(8 * 16)] * 3,
        ),
        (
            {"model_type": "gemma3n_text", "num_kv_shared_layers": 2, "sliding_window_pattern": 3}
            | {"sliding_window": 32},
            [Layer(32, 32)],
        ),
        ({"model_type": "x", "text_config": {"num_hidden_layers": 1}}, [Layer(32)]),
    ],
)
def test_a_config_tells_what_its_layers_keep(config: dict[str, Any], expected: list[Layer]) -> None:
    """Full attention, windows, latent attention, layers that share, and models that wrap one."""
    assert layers(**LLAMA | config) == expected


def test_a_kind_of_layer_that_is_not_known_cannot_be_sized() -> None:
    """It is said by name."""
    with pytest.raises(Unsized, match="'telepathy'"):
        layers(**LLAMA, model_type="x", layer_types=["telepathy"] * 3)


def test_a_config_that_cannot_be_sized_is_charged_its_weights(tmp_path: Path) -> None:
    """The estimate is the weights and the process, and a note says why."""
    path = build("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"layer_types": ["telepathy"] * 2}))
    found = estimate(path)
    assert not found.sized
    assert found.total_bytes == found.weights_bytes + found.process_bytes
    assert "telepathy" in found.notes[-1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 1_000_000),
        ("num_hidden_layers", "many"),
        ("num_attention_heads", 2**40),
        ("num_key_value_heads", 1.5),
        ("num_attention_heads", 7),
        ("layer_types", ["full_attention"]),
        ("layer_types", "full_attention"),
        ("max_position_embeddings", True),
    ],
)
def test_a_field_that_makes_no_sense_is_an_error(field: str, value: object, tmp_path: Path) -> None:
    """The message names the file and the field."""
    path = build("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["head_dim"]
    (path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ModelError, match=rf"config\.json: {field}"):
        estimate(path)
