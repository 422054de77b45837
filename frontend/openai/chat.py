"""POST /v1/chat/completions: body -> conversation -> prompt ids -> rows."""

import contextlib
from typing import Any

import msgspec
from aiohttp import web

from mlxhost.frontend.errors import BadRequest, InvalidGrammar, UnsupportedParameter
from mlxhost.frontend.openai import plan
from mlxhost.frontend.openai.constraints import constraint_of, instructed
from mlxhost.frontend.openai.format import ChatFormat
from mlxhost.frontend.openai.requests import ChatRequest, Message
from mlxhost.frontend.openai.serve import Prepared, Prompt, prepare, serve
from mlxhost.frontend.text.prompts import Conversation

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Handle one request."""
    prepared = await prepare(http, ChatRequest)
    request = prepared.body
    talk = conversation(request)
    asked = request.max_completion_tokens or request.max_tokens
    plan.check_consistent(request, asked)
    constraint = constraint_of(request)
    ending = plan.ending(request, prepared.text.eos_ids, at_start=not talk.continue_final_message)
    prompt = await _prompt(prepared, talk, asked)
    try:
        return await serve(prepared, [prompt], ending, ChatFormat, constraint)
    except InvalidGrammar as error:
        if constraint is None or constraint.instruction is None:
            raise
        prompt = await _prompt(prepared, instructed(talk, constraint.instruction), asked)
        warning = f"{constraint.param} is not enforced, the model was only asked for it: {error.message}"
        return await serve(prepared, [prompt], ending, ChatFormat, warning=warning)


async def _prompt(prepared: Prepared[ChatRequest], talk: Conversation, asked: int | None) -> Prompt:
    ids = await prepared.services.prompts.chat(prepared.text, talk)
    tokens = plan.max_tokens(asked, plan.MAX_CHAT_TOKENS, len(ids), prepared.max_model_len, param="messages")
    return Prompt(ids, tokens)


def conversation(request: ChatRequest) -> Conversation:
    """What the chat template is given. Raises BadRequest, naming the field."""
    if request.continue_final_message and request.add_generation_prompt:
        raise BadRequest(
            "`continue_final_message` and `add_generation_prompt` cannot both be true",
            param="continue_final_message",
        )
    return Conversation(
        messages=[_message(m, f"messages[{i}]") for i, m in enumerate(request.messages)],
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        variables=_variables(request),
    )


def _variables(request: ChatRequest) -> dict[str, Any]:
    """Template variables: those of the request's own fields, overridden by chat_template_kwargs."""
    variables: dict[str, Any] = {}
    if (effort := request.reasoning_effort) is not None:
        if effort not in _EFFORTS:
            raise BadRequest(
                f"`reasoning_effort` is {effort!r}; it must be one of {', '.join(_EFFORTS)}",
                param="reasoning_effort",
            )
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    chosen = request.chat_template_kwargs or {}
    for name in chosen.keys() & {"messages", "add_generation_prompt", "continue_final_message"}:
        raise BadRequest(
            f"`chat_template_kwargs` may not set {name!r}; use the field", param="chat_template_kwargs"
        )
    # A null leaves the choice to the template, which could not tell null from false.
    return {k: v for k, v in (variables | chosen).items() if v is not None}


def _message(message: Message, where: str) -> dict[str, Any]:
    """A message as the template sees it: only the fields that are there."""
    shaped: dict[str, Any] = {"role": message.role, "content": message.content}
    if isinstance(message.content, list):
        shaped["content"] = [
            {"type": "text", "text": _part_text(p.type, p.text, f"{where}.content[{j}]")}
            for j, p in enumerate(message.content)
        ]
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            shaped[name] = value
    if message.tool_calls:
        shaped["tool_calls"] = [_tool_call(msgspec.to_builtins(c)) for c in message.tool_calls]
    return shaped


def _part_text(kind: str, text: str | None, where: str) -> str:
    if kind != "text":
        raise UnsupportedParameter(f"{where}.type", f"{kind!r} is not supported, only text is")
    if text is None:
        raise BadRequest(f"`{where}.text` is missing", param=f"{where}.text")
    return text


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates want arguments as an object; the API has them as JSON in a string."""
    function = call["function"]
    if isinstance(function["arguments"], str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            function["arguments"] = msgspec.json.decode(function["arguments"])
    return call
