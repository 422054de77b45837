"""Messages or text -> token ids.

All of it runs in a thread. A hop there and back costs 0.2 ms, as much as encoding 300 characters, so doing
short prompts in place would gain little and would let a slow template hold up every other stream.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlxhost.frontend.errors import BadRequest, CardError
from mlxhost.frontend.text.model import TextModel
from mlxhost.frontend.text.template import ChatTemplate

T = TypeVar("T")


@dataclass(frozen=True)
class Conversation:
    """What a chat template is given. `messages` have `content` as a string or as a list of
    {"type": "text", "text": ...} parts."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = field(default_factory=dict)


class Prompts:
    """Renders and encodes off the event loop."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def chat(self, text: TextModel, conversation: Conversation) -> list[int]:
        """Ids of a conversation's prompt. Raises BadRequest when the model has no template or it fails."""
        return await self._run(lambda: encode_chat(text, conversation))

    async def plain(self, text: TextModel, prompt: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer itself puts around a text."""
        return await self._run(lambda: text.tokenizer.encode(prompt).ids)

    async def decode(self, text: TextModel, ids: list[int]) -> str:
        """Text of prompt ids, special tokens left out."""
        return await self._run(lambda: str(text.tokenizer.decode(ids)))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def encode_chat(text: TextModel, conversation: Conversation) -> list[int]:
    """Render and encode; the template writes the special tokens itself, so none are added."""
    return list(text.tokenizer.encode(render_chat(text, conversation), add_special_tokens=False).ids)


def render_chat(text: TextModel, conversation: Conversation) -> str:
    """The prompt's text. Raises BadRequest, or CardError when the model's template is unusable."""
    template = text.template
    if template is None:
        raise BadRequest(
            "this model has no chat template; use /v1/completions with a plain prompt", param="messages"
        )
    if isinstance(template, CardError):
        raise template
    messages = [_shaped(message, template) for message in conversation.messages]
    rendered = template.render(
        messages,
        **{"tools": None, "documents": None, **conversation.variables},
        add_generation_prompt=conversation.add_generation_prompt and not conversation.continue_final_message,
    )
    if conversation.continue_final_message:
        rendered = cut_after_final_message(rendered, _joined(conversation.messages[-1].get("content")))
    return rendered


def cut_after_final_message(rendered: str, final: str) -> str:
    """`rendered` up to the end of its last message's text, so that the model goes on writing it.

    Templates may trim messages; then the trimmed text is looked for. Raises BadRequest when the template
    does not show it at all.
    """
    bare = final.strip()
    start = rendered.rfind(bare)
    if not bare or start < 0:
        raise BadRequest(
            "continue_final_message: the model's chat template does not show the last message's text",
            param="continue_final_message",
        )
    whole = final.lstrip()
    kept = whole if rendered.startswith(whole, start) else bare
    return rendered[: start + len(kept)]


def _shaped(message: dict[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """The message in the form that the template reads: content as a string or as a list of parts, and
    `developer` as `system` where the template has never heard of it."""
    shaped = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        if not template.iterates_content:
            shaped["content"] = _joined(content)
    elif template.iterates_content and not template.tests_for_string:
        shaped["content"] = [{"type": "text", "text": content or ""}]
    else:
        shaped["content"] = content or ""
    if message["role"] == "developer" and not template.knows_developer:
        shaped["role"] = "system"
    return shaped


def _joined(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
