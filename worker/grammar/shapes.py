"""What the keywords of a JSON schema must look like. Pure."""

from typing import Any

from mlxhost.worker.grammar.merging import Schema
from mlxhost.worker.grammar.xgr import GrammarError

_NUMBER = "a number", (int, float)
_TEXT = "a string", (str,)
_LIST = "a list", (list,)
_SCHEMAS = "an object", (dict,)
_COUNTS = [f"{bound}{what}" for bound in ("min", "max") for what in ("Items", "Length", "Properties")]
_BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
_SHAPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "type": ("a string or a list of strings", (str, list)),
    "items": ("a schema", (dict, bool, list)),  # a list before 2020-12
    **dict.fromkeys(["properties", "patternProperties", "$defs", "definitions"], _SCHEMAS),
    **dict.fromkeys(["prefixItems", "anyOf", "oneOf", "allOf", "enum", "required"], _LIST),
    **dict.fromkeys([*_BOUNDS, *_COUNTS], _NUMBER),
    **dict.fromkeys(["pattern", "format", "$ref"], _TEXT),
}


def check(schema: Schema, path: str) -> None:
    """Raises GrammarError for the first keyword that is not what it must be."""
    for key, (what, types) in _SHAPES.items():
        if (value := schema.get(key)) is not None and not isinstance(value, types):
            raise GrammarError(f"{path}/{key}: it must be {what}, and it is {_name(value)}")
    for key in ("type", "required"):
        value = schema.get(key)
        if isinstance(value, list) and not all(isinstance(v, str) for v in value):
            raise GrammarError(f"{path}/{key}: it must be a list of strings")


def _name(value: Any) -> str:
    names = {bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")
