"""Typed access to GGUF metadata; every failure names the file and the key."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxhost.worker.errors import ModelError

Scalar = int | float | bool | str
Value = Scalar | list[int] | list[float] | list[bool] | list[str]

LARGEST_COUNT = 1 << 31  # no size in a model's shape comes near


@dataclass(frozen=True)
class Metadata:
    """The key-value part of a GGUF file.

    The getters raise ModelError("bad_model") when a key is absent (and no default was given) or holds
    something else than asked for.
    """

    path: Path
    values: dict[str, Value]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def bad(self, key: str, problem: str) -> ModelError:
        """An error about `key`, for the caller to raise."""
        return ModelError("bad_model", f"{self.path}: metadata key {key} {problem}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, f"should be a string, it is {_shown(value)}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, f"should be true or false, it is {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.bad(key, f"should be a number, it is {_shown(value)}")
        if not math.isfinite(value):
            raise self.bad(key, f"is {value}")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        """An integer from 1 up to what a model's shape can hold."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < LARGEST_COUNT:
            raise self.bad(key, f"should be a positive integer, it is {_shown(value)}")
        return value

    def token_id(self, key: str, vocabulary: int) -> int | None:
        """A token id, or None when the key is absent or, as -1 and 2**32 - 1 do, says that there is none."""
        value = self.values.get(key)
        if value is None or value in (-1, 0xFFFFFFFF):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
            raise self.bad(key, f"is {_shown(value)}, the vocabulary has {vocabulary} tokens")
        return value

    def texts(self, key: str) -> list[str]:
        items = self._list(key)
        found = [item for item in items if isinstance(item, str)]
        if len(found) < len(items):
            raise self.bad(key, "should be a list of strings")
        return found

    def integers(self, key: str) -> list[int]:
        items = self._list(key)
        found = [item for item in items if isinstance(item, int)]
        if len(found) < len(items):
            raise self.bad(key, "should be a list of integers")
        return found

    def numbers(self, key: str) -> list[float]:
        items = self._list(key)
        found = [float(item) for item in items if isinstance(item, (int, float))]
        if len(found) < len(items) or not all(map(math.isfinite, found)):
            raise self.bad(key, "should be a list of finite numbers")
        return found

    def _get(self, key: str, default: Value | None) -> Value:
        value = self.values.get(key, default)
        if value is None:
            raise ModelError("bad_model", f"{self.path}: metadata key {key} is missing")
        return value

    def _list(self, key: str) -> Sequence[object]:
        value = self._get(key, None)
        if not isinstance(value, list):
            raise self.bad(key, f"should be a list, it is {_shown(value)}")
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
