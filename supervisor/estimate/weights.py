"""Bytes that a model's weights take in a worker: cast to the compute dtype, expanded where it does that.

What the worker does is in worker/models/load.py: floating parameters are cast, MLX's quantised layers are
kept on a GPU and expanded on a CPU (stacks of experts excepted), and what an architecture has no use for is
dropped.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlxhost.supervisor.estimate.fields import Fields
from mlxhost.supervisor.estimate.tensors import FLOATS, Tensor

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

# What mlx-lm's `sanitize` methods drop: constants that are computed, other modalities, and the layers that
# predict several tokens at once.
_DROPPED = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|rotary_pos_emb\.inv_freq|vision_tower|vision_model|visual|vision_encoder"
    r"|multi_modal_projector|audio_tower|embed_vision|embed_audio|mtp)(\.|$)"
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def weights_bytes(tensors: Iterable[Tensor], fields: Fields, dtype: str, *, expand_quantised: bool) -> int:
    """Bytes in memory of all `tensors` that the worker keeps, in `dtype` (a key of ITEMSIZE)."""
    kept = {t.name: t for t in tensors if not _is_dropped(t, fields)}
    size = ITEMSIZE[dtype]
    settings = fields.whole.get("quantization")
    quantised = _quantised_layers(kept) if isinstance(settings, Mapping) else set()
    total = 0
    for name, tensor in kept.items():
        layer, _, part = name.rpartition(".")
        expanded = layer in quantised and expand_quantised and len(kept[f"{layer}.weight"].shape) == 2
        if expanded and part == "weight":
            total += tensor.elements * 32 // _bits(settings, layer) * size
        elif not (expanded and part in ("scales", "biases")):
            total += tensor.elements * size if tensor.dtype in FLOATS else tensor.nbytes
    return total


def _quantised_layers(tensors: Mapping[str, Tensor]) -> set[str]:
    """Layers in MLX's own form: packed weights in U32 beside their scales."""
    return {
        name.removesuffix(".scales")
        for name in tensors
        if name.endswith(".scales") and (w := tensors.get(f"{name[:-7]}.weight")) and w.dtype == "U32"
    }


def _bits(settings: Any, layer: str) -> int:
    """Bits a weight of `layer`; config.json may say so for single layers."""
    own = settings.get(layer)
    bits = own.get("bits") if isinstance(own, Mapping) else settings.get("bits")
    return bits if isinstance(bits, int) and 0 < bits <= 32 else 4


def _is_dropped(tensor: Tensor, fields: Fields) -> bool:
    if _DROPPED.search(tensor.name):
        return True
    if fields.values.get("tie_word_embeddings") is True and tensor.name.endswith("lm_head.weight"):
        return True
    layers = fields.count("num_hidden_layers", default=0)
    found = _LAYER.search(tensor.name)
    return bool(
        layers and found and int(found[1]) >= layers and fields.values.get("num_nextn_predict_layers")
    )
