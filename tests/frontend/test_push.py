"""Tokens on their short way: from the dispatcher to the client's socket without waking the handler."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.frontend_client import chat, connect, raw_request, stream
from support.frontend_harness import Host, host
from support.frontend_models import write_model
from support.frontend_served import ANSWER, ANSWER_IDS, TOKENIZER, Served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
ALONE: dict[str, Any] = {"model": "demo", "messages": USER, "stream": True}


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A worker slow enough that every step is a burst of its own."""
    with host() as playing:
        playing.start_frontend()
        directory = write_model(tmp_path_factory.mktemp("steady") / "m")
        playing.start_worker("demo", directory, answer=TOKENIZER.encode("abc dEf").ids, step_ms=15, length=28)
        playing.ready("demo")
        yield playing


def contents(events: list[Any]) -> list[str]:
    return [
        c["delta"]["content"]
        for e in events
        if e != "[DONE]"
        for c in e["choices"]
        if "content" in c["delta"]
    ]


def test_one_event_a_token(steady: Host) -> None:
    """A client that keeps up gets every token in an event of its own, the text of all is the answer."""
    whole = chat(steady.url).json["choices"][0]["message"]["content"]
    texts = contents([event for _, event in stream(steady.url, CHAT, ALONE)])
    assert "".join(texts) == whole
    assert len([t for t in texts if t]) == 28


def test_completion_events_are_as_when_written_by_the_handler(served: Served) -> None:
    """A completion's pushed events have the fields of those that carry token ids, which are never pushed."""
    body = {"model": "demo", "prompt": "x", "stream": True}
    pushed = [e for _, e in stream(served.url, COMPLETIONS, body) if e != "[DONE]"]
    handled = [
        e for _, e in stream(served.url, COMPLETIONS, body | {"return_token_ids": True}) if e != "[DONE]"
    ]
    texts = [["".join(c["text"] for e in events for c in e["choices"])] for events in (pushed, handled)]
    assert texts == [[ANSWER], [ANSWER]]
    assert {k for e in pushed for k in e} == {k for e in handled for k in e}
    ids = [i for e in handled for c in e["choices"] for i in c.get("token_ids", ())]
    assert ids == ANSWER_IDS


@pytest.mark.parametrize("stop", ["c d", "dEf", "b", "Efa"])
def test_stop_strings_across_pushed_tokens(steady: Host, stop: str) -> None:
    """A stop string that spans tokens ends the stream exactly where it ends the whole answer."""
    assert stop in "abc dEf" * 4
    whole = chat(steady.url, stop=stop).json
    assert whole["usage"]["completion_tokens"] < 28
    events = [
        e
        for _, e in stream(
            steady.url, CHAT, ALONE | {"stop": stop, "stream_options": {"include_usage": True}}
        )
    ]
    assert "".join(contents(events)) == whole["choices"][0]["message"]["content"]
    assert events[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert [c["finish_reason"] for e in events[:-1] for c in e["choices"]][-1] == "stop"


def test_choices_share_one_stream(steady: Host) -> None:
    """Four choices pushed into one response arrive whole, each under its own index."""
    events = [e for _, e in stream(steady.url, CHAT, ALONE | {"n": 4})][:-1]
    whole = chat(steady.url).json["choices"][0]["message"]["content"]
    for index in range(4):
        parts = [c["delta"].get("content", "") for e in events for c in e["choices"] if c["index"] == index]
        assert "".join(parts) == whole


def test_http_1_0_gets_bare_events(steady: Host) -> None:
    """A client that does not know chunks gets the events without them, and the end of the connection."""
    with connect(steady.url) as sock:
        sock.sendall(raw_request(CHAT, ALONE).replace(b"HTTP/1.1", b"HTTP/1.0"))
        received = b""
        while chunk := sock.recv(65536):
            received += chunk
    lines = received.partition(b"\r\n\r\n")[2].split(b"\n\n")
    assert lines[-2:] == [b"data: [DONE]", b""]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-2]]
    assert "".join(contents(events)) == chat(steady.url).json["choices"][0]["message"]["content"]
