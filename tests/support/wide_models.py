"""Random models of every tiny family, wide enough that their memory stands out from a process's own.

Some tens of megabytes of weights and of KV cache at CONTEXT tokens, and a prefill of a second or two.
"""

from pathlib import Path
from typing import Any

from support.tiny_models import build

CONTEXT = 1024
_WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_768,
    "max_position_embeddings": CONTEXT,
}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 512}
WIDE: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "qwen3": _WIDE,
    "gemma3": {**_WIDE, "num_hidden_layers": 6, "sliding_window": 512, "query_pre_attn_scalar": 64},
    "qwen3-moe": {**_WIDE, **_EXPERTS},
    "qwen3-next": {
        **_WIDE,
        **_EXPERTS,
        "shared_expert_intermediate_size": 512,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "lfm2": {
        **_WIDE,
        "block_dim": 512,
        "block_ff_dim": 1024,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
    "mamba2": {**_WIDE, "num_heads": 16, "head_dim": 64, "state_size": 64},
}


def build_wide(family: str, directory: Path) -> Path:
    """Write the wide model of `family` into `directory`."""
    return build(family, directory, **WIDE[family])
