"""The state of recurrent layers (SSM, gated delta, convolution): so many numbers whatever the length.

Each function gives (numbers of the compute dtype, numbers of float32) for one layer and one request, after
the layer classes of mlx_lm.models.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mlxhost.supervisor.estimate.fields import Fields, Unsized

Rule = Callable[[Fields], tuple[int, int]]

_SSM_STEP = 256  # tokens that ssm_attn takes at a time

# Kinds whose every layer has such a state and a KV cache.
BESIDE_ATTENTION = frozenset({"falcon_h1"})


def state(fields: Fields) -> tuple[int, int]:
    """What one recurrent layer keeps. Raises Unsized for a kind without a rule."""
    rule = _RULES.get(fields.model_type)
    if rule is None:
        raise Unsized(f"the state of {fields.model_type or 'this kind of'} layers is not known")
    return rule(fields)


def work(fields: Fields, chunk: int, backend: str) -> int:
    """Numbers that one recurrent layer holds while it computes `chunk` tokens. On a CPU, gated delta layers
    keep their state of each token; elsewhere a kernel does without. Raises Unsized."""
    if isinstance(rule := _RULES.get(fields.model_type), _Mamba2):
        return rule.work(fields, chunk)
    conv, matrix = state(fields)
    return chunk * ((matrix if backend == "cpu" else 0) + conv + 8 * fields.count("hidden_size", "d_model"))


def _gated_delta(fields: Fields) -> tuple[int, int]:
    """qwen3_next.Qwen3NextGatedDeltaNet: a convolution over q, k and v, and a matrix for each value head."""
    key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key, value = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    kernel = max(1, fields.count("linear_conv_kernel_dim"))
    return (kernel - 1) * (2 * key_heads * key + value_heads * value), value_heads * key * value


@dataclass(frozen=True, slots=True)
class _Mamba2:
    """The fields that size a mamba2.Mamba2Block or its like: a convolution over x, B and C, and a state for
    each head."""

    heads: str
    head_dim: str
    groups: str
    size: str
    kernel: str

    def __call__(self, fields: Fields) -> tuple[int, int]:
        inner = fields.count(self.heads) * fields.count(self.head_dim)
        return max(0, fields.count(self.kernel) - 1) * self._conv(fields) + inner * fields.count(self.size), 0

    def work(self, fields: Fields, chunk: int) -> int:
        """mlx_lm.models.ssm.ssm_attn: the projections, and per head matrices of a step's tokens by tokens."""
        heads, inner = fields.count(self.heads), fields.count(self.heads) * fields.count(self.head_dim)
        width = inner + self._conv(fields) + heads
        return 8 * chunk * width + 6 * heads * min(chunk, _SSM_STEP) ** 2

    def _conv(self, fields: Fields) -> int:
        inner = fields.count(self.heads) * fields.count(self.head_dim)
        return inner + 2 * fields.count(self.groups) * fields.count(self.size)


def _mamba(fields: Fields) -> tuple[int, int]:
    """mamba.MambaBlock: a convolution and a state over the inner width."""
    inner = fields.count("intermediate_size", "d_inner", default=0) or (
        fields.count("expand", default=2) * fields.count("hidden_size", "d_model")
    )
    kernel = fields.count("conv_kernel", "d_conv")
    return inner * (max(0, kernel - 1) + fields.count("state_size", "d_state")), 0


def _jamba(fields: Fields) -> tuple[int, int]:
    inner = fields.count("mamba_expand") * fields.count("hidden_size")
    return inner * (max(0, fields.count("mamba_d_conv") - 1) + fields.count("mamba_d_state")), 0


def _plamo2(fields: Fields) -> tuple[int, int]:
    inner = fields.count("mamba_num_heads") * fields.count("hidden_size_per_head")
    return inner * max(0, fields.count("mamba_d_conv") - 1), inner * fields.count("mamba_d_state")


def _lfm2(fields: Fields) -> tuple[int, int]:
    """lfm2.ShortConv: the last inputs of a convolution."""
    return max(0, fields.count("conv_L_cache") - 1) * fields.count("hidden_size"), 0


def _kimi(fields: Fields) -> tuple[int, int]:
    """kimi_linear.KimiDeltaAttention: three convolutions and a matrix for each head."""
    settings = fields.values.get("linear_attn_config")
    if not isinstance(settings, dict):
        raise Unsized("config.json does not set linear_attn_config")
    linear = Fields(fields.path, settings)
    heads, size = linear.count("num_heads"), linear.count("head_dim")
    kernel = linear.count("short_conv_kernel_size", default=4)
    return 3 * max(0, kernel - 1) * heads * size, heads * size * size


def _bailing(fields: Fields) -> tuple[int, int]:
    """bailing_hybrid: a matrix for each head."""
    heads = fields.count("num_attention_heads")
    size = fields.count("head_dim", default=0) or fields.count("hidden_size") // max(1, heads)
    return 0, heads * size * size


def _recurrent_gemma(fields: Fields) -> tuple[int, int]:
    width = fields.count("hidden_size")
    return width * max(0, fields.count("conv1d_width") - 1) + width, 0


def _rwkv7(fields: Fields) -> tuple[int, int]:
    """rwkv7: two shifted inputs and a matrix for each head."""
    hidden, size = fields.count("hidden_size"), fields.count("head_dim")
    return 2 * hidden + hidden * size, 0


_RULES: dict[str, Rule] = {
    "qwen3_next": _gated_delta,
    "qwen3_5": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_5_moe": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "olmo_hybrid": _gated_delta,
    "mamba2": _Mamba2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    "nemotron_h": _Mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    "granitemoehybrid": _Mamba2(
        "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"
    ),
    "falcon_h1": _Mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "jamba": _jamba,
    "plamo2": _plamo2,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "kimi_linear": _kimi,
    "bailing_hybrid": _bailing,
    "bailing_moe_linear": _bailing,
    "recurrent_gemma": _recurrent_gemma,
    "rwkv7": _rwkv7,
}
