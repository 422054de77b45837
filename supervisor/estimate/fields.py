"""Typed access to config.json: a field that is absent has a default, one that makes no sense is an error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxhost.supervisor.errors import ModelError

LARGEST = 1 << 31  # no size in a model's shape comes near


class Unsized(Exception):
    """The config does not say what the size depends on; the message names what is missing."""


class Fields:
    """The part of a config that describes the language model. `count` and `counts` raise ModelError, naming
    file, field and value, for what cannot be a size."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.whole = values
        text = values.get("text_config") or values.get("llm_config")
        self.values: Mapping[str, Any] = {**values, **text} if isinstance(text, Mapping) else values

    @property
    def model_type(self) -> str:
        """The language model's kind; of a model that wraps one, the inner kind."""
        return str(self.values.get("model_type", ""))

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is set, as an integer from 0 up. Raises Unsized when none is set."""
        for name in names:
            if (value := self.values.get(name)) is not None:
                return self._size(name, value)
        if default is None:
            raise Unsized(f"config.json does not set {' or '.join(names)}")
        return default

    def counts(self, name: str, length: int) -> list[int]:
        """A size for each layer: a list, or one number for all."""
        value = self.values.get(name)
        if isinstance(value, list):
            if len(value) < length:
                raise self.bad(name, f"has {len(value)} entries for {length} layers")
            return [self._size(name, item) for item in value[:length]]
        return [self.count(name)] * length

    def names(self, name: str, length: int) -> list[str]:
        """A kind for each layer; empty when the field is absent."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.bad(name, "is not a list of names")
        if len(value) < length:
            raise self.bad(name, f"has {len(value)} entries for {length} layers")
        return list(value[:length])

    def indices(self, name: str) -> set[int]:
        """Layer numbers, as the config counts them."""
        value = self.values.get(name)
        if not isinstance(value, list):
            raise self.bad(name, "is not a list of layer numbers")
        return {self._size(name, item) for item in value}

    def bad(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {name} {problem} (it is {str(self.values.get(name))[:60]!r})")

    def _size(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST:
            raise self.bad(name, "should be a whole number from 0 up")
        return value
