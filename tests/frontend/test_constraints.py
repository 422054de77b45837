"""Constraints of every dialect, as requests state them."""

import json
from typing import Any

import msgspec
import pytest

from mlxhost.frontend.errors import BadRequest
from mlxhost.frontend.openai.constraints import constraint_of, instructed, warning_header
from mlxhost.frontend.openai.requests import ChatRequest
from mlxhost.frontend.text.prompts import Conversation
from mlxhost.wire.data import Grammar

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return msgspec.json.decode(msgspec.json.encode(body), type=ChatRequest)


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "grammar", "param", "falls_back"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_object"), "response_format", True),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            Grammar("json_schema", TEXT),
            "response_format.schema",
            True,
        ),
        (
            {"response_format": json_schema(SCHEMA)},
            Grammar("json_schema", TEXT),
            "response_format.json_schema.schema",
            True,
        ),
        (
            {"response_format": json_schema(SCHEMA, strict=True)},
            Grammar("json_schema", TEXT, True),
            "response_format.json_schema.schema",
            False,
        ),
        ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG)), "response_format", False),
        ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT), "guided_json", False),
        ({"guided_json": TEXT}, Grammar("json_schema", TEXT), "guided_json", False),
        ({"guided_json": {}}, Grammar("json_schema", "{}"), "guided_json", False),
        ({"guided_regex": "a+"}, Grammar("regex", "a+"), "guided_regex", False),
        ({"guided_choice": ["a", "é"]}, Grammar("choice", '["a", "é"]'), "guided_choice", False),
        ({"guided_grammar": "root ::= x"}, Grammar("ebnf", "root ::= x"), "guided_grammar", False),
        ({"grammar": "root ::= x"}, Grammar("ebnf", "root ::= x"), "grammar", False),
        ({"json_schema": SCHEMA}, Grammar("json_schema", TEXT), "json_schema", False),
        (
            {"structured_outputs": {"json": SCHEMA}},
            Grammar("json_schema", TEXT),
            "structured_outputs.json",
            False,
        ),
        ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a"), "structured_outputs.regex", False),
        (
            {"structured_outputs": {"choice": ["a"], "regex": None}},
            Grammar("choice", '["a"]'),
            "structured_outputs.choice",
            False,
        ),
        (
            {"structured_outputs": {"json_object": True}},
            Grammar("json_object"),
            "structured_outputs.json_object",
            False,
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            Grammar("structural_tag", "{}"),
            "structured_outputs.structural_tag",
            False,
        ),
        ({"structured_outputs": {"grammar": "x"}}, Grammar("ebnf", "x"), "structured_outputs.grammar", False),
    ],
)
def test_every_dialect_becomes_the_same_grammar(
    fields: dict[str, Any], grammar: Grammar, param: str, falls_back: bool
) -> None:
    """Each field gives the wire's grammar; only what OpenAI calls best effort may fall back to words."""
    constraint = constraint_of(chat(**fields))
    assert constraint is not None
    assert (constraint.grammar, constraint.param) == (grammar, param)
    assert (constraint.instruction is not None) is falls_back


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"guided_json": None, "structured_outputs": None}],
)
def test_no_constraint_is_none(fields: dict[str, Any]) -> None:
    """Absent, null and plain text ask for nothing."""
    assert constraint_of(chat(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema(None)}, "response_format.json_schema"),
        ({"response_format": json_schema("{x")}, "response_format.json_schema.schema"),
        ({"response_format": json_schema([1])}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({}, strict="yes")}, "response_format.json_schema.strict"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_grammar": 1}, "guided_grammar"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
    ],
)
def test_malformed_and_conflicting_constraints_are_refused(fields: dict[str, Any], param: str) -> None:
    """Each is a 400 that names the field at fault."""
    with pytest.raises(BadRequest) as caught:
        constraint_of(chat(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            [{"role": "user", "content": "q"}],
            [{"role": "system", "content": "JSON!"}, {"role": "user", "content": "q"}],
        ),
        ([{"role": "system", "content": "s"}], [{"role": "system", "content": "s\n\nJSON!"}]),
        (
            [{"role": "developer", "content": [{"type": "text", "text": "s"}]}],
            [
                {
                    "role": "developer",
                    "content": [{"type": "text", "text": "s"}, {"type": "text", "text": "JSON!"}],
                }
            ],
        ),
    ],
)
def test_an_instruction_joins_the_system_text(
    messages: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    """It ends the system message that is there, or becomes one."""
    assert instructed(Conversation(messages), "JSON!").messages == expected


def test_a_warning_is_one_header_line() -> None:
    """Quotes, line breaks and other alphabets cannot break out of the header; no warning is no header."""
    assert warning_header("") == {}
    line = warning_header('a "b"\r\nX: y é')["Warning"]
    assert line == '199 mlxhost "a \\"b\\"  X: y \\\\xe9"'
    assert len(warning_header("x" * 5000)["Warning"]) < 1100
