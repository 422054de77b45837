"""Structured output of the demo model through the real fleet, with the official SDK."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from support.real_fleet import client, fleet
from support.supervisor_up import Up

pytestmark = [pytest.mark.demo, pytest.mark.slow]

MESSAGES: Any = [
    {"role": "user", "content": "Describe Lisbon: country, population, and whether it is by the sea."}
]


class City(pydantic.BaseModel):
    """What the SDK's `parse` turns into a strict JSON schema."""

    country: str = pydantic.Field(max_length=30)
    continent: Literal["Europe", "Asia", "Africa"]
    population: int = pydantic.Field(ge=0, le=99_999_999)
    by_the_sea: bool


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with fleet(tmp_path_factory.mktemp("home"), "demo") as running:
        running.url(180)
        yield running


@pytest.fixture(scope="module")
def sdk(up: Up) -> openai.OpenAI:
    return client(up)


def test_the_sdk_parses_what_a_strict_schema_gives(sdk: openai.OpenAI) -> None:
    """The answer is an object of the class, whatever the small model would have liked to say."""
    answer = sdk.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=City, temperature=0, max_tokens=120
    )
    city = answer.choices[0].message.parsed
    assert city is not None
    assert answer.choices[0].finish_reason == "stop"
    assert city.continent in ("Europe", "Asia", "Africa")


def test_a_streamed_answer_is_the_same(sdk: openai.OpenAI) -> None:
    """Jumps over forced text reach the client like any other tokens."""
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}
    fields: Any = {"model": "demo", "messages": MESSAGES, "response_format": schema, "temperature": 0}
    whole = sdk.chat.completions.create(**fields, max_tokens=120).choices[0].message.content
    stream = sdk.chat.completions.create(**fields, max_tokens=120, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert streamed == whole
    City.model_validate_json(streamed)


def test_choices_and_json_objects(sdk: openai.OpenAI) -> None:
    """vLLM's field through the SDK's extra_body, and OpenAI's oldest format."""
    picked = sdk.chat.completions.create(
        model="demo", messages=MESSAGES, extra_body={"guided_choice": ["by the sea", "inland"]}
    )
    assert picked.choices[0].message.content in ("by the sea", "inland")
    plain = sdk.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=200,
    )
    assert (plain.choices[0].message.content or "").startswith("{")
    if plain.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(plain.choices[0].message.content or ""), dict)


def test_a_bad_grammar_is_a_400_and_harms_nobody(sdk: openai.OpenAI) -> None:
    """With the compiler's reason; a stream that ran meanwhile goes on."""
    running = sdk.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=30, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(running))
    with pytest.raises(openai.BadRequestError, match="Unclosed"):
        sdk.chat.completions.create(model="demo", messages=MESSAGES, extra_body={"guided_regex": "[a-"})
    assert list(running)[-1].choices[0].finish_reason == "length"
