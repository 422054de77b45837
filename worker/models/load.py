"""From a model directory to a model ready to run: config, classes, weights, dtype.

Reads weights file by file and settles them as it goes, so that progress can be told and the peak stays
near the weights' own size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten, tree_unflatten

from mlxhost.worker.card import read_json
from mlxhost.worker.errors import ModelError
from mlxhost.worker.kv import RowKV
from mlxhost.worker.models.architecture import import_architecture

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_SETTLE_BYTES = 32 * 1024 * 1024  # how much is evaluated at once


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `dtype` is what it computes in; `notes` are for the operator."""

    model: Any
    config: dict[str, Any]
    dtype: str
    weights_bytes: int
    max_model_len: int
    vocab_size: int
    notes: tuple[str, ...]


def load_model(
    directory: Path,
    dtype: str,
    *,
    expand_quantised: bool,
    on_progress: Callable[[int, int], None],
) -> LoadedModel:
    """Load the model in `directory` computing in `dtype` (a key of DTYPES).

    With `expand_quantised`, quantised layers become plain ones in `dtype` (on a CPU the quantised products
    are some 50 times slower than a fast BLAS). Raises ModelError naming the file or field at fault.
    """
    config = read_json(directory / "config.json")
    model_class, args_class = import_architecture(config)
    weights = _read_weights(directory)
    try:
        model = model_class(args_class.from_dict(config))
    except Exception as error:  # a constructor fails in any way it likes on a bad config
        raise ModelError("bad_model", f"{directory / 'config.json'}: {_reason(error)}") from None
    RowKV.new(model)  # refuses a kind of cache it does not know before gigabytes are read
    notes = []
    try:
        if hasattr(model, "sanitize"):
            weights = model.sanitize(weights)
        quantised = _prepare_quantised(model, config, weights)
        model.load_weights(list(weights.items()), strict=True)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            "bad_model", f"{directory}: weights do not fit config.json: {_reason(error)}"
        ) from None
    del weights
    if quantised and expand_quantised:
        _expand(model)
        notes.append(f"quantised weights were expanded to {dtype}, which is faster on this CPU")
    model.eval()
    _settle(model, DTYPES[dtype], on_progress)
    text_config = config.get("text_config")
    text: dict[str, Any] = text_config if isinstance(text_config, dict) else config
    return LoadedModel(
        model=model,
        config=config,
        dtype=dtype,
        weights_bytes=sum(v.nbytes for _, v in _parameters(model)),
        max_model_len=int(text.get("max_position_embeddings") or 8192),
        vocab_size=int(text.get("vocab_size") or 0),
        notes=tuple(notes),
    )


def _read_weights(directory: Path) -> dict[str, mx.array]:
    """Every tensor in model*.safetensors, still on disk (MLX reads them when they are evaluated)."""
    files = sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError("bad_model", f"{directory}: no *.safetensors file")
    weights: dict[str, mx.array] = {}
    for file in files:
        check_safetensors(file)
        try:
            loaded = mx.load(str(file))
        except Exception as error:
            raise ModelError("bad_model", f"{file}: {_reason(error)}") from None
        weights.update(loaded)  # type: ignore[arg-type]
    return weights


def check_safetensors(file: Path) -> None:
    """Compare the header with the file's size: a truncated file would otherwise fail while it is read.

    Format: 8-byte little-endian header length, JSON header whose data_offsets are relative to its end,
    data. (The safetensors package's own check would load numpy into the worker: 16 MB.)
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise ModelError("bad_model", f"{file}: truncated or not a safetensors file ({size} bytes)")
        try:
            header = msgspec.json.decode(opened.read(length), type=dict[str, Any])
            ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
        except (msgspec.MsgspecError, KeyError, IndexError, TypeError) as error:
            raise ModelError(
                "bad_model", f"{file}: unreadable safetensors header: {_reason(error)}"
            ) from None
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        raise ModelError("bad_model", f"{file}: truncated: {size} bytes of {needed}")


def _prepare_quantised(model: Any, config: dict[str, Any], weights: dict[str, mx.array]) -> bool:
    """Turn the layers whose weights are quantised into quantised layers; whether there were any."""
    settings = config.get("quantization")
    if settings is None:
        if method := (config.get("quantization_config") or {}).get("quant_method"):
            raise ModelError(
                "unsupported_quantisation",
                f"config.json: quantization_config.quant_method {method!r}; "
                "supported: MLX's own `quantization` (convert the model with mlx_lm.convert)",
            )
        return False

    def predicate(path: str, module: Any) -> bool | dict[str, Any]:
        if path in settings:
            chosen: bool | dict[str, Any] = settings[path]
            return chosen
        return hasattr(module, "to_quantized") and f"{path}.scales" in weights

    try:
        nn.quantize(
            model,
            group_size=int(settings["group_size"]),
            bits=int(settings["bits"]),
            mode=settings.get("mode", "affine"),
            class_predicate=predicate,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError("unsupported_quantisation", f"config.json: quantization: {_reason(error)}") from None
    return True


def _expand(model: Any) -> None:
    """Replace quantised linear and embedding layers by plain ones, in place."""
    replaced = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            continue
        weight = mx.dequantize(
            module.weight,
            module.scales,
            module.get("biases"),
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )
        plain: nn.Module
        if isinstance(module, nn.QuantizedEmbedding):
            plain = nn.Embedding(1, 1)
        else:
            plain = nn.Linear(1, 1, bias="bias" in module)
            if "bias" in module:
                plain.bias = module.bias
        plain.weight = weight
        replaced.append((path, plain))
    model.update_modules(tree_unflatten(replaced))


def _settle(model: Any, dtype: mx.Dtype, on_progress: Callable[[int, int], None]) -> None:
    """Cast floating parameters to `dtype` and read everything into memory, a part at a time."""
    keep = getattr(model, "cast_predicate", lambda _path: True)
    parameters = _parameters(model)
    total = sum(v.nbytes for _, v in parameters)
    done = 0
    part: list[tuple[str, mx.array]] = []
    pending = 0
    while parameters:
        # Popping drops the list's reference, so that a cast frees its source at once.
        path, value = parameters.pop()
        pending += value.nbytes
        if mx.issubdtype(value.dtype, mx.floating) and value.dtype != dtype and keep(path):
            value = value.astype(dtype)
        part.append((path, value))
        if pending < _SETTLE_BYTES and parameters:
            continue
        try:
            mx.eval([v for _, v in part])
        except Exception as error:
            raise ModelError("bad_model", f"weights cannot be read: {_reason(error)}") from None
        model.update(tree_unflatten(part))
        done += pending
        part, pending = [], 0
        on_progress(done, total)


def _parameters(model: Any) -> list[tuple[str, mx.array]]:
    """(path, array) of every parameter."""
    flat: Any = tree_flatten(model.parameters())
    return list(flat)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
