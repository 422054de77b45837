"""Two JSON schemas as one that only values of both satisfy. Pure."""

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

# Keywords that say nothing about values.
ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "$schema",
        "$id",
        "$comment",
        "$anchor",
        "$defs",
        "definitions",
        "deprecated",
        "readOnly",
        "writeOnly",
        "id",
    ]
)


def bare(schema: Any) -> Any:
    """Without annotations, which say nothing about values."""
    return {k: v for k, v in schema.items() if k not in ANNOTATIONS} if isinstance(schema, dict) else schema


def both(a: Schema, b: Schema) -> Schema | None:
    """A schema for the values that satisfy both; None when the two cannot be put together."""
    out = dict(a)
    for one, other in ((a, b), (b, a)):
        # Closed to what it does not name itself, and so to the other's properties.
        closed = any(
            one.get(k, True) not in (True, {}) for k in ("additionalProperties", "unevaluatedProperties")
        )
        if closed and (other.get("properties") or {}).keys() - (one.get("properties") or {}).keys():
            return None
        if "prefixItems" in one and "items" in other and "prefixItems" not in other:
            return None
    for key, value in b.items():
        if key not in out or out[key] == value:
            out[key] = value
        elif key in ANNOTATIONS:
            continue
        elif key in _COMBINE:
            combined = _COMBINE[key](out[key], value)
            if combined is None:
                return None
            out[key] = combined
        else:
            return None
    return out


def _properties(a: Schema, b: Schema) -> Schema | None:
    out = dict(a)
    for name, sub in b.items():
        if name not in out or out[name] is True or out[name] == {}:
            out[name] = sub
        elif sub is not True and sub != {} and sub != out[name]:
            if not isinstance(sub, dict) or not isinstance(out[name], dict):
                return None
            together = both(out[name], sub) if "$ref" not in sub and "$ref" not in out[name] else None
            if together is None:
                return None
            out[name] = together
    return out


def _types(a: Any, b: Any) -> Any:
    left, right = (x if isinstance(x, list) else [x] for x in (a, b))
    if "number" in left and "integer" in right:
        left = [*left, "integer"]
    if "number" in right and "integer" in left:
        right = [*right, "integer"]
    shared = [t for t in left if t in right]
    return None if not shared else shared[0] if len(shared) == 1 else shared


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "properties": _properties,
    "required": lambda a, b: list(dict.fromkeys([*a, *b])),
    "type": _types,
    "enum": lambda a, b: [v for v in a if v in b] or None,
    "additionalProperties": lambda a, b: b if a in (True, {}) else a if b in (True, {}) else None,
    "minimum": max,
    "exclusiveMinimum": max,
    "minLength": max,
    "minItems": max,
    "minProperties": max,
    "maximum": min,
    "exclusiveMaximum": min,
    "maxLength": min,
    "maxItems": min,
    "maxProperties": min,
}
