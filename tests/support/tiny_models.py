"""Tiny random models, built in a second: the real architectures and file formats, at under 2 MB each.

Their output is noise, but deterministic noise: what matters here is that every path gives the same.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mlxhost.worker.models.architecture import import_architecture

TEXT = """
Every morning the baker opens the shop at six and puts the first loaves on the shelf by the window.
A request comes in, waits its turn, and leaves as a stream of tokens: one, two, three, and so on up to 4096.
def area(width, height): return width * height  # square metres
{"city": "Lisbon", "unit": "celsius", "days": [1, 2, 3], "rain": false, "wind": null}
The capital of France is Paris. Le café est déjà prêt. Grüße aus Köln. 東京は大きい都市です。
Привет, мир! 🙂🚀
If the queue is full, the server says so at once; otherwise it answers as soon as there is room again.
"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_scaling": None,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_SHAPE, "model_type": "llama"},
    "qwen3": {**_SHAPE, "model_type": "qwen3"},
    # Five of six layers see a window of 32 tokens only.
    "gemma3": {
        **_SHAPE,
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 32,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000.0,
    },
    "qwen3-moe": {**_SHAPE, **_EXPERTS, "model_type": "qwen3_moe"},
    # Three layers of linear attention (a state), one of full attention; experts in each.
    "qwen3-next": {
        **_SHAPE,
        **_EXPERTS,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 64,
        "partial_rotary_factor": 0.5,
    },
    # A layer of short convolutions, one of full attention.
    "lfm2": {
        **_SHAPE,
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
    # State-space layers only: nothing that grows.
    "mamba2": {
        **_SHAPE,
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 32,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 1e9],
        "time_step_rank": "auto",
    },
}


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of about 500 tokens, trained on TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def build(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    bits: int = 0,
    dtype: mx.Dtype = mx.float32,
    **overrides: Any,
) -> Path:
    """Write a random model of `family` into `directory`; with `bits`, quantised as MLX does it. `overrides`
    are fields of its config."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    config = {**FAMILIES[family], "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": eos, **overrides}
    model_class, args_class = import_architecture(config)
    model = model_class(args_class.from_dict(config))
    if family == "gemma3":
        model.sanitize({})  # no lm_head among the weights: the embeddings are tied
    keys = mx.random.split(mx.random.key(seed), 1000)
    weights = []
    for i, (name, value) in enumerate(tree_flatten(model.parameters())):
        if value.ndim > 1 and "conv" not in name:  # wide enough that greedy output is not one token for ever
            spread = 0.5 if "embed" in name else 1.5 * value.shape[-1] ** -0.5
            value = mx.random.normal(value.shape, key=keys[i]) * spread
        weights.append((name, value.astype(dtype)))
    model.load_weights(weights)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return directory
