"""What a request may say about where it runs, and under which id, over HTTP."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.frontend_client import Answer, asked, call, stream
from support.frontend_harness import Child, Host, host, wait_for
from support.frontend_models import write_model
from support.frontend_served import ANSWER_IDS

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
REPLICAS = 3


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, list[Child]]]:
    """Three replicas whose answers tell which of them answered: its index is the number of tokens."""
    directory = write_model(tmp_path_factory.mktemp("m"))
    with host() as playing:
        playing.start_frontend()
        workers = [
            playing.start_worker("demo", directory, index=i, answer=ANSWER_IDS, length=i + 1)
            for i in range(REPLICAS)
        ]
        playing.set_routing("demo", "round-robin")
        wait_for(lambda: call(playing.url, "/ready").json["models"]["demo"]["replicas_ready"] == REPLICAS)
        yield playing, workers


def ask(playing: Host, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    return call(playing.url, CHAT, {"model": "demo", "messages": USER} | fields, headers=headers)


def who(answer: Answer) -> int:
    """Which replica answered."""
    assert answer.status == 200, answer.body
    return int(answer.json["usage"]["completion_tokens"]) - 1


@pytest.mark.parametrize("index", range(REPLICAS))
def test_pinned(replicas: tuple[Host, list[Child]], index: int) -> None:
    """x-mlxhost-replica names the one replica that answers, each time."""
    playing, _ = replicas
    assert [who(ask(playing, {"x-mlxhost-replica": str(index)})) for _ in range(3)] == [index] * 3


def test_subset(replicas: tuple[Host, list[Child]]) -> None:
    """x-mlxhost-replicas bounds where a client's requests go."""
    playing, _ = replicas
    assert {who(ask(playing, {"x-mlxhost-replicas": "1-2"})) for _ in range(4)} == {1, 2}


def test_room(replicas: tuple[Host, list[Child]]) -> None:
    """bootstrap_room % replicas is the replica."""
    playing, _ = replicas
    assert [who(ask(playing, bootstrap_room=room)) for room in (3, 7, 11)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({}, {"session_id": "a"}),
        ({}, {"prompt_cache_key": "b"}),
        ({"x-mlxhost-session": "c"}, {}),
    ],
)
def test_session(replicas: tuple[Host, list[Child]], headers: dict[str, str], fields: dict[str, Any]) -> None:
    """Requests of one session go to one replica, however the session is named."""
    playing, _ = replicas
    assert len({who(ask(playing, headers, **fields)) for _ in range(5)}) == 1


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"x-mlxhost-replica": "3"}, {}, "x-mlxhost-replica"),
        ({"x-mlxhost-replica": "first"}, {}, "x-mlxhost-replica"),
        ({"x-mlxhost-replicas": "2-3"}, {}, "x-mlxhost-replicas"),
        ({"x-mlxhost-replicas": "2"}, {}, "x-mlxhost-replicas"),
        ({}, {"bootstrap_room": -1}, "bootstrap_room"),
        ({}, {"bootstrap_room": "x"}, "bootstrap_room"),
    ],
)
def test_nowhere(
    replicas: tuple[Host, list[Child]], headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    """A place that does not exist is a 400 that names the header or field."""
    playing, _ = replicas
    answer = ask(playing, headers, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_missing_room(replicas: tuple[Host, list[Child]]) -> None:
    """Where rooms decide, a request without one is a 400."""
    playing, _ = replicas
    playing.set_routing("demo", "bootstrap-room")
    try:
        answer = wait_for(lambda: a if (a := ask(playing)).status == 400 else None)
        assert answer.error["param"] == "bootstrap_room"
        assert who(ask(playing, bootstrap_room=4)) == 1
    finally:
        playing.set_routing("demo", "round-robin")
        wait_for(lambda: ask(playing).status == 200)


def test_prefix_affinity(replicas: tuple[Host, list[Child]]) -> None:
    """Prompts that begin alike are answered by one replica, other prompts by others."""
    playing, _ = replicas
    playing.set_routing("demo", "prefix-affinity")
    try:
        texts = ["the quick brown fox " * 30, "lazy dogs jump over " * 30, "hello world says " * 40]

        def tell(text: str) -> int:
            return who(ask(playing, messages=[{"role": "user", "content": text}]))

        homes = wait_for(lambda: h if len(set(h := [tell(t) for t in texts])) == 3 else None)
        assert [[tell(text + f" {n}") for n in range(3)] for text in texts] == [[h] * 3 for h in homes]
    finally:
        playing.set_routing("demo", "round-robin")


def test_a_request_id_in_use_is_refused(tmp_path: Path) -> None:
    """A second request with the X-Request-Id of one that is being answered: 409, at once and not to be
    retried; the first is not touched, and when it is over the id is free again."""
    with host() as playing:
        playing.start_frontend()
        playing.start_worker("demo", write_model(tmp_path / "m"), answer=ANSWER_IDS, step_ms=60)
        playing.ready("demo")
        events = stream(playing.url, CHAT, {"model": "demo", "messages": USER}, {"x-request-id": "mine"})
        next(events)
        refused = ask(playing, {"x-request-id": "mine"})
        assert (refused.status, refused.error["code"]) == (409, "duplicate_request_id")
        assert refused.headers["x-should-retry"] == "false"
        assert ask(playing, {"x-request-id": "other"}, max_tokens=1).status == 200
        assert [event for _, event in events][-1] == "[DONE]"
        assert wait_for(lambda: ask(playing, {"x-request-id": "mine"}, max_tokens=1).status == 200)


def test_a_full_queue_is_said_at_once(tmp_path: Path) -> None:
    """429 with Retry-After within 50 ms (median of 20) while the worker is busy with what it has."""
    with host() as playing:
        playing.start_frontend()
        script = {"answer": ANSWER_IDS, "length": 100_000, "step_ms": 5, "max_rows": 4, "max_queued": 4}
        worker = playing.start_worker("demo", write_model(tmp_path / "m"), **script, max_model_len=200_000)
        playing.ready("demo")
        busy = []
        for count in (4, 8):  # the first four must run before others fill the queue
            busy += [asked(playing.url, max_tokens=8000) for _ in range(4)]
            wait_for(lambda n=count: worker.heartbeat and worker.heartbeat.in_flight == n)
        times = []
        for _ in range(20):
            began = time.perf_counter()
            answer = ask(playing)
            times.append(time.perf_counter() - began)
            assert (answer.status, answer.error["code"]) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
        assert statistics.median(times) < 0.05
        assert not any(b.done() for b in busy)
