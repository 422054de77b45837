"""From request fields to what the worker is told."""

from typing import Any

import msgspec
import pytest

from mlxhost.frontend.errors import BadRequest, ContextLengthExceeded
from mlxhost.frontend.hints import Hints
from mlxhost.frontend.openai import plan
from mlxhost.frontend.openai.requests import ChatRequest
from mlxhost.frontend.text.card import Defaults
from mlxhost.wire.data import Sampling


def request(**fields: Any) -> ChatRequest:
    return msgspec.convert({"model": "m", "messages": [{"role": "user"}]} | fields, ChatRequest)


@pytest.mark.parametrize(
    ("fields", "defaults", "expected"),
    [
        ({}, Defaults(), Sampling()),
        ({}, Defaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1), Sampling(0.6, 0.9, 20, 0.1)),
        ({}, Defaults(do_sample=True, temperature=0.6), Sampling(0.6)),
        ({}, Defaults(do_sample=False, temperature=0.6), Sampling(0.0)),
        ({"temperature": 1}, Defaults(do_sample=False), Sampling(1.0)),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3}, Defaults(top_p=0.9, top_k=20), Sampling(0.0, 0.5, 3)),
        ({"top_k": -1}, Defaults(top_k=20), Sampling(top_k=0)),
        ({"top_k": 0, "min_p": 0}, Defaults(top_k=20, min_p=0.1), Sampling()),
        ({"top_p": 0}, Defaults(), Sampling(temperature=0.0)),
    ],
)
def test_sampling(fields: dict[str, Any], defaults: Defaults, expected: Sampling) -> None:
    """The request's value, else the model's, else neutral; do_sample false means greedy; top_p 0 too."""
    assert plan.sampling(request(**fields), defaults, 0) == expected


@pytest.mark.parametrize(
    ("seed", "choice", "expected"),
    [(None, 3, None), (7, 0, 7), (7, 3, 10), (2**63 - 1, 1, 0), (-1, 0, 2**63 - 1)],
)
def test_each_choice_has_its_seed(seed: int | None, choice: int, expected: int | None) -> None:
    """Choice i uses seed + i, kept within 63 bits; no seed stays none."""
    assert plan.sampling(request(seed=seed), Defaults(), choice).seed == expected


@pytest.mark.parametrize(
    ("asked", "prompt", "expected"),
    [(None, 10, 50), (20, 10, 20), (1000, 10, 90), (None, 60, 40), (5, 99, 1)],
)
def test_max_tokens_is_clamped_to_the_room_left(asked: int | None, prompt: int, expected: int) -> None:
    """What does not fit is cut, not refused, as long as one token fits (context 100, default 50)."""
    assert plan.max_tokens(asked, 50, prompt, 100, param="prompt") == expected


@pytest.mark.parametrize("prompt", [100, 101])
def test_a_full_context_is_refused_with_the_numbers(prompt: int) -> None:
    """No room for a token is context_length_exceeded, naming both lengths."""
    with pytest.raises(ContextLengthExceeded, match=rf"100 tokens.*{prompt}") as caught:
        plan.max_tokens(1, 50, prompt, 100, param="messages")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_limits_carry_the_stops_of_the_worker() -> None:
    """stop_token_ids, ignore_eos and min_tokens go to the worker; min_tokens never passes max_tokens."""
    limits = plan.limits(request(stop_token_ids=[5], ignore_eos=True, min_tokens=20), 8)
    assert (limits.max_tokens, limits.min_tokens, limits.stop_ids, limits.ignore_eos) == (8, 8, [5], True)


@pytest.mark.parametrize(
    ("fields", "stops", "ids"),
    [
        ({}, [], {0}),
        ({"stop": "x"}, ["x"], {0}),
        ({"stop": ["x", "y"], "stop_token_ids": [7]}, ["x", "y"], {0, 7}),
        ({"ignore_eos": True, "stop_token_ids": [7]}, [], {7}),
    ],
)
def test_ending(fields: dict[str, Any], stops: list[str], ids: set[int]) -> None:
    """Stop strings come as a list; ending ids are the model's and the request's."""
    ending = plan.ending(request(**fields), frozenset({0}), at_start=True)
    assert (list(ending.stops), ending.stop_ids) == (stops, ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"stream_options": {}}, "stream_options")],
)
def test_contradictions(fields: dict[str, Any], param: str) -> None:
    """min_tokens above max_tokens, or stream options without a stream, are a 400."""
    body = request(**fields)
    with pytest.raises(BadRequest) as caught:
        plan.check_consistent(body, body.max_tokens)
    assert caught.value.param == param


def test_stop_ids_must_be_in_the_vocabulary() -> None:
    """An id past the vocabulary is refused by name; the last one is fine."""
    plan.check_stop_ids(request(stop_token_ids=[0, 9]), 10)
    with pytest.raises(BadRequest, match="holds 10") as caught:
        plan.check_stop_ids(request(stop_token_ids=[0, 10]), 10)
    assert caught.value.param == "stop_token_ids"


def test_an_empty_stop_string_is_refused() -> None:
    """It would match everywhere."""
    with pytest.raises(BadRequest, match="stop"):
        plan.ending(request(stop=""), frozenset(), at_start=True)


def test_rows_come_in_choice_order() -> None:
    """Choice index is prompt * n + i, seeds restart with each prompt, request ids are distinct."""
    specs = plan.row_specs(
        request(n=2, seed=5, priority=1, prompt_cache_key="k", cache_salt="c", user="u"),
        Defaults(),
        [([1, 2], 10), ([3], 20)],
        request_id="r",
        client="127.0.0.1",
        trace="t",
        hints=Hints(session="k"),
    )
    assert [(s.prompt_tokens, s.sampling.seed, s.limits.max_tokens) for s in specs] == [
        (2, 5, 10),
        (2, 6, 10),
        (1, 5, 20),
        (1, 6, 20),
    ]
    assert len({s.request_id for s in specs}) == 4
    assert [s.cache_salt for s in specs] == ["c"] * 4
    first = specs[0]
    assert (first.priority, first.session_id, first.client, first.trace) == (1, "k", "127.0.0.1", "t")


def test_prompt_frame_is_little_endian_uint32() -> None:
    """The frame is what the wire says on every machine."""
    assert plan.prompt_frame([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])
