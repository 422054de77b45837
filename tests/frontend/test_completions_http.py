"""Plain completions over HTTP."""

from typing import Any

import openai
from support.frontend_client import Answer, call
from support.frontend_served import ANSWER, ANSWER_IDS, TOKENIZER, Served


def complete(url: str, prompt: Any, model: str = "demo", **fields: Any) -> Answer:
    return call(url, "/v1/completions", {"model": model, "prompt": prompt} | fields)


def test_sdk(served: Served) -> None:
    """The SDK gets text, finish reason and usage, streamed and not."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        answer = client.completions.create(model="demo", prompt="hi")
        stream = client.completions.create(model="demo", prompt="hi", stream=True)
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert text == ANSWER


def test_prompts_times_n(served: Served) -> None:
    """Choice index is prompt * n + i, and each prompt's tokens count once."""
    answer = complete(served.url, ["hello", "the dog"], "echo", n=2).json
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "hello"),
        (1, "hello"),
        (2, "the dog"),
        (3, "the dog"),
    ]
    ids = [len(TOKENIZER.encode(p).ids) for p in ("hello", "the dog")]
    assert answer["usage"]["prompt_tokens"] == sum(ids)
    assert answer["usage"]["completion_tokens"] == 2 * sum(ids)


def test_token_id_prompts(served: Served) -> None:
    """Ids reach the worker as they are, one list or several."""
    assert complete(served.url, ANSWER_IDS, "echo").json["choices"][0]["text"] == ANSWER
    several = complete(served.url, [ANSWER_IDS, ANSWER_IDS[:1]], "echo").json["choices"]
    assert [c["text"] for c in several] == [ANSWER, TOKENIZER.decode(ANSWER_IDS[:1])]


def test_echo(served: Served) -> None:
    """echo puts the prompt before the text, for text and id prompts, streamed and not."""
    prompt = "the dog "
    assert complete(served.url, prompt, echo=True).json["choices"][0]["text"] == prompt + ANSWER
    ids = TOKENIZER.encode(prompt).ids
    assert complete(served.url, ids, echo=True).json["choices"][0]["text"] == prompt + ANSWER
    *chunks, done = complete(served.url, prompt, echo=True, stream=True).events
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["text"] == prompt
    assert "".join(c["choices"][0]["text"] for c in chunks) == prompt + ANSWER


def test_default_length_is_512(served: Served) -> None:
    """Without max_tokens a completion ends after 512 tokens."""
    answer = complete(served.url, ANSWER_IDS * 60, "echo").json
    assert answer["usage"]["completion_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_bad_prompts(served: Served) -> None:
    """Empty prompts, ids outside the vocabulary and too many choices are a 400 for `prompt`."""
    for prompt, fields in (("", {}), ([10**6], {}), ([-1], {}), (["a"] * 20, {"n": 16}), ([], {})):
        answer = complete(served.url, prompt, **fields)
        assert (answer.status, answer.error["param"]) == (400, "prompt")
