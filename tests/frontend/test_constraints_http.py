"""What a client sees of constraints: reasons before headers, fallbacks and warnings."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.frontend_client import Answer, call, chat
from support.frontend_harness import Host, host
from support.frontend_models import write_model
from support.frontend_served import TOKENIZER

SCHEMA = {"type": "object"}
REASON = 'the regex cannot be used: "x" is wrong'


@pytest.fixture(scope="module")
def playing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Models that repeat their prompt: one accepts grammars, one refuses all, one enforces only a part."""
    models = tmp_path_factory.mktemp("constraints")
    with host() as fleet:
        fleet.start_frontend()
        fleet.start_worker("able", write_model(models / "able"))
        fleet.start_worker("unable", write_model(models / "unable"), grammar_error=REASON)
        fleet.start_worker("partly", write_model(models / "partly"), grammar_warning="uniqueItems at #")
        fleet.ready("able", "unable", "partly")
        yield fleet


def formatted(strict: bool | None = None) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": strict}}


def content(answer: Answer) -> str:
    return str(answer.json["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "x"}, "guided_regex"),
        ({"response_format": formatted(strict=True)}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA}, "stream": True}, "structured_outputs.json"),
    ],
)
def test_a_grammar_that_does_not_compile_is_a_400_with_the_reason(
    playing: Host, fields: dict[str, Any], param: str
) -> None:
    """Also when the answer would have been streamed: no header is out yet."""
    answer = chat(playing.url, "unable", **fields)
    assert answer.status == 400
    assert answer.error["message"] == REASON
    assert (answer.error["param"], answer.error["code"]) == (param, "invalid_grammar")


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"response_format": formatted()}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_best_effort_formats_fall_back_to_words_with_a_warning(
    playing: Host, fields: dict[str, Any], stream: bool
) -> None:
    """The model is asked for JSON in the prompt instead, and the client is told."""
    answer = chat(playing.url, "unable", stream=stream, **fields)
    assert answer.status == 200
    assert "is not enforced" in answer.headers["warning"]
    assert "is wrong" in answer.headers["warning"]
    if stream:
        deltas = [e["choices"][0]["delta"] for e in answer.events if e and e != "[DONE]"]
        text = "".join(d.get("content") or "" for d in deltas)
    else:
        text = content(answer)
    assert "Answer with" in text, "the prompt, which this worker repeats, holds the instruction"


def test_completions_do_not_fall_back(playing: Host) -> None:
    """There is no conversation to put an instruction in: 400."""
    body = {"model": "unable", "prompt": "x", "response_format": {"type": "json_object"}}
    answer = call(playing.url, "/v1/completions", body)
    assert (answer.status, answer.error["param"]) == (400, "response_format")


def test_what_is_not_enforced_is_said_in_a_warning(playing: Host) -> None:
    """A schema that is enforced in part is served with a Warning header; strict, it is a 400."""
    answer = chat(playing.url, "partly", guided_json=SCHEMA)
    assert (answer.status, answer.headers["warning"]) == (200, '199 mlxhost "not enforced: uniqueItems at #"')
    strict = chat(playing.url, "partly", response_format=formatted(strict=True))
    assert (strict.status, strict.error["message"]) == (400, "uniqueItems at #")


def test_an_enforced_constraint_says_nothing(playing: Host) -> None:
    """No warning, and the prompt is as it was."""
    answer = chat(playing.url, "able", text="hello there", response_format=formatted(strict=True), n=2)
    assert (answer.status, "warning" in answer.headers) == (200, False)
    assert "Answer with" not in content(answer)
    body = {"model": "able", "prompt": TOKENIZER.encode("abc").ids, "guided_choice": ["a"]}
    assert call(playing.url, "/v1/completions", body).status == 200


def test_conflicting_constraints_are_a_400(playing: Host) -> None:
    """Both fields are named."""
    answer = chat(playing.url, "able", guided_regex="a", guided_json=SCHEMA)
    assert answer.status == 400
    assert "`guided_regex`" in answer.error["message"]
    assert "`guided_json`" in answer.error["message"]
