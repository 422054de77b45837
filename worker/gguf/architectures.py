"""What each supported GGUF architecture becomes: the model's config and the tensors it needs.

One function and one table entry per architecture; the functions are pure (a header in, a plan out).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.header import Header, TensorInfo
from mlxhost.worker.gguf.metadata import Metadata
from mlxhost.worker.gguf.rope import rope_scaling


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the model directory. `source` None means zeros (a bias that the file leaves out).

    `head_rows` > 0: the rows of each head, so many, are stored in interleaved-rope order and must be put
    back in half-split order.
    """

    name: str
    shape: tuple[int, ...]
    source: TensorInfo | None
    head_rows: int = 0


@dataclass(frozen=True)
class Plan:
    """What to write. `config` lacks only the keys that the tokenizer decides."""

    config: dict[str, Any]
    tensors: list[PlannedTensor]

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])


def plan(header: Header) -> Plan:
    """The plan for `header`'s architecture.

    Raises ModelError: "unsupported_architecture" with the supported ones, or "bad_model" naming the key
    or tensor that is missing or does not fit.
    """
    metadata = header.metadata
    kind = metadata.text("general.type", "model")
    if kind != "model":
        raise ModelError("bad_model", f"{header.path}: a GGUF of type {kind!r}, not a model")
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            "unsupported_architecture",
            f"{header.path}: architecture {name!r} is not supported as GGUF "
            f"(supported: {', '.join(sorted(ARCHITECTURES))}); "
            "a model directory in MLX or Hugging Face form may work",
        )
    return ARCHITECTURES[name](header)


def _llama(header: Header) -> Plan:
    metadata = header.metadata
    _refuse_variants(metadata, "llama")
    hidden = metadata.count("llama.embedding_length")
    layers = metadata.count("llama.block_count")
    feed_forward = metadata.count("llama.feed_forward_length")
    heads = metadata.count("llama.attention.head_count")
    kv_heads = metadata.count("llama.attention.head_count_kv", heads)
    if "llama.attention.key_length" not in metadata and hidden % heads:
        raise metadata.bad("llama.attention.head_count", f"is {heads}, which does not divide {hidden}")
    head_dim = metadata.count("llama.attention.key_length", hidden // heads or 1)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.count(key, head_dim) != head_dim:
            raise _unsupported(metadata, f"{key} differs from the head size {head_dim}")
    if heads % kv_heads or head_dim % 2:
        raise metadata.bad("llama.attention.head_count_kv", f"does not fit {heads} heads of size {head_dim}")
    theta = metadata.number("llama.rope.freq_base", 10_000.0)

    take = _Taker(header)
    tensors = [
        take("token_embd.weight", "model.embed_tokens.weight", (take.rows("token_embd.weight"), hidden))
    ]
    attention = {
        "attn_q": ("self_attn.q_proj", (heads * head_dim, hidden), head_dim),
        "attn_k": ("self_attn.k_proj", (kv_heads * head_dim, hidden), head_dim),
        "attn_v": ("self_attn.v_proj", (kv_heads * head_dim, hidden), 0),
        "attn_output": ("self_attn.o_proj", (hidden, heads * head_dim), 0),
    }
    mlp = {
        "ffn_gate": ("mlp.gate_proj", (feed_forward, hidden), 0),
        "ffn_up": ("mlp.up_proj", (feed_forward, hidden), 0),
        "ffn_down": ("mlp.down_proj", (hidden, feed_forward), 0),
    }
    attention_bias = any(f"blk.0.{part}.bias" in header.tensors for part in attention)
    mlp_bias = any(f"blk.0.{part}.bias" in header.tensors for part in mlp)
    for layer in range(layers):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        tensors += [
            take(theirs + "attn_norm.weight", ours + "input_layernorm.weight", (hidden,)),
            take(theirs + "ffn_norm.weight", ours + "post_attention_layernorm.weight", (hidden,)),
        ]
        for parts, bias in ((attention, attention_bias), (mlp, mlp_bias)):
            for part, (name, shape, head_rows) in parts.items():
                tensors.append(take(f"{theirs}{part}.weight", f"{ours}{name}.weight", shape, head_rows))
                if bias:
                    tensors.append(
                        take(f"{theirs}{part}.bias", f"{ours}{name}.bias", shape[:1], head_rows, zeros=True)
                    )
    tensors.append(take("output_norm.weight", "model.norm.weight", (hidden,)))
    vocabulary = tensors[0].shape[0]
    tied = "output.weight" not in header.tensors
    if not tied:
        tensors.append(take("output.weight", "lm_head.weight", (vocabulary, hidden)))
    factors = take.optional("rope_freqs.weight")
    take.refuse_leftovers(r"blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _float32(metadata.number("llama.attention.layer_norm_rms_epsilon")),
        "vocab_size": vocabulary,
        "rope_theta": _float32(theta),
        "rope_scaling": rope_scaling(header, "llama", head_dim, theta, factors),
        "max_position_embeddings": metadata.count("llama.context_length"),
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "tie_word_embeddings": tied,
    }
    return Plan(config, tensors)


ARCHITECTURES: dict[str, Callable[[Header], Plan]] = {"llama": _llama}


class _Taker:
    """Takes tensors out of a header, checks their shapes, and knows in the end which nobody took."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.left = set(header.tensors)

    def rows(self, theirs: str) -> int:
        tensor = self.header.tensors.get(theirs)
        return tensor.shape[0] if tensor else 0

    def __call__(
        self, theirs: str, ours: str, shape: tuple[int, ...], head_rows: int = 0, *, zeros: bool = False
    ) -> PlannedTensor:
        source = self.header.tensors.get(theirs)
        if source is None and not zeros:
            raise ModelError("bad_model", f"{self.header.path}: tensor {theirs} is missing")
        if source is not None and source.shape != shape:
            raise ModelError(
                "bad_model",
                f"{self.header.path}: tensor {theirs} has the shape {list(source.shape)}, "
                f"the metadata asks for {list(shape)}",
            )
        self.left.discard(theirs)
        return PlannedTensor(ours, shape, source, head_rows)

    def optional(self, theirs: str) -> TensorInfo | None:
        self.left.discard(theirs)
        return self.header.tensors.get(theirs)

    def refuse_leftovers(self, ignored: str) -> None:
        for name in sorted(self.left):
            if not re.fullmatch(ignored, name):
                raise _unsupported(self.header.metadata, f"tensor {name} is not part of the architecture")


def _refuse_variants(metadata: Metadata, prefix: str) -> None:
    """Models that share the architecture's name but compute something else."""
    for key in ("attention.scale", "logit_scale", "embedding_scale", "residual_scale"):
        if f"{prefix}.{key}" in metadata:
            raise _unsupported(metadata, f"{prefix}.{key} is set")
    if metadata.values.get(f"{prefix}.expert_count", 0):
        raise _unsupported(metadata, "it is a mixture of experts")
    if not metadata.flag(f"{prefix}.attention.causal", True):
        raise _unsupported(metadata, "its attention is not causal")


def _unsupported(metadata: Metadata, why: str) -> ModelError:
    name = metadata.text("general.architecture")
    return ModelError(
        "unsupported_architecture",
        f"{metadata.path}: this variant of the {name} architecture is not supported as GGUF: {why}",
    )


def _float32(value: float) -> float:
    """The shortest decimal that is this float32: 9.99999974e-06 was written as 1e-05."""
    return float(f"{value:.7g}")
