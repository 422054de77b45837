"""JSON schemas as the grammar compiler understands them: what it would drop is rewritten or named.

The compiler ignores some keywords in silence, and others depending on their neighbours. `prepare` first
rewrites a schema into one that admits no value which the original forbids and that uses only what is
enforced, where there is such a form; then it names what is left. Pure.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from mlxhost.worker.grammar.merging import ANNOTATIONS, Schema, bare, both
from mlxhost.worker.grammar.shapes import check
from mlxhost.worker.grammar.values import CHECKED, Unsatisfiable, keep_what_fits
from mlxhost.worker.grammar.xgr import GrammarError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keywords that say something only about values of one type.
_FAMILIES: dict[str, frozenset[str]] = {
    "object": _words(
        "properties required additionalProperties patternProperties propertyNames minProperties "
        "maxProperties unevaluatedProperties dependentRequired dependentSchemas dependencies"
    ),
    "array": _words(
        "items prefixItems additionalItems unevaluatedItems minItems maxItems uniqueItems contains "
        "minContains maxContains"
    ),
    "string": _words("pattern minLength maxLength format"),
    "number": _words("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"),
}
_TYPED = frozenset().union(*_FAMILIES.values())
_SHAPES = _words("type enum const $ref anyOf oneOf allOf")
# Never enforced, whatever stands beside them.
_IGNORED = _words(
    "not if then else contains minContains maxContains dependentRequired dependentSchemas dependencies "
    "$dynamicRef $recursiveRef unevaluatedItems additionalItems"
)
# Formats of the specification that the compiler does not know; any other name is an annotation.
_OPEN_FORMATS = _words("idn-email idn-hostname iri iri-reference regex")
_COUNTS = _words("minItems maxItems minLength maxLength minProperties maxProperties")
_LONGEST = 1000  # characters; half a second to compile
_MAX_REFERENCES = 32  # how far references are followed while branches are merged


def prepare(text: str) -> tuple[str, list[str]]:
    """(the schema to compile, what of it cannot be enforced). Raises GrammarError when it is no schema.

    Recursion is bounded by Python's own limit: raises RecursionError for a schema nested deeper.
    """
    try:
        root = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None
    if not isinstance(root, dict | bool):
        raise GrammarError("the schema must be an object or a boolean")
    walk = _Walk(root)
    try:
        prepared = walk.schema(root, "#")
    except (TypeError, AttributeError, ValueError) as error:  # in a part that is merged before it is checked
        raise GrammarError(f"the schema is malformed: {error}") from None
    return json.dumps(prepared), list(dict.fromkeys(walk.notes))


class _Walk:
    """One pass over a schema, collecting notes."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._inlined: list[str] = []  # references that were written out around where the walk is
        self.notes: list[str] = []

    def schema(self, value: Any, path: str) -> Any:
        """`value` rewritten, and its subschemas."""
        if not isinstance(value, dict):
            return value
        schema: Schema = {k: v for k, v in value.items() if v is not None or k in ("const", "default")}
        check(schema, path)
        for key in _COUNTS & schema.keys():  # 2.0 is an integer in JSON
            if isinstance(count := schema[key], float) and count.is_integer():
                schema[key] = int(count)
        outside = len(self._inlined)
        schema = self._merged(schema)
        self._old_tuples(schema)
        self._give_type(schema)
        self._name_required(schema, path)
        keep_what_fits(schema, path)
        forbidden = _leave_out_the_impossible(schema, path)
        _leave_room(schema)
        if forbidden and _is_open(schema):
            self._note(path, "properties that are false, beside others that are not named")
        _bound_length(schema)
        self._report(schema, path)
        inside = self._inside(schema, path)
        del self._inlined[outside:]
        return inside

    def _inside(self, schema: Schema, path: str) -> Schema:
        """Subschemas, wherever the specification has them."""
        out: Schema = {}
        for key, value in schema.items():
            where = f"{path}/{key}"
            if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
                out[key] = {name: self.schema(sub, f"{where}/{name}") for name, sub in value.items()}
            elif key in ("anyOf", "oneOf") and isinstance(value, list):
                out[key] = self._branches(value, where)
            elif key in ("allOf", "prefixItems") and isinstance(value, list):
                out[key] = [self.schema(sub, f"{where}/{i}") for i, sub in enumerate(value)]
            elif key in ("items", "additionalProperties", "unevaluatedProperties", "propertyNames"):
                out[key] = self.schema(value, where)
            else:
                out[key] = value
        return out

    def _branches(self, branches: list[Any], path: str) -> list[Any]:
        """Those that a value can satisfy, when there are any."""
        kept, last = [], None
        for i, branch in enumerate(branches):
            try:
                kept.append(self.schema(branch, f"{path}/{i}"))
            except Unsatisfiable as error:
                last = error
        if last is not None and not kept:
            raise last
        return kept

    # Rewrites, each to a schema that admits no more values

    def _merged(self, schema: Schema) -> Schema:
        """Without allOf, and without keywords beside $ref, anyOf and oneOf: those are moved inside."""
        for _ in range(_MAX_REFERENCES):
            beside = [k for k in schema if k in _TYPED or k in ("type", "enum", "const")]
            composed = [k for k in ("$ref", "allOf", "anyOf", "oneOf") if k in schema]
            if "allOf" in schema and isinstance(schema["allOf"], list):
                parts = [{k: v for k, v in schema.items() if k != "allOf"}, *schema["allOf"]]
            elif "$ref" in schema and (beside or len(composed) > 1):
                target = self._inline(schema["$ref"])
                if target is None:
                    return schema
                parts = [{k: v for k, v in schema.items() if k != "$ref"}, target]
            else:
                break
            # It looks through to what stands beside it, unlike one inside a part.
            outer = parts[0].pop("unevaluatedProperties", None)
            narrows = any(isinstance(p, dict) and "unevaluatedProperties" in p for p in parts[1:])
            if narrows and (outer is not None or {"anyOf", "oneOf"} & schema.keys()):
                return schema
            merged = self._merge_all(parts)
            if merged is None:
                return schema  # as it is: `_report` says so
            schema = merged if outer is None else merged | {"unevaluatedProperties": outer}
        for key in ("anyOf", "oneOf"):
            beside = [k for k in schema if k not in ANNOTATIONS and k != key]
            branches = schema.get(key)
            if branches and isinstance(branches, list) and beside:
                outer = {k: schema[k] for k in ("unevaluatedProperties",) if k in schema}
                base = {k: v for k, v in schema.items() if k != key and k not in outer}
                merged_branches = [self._merge_all([base, branch]) for branch in branches]
                if all(b is not None for b in merged_branches):
                    keep = {k: v for k, v in schema.items() if k in ANNOTATIONS}
                    return keep | {key: [bare(b) | outer for b in merged_branches if b is not None]}
        return schema

    def _merge_all(self, parts: list[Any]) -> Schema | None:
        """One schema for all of `parts`; None when that cannot be written down."""
        merged: Schema = {}
        for part in parts:
            if part is True:
                continue
            if not isinstance(part, dict):
                return None
            for _ in range(_MAX_REFERENCES):
                if "$ref" not in part or not merged:
                    break
                target = self._inline(part["$ref"])
                if not isinstance(target, dict):
                    return None
                part = bare(target) | {k: v for k, v in part.items() if k != "$ref"}
            together = both(merged, part)
            if together is None:
                return None
            merged = together
        return merged

    def _old_tuples(self, schema: Schema) -> None:
        """`items` as a list is what drafts before 2020-12 call prefixItems."""
        if isinstance(schema.get("items"), list):
            schema["prefixItems"] = schema.pop("items")
            if "additionalItems" in schema:
                schema["items"] = schema.pop("additionalItems")

    def _give_type(self, schema: Schema) -> None:
        """Without a type, the keywords of one would be ignored."""
        if not _SHAPES & schema.keys():
            kind = next((kind for kind, keywords in _FAMILIES.items() if keywords & schema.keys()), None)
            if kind is not None:
                schema["type"] = kind

    def _name_required(self, schema: Schema, path: str) -> None:
        """A required property that `properties` does not have would be forbidden instead."""
        required = schema.get("required")
        if schema.get("type") != "object" or not isinstance(required, list):
            return
        properties = schema.get("properties") or {}
        other = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        patterns: Mapping[str, Any] = schema.get("patternProperties") or {}
        added = {}
        for name in required:
            if isinstance(name, str) and name not in properties:
                added[name] = next((s for p, s in patterns.items() if _matches(p, name)), other)
        if any(sub is False for sub in added.values()):
            raise Unsatisfiable(f"{path}: a required property is forbidden by additionalProperties")
        if added:
            schema["properties"] = properties | added

    # What is left

    def _report(self, schema: Schema, path: str) -> None:
        for key in sorted(_IGNORED & schema.keys()):
            self._note(path, key)
        if schema.get("uniqueItems") is True and not 0 < _count(schema, "maxItems") <= 1:
            self._note(path, "uniqueItems")
        if "allOf" in schema:
            self._note(path, "allOf (its parts cannot be merged)")
        listed = sorted({"enum", "const"} & schema.keys())
        if listed and (beside := sorted((_TYPED - CHECKED - {"format"}) & schema.keys())):
            self._note(path, f"{', '.join(beside)} beside {listed[0]}")
        for key in ("$ref", "anyOf", "oneOf"):
            beside = sorted((_TYPED | {"type", "enum", "const", "anyOf", "oneOf"}) & schema.keys() - {key})
            if key in schema and beside:
                self._note(path, f"{', '.join(beside)} beside {key}")
        if isinstance(ref := schema.get("$ref"), str) and self._target(ref) is None:
            self._note(path, f"$ref {ref!r} (only references inside the schema are followed)")
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            if re.search(r"\(\?[=!<]|\\[bB]|\\\d", pattern):
                self._note(path, f"pattern {pattern!r} (look-around, \\b and back references)")
            if {"minLength", "maxLength"} & schema.keys():
                self._note(path, "minLength and maxLength beside pattern")
        if isinstance(form := schema.get("format"), str) and form in _OPEN_FORMATS:
            self._note(path, f"format {form!r}")
        if len(schema.get("patternProperties") or {}) > 1:
            self._note(path, "several patternProperties (of those that match a name, one is enforced)")
        if {"patternProperties", "propertyNames"} <= schema.keys():
            self._note(path, "propertyNames beside patternProperties")
        if schema.get("properties") and {"patternProperties", "propertyNames"} & schema.keys():
            self._note(path, "patternProperties or propertyNames beside properties")
        number = schema.get("multipleOf")
        if number is not None and (schema.get("type") != "integer" or not float(number).is_integer()):
            self._note(path, "multipleOf of numbers that are not integers")

    def _note(self, path: str, what: str) -> None:
        self.notes.append(f"{what} at {path}")

    def _inline(self, ref: Any) -> Any:
        """What a reference points at, to be written in its place; None where that would never end."""
        if ref in self._inlined:
            return None
        target = self._target(ref)
        if target is not None:
            self._inlined.append(ref)
        return target

    def _target(self, ref: Any) -> Any:
        """What a reference inside the schema points at (RFC 6901); None for any other."""
        if ref == "#":
            return self._root
        if not isinstance(ref, str) or not ref.startswith("#/"):
            return None
        found = self._root
        for part in ref[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                return None
        return found


def _leave_out_the_impossible(schema: Schema, path: str) -> bool:
    """Properties and branches that no value satisfies, which the compiler does not know. Whether there were
    such properties."""
    forbidden = set()
    if properties := schema.get("properties"):
        schema["properties"] = {name: sub for name, sub in properties.items() if sub is not False}
        forbidden = properties.keys() - schema["properties"].keys()
        if needed := sorted(forbidden & set(schema.get("required") or [])):
            raise Unsatisfiable(f"{path}: the required property {needed[0]!r} is forbidden by properties")
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            schema[key] = [branch for branch in branches if branch is not False] or branches
    return bool(forbidden)


def _is_open(schema: Schema) -> bool:
    """Whether objects may have properties that are not named."""
    other = (schema.get(k, False) for k in ("additionalProperties", "unevaluatedProperties"))
    return any(o is not False for o in other) or bool(schema.get("patternProperties"))


def _bound_length(schema: Schema) -> None:
    """Lengths as a pattern: by themselves they let raw control characters into a string, which JSON forbids.
    A pattern takes time by the square of the length, so large ones stay as they are."""
    kinds = schema.get("type")
    if {"minLength", "maxLength"} & schema.keys() and not {
        "pattern",
        "format",
        "enum",
        "const",
    } & schema.keys():
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        bounds = [bound for bound in (least, most) if bound is not None]
        if not all(isinstance(bound, int) and 0 <= bound <= _LONGEST for bound in bounds):
            return
        if ("string" in kinds if isinstance(kinds, list) else kinds == "string") and bounds == sorted(bounds):
            schema["pattern"] = f"^.{{{least},{'' if most is None else most}}}$"
            schema.pop("minLength", None)
            schema.pop("maxLength", None)


def _leave_room(schema: Schema) -> None:
    """What a schema does not mention is forbidden by the compiler; where that leaves too little, allow it."""
    items, properties = schema.get("prefixItems") or [], schema.get("properties") or {}
    few = not items or _count(schema, "minItems") > len(items)
    if schema.get("type") == "array" and "items" not in schema and few:
        schema["items"] = {}
    closed = {"additionalProperties", "unevaluatedProperties", "patternProperties"} & schema.keys()
    if not closed and _count(schema, "minProperties") > len(properties):
        schema["additionalProperties"] = {}


def _count(schema: Schema, key: str) -> float:
    value = schema.get(key)
    return value if isinstance(value, int | float) else 0


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False
