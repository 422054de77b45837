"""Request bodies: what is taken, what is refused, and which field the refusal names."""

from typing import Any

import msgspec
import pytest

from mlxhost.frontend.errors import BadRequest, UnsupportedParameter
from mlxhost.frontend.http.body import decode_body, inflate
from mlxhost.frontend.openai.chat import conversation
from mlxhost.frontend.openai.completions import prompt_list
from mlxhost.frontend.openai.requests import ChatRequest, CompletionRequest
from mlxhost.frontend.openai.unsupported import refuse_unsupported

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PLAIN = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return decode_body(msgspec.json.encode(CHAT | fields), ChatRequest)


def plain(**fields: Any) -> CompletionRequest:
    return decode_body(msgspec.json.encode(PLAIN | fields), CompletionRequest)


def test_null_means_absent() -> None:
    """A body in which every optional field is null equals one without them."""
    optional = {f for f in ChatRequest.__struct_fields__ if f not in ("model", "messages")}
    assert chat(**dict.fromkeys(optional)) == chat()
    optional = {f for f in CompletionRequest.__struct_fields__ if f not in ("model", "prompt")}
    assert plain(**dict.fromkeys(optional)) == plain()


def test_unknown_keys_are_ignored() -> None:
    """Fields of other servers and of the future do no harm."""
    assert chat(store=True, metadata={"a": 1}, service_tier="auto", zzz=[[{}]]) == chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_wrong_values_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """A value of the wrong type or range is a 400 whose param is the field."""
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 1},
        {"top_k": -1},
        {"n": 16},
        {"stop": "x"},
        {"stop": []},
        {"stop": ["a"] * 16},
        {"seed": -(2**63)},
        {"max_completion_tokens": 1},
    ],
)
def test_values_at_the_edge_are_taken(fields: dict[str, Any]) -> None:
    """The ends of each range belong to it, and ints do where floats are asked for."""
    request = chat(**fields)
    assert {name: getattr(request, name) for name in fields} == fields


@pytest.mark.parametrize("name", ["model", "messages"])
def test_missing_fields_are_named(name: str) -> None:
    """A body without a required field is a 400 naming it."""
    with pytest.raises(BadRequest, match=name) as caught:
        decode_body(msgspec.json.encode({k: v for k, v in CHAT.items() if k != name}), ChatRequest)
    assert caught.value.param == name


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  ",
        b"{",
        b"null",
        b"[]",
        b'{"a":1}{"a":1}',
        b'{"model":"\xff"}',
        b'{"x":NaN}',
        b'{"x":' * 50_000,
    ],
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    """Whatever is sent, the answer is a 400 and not a crash, deep nesting included."""
    with pytest.raises(BadRequest):
        decode_body(body, ChatRequest)


def test_cut_compression_is_refused() -> None:
    """Half a gzip stream is a 400."""
    import gzip

    whole = gzip.compress(b"{}" * 1000)
    assert inflate(whole, 10_000) == b"{}" * 1000
    with pytest.raises(BadRequest, match="too early"):
        inflate(whole[: len(whole) // 2], 10_000)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{}], "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"best_of": 2}, "best_of"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"adapter": "lora"}, "adapter"),
    ],
)
def test_what_cannot_be_done_is_refused_not_ignored(fields: dict[str, Any], param: str) -> None:
    """A known field that asks for something unsupported is a 400 naming it."""
    with pytest.raises(UnsupportedParameter) as caught:
        refuse_unsupported(chat(**fields))
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": False, "top_logprobs": 0},
        {"tools": []},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"functions": [{}], "function_call": "none"},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"best_of": 2, "n": 2},
        {"best_of": 1},
        {"modalities": ["text"]},
    ],
)
def test_neutral_values_of_unsupported_fields_are_taken(fields: dict[str, Any]) -> None:
    """SDKs and clients that send defaults explicitly are served."""
    refuse_unsupported(chat(**fields))


@pytest.mark.parametrize(("fields", "param"), [({"logprobs": 0}, "logprobs"), ({"suffix": "x"}, "suffix")])
def test_completions_refuse_what_they_cannot_do(fields: dict[str, Any], param: str) -> None:
    """logprobs 0 asks for the chosen token's logprob, so it is refused as well."""
    with pytest.raises(UnsupportedParameter) as caught:
        refuse_unsupported(plain(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
    ],
)
def test_prompt_forms(prompt: Any, prompts: list[Any]) -> None:
    """A text or a list of ids is one prompt, a list of either is several."""
    assert prompt_list(plain(prompt=prompt).prompt) == prompts


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]], ["a", [1]]])
def test_mixed_prompts_are_refused(prompt: Any) -> None:
    """An empty list or a mixture is a 400 for `prompt`."""
    with pytest.raises(BadRequest) as caught:
        prompt_list(plain(prompt=prompt).prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "messages[1].content[1].type"),
        ({"type": "input_audio"}, "messages[1].content[1].type"),
        ({"type": "text"}, "messages[1].content[1].text"),
    ],
)
def test_parts_other_than_text_are_refused_by_place(part: dict[str, Any], param: str) -> None:
    """An image or a text part without text is a 400 that says where it stands."""
    messages = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, part]},
    ]
    with pytest.raises(BadRequest) as caught:
        conversation(chat(messages=messages))
    assert caught.value.param == param


def test_messages_reach_the_template_as_written() -> None:
    """Known fields pass through, absent ones stay absent, tool arguments become objects."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
    bad = {"function": {"name": "f", "arguments": "{not json"}}
    messages = [
        {"role": "user", "content": "x", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call, bad]},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
    ]
    shaped = conversation(chat(messages=messages)).messages
    assert shaped[0] == messages[0]
    assert shaped[1]["tool_calls"][0]["function"]["arguments"] == {"a": "ü"}
    assert shaped[1]["tool_calls"][1]["function"]["arguments"] == "{not json"
    assert shaped[2] == messages[2]


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
        ({"chat_template_kwargs": {"enable_thinking": None, "x": 1}}, {"x": 1}),
    ],
)
def test_template_variables(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    """reasoning_effort becomes variables, chat_template_kwargs win, null leaves it to the template."""
    assert conversation(chat(**fields)).variables == variables


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], param: str) -> None:
    """Values that cannot be meant are a 400."""
    with pytest.raises(BadRequest) as caught:
        conversation(chat(**fields))
    assert caught.value.param == param
