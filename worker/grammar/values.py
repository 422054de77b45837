"""Listed values (enum, const) of a JSON schema against the keywords beside them. Pure.

The compiler takes a list as it is and ignores what stands beside it, so the values that the rest forbids are
left out here.
"""

import math
import re
from typing import Any

from mlxhost.worker.grammar.merging import Schema
from mlxhost.worker.grammar.xgr import GrammarError

# Keywords that are checked here; others beside a list, about objects and arrays, are not.
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength")
CHECKED = frozenset(["type", "enum", "const", "pattern", *_BOUNDS])
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
}


class Unsatisfiable(GrammarError):
    """No value satisfies a schema."""


def keep_what_fits(schema: Schema, path: str) -> None:
    """Leave out values that `type`, bounds, lengths or `pattern` forbid. Raises Unsatisfiable when none is
    left."""
    if not (CHECKED - {"enum", "const"}) & schema.keys():
        return
    if isinstance(values := schema.get("enum"), list):
        schema["enum"] = [value for value in values if _fits(schema, value)]
        if values and not schema["enum"]:
            raise Unsatisfiable(f"{path}: no value of enum is allowed by the keywords beside it")
    if "const" in schema and not _fits(schema, schema["const"]):
        raise Unsatisfiable(f"{path}: the value of const is not allowed by the keywords beside it")


def _fits(schema: Schema, value: Any) -> bool:
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds != [None] and not any(_is(value, kind) for kind in kinds):
        return False
    if isinstance(value, str):
        return _string_fits(schema, value)
    return not _is(value, "number") or _number_fits(schema, value)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return kind in _TYPES and isinstance(value, _TYPES[kind])


def _string_fits(schema: Schema, value: str) -> bool:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return False
    try:
        return "pattern" not in schema or re.search(schema["pattern"], value) is not None
    except re.error:
        return True  # the compiler says what is wrong with it


def _number_fits(schema: Schema, value: float) -> bool:
    least: float = schema.get("minimum", value)
    most: float = schema.get("maximum", value)
    above: float = schema.get("exclusiveMinimum", -math.inf)
    below: float = schema.get("exclusiveMaximum", math.inf)
    return least <= value <= most and above < value < below
