"""Request bodies of the OpenAI dialect, as types: what they may hold, with ranges.

JSON null means absent, and unknown keys are ignored. Fields of a known meaning that this server cannot
honour yet are listed all the same, so that they can be refused instead of ignored (openai.unsupported).
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

MAX_N = 16
MAX_STOPS = 16

PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stops = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_STOPS)]
TokenIds = list[Annotated[int, Meta(ge=0, le=2**32 - 1)]]


class StreamOptions(Struct):
    include_usage: bool | None = None


class GenerationRequest(Struct, kw_only=True):
    """What chat completions and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: PositiveInt | None = None
    min_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Stops | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    bootstrap_room: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None

    # Constraints: see openai.constraints.
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    json_schema: Any = None

    # Known, and refused unless they ask for nothing.
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    xtc_probability: Probability | None = None
    logit_bias: dict[str, Any] | None = None
    best_of: PositiveInt | None = None
    adapter: Any = None


class ContentPart(Struct):
    type: str
    text: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: Any = None


class ToolCall(Struct):
    """A call that the model made earlier in the conversation."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(Struct):
    role: Annotated[str, Meta(min_length=1)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions. `prompt` is a text, a list of texts, a list of ids, or a list of such
    lists; openai.completions tells them apart."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None

    logprobs: Annotated[int, Meta(ge=0, le=20)] | bool | None = None
    suffix: str | None = None
