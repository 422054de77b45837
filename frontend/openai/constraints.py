"""Constraints on the output as requests state them -> the wire's Grammar. Pure.

Three dialects: OpenAI's response_format, vLLM's guided_* fields and structured_outputs object, and
llama.cpp's grammar and json_schema fields. A request has at most one constraint. Whether it compiles is for
the worker to find; what it cannot enforce becomes a Warning header, or an error where the request is strict.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlxhost.frontend.errors import BadRequest
from mlxhost.frontend.openai.requests import GenerationRequest
from mlxhost.frontend.text.prompts import Conversation
from mlxhost.wire.data import Grammar

_MAX_WARNING_CHARS = 1000


@dataclass(frozen=True)
class Constraint:
    """What the output must be, and the field that says so. `instruction` is what asks the model for it in
    words, for when it cannot be enforced; None when that would not do."""

    grammar: Grammar
    param: str
    instruction: str | None = None


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """The request's constraint, None when it has none. Raises BadRequest for a malformed one, and for two."""
    found = [c for c in (_response_format(request.response_format), *_fields(request)) if c is not None]
    if len(found) > 1:
        names = " and ".join(f"`{c.param}`" for c in found)
        raise BadRequest(f"only one constraint can hold: {names} are both given", param=found[1].param)
    return found[0] if found else None


def instructed(conversation: Conversation, instruction: str) -> Conversation:
    """The conversation with `instruction` at the end of its system text."""
    first, *rest = conversation.messages
    if first["role"] not in ("system", "developer"):
        return replace(
            conversation, messages=[{"role": "system", "content": instruction}, *conversation.messages]
        )
    content = first["content"]
    if isinstance(content, list):
        merged: Any = [*content, {"type": "text", "text": instruction}]
    else:
        merged = f"{content}\n\n{instruction}" if content else instruction
    return replace(conversation, messages=[{**first, "content": merged}, *rest])


def warning_header(text: str) -> dict[str, str]:
    """`text` as a Warning header (RFC 7234, 5.5; code 199 is for any other warning); none for none."""
    if not text:
        return {}
    plain = text.encode("ascii", "backslashreplace").decode()[:_MAX_WARNING_CHARS]
    quoted = "".join(c if c.isprintable() else " " for c in plain).replace("\\", "\\\\").replace('"', '\\"')
    return {"Warning": f'199 mlxhost "{quoted}"'}


def _response_format(value: Mapping[str, Any] | None) -> Constraint | None:
    if value is None:
        return None
    param = "response_format"
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            if value.get("schema") is not None:
                return _schema(value["schema"], f"{param}.schema", fallback=True)
            asked = "Answer with one JSON object and nothing else."
            return Constraint(Grammar("json_object"), param, asked)
        case "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict) or inner.get("schema") is None:
                raise BadRequest(f"`{param}.json_schema.schema` is missing", param=f"{param}.json_schema")
            strict = inner.get("strict")
            if strict not in (None, True, False):
                raise BadRequest(
                    f"`{param}.json_schema.strict` must be a boolean", param=f"{param}.json_schema.strict"
                )
            where = f"{param}.json_schema.schema"
            return _schema(inner["schema"], where, strict=bool(strict), fallback=not strict)
        case "structural_tag":
            return Constraint(Grammar("structural_tag", json.dumps(value)), param)
        case other:
            raise BadRequest(
                f"`{param}.type` is {other!r}; it must be text, json_object, json_schema or structural_tag",
                param=f"{param}.type",
            )


def _fields(request: GenerationRequest) -> list[Constraint | None]:
    """Of every other field that is given."""
    stated: list[Constraint | None] = [
        _given("guided_json", request.guided_json, _schema),
        _given("guided_regex", request.guided_regex, _regex),
        _given("guided_choice", request.guided_choice, _choice),
        _given("guided_grammar", request.guided_grammar, _ebnf),
        _given("grammar", request.grammar, _ebnf),
        _given("json_schema", request.json_schema, _schema),
    ]
    outputs, name = request.structured_outputs, "structured_outputs"
    if outputs is None:
        return stated
    if not isinstance(outputs, dict):
        raise BadRequest(f"`{name}` must be an object", param=name)
    kinds: dict[str, Callable[[Any, str], Constraint | None]] = {
        "json": _schema,
        "regex": _regex,
        "choice": _choice,
        "grammar": _ebnf,
        "json_object": lambda on, param: Constraint(Grammar("json_object"), param) if on else None,
        "structural_tag": _structural_tag,
    }
    given = {kind: outputs[kind] for kind in kinds if outputs.get(kind) is not None}
    if not given:
        raise BadRequest(f"`{name}` needs one of {', '.join(kinds)}", param=name)
    return stated + [kinds[kind](value, f"{name}.{kind}") for kind, value in given.items()]


def _given(param: str, value: Any, read: Callable[[Any, str], Constraint | None]) -> Constraint | None:
    return None if value is None else read(value, param)


def _schema(value: Any, param: str, *, strict: bool = False, fallback: bool = False) -> Constraint:
    """A JSON schema, as JSON or as its text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRequest(f"`{param}` is not JSON", param=param) from None
    if not isinstance(value, dict | bool):
        raise BadRequest(f"`{param}` must be a JSON schema: an object", param=param)
    text = json.dumps(value, ensure_ascii=False)
    if any("\ud800" <= c <= "\udfff" for c in text):  # from an escape in a schema that is given as text
        raise BadRequest(f"`{param}` holds half a surrogate pair, which is no text", param=param)
    asked = f"Answer with JSON that conforms to this JSON schema, and with nothing else:\n{text}"
    return Constraint(Grammar("json_schema", text, strict), param, asked if fallback else None)


def _regex(value: Any, param: str) -> Constraint:
    return Constraint(Grammar("regex", _text(value, param)), param)


def _ebnf(value: Any, param: str) -> Constraint:
    return Constraint(Grammar("ebnf", _text(value, param)), param)


def _choice(value: Any, param: str) -> Constraint:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise BadRequest(f"`{param}` must be a list of at least one string", param=param)
    return Constraint(Grammar("choice", json.dumps(value, ensure_ascii=False)), param)


def _structural_tag(value: Any, param: str) -> Constraint:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Constraint(Grammar("structural_tag", text), param)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"`{param}` must be a string that is not empty", param=param)
    return value
