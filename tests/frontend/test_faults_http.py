"""What clients see when workers fail, clients leave, models change state and the server stops."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.frontend_client import asked, call, chat, connect, raw_request, stream
from support.frontend_harness import Child, Host, host, wait_for
from support.frontend_models import write_model
from support.frontend_served import ANSWER, ANSWER_IDS, TOKENIZER

from mlxhost.wire import control

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
SLOW: dict[str, Any] = {"answer": ANSWER_IDS, "length": 5000, "step_ms": 5.0}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m")


@pytest.fixture
def playing() -> Iterator[Host]:
    with host() as made:
        made.start_frontend()
        yield made


def in_flight(child: Child) -> int:
    return child.heartbeat.in_flight if child.heartbeat else 0


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [c for e in events for c in e.get("choices", ()) if c["index"] == index]
    return "".join(c["delta"].get("content", "") for c in choices)


def test_worker_killed_mid_stream(playing: Host, directory: Path) -> None:
    """Its stream ends within a second with worker_lost and no finish chunk; the other model's goes on; the
    next request is refused until the worker is back, then served."""
    dying = playing.start_worker("demo", directory, **SLOW)
    playing.start_worker("other", directory, **SLOW)
    playing.ready("demo", "other")
    ours = stream(playing.url, CHAT, {"model": "demo", "messages": USER})
    others = stream(playing.url, CHAT, {"model": "other", "messages": USER})
    events = [next(ours)[1] for _ in range(5)]
    for _ in range(3):
        next(others)
    os.kill(dying.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    playing.reap(dying)
    events += [event for _, event in ours]
    assert time.monotonic() - killed < 1
    assert events[-1].keys() == {"error"}
    error = events[-1]["error"]
    assert (error["code"], error["type"]) == ("worker_lost", "server_error")
    assert "tokens had been generated" in error["message"]
    assert error["tokens_emitted"] >= 3
    assert error["retryable"] is True
    assert not any(c["finish_reason"] for e in events[:-1] for c in e["choices"])
    later = [next(others)[1] for _ in range(20)]
    assert not any("error" in e for e in later)
    refused = chat(playing.url)
    assert (refused.status, refused.error["code"]) == (503, "model_backoff")
    assert "retry-after" in refused.headers
    playing.start_worker("demo", directory, answer=ANSWER_IDS)
    playing.ready("demo")
    assert chat(playing.url).json["choices"][0]["message"]["content"] == ANSWER
    others.close()


def test_worker_killed_before_the_first_byte(directory: Path) -> None:
    """Lost before headers went out, and no other worker in time: a retryable 503, streaming or not."""
    with host() as playing:
        playing.start_frontend(replay_wait_s=0.3)
        for streaming in (True, False):
            worker = playing.start_worker("demo", directory, accept_ms=60_000)
            playing.ready("demo")
            answer = asked(playing.url, stream=streaming)
            wait_for(lambda w=worker: in_flight(w))
            worker.process.kill()
            playing.reap(worker)
            got = answer.result(5)
            assert (got.status, got.error["code"]) == (503, "worker_lost")
            assert (got.error["tokens_emitted"], got.error["retryable"]) == (0, True)
            assert "x-should-retry" not in got.headers


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("accept_ms", [0.0, 60_000.0], ids=["running", "queued"])
def test_client_disconnect_frees_the_row(
    playing: Host, directory: Path, streaming: bool, accept_ms: float
) -> None:
    """A client that leaves, queued or running, streaming or not, frees its row within 250 ms."""
    worker = playing.start_worker("demo", directory, **SLOW, accept_ms=accept_ms)
    playing.ready("demo")
    with connect(playing.url) as sock:
        sock.sendall(raw_request(CHAT, {"model": "demo", "messages": USER, "stream": streaming}))
        wait_for(lambda: in_flight(worker) == 1)
    left = time.monotonic()
    wait_for(lambda: in_flight(worker) == 0)
    assert time.monotonic() - left < 0.25


def test_stop_string_frees_the_row(playing: Host, directory: Path) -> None:
    """A stop string ends the row at the worker too, not only the text."""
    worker = playing.start_worker("demo", directory, **SLOW)
    playing.ready("demo")
    answer = chat(playing.url, stop="日本").json
    assert answer["choices"][0]["message"]["content"] == "naïve café "
    assert answer["usage"]["completion_tokens"] < 50
    wait_for(lambda: in_flight(worker) == 0, 1)


def test_slow_reader_loses_nothing(playing: Host, directory: Path) -> None:
    """A client that reads nothing until its rows have ended gets the whole text, merged once the buffers
    were full; the rows were not held up and other clients were not either."""
    n, length = 12, 3000
    worker = playing.start_worker(
        "demo", directory, answer=ANSWER_IDS, length=length, step_ms=0.1, max_rows=16
    )
    playing.ready("demo")
    with connect(playing.url, receive_buffer=4096) as sock:
        sock.sendall(raw_request(CHAT, {"model": "demo", "messages": USER, "stream": True, "n": n}))
        wait_for(lambda: in_flight(worker) > 0)
        assert chat(playing.url, max_tokens=len(ANSWER_IDS)).status == 200
        wait_for(lambda: in_flight(worker) == 0)
        received = b""
        while b"[DONE]" not in received:
            chunk = sock.recv(65536)
            assert chunk
            received += chunk
    events = [
        json.loads(line[6:]) for line in _unchunked(received).splitlines() if line.startswith(b"data: {")
    ]

    repeated = (ANSWER_IDS * (length // len(ANSWER_IDS) + 1))[:length]
    assert all(text_of(events, i) == TOKENIZER.decode(repeated) for i in range(n))
    assert len(events) < n * length


def _unchunked(response: bytes) -> bytes:
    """Body of a chunked response."""
    _, _, rest = response.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def test_rejections_reach_the_client(playing: Host, directory: Path) -> None:
    """A full queue is a 429 with Retry-After, at once and before any stream header."""
    playing.start_worker("demo", directory, reject=["queue_full", "16 requests wait", 2.5])
    playing.ready("demo")
    for streaming in (True, False):
        start = time.monotonic()
        answer = chat(playing.url, stream=streaming)
        assert time.monotonic() - start < 0.5
        assert (answer.status, answer.error["type"], answer.error["code"]) == (
            429,
            "rate_limit_error",
            "queue_full",
        )
        assert answer.headers["retry-after"] == "3"
        assert "x-should-retry" not in answer.headers


def test_one_refused_choice_refuses_the_request(playing: Host, directory: Path) -> None:
    """When the queue takes only some of n choices, the client gets a 429 and the others are stopped."""
    worker = playing.start_worker("demo", directory, **SLOW, max_rows=1, max_queued=1)
    playing.ready("demo")
    assert chat(playing.url, n=16).status == 429
    wait_for(lambda: in_flight(worker) == 0, 2)


@pytest.mark.parametrize("streaming", [True, False])
def test_failed_row(playing: Host, directory: Path, streaming: bool) -> None:
    """A row that fails is a 500 with the worker's words, or an error event in its stream."""
    playing.start_worker("demo", directory, row_error="poison in layer 3")
    playing.ready("demo")
    answer = chat(playing.url, stream=streaming)
    error = answer.events[-1]["error"] if answer.status == 200 else answer.error
    assert (error["code"], error["message"]) == ("generation_failed", "poison in layer 3")
    if not streaming:
        assert answer.status == 500


@pytest.mark.parametrize("script", [{"malformed_after": 3}, {"duplicate_terminal": True}])
def test_bad_messages_do_not_harm_streams(playing: Host, directory: Path, script: dict[str, Any]) -> None:
    """An undecodable OUT and a duplicate terminal change nothing for the client."""
    playing.start_worker("demo", directory, answer=ANSWER_IDS, **script)
    playing.ready("demo")
    for _ in range(3):
        assert chat(playing.url).json["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize(
    ("state", "code", "retry"),
    [
        ("draining", "model_draining", True),
        ("loading", "model_loading", True),
        ("failed", "model_failed", False),
    ],
)
def test_models_that_are_not_ready(
    playing: Host, directory: Path, state: str, code: str, retry: bool
) -> None:
    """503 says the state and the reason; /ready follows at once; being ready again serves again."""
    playing.start_worker("demo", directory, answer=ANSWER_IDS)
    playing.ready("demo")
    playing.set_state("demo", state, "said so")
    answer = wait_for(lambda: a if (a := chat(playing.url)).status == 503 else None)
    assert answer.error["code"] == code
    assert "said so" in answer.error["message"]
    assert "retry-after" in answer.headers
    assert ("x-should-retry" not in answer.headers) == retry
    ready = call(playing.url, "/ready")
    assert (ready.status, ready.json["models"]["demo"]["state"]) == (503, state)
    assert call(playing.url, "/v1/models").json["data"][0]["state"] == state
    playing.set_state("demo", "ready")
    playing.ready("demo")
    assert chat(playing.url).status == 200


def test_draining_finishes_running_streams(playing: Host, directory: Path) -> None:
    """A stream that runs when its model starts to drain goes on to its end."""
    playing.start_worker("demo", directory, answer=ANSWER_IDS, length=100, step_ms=5)
    playing.ready("demo")
    events = stream(playing.url, CHAT, {"model": "demo", "messages": USER})
    next(events)
    playing.set_state("demo", "draining")
    assert [e for _, e in events][-1] == "[DONE]"


@pytest.mark.parametrize("routing", ["round-robin", "least-in-flight", "minimum-kv-usage"])
def test_replicas_share_the_load(playing: Host, directory: Path, routing: str) -> None:
    """With every policy four concurrent streams end up two on each of two equal replicas."""
    workers = [playing.start_worker("demo", directory, index=i, **SLOW) for i in (0, 1)]
    playing.set_routing("demo", routing)
    wait_for(lambda: call(playing.url, "/ready").json["models"]["demo"]["replicas_ready"] == 2)
    streams = [stream(playing.url, CHAT, {"model": "demo", "messages": USER}) for _ in range(4)]
    for events in streams:
        next(events)
    wait_for(lambda: [w.heartbeat.in_flight for w in workers if w.heartbeat] == [2, 2], 5)
    for events in streams:
        events.close()


def test_shutdown_refuses_new_and_finishes_old(playing: Host, directory: Path) -> None:
    """accepting false: new requests get 503 with Retry-After at once, the running stream ends well, the
    frontend reports that it is empty; STOP then ends it with exit code 0."""
    playing.start_worker("demo", directory, answer=ANSWER_IDS, length=600, step_ms=5)
    playing.ready("demo")
    frontend = next(c for c in playing.children.values() if c.hello and c.hello.role == "frontend")
    events = stream(playing.url, CHAT, {"model": "demo", "messages": USER})
    next(events)
    playing.accepting = False
    playing.publish()
    refused = wait_for(lambda: a if (a := chat(playing.url, max_tokens=1)).status == 503 else None)
    assert (refused.error["code"], refused.headers["retry-after"]) == ("shutting_down", "5")
    assert call(playing.url, "/ready").status == 503
    wait_for(lambda: in_flight(frontend) == 1, 3)
    assert [e for _, e in events][-1] == "[DONE]"
    ended = time.monotonic()
    wait_for(lambda: in_flight(frontend) == 0, 2)
    assert time.monotonic() - ended < 0.5
    playing.send(frontend, control.Stop(5.0))
    assert frontend.process.wait(5) == 0
    assert "stopped" in playing.log.read_text()


def test_stop_waits_no_longer_than_its_deadline(playing: Host, directory: Path) -> None:
    """STOP with a stream that would run on: the frontend goes when the deadline has passed."""
    worker = playing.start_worker("demo", directory, **SLOW)
    playing.ready("demo")
    frontend = next(c for c in playing.children.values() if c.hello and c.hello.role == "frontend")
    events = stream(playing.url, CHAT, {"model": "demo", "messages": USER})
    next(events)
    start = time.monotonic()
    playing.send(frontend, control.Stop(0.5))
    assert frontend.process.wait(10) == 0
    assert 0.4 < time.monotonic() - start < 4
    wait_for(lambda: in_flight(worker) == 0, 2)
    events.close()


def test_frontend_goes_with_its_supervisor(playing: Host) -> None:
    """End-of-file on the lifeline ends the process at once."""
    frontend = next(iter(playing.children.values()))
    assert frontend.process.stdin is not None
    frontend.process.stdin.close()
    start = time.monotonic()
    frontend.process.wait(5)
    assert time.monotonic() - start < 1


def test_control_calls_are_answered(playing: Host) -> None:
    """A frontend has no operations and says so."""
    frontend = next(iter(playing.children.values()))
    playing.send(frontend, control.Ctl("c1", "flush"))
    reply = wait_for(lambda: next((m for m in frontend.messages if isinstance(m, control.Reply)), None))
    assert (reply.call_id, reply.code) == ("c1", "unsupported")


def test_access_log_has_one_line_a_request(playing: Host, directory: Path) -> None:
    """Each request leaves one line with its method, path, status, model, tokens and time."""
    playing.start_worker("demo", directory, answer=ANSWER_IDS)
    playing.ready("demo")
    answer = chat(playing.url)
    line = next(ln for ln in playing.log.read_text().splitlines() if answer.headers["x-request-id"] in ln)
    for part in (
        "method=POST",
        f"path={CHAT}",
        "status=200",
        "model=demo",
        f"completion_tokens={len(ANSWER_IDS)}",
        "ms=",
    ):
        assert part in line
