"""Every fault of a worker, and what the HTTP client of a whole fleet sees of it: real supervisor, real
frontend, fake workers that misbehave."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.frontend_client import Answer, call, stream
from support.supervisor_up import Stream, Up, serving, status_of, wait_for

PROMPT = list(range(40, 60))
FIRST = {"only_epoch": 1}  # the next process is healthy


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


@pytest.fixture
def fleet(tmp_path: Path, llama: Path) -> Callable[..., Any]:
    """A fleet of "bad", which has the given fault, and a healthy "good"."""

    def start(timing: dict[str, float] | None = None, **script: Any) -> Any:
        scripts = {
            "bad": {"answer": PROMPT, **script},
            "good": {"answer": PROMPT, "step_ms": 5, "length": 100},
        }
        return serving(tmp_path, f"bad={llama},good={llama}", script=scripts, timing=timing)

    return start


def ask(up: Up, model: str = "bad", **fields: Any) -> Answer:
    """A completion, not streamed; sampled ones have no seed, so that they may be run again."""
    return call(
        up.url(), "/v1/completions", {"model": model, "prompt": PROMPT, "return_token_ids": True} | fields
    )


def ids_of(answer: Answer) -> list[int]:
    ids: list[int] = answer.json["choices"][0]["token_ids"]
    return ids


def good_goes_on(up: Up) -> None:
    """A stream of the healthy model, begun during the fault, comes to its end."""
    beside = Stream(up.url(), "good", 50).begun()
    assert beside.join(20).finish == "length"


def test_slow(fleet: Callable[..., Any]) -> None:
    """Each token arrives when it is made, not at the end, and the other model is not held up."""
    with fleet(step_ms=150) as up:
        events = stream(up.url(), "/v1/completions", {"model": "bad", "prompt": PROMPT, "max_tokens": 6})
        start = time.monotonic()
        good = ThreadPoolExecutor(1).submit(ask, up, "good")
        times = [at for at, event in events if event != "[DONE]"]
        assert len(times) >= 6
        assert times[-1] - times[0] > 0.5
        assert good.result(10).status == 200
        assert time.monotonic() - start < 5


def test_silent(fleet: Callable[..., Any]) -> None:
    """No OUT any more while heartbeats go on: the supervisor finds it stuck, its stream ends with
    worker_lost, and the next process serves."""
    with fleet(silent_after=3, step_ms=20, timing={"stuck_s": 1.0}, **FIRST) as up:
        lost = Stream(up.url(), "bad", 50).begun()
        good_goes_on(up)
        error = lost.join(15).error
        assert error is not None
        assert (error["code"], error["tokens_emitted"], error["retryable"]) == ("worker_lost", 3, True)
        wait_for(lambda: status_of(up.url(), "bad") == 200, 20)


def test_frozen(fleet: Callable[..., Any]) -> None:
    """Neither OUT nor heartbeat: noticed by the missing heartbeats, then as above."""
    with fleet(freeze_after=3, step_ms=20, timing={"stale_s": 1.0}, **FIRST) as up:
        lost = Stream(up.url(), "bad", 50).begun()
        good_goes_on(up)
        error = lost.join(15).error
        assert error is not None
        assert error["code"] == "worker_lost"
        wait_for(lambda: status_of(up.url(), "bad") == 200, 20)


def test_dies_mid_step(fleet: Callable[..., Any]) -> None:
    """SIGKILL after five tokens: a stream that has shown text ends with worker_lost and what it had; a
    request that has shown none gets one normal, whole answer from the next process."""
    with fleet(die_after=5, step_ms=20, **FIRST) as up:
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(ask, up)
            lost = Stream(up.url(), "bad", 50).begun()
            error = lost.join(15).error
            assert error is not None
            assert error["code"] == "worker_lost"
            assert 0 < error["tokens_emitted"] <= 5
            assert lost.finish is None
            answer = whole.result(30)
        assert answer.status == 200
        assert ids_of(answer) == PROMPT
        assert answer.json["usage"]["completion_tokens"] == len(PROMPT)


@pytest.mark.parametrize(
    "fault",
    [{"malformed_after": 3}, {"duplicate_terminal": True}, {"flood": 200}],
    ids=["malformed", "duplicate_terminal", "flood"],
)
def test_noise(fleet: Callable[..., Any], fault: dict[str, Any]) -> None:
    """An OUT that cannot be read, a second terminal message, and hundreds of foreign messages a step change
    no token of any answer, whole or streamed."""
    with fleet(**fault) as up:
        for _ in range(3):
            answer = ask(up)
            assert ids_of(answer) == PROMPT
            assert answer.json["usage"]["completion_tokens"] == len(PROMPT)
        body = {"model": "bad", "prompt": PROMPT}
        events = [e for _, e in stream(up.url(), "/v1/completions", body)]
        assert events[-1] == "[DONE]"
        streamed = "".join(c["text"] for e in events[:-1] for c in e["choices"])
        assert streamed == ask(up).json["choices"][0]["text"]
        good_goes_on(up)


def test_wrong_epoch(fleet: Callable[..., Any]) -> None:
    """A worker whose OUTs carry a foreign epoch is never believed: 503 worker_not_connected, retryable,
    within seconds; never its tokens."""
    with fleet(wrong_epoch=True) as up:
        start = time.monotonic()
        answer = ask(up)
        assert time.monotonic() - start < 5
        assert (answer.status, answer.error["code"]) == (503, "worker_not_connected")
        assert "retry-after" in answer.headers
        good_goes_on(up)


def test_wrong_token(fleet: Callable[..., Any]) -> None:
    """A process that does not know the join token is not let in: the model answers 503 and says why, the
    other model serves, and `ctl load` brings it back."""
    with fleet(hello_token="forged", only_epoch=2) as up:
        os.kill(up.replica("bad/0")["pid"], signal.SIGKILL)
        up.line("wrong join token")
        refused = wait_for(lambda: a if (a := ask(up)).error["code"] == "model_failed" else None)
        assert refused.status == 503
        assert "wrong join token" in refused.error["message"]
        assert refused.headers["x-should-retry"] == "false"
        good_goes_on(up)
        up.ctl("load", "bad")
        wait_for(lambda: ask(up).status == 200, 20)


def test_late_reply(fleet: Callable[..., Any]) -> None:
    """A worker that answers control calls late has its answer dropped and the call timed out; clients of its
    model notice nothing."""
    with fleet(late_reply_s=2.0) as up:
        with ThreadPoolExecutor(1) as pool:
            flush = pool.submit(up.ctl, "call", "bad", "health", "--timeout", "0.5", check=False)
            assert ids_of(ask(up)) == PROMPT
            done = flush.result(20)
        assert done.returncode != 0
        assert "timeout" in (done.stdout + done.stderr).lower()
        time.sleep(2)
        assert ids_of(ask(up)) == PROMPT
