"""Kinds of values that options take: how each is read from text (flags, variables) and from a TOML value.

Both ways end in one Python value. A ValueError says what is allowed; the caller adds the name and the place.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mlxhost.supervisor.nearby import nearby

MAX_SECONDS = 366 * 86_400.0
_BYTES: Mapping[str, float] = {
    "": 1,
    "b": 1,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS: Mapping[str, float] = {"": 1, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


class Kind(Protocol):
    """`allowed` completes "must be ..."; `metavar` stands for a value in help texts."""

    @property
    def allowed(self) -> str: ...
    @property
    def metavar(self) -> str: ...
    def of_text(self, text: str) -> Any: ...
    def of_value(self, value: object) -> Any: ...
    def shown(self, value: Any) -> str:
        """`value` as TOML."""
        ...


def toml_text(text: str) -> str:
    """A TOML basic string. JSON's escapes are all TOML's, except for DEL, which JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(frozen=True, slots=True)
class Text:
    """Any string; `check` raises ValueError for one that cannot be."""

    metavar: str = "TEXT"
    allowed: str = "a string"
    check: Callable[[str], None] = lambda _: None

    def of_text(self, text: str) -> str:
        self.check(text)
        return text

    def of_value(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be {self.allowed} in quotes")
        return self.of_text(value)

    def shown(self, value: str) -> str:
        return toml_text(value)


@dataclass(frozen=True, slots=True)
class Texts:
    """A list of strings; as text, separated by commas."""

    metavar: str
    allowed: str

    def of_text(self, text: str) -> tuple[str, ...]:
        return tuple(item.strip() for item in text.split(",") if item.strip())

    def of_value(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"must be {self.allowed}")
        return tuple(value)

    def shown(self, value: tuple[str, ...]) -> str:
        return f"[{', '.join(map(toml_text, value))}]"


@dataclass(frozen=True, slots=True)
class Whole:
    low: int
    high: int | None = None
    metavar: str = "N"

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.low} {'up' if self.high is None else f'to {self.high}'}"

    def of_text(self, text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
            raise ValueError(f"must be {self.allowed}")
        return self.of_value(int(text))

    def of_value(self, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < self.low:
            raise ValueError(f"must be {self.allowed}")
        if self.high is not None and value > self.high:
            raise ValueError(f"must be {self.allowed}")
        return value

    def shown(self, value: int) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float
    metavar: str = "NUMBER"

    @property
    def allowed(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"

    def of_text(self, text: str) -> float:
        try:
            return self.of_value(float(text))
        except ValueError:
            raise ValueError(f"must be {self.allowed}") from None

    def of_value(self, value: object) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not self.low <= value <= self.high
        ):
            raise ValueError(f"must be {self.allowed}")
        return float(value)

    def shown(self, value: float) -> str:
        return f"{value:g}"


@dataclass(frozen=True, slots=True)
class Choice:
    names: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return f"one of {', '.join(self.names)}"

    @property
    def metavar(self) -> str:
        return "|".join(self.names)

    def of_text(self, text: str) -> str:
        if text not in self.names:
            raise ValueError(f"must be {self.allowed}{nearby(text, self.names)}")
        return text

    def of_value(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be {self.allowed}")
        return self.of_text(value)

    def shown(self, value: str) -> str:
        return toml_text(value)


@dataclass(frozen=True, slots=True)
class Switch:
    allowed: str = "true or false"
    metavar: str = "true|false"

    def of_text(self, text: str) -> bool:
        match text.lower():
            case "true" | "on" | "yes" | "1":
                return True
            case "false" | "off" | "no" | "0":
                return False
        raise ValueError(f"must be {self.allowed}")

    def of_value(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be {self.allowed}")
        return value

    def shown(self, value: bool) -> str:
        return str(value).lower()


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes: a whole number, or text such as 24GiB or 500MB."""

    allowed: str = "bytes, such as 24GiB, 500MB or 1000000"
    metavar: str = "SIZE"

    def of_text(self, text: str) -> int:
        value = _quantity(text, _BYTES)
        if value is None or not math.isfinite(value) or value >= 2**63:
            raise ValueError(f"must be {self.allowed}")
        return int(value)

    def of_value(self, value: object) -> int:
        if isinstance(value, str):
            return self.of_text(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"must be {self.allowed}")
        return value

    def shown(self, value: int) -> str:
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            scale = int(_BYTES[unit.lower()])
            if value and value % scale == 0:
                return toml_text(f"{value // scale}{unit}")
        return str(value)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes as in Size, or a part of what there is: up to 1 as a fraction, or a percentage."""

    allowed: str = "bytes such as 24GiB or 500MB, or a part such as 0.6 or 60%"
    metavar: str = "SIZE|PART"

    def of_text(self, text: str) -> float:
        part = re.fullmatch(r"(\d+(?:\.\d+)?)%", text.strip())
        value = float(part[1]) / 100 if part else _quantity(text, _BYTES)
        if value is None or not 0 < value < 2**63 or (part and value > 1):
            raise ValueError(f"must be {self.allowed}")
        return value

    def of_value(self, value: object) -> float:
        if isinstance(value, str):
            return self.of_text(value)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**63:
            raise ValueError(f"must be {self.allowed}")
        return float(value)

    def shown(self, value: float) -> str:
        return Size().shown(int(value)) if value > 1 else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds: a number, or text such as 90s, 10m, 2h or 1d."""

    allowed: str = "a time, such as 90s, 10m, 2h, 1d or seconds (0: never)"
    metavar: str = "TIME"

    def of_text(self, text: str) -> float:
        value = _quantity(text, _SECONDS)
        if value is None or value > MAX_SECONDS:
            raise ValueError(f"must be {self.allowed}")
        return value

    def of_value(self, value: object) -> float:
        if isinstance(value, str):
            return self.of_text(value)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MAX_SECONDS:
            raise ValueError(f"must be {self.allowed}")
        return float(value)

    def shown(self, value: float) -> str:
        for unit in ("d", "h", "m"):
            if value and value % _SECONDS[unit] == 0:
                return toml_text(f"{value / _SECONDS[unit]:.0f}{unit}")
        return f"{value:g}"


def _quantity(text: str, units: Mapping[str, float]) -> float | None:
    """A number times its unit; None when it is not that."""
    found = _QUANTITY.fullmatch(text.strip())
    scale = units.get(found[2].lower()) if found else None
    return float(found[1]) * scale if found and scale is not None else None
