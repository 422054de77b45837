"""Gemma 3, text (`gemma3`): four norms a layer, and layers that see a sliding window between those that see
everything."""

from mlxhost.worker.gguf.decoder import Norm, read_decoder, tensors_and_config
from mlxhost.worker.gguf.header import Header
from mlxhost.worker.gguf.metadata import Metadata
from mlxhost.worker.gguf.plan import Plan, float32, unsupported

# llama.cpp's defaults for keys that no converter wrote before 2026 (src/models/gemma3.cpp).
_PATTERN, _LOCAL_THETA = 6, 10_000.0
# Only Gemma 3 27B, which its depth tells, scales the queries by another number than the head size.
_LAYERS_27B = 62


def gemma3(header: Header) -> Plan:
    """The plan of an architecture `gemma3` file. Raises ModelError.

    GGUF stores each norm's weight with the 1 added that the model class adds itself, so 1 comes off.
    """
    metadata = header.metadata
    decoder = read_decoder(header)
    feed_forward = metadata.count("gemma3.feed_forward_length")
    window, pattern = _sliding_window(metadata, decoder.layers)
    norms = {
        "attn_norm": Norm("input_layernorm", decoder.hidden),
        "post_attention_norm": Norm("post_attention_layernorm", decoder.hidden),
        "ffn_norm": Norm("pre_feedforward_layernorm", decoder.hidden),
        "post_ffw_norm": Norm("post_feedforward_layernorm", decoder.hidden),
        **decoder.head_norms(),
    }
    projections = decoder.attention() | decoder.gated_mlp(feed_forward)
    tensors, config = tensors_and_config(header, decoder, norms, projections, shift=-1.0)
    scalar = decoder.hidden / decoder.heads if decoder.layers == _LAYERS_27B else decoder.head_dim
    config |= {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "intermediate_size": feed_forward,
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": float32(metadata.number("gemma3.rope.freq_base_swa", _LOCAL_THETA)),
        "sliding_window": window,
        "sliding_window_pattern": pattern,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
    }
    return Plan(config, tensors)


def _sliding_window(metadata: Metadata, layers: int) -> tuple[int, int]:
    """(tokens, period): the last of every `period` layers sees everything; 1 means that all do."""
    key = "gemma3.attention.sliding_window"
    if metadata.values.get(key, 0) == 0:
        return metadata.count("gemma3.context_length"), 1
    window = metadata.count(key)
    pattern = metadata.values.get(f"{key}_pattern", _PATTERN)
    if isinstance(pattern, list):
        pattern = _period(metadata, list(pattern), layers)
    elif isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise metadata.bad(f"{key}_pattern", f"is {pattern!r}")
    if pattern > layers:
        raise unsupported(metadata, f"of its {layers} layers none sees everything (one in {pattern} would)")
    return window, pattern


def _period(metadata: Metadata, slides: list[object], layers: int) -> int:
    """The period of a list that says of each layer whether it slides."""
    period = slides.index(False) + 1 if False in slides else layers + 1
    if len(slides) != layers or slides != [(layer + 1) % period != 0 for layer in range(layers)]:
        raise unsupported(metadata, "its sliding layers follow no period")
    return period
