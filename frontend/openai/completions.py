"""POST /v1/completions: body -> prompts -> rows."""

from collections.abc import Sequence

from aiohttp import web

from mlxhost.frontend.errors import BadRequest
from mlxhost.frontend.openai import plan
from mlxhost.frontend.openai.constraints import constraint_of
from mlxhost.frontend.openai.format import CompletionFormat
from mlxhost.frontend.openai.requests import CompletionRequest
from mlxhost.frontend.openai.serve import Prompt, prepare, serve
from mlxhost.frontend.services import Services
from mlxhost.frontend.text.model import TextModel


async def completions(http: web.Request) -> web.StreamResponse:
    """Handle one request."""
    prepared = await prepare(http, CompletionRequest)
    request = prepared.body
    plan.check_consistent(request, request.max_tokens)
    constraint = constraint_of(request)
    sources = prompt_list(request.prompt)
    if len(sources) * (request.n or 1) > plan.MAX_CHOICES:
        raise BadRequest(
            f"{len(sources)} prompts times n = {request.n or 1} is more than {plan.MAX_CHOICES} choices",
            param="prompt",
        )
    prompts = []
    for source in sources:
        ids = await _encode(prepared.services, prepared.text, source)
        tokens = plan.max_tokens(
            request.max_tokens,
            plan.DEFAULT_COMPLETION_TOKENS,
            len(ids),
            prepared.max_model_len,
            param="prompt",
        )
        echo = await _echo(prepared.services, prepared.text, source) if request.echo else ""
        prompts.append(Prompt(ids, tokens, echo))
    ending = plan.ending(request, prepared.text.eos_ids, at_start=False)
    return await serve(prepared, prompts, ending, CompletionFormat, constraint)


def prompt_list(prompt: str | Sequence[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a request: one for a text or a list of ids, several for a list of either.

    Raises BadRequest for an empty list or a mixture.
    """
    if isinstance(prompt, str):
        return [prompt]
    texts = [p for p in prompt if isinstance(p, str)]
    ids = [p for p in prompt if isinstance(p, int)]
    lists = [p for p in prompt if isinstance(p, list)]
    if not prompt or len(prompt) not in (len(texts), len(ids), len(lists)):
        raise BadRequest(
            "`prompt` must be a string, a list of strings, a list of token ids or a list of such lists",
            param="prompt",
        )
    return [ids] if ids else [*texts, *lists]


async def _encode(services: Services, text: TextModel, prompt: str | list[int]) -> list[int]:
    ids = await services.prompts.plain(text, prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise BadRequest("`prompt` is empty: at least one token is needed", param="prompt")
    if isinstance(prompt, list):
        wrong = next((i for i in prompt if not 0 <= i < text.vocab_size), None)
        if wrong is not None:
            raise BadRequest(
                f"`prompt` holds the token id {wrong}; the vocabulary has {text.vocab_size}", param="prompt"
            )
    return ids


async def _echo(services: Services, text: TextModel, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else await services.prompts.decode(text, prompt)
