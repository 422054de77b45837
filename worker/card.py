"""The model card: what a frontend needs to serve a model, by content.

Reads a model directory's small files only; no weights, no MLX.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mlxhost.wire.control import CardFile, ModelCard
from mlxhost.worker.errors import ModelError

CARD_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError naming the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise ModelError("bad_model", f"{path}: no such file") from None
    except OSError as error:
        raise ModelError("bad_model", f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ModelError("bad_model", f"{path}: not a JSON object ({error})") from None


def model_card(directory: Path) -> ModelCard:
    """Card of the model in `directory`. Raises ModelError when a needed file is absent or unreadable."""
    config = read_json(directory / "config.json")
    if not (directory / "tokenizer.json").is_file():
        raise ModelError(
            "bad_model", f"{directory}: no tokenizer.json; mlxhost needs the fast tokenizer's file"
        )
    text = config.get("text_config")
    vocab = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else 0)
    return ModelCard(
        directory=str(directory),
        files=[_card_file(directory / name) for name in CARD_FILES if (directory / name).is_file()],
        architecture=str(config.get("model_type", "")),
        vocab_size=int(vocab or 0),
        eos_ids=eos_ids(directory, config),
    )


def eos_ids(directory: Path, config: Mapping[str, Any]) -> list[int]:
    """End-of-sequence ids: generation_config.json's where it names any, else config.json's."""
    generation = directory / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if found is None:
        found = config.get("eos_token_id")
    if found is None:
        return []
    return [int(i) for i in found] if isinstance(found, list) else [int(found)]


def _card_file(path: Path) -> CardFile:
    data = path.read_bytes()
    return CardFile(path.name, hashlib.sha256(data).hexdigest(), len(data))
