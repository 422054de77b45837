"""What each layer of a model remembers of a request, from its config: keys and values, a window, a state.

Follows the `make_cache` methods and attention classes of mlx_lm.models; recurrent layers are in
`recurrent.py`. A model kind without rules of its own is taken as transformers describe one: `layer_types`
where given, else full attention everywhere, which is also mlx-lm's default.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mlxhost.supervisor.estimate import recurrent
from mlxhost.supervisor.estimate.fields import Fields, Unsized


@dataclass(frozen=True, slots=True)
class Layer:
    """Numbers that one layer keeps for a request. A window of 0 keeps every token."""

    per_token: int = 0
    window: int = 0
    state: int = 0  # of the compute dtype, whatever the length
    state32: int = 0  # of float32


Kinds = list[str]  # one of FULL, SLIDING, CHUNKED, RECURRENT, NONE for each layer
FULL, SLIDING, CHUNKED, RECURRENT, NONE = "full", "sliding", "chunked", "recurrent", "none"

_BY_LAYER_TYPE = {
    "full_attention": FULL,
    "attention": FULL,
    "global": FULL,
    "sliding_attention": SLIDING,
    "sliding": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": RECURRENT,
    "conv": RECURRENT,
    "mamba": RECURRENT,
    "recurrent": RECURRENT,
    "moe": NONE,
    "mlp": NONE,
}
# Kinds whose attention caches the latent vector of multi-head latent attention, not the keys and values
# made of it; deepseek_v2 and minicpm3 cache the latter.
_EXPANDED_LATENT = frozenset({"deepseek_v2", "minicpm3"})


def layers_of(fields: Fields) -> list[Layer]:
    """One entry for each layer that keeps something. Raises Unsized, or ModelError for a bad field."""
    kinds = kinds_of(fields)
    found = []
    for index, kind in enumerate(kinds):
        if kind is RECURRENT:
            state, state32 = recurrent.state(fields)
            found.append(Layer(state=state, state32=state32))
        elif kind in (FULL, SLIDING, CHUNKED):
            found.append(_attention(fields, index, kind, len(kinds)))
    if fields.model_type in recurrent.BESIDE_ATTENTION:
        state, state32 = recurrent.state(fields)
        found += [Layer(state=state, state32=state32) for kind in kinds if kind in (FULL, SLIDING)]
    return found


def kinds_of(fields: Fields) -> Kinds:
    """What each layer is."""
    count = fields.count("num_hidden_layers", "n_layers", "n_layer", "num_layers")
    if count > 10_000:
        raise fields.bad("num_hidden_layers", "is more than any model has")
    if rule := _RULES.get(fields.model_type):
        return rule(fields, count)
    return _typed(fields, count) or [FULL] * count


def _typed(fields: Fields, count: int) -> Kinds:
    """By `layer_types`; empty when there are none."""
    kinds = []
    for name in fields.names("layer_types", count) or fields.names("layers_block_type", count):
        if name not in _BY_LAYER_TYPE:
            raise Unsized(f"layers of the kind {name!r} are not known")
        kinds.append(_BY_LAYER_TYPE[name])
    return kinds


def _patterned(default: int) -> Callable[[Fields, int], Kinds]:
    """Every n-th layer sees all, the others a window; also without `layer_types`, which may be absent."""

    def rule(fields: Fields, count: int) -> Kinds:
        if typed := _typed(fields, count):
            return typed
        every = fields.count("sliding_window_pattern", "_sliding_window_pattern", default=default)
        return [FULL if every == 0 or i % every == every - 1 else SLIDING for i in range(count)]

    return rule


def _every(name: str, default: int) -> Callable[[Fields, int], Kinds]:
    """Every n-th layer attends, the others are recurrent; the layers of an unfinished last group attend too
    for the kinds that have groups."""

    def rule(fields: Fields, count: int) -> Kinds:
        if typed := _typed(fields, count):
            return typed
        every = max(1, fields.count(name, default=default))
        whole = count // every * every if name == "layer_group_size" else count
        return [FULL if (i + 1) % every == 0 or i >= whole else RECURRENT for i in range(count)]

    return rule


def _shared(rule: Callable[[Fields, int], Kinds]) -> Callable[[Fields, int], Kinds]:
    """The last layers use the keys and values of earlier ones and keep none."""

    def shared(fields: Fields, count: int) -> Kinds:
        own = count - min(count, fields.count("num_kv_shared_layers", default=0))
        return rule(fields, count)[:own] + [NONE] * (count - own)

    return shared


def _recurrent_only(fields: Fields, count: int) -> Kinds:
    return [RECURRENT] * count


def _full_only(fields: Fields, count: int) -> Kinds:
    return [FULL] * count


def _lfm2(fields: Fields, count: int) -> Kinds:
    if "full_attn_idxs" not in fields:
        return _typed(fields, count)
    attending = fields.indices("full_attn_idxs")
    return [FULL if i in attending else RECURRENT for i in range(count)]


def _nemotron_h(fields: Fields, count: int) -> Kinds:
    given = fields.values.get("hybrid_override_pattern", "")
    pattern = "".join(map(str, given)) if isinstance(given, list) else str(given)
    marks = {"M": RECURRENT, "*": FULL, "-": NONE, "E": NONE}
    if len(pattern) < count or not set(pattern) <= marks.keys():
        raise fields.bad(
            "hybrid_override_pattern", f"does not name {count} layers of the kinds M, *, - and E"
        )
    return [marks[mark] for mark in pattern[:count]]


def _jamba(fields: Fields, count: int) -> Kinds:
    if typed := _typed(fields, count):
        return typed
    period = max(1, fields.count("attn_layer_period", default=8))
    offset = fields.count("attn_layer_offset", default=4)
    return [FULL if i % period == offset else RECURRENT for i in range(count)]


def _kimi(fields: Fields, count: int) -> Kinds:
    settings = fields.values.get("linear_attn_config")
    linear = settings.get("kda_layers") if isinstance(settings, dict) else None
    if not isinstance(linear, list):
        raise Unsized("config.json does not set linear_attn_config.kda_layers")
    return [RECURRENT if i + 1 in linear else FULL for i in range(count)]


def _plamo2(fields: Fields, count: int) -> Kinds:
    step = fields.count("mamba_step", default=2)
    if count <= step // 2:
        return [RECURRENT] * (count - 1) + [FULL]
    return [RECURRENT if i % max(1, step) != step // 2 else FULL for i in range(count)]


def _recurrent_gemma(fields: Fields, count: int) -> Kinds:
    block = fields.values.get("block_types") or fields.values.get("_block_types")
    if not isinstance(block, list) or not block:
        raise Unsized("config.json does not set block_types")
    return [SLIDING if block[i % len(block)] == "attention" else RECURRENT for i in range(count)]


def _unknown(fields: Fields, count: int) -> Kinds:
    raise Unsized(f"how layers of the kind {fields.model_type} share their caches is not known")


def _exaone4(fields: Fields, count: int) -> Kinds:
    pattern = fields.values.get("sliding_window_pattern")
    if not isinstance(pattern, str) or not pattern:
        return [FULL] * count
    return [FULL if i == count - 1 or pattern[i % len(pattern)] == "G" else SLIDING for i in range(count)]


def _llama4(fields: Fields, count: int) -> Kinds:
    return [FULL if (i + 1) % 4 == 0 else CHUNKED for i in range(count)]


_RULES: dict[str, Callable[[Fields, int], Kinds]] = {
    "afm7": _unknown,
    "baichuan_m1": _unknown,
    "nemotron-nas": _unknown,
    "gemma3_text": _patterned(6),
    "gemma3": _patterned(6),
    "gemma3n_text": _shared(_patterned(5)),
    "gemma3n": _shared(_patterned(5)),
    "gemma4_text": _shared(_patterned(5)),
    "gemma4": _shared(_patterned(5)),
    "cohere2": _patterned(4),
    "gpt_oss": _patterned(2),
    "olmo3": _patterned(4),
    "exaone4": _exaone4,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "qwen3_next": _every("full_attention_interval", 4),
    "qwen3_5": _every("full_attention_interval", 4),
    "qwen3_5_text": _every("full_attention_interval", 4),
    "qwen3_5_moe": _every("full_attention_interval", 4),
    "qwen3_5_moe_text": _every("full_attention_interval", 4),
    "bailing_hybrid": _every("layer_group_size", 4),
    "bailing_moe_linear": _every("layer_group_size", 4),
    "bailing_moe_v3": _every("layer_group_size", 4),
    "kimi_linear": _kimi,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "mamba": _recurrent_only,
    "falcon_mamba": _recurrent_only,
    "mamba2": _recurrent_only,
    "rwkv7": _recurrent_only,
    "falcon_h1": _full_only,
    "jamba": _jamba,
    "nemotron_h": _nemotron_h,
    "plamo2": _plamo2,
    "recurrent_gemma": _recurrent_gemma,
}


def _attention(fields: Fields, index: int, kind: str, count: int) -> Layer:
    window = 0
    if kind is SLIDING:
        window = fields.count("sliding_window", "attention_window_size", "sliding_window_size", "window_size")
    elif kind is CHUNKED:
        window = fields.count("attention_chunk_size")
    return Layer(_per_token(fields, index, kind, count), window)


def _per_token(fields: Fields, index: int, kind: str, count: int) -> int:
    """Numbers that one token adds to one attention layer."""
    heads = fields.count("num_attention_heads", "n_heads", "n_head", "num_heads")
    if "kv_lora_rank" in fields:
        rope = fields.count("qk_rope_head_dim")
        if fields.model_type in _EXPANDED_LATENT:
            return heads * (fields.count("qk_nope_head_dim") + rope + fields.count("v_head_dim", default=0))
        attentions = 2 if fields.model_type.startswith("longcat_flash") else 1
        return attentions * (fields.count("kv_lora_rank") + rope) + fields.count("index_head_dim", default=0)
    size = fields.count("head_dim", "hidden_size_per_head", "kv_channels", default=0)
    if not size:
        hidden = fields.count("hidden_size", "d_model", "n_embd", "dim")
        if not heads or hidden % heads:
            raise fields.bad("num_attention_heads", f"does not divide the hidden size {hidden}")
        size = hidden // heads
    values = fields.count("v_head_dim", default=size)
    if fields.model_type in ("gemma4_text", "gemma4") and kind is FULL:
        size = values = fields.count("global_head_dim", default=size)
        if "num_global_key_value_heads" in fields and fields.values.get("attention_k_eq_v"):
            return fields.count("num_global_key_value_heads") * 2 * size
    if kind is SLIDING and "swa_num_key_value_heads" in fields:
        size, values = fields.count("swa_head_dim"), fields.count("swa_v_head_dim")
        return fields.count("swa_num_key_value_heads") * (size + values)
    if fields.model_type == "recurrent_gemma":
        return size + values
    if fields.values.get("multi_query") is True:
        return size + values
    if isinstance(fields.values.get("num_key_value_heads"), list):
        return fields.counts("num_key_value_heads", count)[index] * (size + values)
    kv_heads = fields.count(
        "num_key_value_heads", "n_kv_heads", "num_kv_heads", "multi_query_group_num", default=heads
    )
    return kv_heads * (size + values)
