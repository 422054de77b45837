"""Request fields -> what the worker is told (Sampling, Limits) and what ends the text (Ending). Pure."""

import sys
from array import array
from collections.abc import Sequence
from typing import TypeVar

from mlxhost.frontend.errors import BadRequest, ContextLengthExceeded
from mlxhost.frontend.generation import Ending
from mlxhost.frontend.hints import ANYWHERE, Hints
from mlxhost.frontend.openai.requests import GenerationRequest
from mlxhost.frontend.rows import RowSpec
from mlxhost.frontend.text.card import Defaults
from mlxhost.wire.data import Grammar, Limits, Sampling

T = TypeVar("T")

MAX_CHAT_TOKENS = 65_536
DEFAULT_COMPLETION_TOKENS = 512
MAX_CHOICES = 128  # prompts times n

_SEEDS = 1 << 63


def sampling(request: GenerationRequest, defaults: Defaults, choice: int) -> Sampling:
    """How choice `choice` of a prompt samples: the request's values, else the model's, else neutral ones."""
    default_temperature = 0.0 if defaults.do_sample is False else _first(defaults.temperature, 1.0)
    temperature = _first(request.temperature, default_temperature)
    top_p = _first(request.top_p, defaults.top_p, 1.0)
    if top_p == 0:  # only the likeliest token can fit
        temperature, top_p = 0.0, 1.0
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, _first(request.top_k, defaults.top_k, 0)),
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        seed=None if request.seed is None else (request.seed + choice) % _SEEDS,
    )


def max_tokens(asked: int | None, default: int, prompt_tokens: int, max_model_len: int, *, param: str) -> int:
    """How many tokens the answer may have: what was asked for, clamped to the room that is left.

    Raises ContextLengthExceeded when there is none.
    """
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(prompt_tokens, max_model_len, param)
    return min(asked if asked is not None else default, room)


def limits(request: GenerationRequest, tokens: int) -> Limits:
    """When a row ends."""
    return Limits(
        max_tokens=tokens,
        min_tokens=min(request.min_tokens or 0, tokens),
        stop_ids=request.stop_token_ids or [],
        ignore_eos=bool(request.ignore_eos),
    )


def ending(request: GenerationRequest, eos_ids: frozenset[int], *, at_start: bool) -> Ending:
    """What ends the text. Raises BadRequest for an empty stop string."""
    if request.stop == "":
        raise BadRequest("`stop` must not be an empty string", param="stop")
    ends = frozenset(request.stop_token_ids or ()) | (frozenset() if request.ignore_eos else eos_ids)
    return Ending(
        stops=[request.stop] if isinstance(request.stop, str) else request.stop or [],
        include=bool(request.include_stop_str_in_output),
        min_tokens=request.min_tokens or 0,
        stop_ids=ends,
        at_start=at_start,
    )


def check_consistent(request: GenerationRequest, asked: int | None) -> None:
    """Raises BadRequest for fields that contradict one another."""
    if request.min_tokens is not None and asked is not None and request.min_tokens > asked:
        raise BadRequest(
            f"`min_tokens` ({request.min_tokens}) is more than the {asked} tokens allowed", param="min_tokens"
        )
    if request.stream_options is not None and not request.stream:
        raise BadRequest("`stream_options` is only allowed when `stream` is true", param="stream_options")


def check_stop_ids(request: GenerationRequest, vocab_size: int) -> None:
    """Raises BadRequest for a stop id that the model can never write."""
    wrong = next((i for i in request.stop_token_ids or () if i >= vocab_size), None)
    if wrong is not None:
        raise BadRequest(
            f"`stop_token_ids` holds {wrong}; the vocabulary has {vocab_size}", param="stop_token_ids"
        )


def row_specs(
    request: GenerationRequest,
    defaults: Defaults,
    prompts: Sequence[tuple[Sequence[int], int]],
    *,
    request_id: str,
    client: str,
    trace: str,
    hints: Hints = ANYWHERE,
    grammar: Grammar | None = None,
) -> list[RowSpec]:
    """One spec a choice, in the order of their indices. `prompts` are (ids, max_tokens)."""
    specs: list[RowSpec] = []
    for ids, tokens in prompts:
        frame, row_limits = prompt_frame(ids), limits(request, tokens)
        for choice in range(request.n or 1):
            specs.append(
                RowSpec(
                    request_id=f"{request_id}-{len(specs)}",
                    prompt=frame,
                    prompt_tokens=len(ids),
                    sampling=sampling(request, defaults, choice),
                    limits=row_limits,
                    priority=request.priority or 0,
                    client=client,
                    session_id=hints.session,
                    cache_salt=request.cache_salt or "",
                    trace=trace,
                    hints=hints,
                    grammar=grammar,
                )
            )
    return specs


def prompt_frame(ids: Sequence[int]) -> bytes:
    """Ids as the little-endian uint32 that the wire carries."""
    words = array("I", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _first(*values: T | None) -> T:
    return next(v for v in values if v is not None)
