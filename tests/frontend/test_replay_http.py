"""What clients see when a worker dies before they saw anything: one normal answer."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.frontend_client import Answer, asked, call, chat, stream
from support.frontend_harness import Child, Host, host, wait_for
from support.frontend_models import write_model
from support.frontend_served import ANSWER, ANSWER_IDS

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
DYING: dict[str, Any] = {"answer": ANSWER_IDS, "die_after": 5}
HEALTHY: dict[str, Any] = {"answer": ANSWER_IDS}
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 1}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m")


@pytest.fixture
def playing() -> Iterator[Host]:
    with host() as made:
        made.start_frontend()
        yield made


def two_replicas(
    playing: Host, directory: Path, first: dict[str, Any], second: dict[str, Any]
) -> list[Child]:
    """Replica 0, where the first request goes, and replica 1."""
    workers = [
        playing.start_worker("demo", directory, index=i, **script) for i, script in enumerate((first, second))
    ]
    playing.set_routing("demo", "round-robin")
    wait_for(lambda: call(playing.url, "/ready").json["models"]["demo"]["replicas_ready"] == 2)
    return workers


def text_of(answer: Answer) -> str:
    if "event-stream" not in answer.headers["content-type"]:
        text: str = answer.json["choices"][0]["message"]["content"]
        return text
    chunks = [e for e in answer.events if isinstance(e, dict)]
    return "".join(c["delta"].get("content", "") for e in chunks for c in e["choices"])


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded", "sampled"])
def test_died_amid_a_whole_answer(playing: Host, directory: Path, sampling: dict[str, Any]) -> None:
    """The other replica answers: 200, the text once, its tokens counted once."""
    first, second = two_replicas(playing, directory, DYING, HEALTHY)
    answer = asked(playing.url, **sampling)
    playing.reap(first)
    got = answer.result(10)
    assert (got.status, text_of(got)) == (200, ANSWER)
    usage = got.json["usage"]
    assert usage["completion_tokens"] == len(ANSWER_IDS)
    assert usage["total_tokens"] == usage["prompt_tokens"] + len(ANSWER_IDS)
    assert second.process.poll() is None
    assert "replayed" in playing.log.read_text()


@pytest.mark.parametrize("streaming", [True, False])
def test_died_before_the_first_token(playing: Host, directory: Path, streaming: bool) -> None:
    """Killed while the request waits, streamed or not: the other replica answers."""
    first, _ = two_replicas(playing, directory, {"accept_ms": 60_000.0}, HEALTHY)
    answer = asked(playing.url, stream=streaming)
    wait_for(lambda: first.heartbeat and first.heartbeat.in_flight == 1)
    first.process.kill()
    playing.reap(first)
    got = answer.result(10)
    assert (got.status, text_of(got)) == (200, ANSWER)


def test_died_after_the_headers_of_a_stream(playing: Host, directory: Path) -> None:
    """A stream whose headers and role are out, but no text yet, goes on with the other replica's text."""
    first, _ = two_replicas(playing, directory, {"answer": ANSWER_IDS, "step_ms": 60_000.0}, HEALTHY)
    # The fake takes its first step at once and the second a minute later: let the first be another's.
    assert [chat(playing.url, max_tokens=1).status for _ in range(2)] == [200, 200]
    events = stream(playing.url, CHAT, {"model": "demo", "messages": USER})
    assert next(events)[1]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    wait_for(lambda: first.heartbeat and first.heartbeat.in_flight == 1)
    first.process.kill()
    playing.reap(first)
    rest = [event for _, event in events]
    assert rest[-1] == "[DONE]"
    assert "".join(c["delta"].get("content", "") for e in rest[:-1] for c in e["choices"]) == ANSWER


def test_the_only_replica_comes_back(playing: Host, directory: Path) -> None:
    """With one replica the request waits for its respawn, and is then answered."""
    worker = playing.start_worker("demo", directory, **DYING)
    playing.ready("demo")
    answer = asked(playing.url, temperature=0)
    playing.reap(worker)
    time.sleep(0.5)
    assert not answer.done()
    playing.start_worker("demo", directory, **HEALTHY)
    got = answer.result(10)
    assert (got.status, text_of(got)) == (200, ANSWER)


def test_a_request_that_kills_every_worker(playing: Host, directory: Path) -> None:
    """It takes two workers with it and no more: 503 worker_lost, not to be retried."""
    workers = two_replicas(playing, directory, DYING, DYING)
    answer = asked(playing.url)
    for worker in workers:
        playing.reap(worker)
    got = answer.result(10)
    assert (got.status, got.error["code"], got.error["retryable"]) == (503, "worker_lost", False)
    assert got.headers["x-should-retry"] == "false"


def test_several_choices_are_replayed_one_by_one(playing: Host, directory: Path) -> None:
    """Of four choices on two replicas, those of the dead one are started anew: four answers, counted once."""
    first, _ = two_replicas(playing, directory, DYING, HEALTHY)
    answer = asked(playing.url, n=4)
    playing.reap(first)
    got = answer.result(10)
    assert [c["message"]["content"] for c in got.json["choices"]] == [ANSWER] * 4
    assert got.json["usage"]["completion_tokens"] == 4 * len(ANSWER_IDS)


def test_a_client_that_leaves_while_it_waits(playing: Host, directory: Path) -> None:
    """Nothing is left of a request whose client went away before a worker came back."""
    worker = playing.start_worker("demo", directory, **DYING)
    playing.ready("demo")
    frontend = next(c for c in playing.children.values() if c.hello and c.hello.role == "frontend")
    with pytest.raises(TimeoutError):
        call(playing.url, CHAT, {"model": "demo", "messages": USER}, timeout=1.0)
    playing.reap(worker)
    wait_for(lambda: frontend.heartbeat and frontend.heartbeat.in_flight == 0, 3)
    again = playing.start_worker("demo", directory, **HEALTHY)
    playing.ready("demo")
    time.sleep(0.2)
    assert again.heartbeat
    assert again.heartbeat.load.tick == 0
