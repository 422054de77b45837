"""Qwen: `qwen2`, `qwen3` and `qwen3moe`. The rows of q and k are in Hugging Face's order in all of them."""

from mlxhost.worker.gguf.decoder import read_decoder, tensors_and_config
from mlxhost.worker.gguf.header import Header
from mlxhost.worker.gguf.plan import Plan, unsupported


def qwen2(header: Header) -> Plan:
    """The plan of an architecture `qwen2` file: q, k and v have biases. Raises ModelError."""
    metadata = header.metadata
    decoder = read_decoder(header)
    if decoder.head_dim * decoder.heads != decoder.hidden:
        raise unsupported(
            metadata,
            f"{decoder.heads} heads of size {decoder.head_dim} are not the hidden size {decoder.hidden}",
        )
    feed_forward = metadata.count("qwen2.feed_forward_length")
    projections = decoder.attention(bias=True) | decoder.gated_mlp(feed_forward)
    tensors, config = tensors_and_config(header, decoder, decoder.norms(), projections)
    kind = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return Plan({**kind, **config, "intermediate_size": feed_forward, "hidden_act": "silu"}, tensors)


def qwen3(header: Header) -> Plan:
    """The plan of an architecture `qwen3` file: queries and keys are normed head by head. Raises
    ModelError."""
    decoder = read_decoder(header)
    feed_forward = header.metadata.count("qwen3.feed_forward_length")
    projections = decoder.attention() | decoder.gated_mlp(feed_forward)
    tensors, config = tensors_and_config(header, decoder, decoder.norms() | decoder.head_norms(), projections)
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return Plan({**kind, **config, "intermediate_size": feed_forward, "hidden_act": "silu"}, tensors)


def qwen3moe(header: Header) -> Plan:
    """The plan of an architecture `qwen3moe` file: every layer's MLP is a mixture of experts, whose
    weights lie stacked in one tensor. Raises ModelError."""
    metadata = header.metadata
    decoder = read_decoder(header, knows=("expert_count",))
    experts = metadata.count("qwen3moe.expert_count")
    used = metadata.count("qwen3moe.expert_used_count")
    if used > experts:
        raise metadata.bad("qwen3moe.expert_used_count", f"is {used} of {experts} experts")
    if metadata.number("qwen3moe.expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise unsupported(metadata, "qwen3moe.expert_weights_scale is set")
    if metadata.values.get("qwen3moe.expert_shared_count", 0):
        raise unsupported(metadata, "it has shared experts")
    # llama.cpp's default, from before the key was written.
    default = max(1, metadata.count("qwen3moe.feed_forward_length", used) // used)
    each = metadata.count("qwen3moe.expert_feed_forward_length", default)
    projections = decoder.attention() | decoder.experts("mlp", experts, each)
    tensors, config = tensors_and_config(header, decoder, decoder.norms() | decoder.head_norms(), projections)
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": metadata.count("qwen3moe.feed_forward_length", each),
        "moe_intermediate_size": each,
        "num_experts": experts,
        "num_experts_per_tok": used,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
    }
    return Plan(config, tensors)
