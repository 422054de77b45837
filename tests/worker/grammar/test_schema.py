"""Schemas as they are prepared: nothing the original forbids is let through without a note."""

import json
from typing import Any

import jsonschema
import pytest
from support.grammars import accepts, compiled, schema_accepts

from mlxhost.worker.grammar.schema import prepare
from mlxhost.worker.grammar.xgr import GrammarError

OBJECT = {"type": "object"}


def notes(schema: Any) -> list[str]:
    return prepare(json.dumps(schema))[1]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # A required property that `properties` does not name.
        ({**OBJECT, "required": ["a"]}, [{"a": 1}], [{}]),
        (
            {**OBJECT, "required": ["a"], "additionalProperties": {"type": "integer"}},
            [{"a": 1}],
            [{}, {"a": ""}],
        ),
        # Keywords without a type.
        ({"minimum": 3}, [3], [2]),
        ({"maxItems": 1}, [[1]], [[1, 2]]),
        # What is forbidden unless it is mentioned.
        ({"type": "array"}, [[], [1, "a"]], [{}]),
        ({"prefixItems": [{"type": "integer"}], "minItems": 2}, [[1, "a"]], [[1]]),
        ({**OBJECT, "minProperties": 1}, [{"a": 1}], [{}]),
        ({"pattern": "^a+$"}, ["aa"], ["b"]),
        ({"properties": {"a": {"minLength": 2}}}, [{"a": "xx"}], [{"a": "x"}]),
        # Compositions.
        (
            {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["b"]}]},
            [{"a": 1, "b": 2}],
            [{"a": 1}, {"b": 1}],
        ),
        (
            {**OBJECT, "properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}]},
            [{"a": 1}],
            [{}],
        ),
        (
            {"$ref": "#/$defs/x", "maximum": 5, "$defs": {"x": {"type": "integer", "minimum": 1}}},
            [1, 5],
            [0, 6],
        ),
        ({"allOf": [{"type": "integer"}, {"type": "number", "maximum": 5}]}, [5], [6, 1.5]),
        # Lengths, also among several types.
        ({"type": ["string", "null"], "minLength": 2, "maxLength": 3}, ["é東", None], ["a", "abcd"]),
        # What no value satisfies.
        ({"anyOf": [False, {"type": "integer"}]}, [1], ["a"]),
        ({**OBJECT, "properties": {"a": False, "b": {"type": "integer"}}}, [{"b": 1}], [{"a": 1}]),
        # Listed values, of which what stands beside them forbids some.
        ({"enum": ["abc", "a", 1], "maxLength": 2}, ["a", 1], ["abc"]),
        ({"type": "string", "enum": ["b", 1, True]}, ["b"], [1, True]),
        ({"type": "integer", "enum": [1, 2, 2.5, True], "exclusiveMinimum": 1}, [2], [1, 2.5, True]),
        ({"allOf": [{"enum": ["a", "bc"]}, {"pattern": "^.$"}]}, ["a"], ["bc"]),
        ({"type": "string", "anyOf": [{"enum": ["a"]}, {"const": 1}]}, ["a"], [1]),
        # What drafts before 2020-12 wrote.
        ({"items": [{"type": "integer"}], "additionalItems": False}, [[1]], [["a"], [1, 2]]),
    ],
)
def test_a_schema_is_rewritten_so_that_all_of_it_holds(schema: Any, good: list[Any], bad: list[Any]) -> None:
    """No note, and the grammar decides as an independent validator does."""
    validator = (
        jsonschema.Draft201909Validator if "additionalItems" in schema else jsonschema.Draft202012Validator
    )
    assert notes(schema) == []
    for value in good:
        assert validator(schema).is_valid(value)
        assert schema_accepts(schema, value), value
    for value in bad:
        assert not validator(schema).is_valid(value)
        assert not schema_accepts(schema, value), value


@pytest.mark.parametrize(
    ("schema", "note"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "integer"}}, "not"),
        ({**OBJECT, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "string", "pattern": "^(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "beside pattern"),
        ({"type": "string", "format": "idn-email"}, "format"),
        ({"$ref": "https://example.org/x"}, "$ref"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "allOf"),
        ({**OBJECT, "patternProperties": {"a": {}, "b": {}}}, "several patternProperties"),
        ({**OBJECT, "properties": {"a": {}}, "propertyNames": {"pattern": "a"}}, "beside properties"),
        ({**OBJECT, "properties": {"a": False}, "additionalProperties": True}, "properties that are false"),
        ({"enum": [{}], "required": ["a"]}, "required beside enum"),
    ],
)
def test_what_cannot_be_enforced_is_named_with_its_place(schema: Any, note: str) -> None:
    """Wherever the keyword stands, also deep inside."""
    assert note in notes(schema)[0]
    assert notes({**OBJECT, "properties": {"deep": schema}})[0].endswith("at #/properties/deep")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{x", "not JSON"),
        ("3", "object or a boolean"),
        (json.dumps({**OBJECT, "required": ["a"], "additionalProperties": False}), "forbidden"),
        (json.dumps({**OBJECT, "required": ["a"], "properties": {"a": False}}), "'a' is forbidden"),
        (json.dumps({"type": "string", "enum": [1]}), "no value of enum"),
        (json.dumps({"type": "string", "const": 1}), "value of const"),
        ('{"properties": 1}', "#/properties: it must be an object, and it is a number"),
        ('{"properties": {"x": {"type": 5}}}', "#/properties/x/type"),
        ('{"required": [1]}', "list of strings"),
        ('{"minLength": 1, "oneOf": [{"minLength": ["a"]}]}', "malformed"),
    ],
)
def test_what_is_no_schema_is_refused(text: str, reason: str) -> None:
    """With the reason."""
    with pytest.raises(GrammarError, match=reason):
        prepare(text)


def test_recursive_schemas_stay_recursive() -> None:
    """A tree is neither unrolled nor walked for ever."""
    tree = {**OBJECT, "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}, "required": ["kids"]}
    assert notes(tree) == []
    assert schema_accepts(tree, {"kids": [{"kids": []}, {"kids": [{"kids": []}]}]})
    assert not schema_accepts(tree, {"kids": [{}]})
    loop = {"allOf": [{"$ref": "#"}], "type": "integer"}
    assert notes(loop) != []


def test_what_cannot_be_written_out_is_named() -> None:
    """A reference that leads back to itself through keywords beside it is not followed for ever."""
    resource = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/r"}], "minProperties": 1}
    schema = {"$ref": "#/$defs/r", "$defs": {"r": {**OBJECT, "additionalProperties": resource}}}
    assert any("beside" in note for note in notes(schema))


def test_a_bounded_string_holds_no_raw_control_character() -> None:
    """JSON forbids them; lengths by themselves would let them in."""
    grammar = compiled("json_schema", json.dumps({"type": "string", "maxLength": 5}))
    assert accepts(grammar, '"ab"')
    assert not accepts(grammar, '"a\x06"')
    assert not accepts(grammar, '"a\tb"')


def test_annotations_and_nulls_change_nothing() -> None:
    """Titles beside a reference, and keywords set to null, are no constraints."""
    assert notes({"type": "integer", "format": "int32"}) == []
    schema = {"$ref": "#/$defs/x", "title": "t", "minimum": None, "$defs": {"x": {"type": "integer"}}}
    assert notes(schema) == []
    assert schema_accepts(schema, -5)
