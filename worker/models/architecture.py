"""Model classes by `model_type`, imported without running `mlx_lm/__init__`."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from mlxhost.worker.errors import ModelError

# mlx_lm.utils.MODEL_REMAPPING, copied because importing that module costs what this one saves; a contract
# test compares the two.
REMAPPED = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}


def install_seam() -> None:
    """Make `mlx_lm.models.*` importable with our attention dispatcher in it, and nothing else of mlx-lm.

    Must run before anything imports an architecture: each binds the attention function by name. Raises
    ModelError when mlx-lm is not installed.
    """
    _install_bare_package()
    importlib.import_module("mlxhost.worker.models.attention").install()


def _install_bare_package() -> None:
    """An empty `mlx_lm` with the right `__path__`, so that its `__init__` never runs."""
    if "mlx_lm" in sys.modules:
        return
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.submodule_search_locations is None:
        raise ModelError("unsupported_architecture", "mlx-lm is not installed; pip install mlx-lm")
    package = ModuleType("mlx_lm")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["mlx_lm"] = package


def import_architecture(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
    """(Model, ModelArgs) of the architecture that config.json's `model_type` names.

    Raises ModelError unsupported_architecture: whatever a model module does when imported (SystemExit
    included) means that it cannot be used here.
    """
    install_seam()
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type.replace("_", "").replace("-", "").isalnum():
        raise ModelError("bad_model", f"config.json: model_type is {model_type!r}, expected a name")
    if config.get("model_file"):
        raise ModelError(
            "unsupported_architecture",
            f"config.json: model_file {config['model_file']!r} is code of the model; mlxhost does not run it",
        )
    name = REMAPPED.get(model_type, model_type)
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
        return module.Model, module.ModelArgs
    except ModuleNotFoundError as error:
        if error.name != f"mlx_lm.models.{name}":
            raise _unusable(model_type, error) from None
        raise ModelError(
            "unsupported_architecture",
            f"config.json: model_type {model_type!r} is not one that mlx-lm knows",
        ) from None
    except (Exception, SystemExit) as error:
        raise _unusable(model_type, error) from None


def _unusable(model_type: str, error: BaseException) -> ModelError:
    reason = str(error) or type(error).__name__
    return ModelError("unsupported_architecture", f"model_type {model_type!r} cannot be used here: {reason}")
