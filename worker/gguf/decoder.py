"""What the supported architectures have in common: sizes, config keys and the stack of layers.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; what a missing key means is taken
from llama.cpp's loaders.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxhost.worker.gguf.header import Header
from mlxhost.worker.gguf.metadata import Metadata
from mlxhost.worker.gguf.plan import PlannedTensor, Taker, float32, unsupported
from mlxhost.worker.gguf.rope import rope_scaling

# Per-layer copies of what rope is told by other keys.
_IGNORED = r"blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight"
# Each of these changes what a model computes; the architectures that know one take it out of the list.
_VARIANTS = (
    "attention.scale",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "rope.scaling.yarn_log_multiplier",
)


@dataclass(frozen=True)
class Projection:
    """A linear layer: its name under the layer, its weight's shape, and whether it has a bias. `head_rows`
    as in PlannedTensor."""

    name: str
    shape: tuple[int, ...]
    head_rows: int = 0
    bias: bool = False


@dataclass(frozen=True)
class Norm:
    """A norm's weight: its name under the layer, and its length."""

    name: str
    size: int


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder, as the metadata under `prefix` gives them."""

    prefix: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    context: int

    def attention(self, *, interleaved: bool = False, bias: bool = False) -> dict[str, Projection]:
        """The q, k and v projections and the one behind them. `interleaved`: q's and k's rows are stored in
        interleaved-rope order. `bias` is of q, k and v."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = self.head_dim if interleaved else 0
        return {
            "attn_q": Projection("self_attn.q_proj", (queries, self.hidden), rows, bias),
            "attn_k": Projection("self_attn.k_proj", (keys, self.hidden), rows, bias),
            "attn_v": Projection("self_attn.v_proj", (keys, self.hidden), 0, bias),
            "attn_output": Projection("self_attn.o_proj", (self.hidden, queries)),
        }

    def gated_mlp(self, feed_forward: int) -> dict[str, Projection]:
        """The three projections of a gated MLP."""
        return {
            "ffn_gate": Projection("mlp.gate_proj", (feed_forward, self.hidden)),
            "ffn_up": Projection("mlp.up_proj", (feed_forward, self.hidden)),
            "ffn_down": Projection("mlp.down_proj", (self.hidden, feed_forward)),
        }

    def experts(self, name: str, count: int, feed_forward: int) -> dict[str, Projection]:
        """A mixture of `count` gated MLPs, stacked, and the router to them, under `name`."""
        stack = f"{name}.switch_mlp"
        return {
            "ffn_gate_inp": Projection(f"{name}.gate", (count, self.hidden)),
            "ffn_gate_exps": Projection(f"{stack}.gate_proj", (count, feed_forward, self.hidden)),
            "ffn_up_exps": Projection(f"{stack}.up_proj", (count, feed_forward, self.hidden)),
            "ffn_down_exps": Projection(f"{stack}.down_proj", (count, self.hidden, feed_forward)),
        }

    def norms(self) -> dict[str, Norm]:
        """The norms before attention and before the MLP."""
        return {
            "attn_norm": Norm("input_layernorm", self.hidden),
            "ffn_norm": Norm("post_attention_layernorm", self.hidden),
        }

    def head_norms(self) -> dict[str, Norm]:
        """The norms of each head's queries and keys."""
        return {
            "attn_q_norm": Norm("self_attn.q_norm", self.head_dim),
            "attn_k_norm": Norm("self_attn.k_norm", self.head_dim),
        }


def read_decoder(header: Header, *, knows: tuple[str, ...] = ()) -> Decoder:
    """The sizes in `header`.

    Raises ModelError: "bad_model" for a key that is missing or does not fit the others,
    "unsupported_architecture" for a key that asks for another computation, `knows` excepted.
    """
    metadata = header.metadata
    prefix = metadata.text("general.architecture")
    _refuse_variants(metadata, prefix, knows)
    hidden = metadata.count(f"{prefix}.embedding_length")
    layers = metadata.count(f"{prefix}.block_count")
    heads = metadata.count(f"{prefix}.attention.head_count")
    kv_heads = metadata.count(f"{prefix}.attention.head_count_kv", heads)
    if f"{prefix}.attention.key_length" not in metadata and hidden % heads:
        raise metadata.bad(f"{prefix}.attention.head_count", f"is {heads}, which does not divide {hidden}")
    head_dim = metadata.count(f"{prefix}.attention.key_length", hidden // heads or 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.count(f"{prefix}.{key}", head_dim) != head_dim:
            raise unsupported(metadata, f"{prefix}.{key} differs from the head size {head_dim}")
    if heads % kv_heads or head_dim % 2:
        raise metadata.bad(
            f"{prefix}.attention.head_count_kv", f"does not fit {heads} heads of size {head_dim}"
        )
    return Decoder(
        prefix=prefix,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=float32(metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon")),
        theta=metadata.number(f"{prefix}.rope.freq_base", 10_000.0),
        context=metadata.count(f"{prefix}.context_length"),
    )


def tensors_and_config(
    header: Header,
    decoder: Decoder,
    norms: Mapping[str, Norm],
    projections: Mapping[str, Projection],
    *,
    shift: float = 0.0,
) -> tuple[list[PlannedTensor], dict[str, Any]]:
    """All tensors of a model whose layers hold `norms` and `projections` (by their GGUF names), and the
    config keys that every architecture has. `shift` is added to the norms' weights.

    Raises ModelError for a tensor that is missing, too many or of another shape.
    """
    take = Taker(header)
    vocabulary = take.rows("token_embd.weight")
    tensors = [take("token_embd.weight", "model.embed_tokens.weight", (vocabulary, decoder.hidden))]
    for layer in range(decoder.layers):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        for part, norm in norms.items():
            tensors.append(
                take(f"{theirs}{part}.weight", f"{ours}{norm.name}.weight", (norm.size,), shift=shift)
            )
        for part, projection in projections.items():
            name, rows = ours + projection.name, projection.head_rows
            tensors.append(take(f"{theirs}{part}.weight", f"{name}.weight", projection.shape, head_rows=rows))
            if projection.bias:
                shape = projection.shape[:1]
                bias = take(f"{theirs}{part}.bias", f"{name}.bias", shape, head_rows=rows, zeros=True)
                tensors.append(bias)
    tensors.append(take("output_norm.weight", "model.norm.weight", (decoder.hidden,), shift=shift))
    tied = "output.weight" not in header.tensors
    if not tied:
        tensors.append(take("output.weight", "lm_head.weight", (vocabulary, decoder.hidden)))
    factors = take.optional("rope_freqs.weight")
    take.refuse_leftovers(_IGNORED)
    return tensors, {
        "hidden_size": decoder.hidden,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "rms_norm_eps": decoder.eps,
        "vocab_size": vocabulary,
        "rope_theta": float32(decoder.theta),
        "rope_scaling": rope_scaling(header, decoder.prefix, decoder.head_dim, decoder.theta, factors),
        "max_position_embeddings": decoder.context,
        "tie_word_embeddings": tied,
    }


def _refuse_variants(metadata: Metadata, prefix: str, knows: tuple[str, ...]) -> None:
    """Models that share the architecture's name but compute something else."""
    for key in _VARIANTS:
        value = metadata.values.get(f"{prefix}.{key}", 0)
        if value == 0 or key in knows:
            continue
        if key == "expert_count":
            raise unsupported(metadata, f"it is a mixture of {value} experts")
        raise unsupported(metadata, f"{prefix}.{key} is {value}")
    if not metadata.flag(f"{prefix}.attention.causal", True):
        raise unsupported(metadata, "its attention is not causal")
