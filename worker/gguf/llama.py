"""Llama and Mistral: `llama` (Mistral 7B, Small and Mixtral, too) and `mistral3` (Ministral 3)."""

from dataclasses import replace
from typing import Any

from mlxhost.worker.gguf.decoder import Decoder, read_decoder, tensors_and_config
from mlxhost.worker.gguf.header import Header
from mlxhost.worker.gguf.plan import Plan, float32, unsupported

_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_TEMPERATURE = "attention.temperature_scale"


def llama(header: Header) -> Plan:
    """The plan of an architecture `llama` file: a Mixtral when it has experts. Raises ModelError."""
    decoder = read_decoder(header, knows=("expert_count",))
    if header.metadata.values.get("llama.expert_count", 0):
        return _mixtral(header, decoder)
    return _plan(header, decoder)


def mistral3(header: Header) -> Plan:
    """The plan of an architecture `mistral3` file: a llama, with or without Ministral 3's scaling of the
    queries by position. Raises ModelError."""
    metadata = header.metadata
    decoder = read_decoder(header, knows=(_TEMPERATURE, _LOG_MULTIPLIER))
    planned = _plan(header, decoder)
    beta = metadata.number(f"mistral3.{_TEMPERATURE}", 0.0)
    log_multiplier = metadata.number(f"mistral3.{_LOG_MULTIPLIER}", 0.0)
    config = planned.config
    if beta == 0.0:
        if log_multiplier != 0.0:
            raise unsupported(metadata, f"mistral3.{_LOG_MULTIPLIER} without mistral3.{_TEMPERATURE}")
        return planned
    scaling: dict[str, Any] | None = config.pop("rope_scaling")
    if scaling is None or scaling["rope_type"] != "yarn":
        raise unsupported(metadata, f"mistral3.{_TEMPERATURE} without rope scaling of the type yarn")
    if config["attention_bias"] or config["mlp_bias"]:
        raise unsupported(metadata, f"mistral3.{_TEMPERATURE} together with biases")
    parameters = {
        **scaling,
        "rope_theta": config.pop("rope_theta"),
        "llama_4_scaling_beta": float32(beta),
        # Rope's own factor is the ratio of the two (llama.cpp: yarn_attn_factor).
        "mscale": 1.0,
        "mscale_all_dim": float32(log_multiplier),
    }
    config |= {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_parameters": parameters,
    }
    return planned


def _mixtral(header: Header, decoder: Decoder) -> Plan:
    metadata = header.metadata
    experts = metadata.count("llama.expert_count")
    used = metadata.count("llama.expert_used_count")
    if used > experts:
        raise metadata.bad("llama.expert_used_count", f"is {used} of {experts} experts")
    if decoder.head_dim * decoder.heads != decoder.hidden:
        raise unsupported(metadata, f"experts, and heads whose size {decoder.head_dim} is given apart")
    feed_forward = metadata.count("llama.feed_forward_length")
    projections = decoder.attention(interleaved=True) | decoder.experts(
        "block_sparse_moe", experts, feed_forward
    )
    tensors, config = tensors_and_config(header, decoder, decoder.norms(), projections)
    if config["rope_scaling"] is not None:
        raise unsupported(metadata, "experts together with rope scaling")
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": feed_forward,
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "hidden_act": "silu",
    }
    return Plan(config, tensors)


def _plan(header: Header, decoder: Decoder) -> Plan:
    feed_forward = header.metadata.count(f"{decoder.prefix}.feed_forward_length")
    attention = decoder.attention(interleaved=True)
    mlp = decoder.gated_mlp(feed_forward)
    biased = {
        "attention_bias": any(f"blk.0.{part}.bias" in header.tensors for part in attention),
        "mlp_bias": any(f"blk.0.{part}.bias" in header.tensors for part in mlp),
    }
    # The model class has a bias in all of a group's layers or in none.
    projections = {part: replace(p, bias=biased["attention_bias"]) for part, p in attention.items()}
    projections |= {part: replace(p, bias=biased["mlp_bias"]) for part, p in mlp.items()}
    tensors, config = tensors_and_config(header, decoder, decoder.norms(), projections)
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return Plan(
        {**kind, **config, "intermediate_size": feed_forward, "hidden_act": "silu", **biased}, tensors
    )
