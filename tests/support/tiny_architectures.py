"""A tiny random model of each GGUF architecture, twice: as an MLX directory and as a GGUF file.

The way from one to the other is written down here as llama.cpp's converter has it, independently of the
package under test.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf import GGUFWriter
from gguf.quants import dequantize
from mlx.utils import tree_flatten
from numpy.typing import NDArray
from support.tiny_gguf import add_key, bpe_metadata, deinterleave, interleave, pack, tiny_bpe

from mlxhost.worker.models.architecture import import_architecture

HIDDEN = FEED_FORWARD = 256  # one block of the widest kinds
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 128
WINDOW = 16

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
    "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
}
_MIXTRAL_NAMES = _NAMES | {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.switch_mlp.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.switch_mlp.up_proj": "ffn_up_exps",
    "block_sparse_moe.switch_mlp.down_proj": "ffn_down_exps",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}


@dataclass(frozen=True)
class Tiny:
    """What a family's config.json says beyond the common sizes, and what its GGUF keys say beyond them."""

    architecture: str
    config: Mapping[str, Any]
    keys: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 2
    head_dim: int = HEAD_DIM
    interleaved: bool = False
    names: Mapping[str, str] = field(default_factory=lambda: _NAMES)
    norm_shift: float = 0.0

    def write(
        self, folder: Path, kind: Q = Q.F32, changes: Mapping[str, Any] | None = None
    ) -> tuple[Path, Path]:
        """(MLX directory in float32, GGUF file) of one random model; matrices of the GGUF are of `kind`,
        and the directory holds their dequantised values. `changes` override keys of the GGUF, under the
        architecture's prefix; None removes one."""
        folder.mkdir(parents=True, exist_ok=True)
        vocabulary = bpe_metadata(tiny_bpe())
        config = self._config(len(vocabulary["tokenizer.ggml.tokens"]))
        source = folder / "tiny.gguf"
        writer = GGUFWriter(source, self.architecture)
        changed = {f"{self.architecture}.{key}": value for key, value in (changes or {}).items()}
        for key, value in {**self._keys(), **vocabulary, **changed}.items():
            if value is not None:
                add_key(writer, key, value)
        weights = {}
        for name, values in _random_weights(config).items():
            weights[name] = mx.array(self._add(writer, name, values, kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        directory = folder / "mlx"
        directory.mkdir()
        mx.save_safetensors(str(directory / "model.safetensors"), weights)
        (directory / "config.json").write_text(json.dumps(config))
        return directory, source

    def _config(self, vocabulary: int) -> dict[str, Any]:
        common = {
            "hidden_size": HIDDEN,
            "num_hidden_layers": self.layers,
            "intermediate_size": FEED_FORWARD,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-6,
            "rope_theta": 50_000.0,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "vocab_size": vocabulary,
        }
        return {**common, **self.config}

    def _keys(self) -> dict[str, Any]:
        keys = {
            "block_count": self.layers,
            "context_length": 256,
            "embedding_length": HIDDEN,
            "feed_forward_length": FEED_FORWARD,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 50_000.0,
            **self.keys,
        }
        return {f"{self.architecture}.{key}": value for key, value in keys.items()}

    def _add(
        self, writer: GGUFWriter, name: str, values: NDArray[np.float32], kind: Q
    ) -> NDArray[np.float32]:
        """Add a tensor; gives its values as they should come back."""
        theirs = self._name(name)
        rotated = self.interleaved and theirs.split(".")[-2] in ("attn_q", "attn_k")
        stored = interleave(values, self.head_dim) if rotated else values
        if "norm" in name:
            stored = stored + np.float32(self.norm_shift)
        if values.ndim == 1 or kind == Q.F32:
            writer.add_tensor(theirs, stored)
            return values
        packed = pack(stored.reshape(-1, stored.shape[-1]), kind)
        writer.add_tensor(theirs, packed.reshape(*stored.shape[:-1], -1), raw_dtype=kind)
        back = np.ascontiguousarray(dequantize(packed, kind), np.float32).reshape(values.shape)
        return deinterleave(back, self.head_dim) if rotated else back

    def _name(self, name: str) -> str:
        if name in _OUTER:
            return _OUTER[name]
        _, _, layer, rest = name.split(".", 3)
        part, suffix = rest.rsplit(".", 1)
        return f"blk.{layer}.{self.names[part]}.{suffix}"


def _random_weights(config: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Under the names and in the shapes of mlx-lm's model class."""
    model_class, args_class = import_architecture(config)
    model = model_class(args_class.from_dict(config))
    if config["tie_word_embeddings"]:
        model.sanitize({})  # Gemma's drops its output head when there is none among the weights
    rng = np.random.default_rng(0)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        values = rng.standard_normal(value.shape, np.float32)
        # Norm weights that GGUF stores plus 1 come back only as exactly as 1 + w holds w.
        weights[name] = values * value.shape[-1] ** -0.5 if value.ndim > 1 else np.round(values * 64) / 256
    return weights


_GEMMA = {
    "model_type": "gemma3_text",
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": HEAD_DIM,
    "rope_local_base_freq": 10_000.0,
}
_GEMMA_FORM: dict[str, Any] = {"names": _GEMMA_NAMES, "norm_shift": 1.0}
_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": FEED_FORWARD,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

TINY: dict[str, Tiny] = {
    "llama": Tiny("llama", {"model_type": "llama", "tie_word_embeddings": False}, interleaved=True),
    "llama with biases": Tiny(
        "llama", {"model_type": "llama", "attention_bias": True, "mlp_bias": True}, interleaved=True
    ),
    "mixtral": Tiny(
        "llama",
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {"expert_count": 4, "expert_used_count": 2},
        head_dim=HIDDEN // HEADS,
        interleaved=True,
        names=_MIXTRAL_NAMES,
    ),
    "mistral3": Tiny("mistral3", {"model_type": "mistral"}, interleaved=True),
    "ministral": Tiny(
        "mistral3",
        {
            "model_type": "ministral3",
            "rope_parameters": {
                **_YARN,
                "rope_theta": 50_000.0,
                "llama_4_scaling_beta": 0.125,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        {**_YARN_KEYS, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.125},
        interleaved=True,
    ),
    "qwen2": Tiny("qwen2", {"model_type": "qwen2"}, head_dim=HIDDEN // HEADS),
    "qwen2 with yarn": Tiny(
        "qwen2", {"model_type": "qwen2", "rope_scaling": _YARN}, _YARN_KEYS, head_dim=HIDDEN // HEADS
    ),
    "qwen3": Tiny("qwen3", {"model_type": "qwen3", "tie_word_embeddings": False}),
    "qwen3moe": Tiny(
        "qwen3moe",
        _MOE,
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": FEED_FORWARD},
    ),
    "gemma3": Tiny(
        "gemma3",
        {**_GEMMA, "sliding_window_pattern": 6},
        {"attention.sliding_window": WINDOW},
        layers=6,
        **_GEMMA_FORM,
    ),
    "gemma3 with all keys": Tiny(
        "gemma3",
        {
            **_GEMMA,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 20_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "tie_word_embeddings": False,
        },
        {
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base_swa": 20_000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        **_GEMMA_FORM,
    ),
    "gemma3 without a window": Tiny(
        "gemma3", {**_GEMMA, "sliding_window": 256, "sliding_window_pattern": 1}, **_GEMMA_FORM
    ),
}
