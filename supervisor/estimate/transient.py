"""What computing takes beyond weights and caches: the activations of one prefill chunk, the logits of a step.

MLX frees a layer's intermediates before the next layer needs its own, so the largest layer counts, not their
sum. Logits of prompt tokens are never computed.
"""

from collections.abc import Sequence

from mlxhost.supervisor.estimate import recurrent
from mlxhost.supervisor.estimate.fields import Fields, Unsized
from mlxhost.supervisor.estimate.layers import Layer

MAX_CHUNK, MIN_CHUNK = 2048, 32  # as worker/prefill.py bounds them
GAP_S, SHORT_S = 0.25, 0.05  # what a chunk may take, and what is short enough not to matter
# Float32 products of a fast BLAS, measured on an EPYC core: 300 tokens a second of a 135M model on two.
CPU_FLOPS_A_CORE = 40e9
CPU_BYTES_S = 10e9  # weights read from memory
# Freed buffers that a lease lets MLX keep for reuse, at the least: they are held whatever a chunk takes.
BUFFER_BYTES = 32 << 20
# Head sizes for which a GPU attends without writing the scores down (mlx's scaled_dot_product_attention).
FUSED_HEADS = frozenset({64, 80, 128})
_ROWS = {"cpu": 16}  # decoded together; 64 elsewhere, as worker/backend.py has it
_LOGIT_COPIES = 3  # logits, their scaled form, noise


def chunk_tokens(parameters: int, itemsize: int, backend: str, cores: int, context: int) -> int:
    """Tokens that the worker will prefill at once (worker/chunks.py): what it can do in the gap it aims at,
    and no more than makes reading the `parameters` (embeddings aside) worth it."""
    if backend != "cpu":
        return min(MAX_CHUNK, context)
    start_s = parameters * itemsize / CPU_BYTES_S
    budget_s = min(GAP_S, max(SHORT_S, 9 * start_s))
    chunk = int(budget_s * CPU_FLOPS_A_CORE * cores / (2 * max(1, parameters)))
    return min(max(chunk, MIN_CHUNK), MAX_CHUNK, context)


def transient_bytes(
    fields: Fields, layers: Sequence[Layer], chunk: int, context: int, itemsize: int, backend: str
) -> int:
    """The largest of what prefill and decode hold for a moment. Raises Unsized or ModelError."""
    hidden = fields.count("hidden_size", "d_model", "n_embd", "dim")
    heads = fields.count("num_attention_heads", "n_heads", "n_head", "num_heads")
    vocabulary = fields.count("vocab_size", default=0)
    rows = _ROWS.get(backend, 64)
    attention = 0
    if any(layer.per_token for layer in layers):
        size = fields.count("head_dim", default=hidden // max(1, heads))
        attention = 4 * chunk * heads * size
        if backend == "cpu" or size not in FUSED_HEADS:
            attention += 2 * chunk * heads * context
    # Rotating caches hold the chunk beside their window, and a growing cache is copied when it grows.
    copies = max((_copied(layer, chunk, context) for layer in layers), default=0)
    windows = sum(layer.per_token * chunk for layer in layers if layer.window)
    prefill = 3 * chunk * hidden + max(attention, 3 * chunk * _widest(fields, hidden)) + copies + windows
    recurrent_work = 0
    if any(layer.state or layer.state32 for layer in layers):
        recurrent_work = recurrent.work(fields, chunk, backend)
    return max(
        BUFFER_BYTES,
        itemsize * max(prefill, 3 * chunk * hidden + recurrent_work, _LOGIT_COPIES * rows * vocabulary),
    )


def _copied(layer: Layer, chunk: int, context: int) -> int:
    return layer.per_token * (min(context, layer.window + chunk) if layer.window else context)


def _widest(fields: Fields, hidden: int) -> int:
    """Numbers a token has in the widest feed-forward layer."""
    try:
        dense = fields.count("intermediate_size", "ffn_hidden_size", "n_inner", "hidden_dim")
    except Unsized:
        dense = 4 * hidden
    chosen = fields.count(
        "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", default=0
    )
    shared = fields.count("shared_expert_intermediate_size", default=0)
    return max(dense, chosen * fields.count("moe_intermediate_size", default=dense) + shared)
