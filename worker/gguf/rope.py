"""Rope scaling of a GGUF as a Hugging Face `rope_scaling` entry."""

import math
from typing import Any

import numpy as np

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.header import Header, TensorInfo
from mlxhost.worker.gguf.tensors import read_tensor

# Llama 3.1 to 3.3 all use these, and only the factor and the original context vary.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0
ORIGINAL_CONTEXTS = tuple(1 << power for power in range(11, 18))


def rope_scaling(
    header: Header, prefix: str, head_dim: int, theta: float, factors: TensorInfo | None
) -> dict[str, Any] | None:
    """The `rope_scaling` entry that gives what the file asks for, or None for plain rope.

    `factors` is the tensor of per-frequency divisors that a Llama 3.1 file carries in place of keys.
    Raises ModelError("unsupported_architecture") for a scaling that no entry expresses.
    """
    metadata = header.metadata
    kind = metadata.text(f"{prefix}.rope.scaling.type", "none")
    if factors is not None:
        if kind != "none":
            raise _unsupported(header, f"rope scaling {kind!r} together with {factors.name}")
        return _llama3(header, head_dim, theta, factors)
    if kind == "none":
        # Older files say only this.
        factor = metadata.number(f"{prefix}.rope.scale_linear", 1.0)
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    factor = metadata.number(f"{prefix}.rope.scaling.factor")
    if factor <= 0:
        raise metadata.bad(f"{prefix}.rope.scaling.factor", f"is {factor}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
            if metadata.number(f"{prefix}.rope.scaling.{key}", 1.0) != 1.0:
                raise _unsupported(header, f"{prefix}.rope.scaling.{key}")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": metadata.count(
                f"{prefix}.rope.scaling.original_context_length"
            ),
            "beta_fast": metadata.number(f"{prefix}.rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number(f"{prefix}.rope.scaling.yarn_beta_slow", 1.0),
        }
    raise _unsupported(header, f"rope scaling {kind!r}")


def _llama3(header: Header, head_dim: int, theta: float, tensor: TensorInfo) -> dict[str, Any] | None:
    """The llama3 parameters that give these divisors. The file does not name them, so they are found by
    computing what each candidate gives (formula: transformers' `_compute_llama3_parameters`)."""
    if tensor.shape != (head_dim // 2,):
        raise ModelError(
            "bad_model", f"{header.path}: tensor {tensor.name} has the shape {list(tensor.shape)}"
        )
    divisors = read_tensor(header, tensor)
    if np.all(divisors == 1.0):
        return None
    factor = float(divisors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    for context in ORIGINAL_CONTEXTS:
        smooth = (context / wavelengths - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)
        smooth = np.clip(smooth, 0.0, 1.0)
        if np.allclose(divisors, 1.0 / ((1.0 - smooth) / factor + smooth), rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW_FREQ_FACTOR,
                "high_freq_factor": HIGH_FREQ_FACTOR,
                "original_max_position_embeddings": context,
            }
    raise _unsupported(header, f"the frequency factors in {tensor.name} are not those of Llama 3")


def _unsupported(header: Header, what: str) -> ModelError:
    return ModelError("unsupported_architecture", f"{header.path}: {what} is not supported")
