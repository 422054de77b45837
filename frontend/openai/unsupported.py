"""Fields that ask for something this server cannot do yet: refused by name, never silently ignored."""

from collections.abc import Callable
from typing import Any

from mlxhost.frontend.errors import UnsupportedParameter
from mlxhost.frontend.openai.requests import ChatRequest, CompletionRequest, GenerationRequest

# Field -> the values, beside null, that ask for nothing.
_COMMON: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "xtc_probability": (0,),
    "logit_bias": ({},),
    "adapter": (),
}
_CHAT: dict[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "function_call": ("none",),
    "modalities": ([], ["text"]),
    "audio": (),
}
_COMPLETION: dict[str, tuple[object, ...]] = {"suffix": ("",)}


def refuse_unsupported(request: GenerationRequest) -> None:
    """Raises UnsupportedParameter naming the first field that cannot be honoured."""
    _refuse(request, _COMMON)
    if request.best_of not in (None, request.n or 1):
        raise UnsupportedParameter("best_of", "is supported only when equal to n")
    if isinstance(request, ChatRequest):
        _refuse(request, _CHAT)
        _refuse_tools(request)
    elif isinstance(request, CompletionRequest):
        _refuse(request, _COMPLETION)
        # 0 asks for the chosen token's logprob; only false asks for nothing.
        if request.logprobs is not None and request.logprobs is not False:
            raise UnsupportedParameter("logprobs")


def _refuse(request: GenerationRequest, harmless: dict[str, tuple[object, ...]]) -> None:
    value_of: Callable[[str], Any] = request.__getattribute__
    for name, values in harmless.items():
        value = value_of(name)
        if value is not None and value not in values:
            raise UnsupportedParameter(name)


def _refuse_tools(request: ChatRequest) -> None:
    """Tools are offered only with a tool_choice (or function_call) other than "none"; with it they are
    hidden from the model, which is what the client asked for."""
    if request.tool_choice not in (None, "none"):
        raise UnsupportedParameter("tool_choice", 'is supported only as "none"')
    if request.tools and request.tool_choice != "none":
        raise UnsupportedParameter("tools", 'are not supported by this server unless tool_choice is "none"')
    if request.functions and request.function_call != "none":
        raise UnsupportedParameter("functions")
