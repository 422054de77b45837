"""The supported GGUF architectures, by the name in `general.architecture`."""

from collections.abc import Callable

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.gemma import gemma3
from mlxhost.worker.gguf.header import Header
from mlxhost.worker.gguf.llama import llama, mistral3
from mlxhost.worker.gguf.plan import Plan
from mlxhost.worker.gguf.qwen import qwen2, qwen3, qwen3moe

ARCHITECTURES: dict[str, Callable[[Header], Plan]] = {
    "gemma3": gemma3,
    "llama": llama,
    "mistral3": mistral3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
}


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
