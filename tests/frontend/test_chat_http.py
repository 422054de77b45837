"""Chat completions over HTTP, through the SDK and raw."""

import asyncio
from typing import Any

import openai
import pytest
from support.frontend_client import call, chat
from support.frontend_served import ANSWER, ANSWER_IDS, TOKENIZER, Served

USER: Any = [{"role": "user", "content": "hi"}]


def test_sdk_sync(served: Served) -> None:
    """The sync SDK gets the whole answer, its finish reason and usage."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(model="demo", messages=USER)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ANSWER_IDS)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(ANSWER_IDS)


def test_sdk_stream(served: Served) -> None:
    """The streaming SDK gets the same text in pieces, and usage at the end when asked for."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(
                model="demo", messages=USER, stream=True, stream_options={"include_usage": True}
            )
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ANSWER_IDS)
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_sdk_async(served: Served) -> None:
    """Concurrent async requests, streaming and not, all get the whole answer."""

    async def body() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:

            async def whole() -> str:
                answer = await client.chat.completions.create(model="demo", messages=USER)
                return answer.choices[0].message.content or ""

            async def streamed() -> str:
                stream = await client.chat.completions.create(model="demo", messages=USER, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*(f() for f in (whole, streamed) for _ in range(4)))

    assert asyncio.run(body()) == [ANSWER] * 8


def test_sdk_models(served: Served) -> None:
    """The SDK lists models and retrieves one by its full id."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["demo", "echo"]
        assert client.models.retrieve("org/demo-135m").id == "demo"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("org/absent")


def test_stream_events_are_exact(served: Served) -> None:
    """Role chunk first and alone, text, one finish chunk with an empty delta, [DONE]; one id throughout."""
    answer = chat(served.url, stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)
    first, last = chunks[0]["choices"][0], chunks[-1]["choices"][0]
    assert (first["delta"], first["finish_reason"]) == ({"role": "assistant", "content": ""}, None)
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    middle = [c["choices"][0] for c in chunks[1:-1]]
    assert all(c["delta"].keys() == {"content"} and c["finish_reason"] is None for c in middle)
    assert "".join(c["delta"]["content"] for c in middle) == ANSWER


def test_usage_chunk_comes_last_and_only_if_asked(served: Served) -> None:
    """include_usage adds one chunk without choices, with cached tokens."""
    *_, usage, done = chat(served.url, stream=True, stream_options={"include_usage": True}).events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_n_choices(served: Served) -> None:
    """n choices come with their indices, each with role and finish in a stream; the prompt counts once."""
    whole = chat(served.url, n=3).json
    assert [(c["index"], c["message"]["content"]) for c in whole["choices"]] == [
        (i, ANSWER) for i in range(3)
    ]
    assert whole["usage"]["completion_tokens"] == 3 * len(ANSWER_IDS)
    assert whole["usage"]["prompt_tokens"] == chat(served.url).json["usage"]["prompt_tokens"]
    *chunks, _ = chat(served.url, n=3, stream=True).events
    choices = [c["choices"][0] for c in chunks]
    for index in range(3):
        own = [c for c in choices if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == ANSWER
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": "日本"}, "naïve café ", "stop"),
        ({"stop": ["absent", "says"]}, "naïve café 日本語 👩‍🚀 ", "stop"),
        ({"stop": "日本", "include_stop_str_in_output": True}, "naïve café 日本", "stop"),
        ({"stop": "hello world"}, ANSWER, "stop"),
        ({"max_tokens": 3}, TOKENIZER.decode(ANSWER_IDS[:3]), "length"),
        ({"max_completion_tokens": 2, "max_tokens": 5}, TOKENIZER.decode(ANSWER_IDS[:2]), "length"),
        ({"stop_token_ids": [ANSWER_IDS[-1]]}, TOKENIZER.decode(ANSWER_IDS[:-1]), "stop"),
        ({"stop": "é", "min_tokens": 7}, ANSWER, "stop"),
    ],
)
def test_endings(served: Served, fields: dict[str, Any], text: str, reason: str, streaming: bool) -> None:
    """Stop strings, stop ids and limits end the text alike, streamed or not."""
    answer = chat(served.url, stream=streaming, **fields)
    if streaming:
        choices = [e["choices"][0] for e in answer.events[:-1]]
        found = "".join(c["delta"].get("content", "") for c in choices), choices[-1]["finish_reason"]
    else:
        choice = answer.json["choices"][0]
        found = choice["message"]["content"], choice["finish_reason"]
    assert found == (text, reason)


def test_the_worker_gets_the_rendered_prompt(served: Served) -> None:
    """What the worker is sent is the template's text, its special tokens as single ids."""
    answer = chat(served.url, "echo", "x", return_token_ids=True).json
    expected = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(answer["prompt_token_ids"], skip_special_tokens=False) == expected
    assert answer["choices"][0]["token_ids"] == answer["prompt_token_ids"]
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])


def test_token_ids_in_a_stream(served: Served) -> None:
    """return_token_ids adds the prompt's ids to the first chunk and each delta's own to it."""
    *chunks, _ = chat(served.url, stream=True, return_token_ids=True).events
    assert chunks[0]["prompt_token_ids"]
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == ANSWER_IDS


def test_continue_final_message(served: Served) -> None:
    """The prompt ends inside the last message."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Well"}]
    body = {"model": "echo", "messages": messages, "continue_final_message": True, "return_token_ids": True}
    ids = call(served.url, "/v1/chat/completions", body).json["prompt_token_ids"]
    assert TOKENIZER.decode(ids).endswith("assistant\nWell")


@pytest.mark.parametrize("name", ["demo", "org/demo-135m", "demo-dir"])
def test_models_answer_to_all_their_names(served: Served, name: str) -> None:
    """Name, alias and directory name lead to the model, which answers under its own name."""
    answer = chat(served.url, name)
    assert (answer.status, answer.json["model"]) == (200, "demo")


def test_context_overflow(served: Served) -> None:
    """A prompt longer than the context is refused with the numbers; streams get the same 400."""
    for streaming in (False, True):
        answer = chat(served.url, text="x " * 20_000, stream=streaming)
        assert answer.status == 400
        assert answer.error["code"] == "context_length_exceeded"
        assert "8192" in answer.error["message"]


def test_models_route(served: Served) -> None:
    """A model object has the API's fields and ours."""
    model = call(served.url, "/v1/models/org/demo-135m").json
    assert model == {
        "id": "demo",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "mlxhost",
        "max_model_len": 8192,
        "state": "ready",
        "aliases": ["org/demo-135m"],
    }
