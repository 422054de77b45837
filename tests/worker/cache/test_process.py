"""The prefix cache of real worker processes: restarts, kills, replicas, sleep, reload, calls."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import build
from support.worker_harness import WorkerProcess

from mlxhost.wire import data

PROMPT = [random.Random(3).randrange(400) for _ in range(600)]


def start(tmp_path: Path, model: Path, name: str, **config: Any) -> WorkerProcess:
    """A worker of its own, with the cache that all in `tmp_path` share."""
    run = tmp_path / name
    run.mkdir()
    return WorkerProcess(run, model, cache_dir=str(tmp_path / "cache"), **config)


def ask(worker: WorkerProcess, handle: int, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt's were cached."""
    worker.add(handle, prompt, 6, **fields)
    tokens: list[int] = []
    while True:
        message = worker.receive(30)
        if isinstance(message, data.Out) and handle in message.handles:
            tokens += message.tokens
            if any(message.finish):
                return tokens, message.cached_tokens[0]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def cache(worker: WorkerProcess) -> dict[str, Any]:
    figures: dict[str, Any] = worker.call("get_state").result["prefix_cache"]
    return figures


@pytest.mark.slow
def test_a_killed_workers_successor_has_its_cache(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """Flushed, then killed with SIGKILL: the next process starts from the same prefix, with equal tokens."""
    with start(tmp_path, tiny_models["llama"], "a") as worker:
        tokens, cached = ask(worker, 1, PROMPT)
        assert cached == 0
        report = worker.call("flush").result
        assert report["durable"]
        assert report["missing"] == report["pending_spills"] == report["failed"] == report["dropped"] == 0
        assert report["longest_durable_prefix_tokens"] == 605
        assert report["entries"] > 0
        assert report["bytes"] > 0
    with start(tmp_path, tiny_models["llama"], "b") as worker:
        assert worker.ready is not None
        assert ask(worker, 1, PROMPT) == (tokens, 599)


@pytest.mark.slow
def test_a_stop_makes_the_cache_durable(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """STOP right after an answer: what was not written yet is, before the process ends."""
    from mlxhost.wire.control import Stop

    with start(tmp_path, tiny_models["llama"], "a") as worker:
        tokens, _ = ask(worker, 1, PROMPT)
        worker.tell(Stop(10.0))
        assert worker.process.wait(30) == 0
    with start(tmp_path, tiny_models["llama"], "b") as worker:
        assert ask(worker, 1, PROMPT) == (tokens, 599)


@pytest.mark.slow
def test_sleep_keeps_the_cache_and_other_weights_lose_it(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    """After sleep and wake the prefix is there; after a reload of other weights it is foreign, and the
    answer is that of the new weights."""
    other = build("llama", tmp_path / "other", seed=7)
    with start(tmp_path, tiny_models["llama"], "a") as worker:
        tokens, _ = ask(worker, 1, PROMPT)
        assert worker.call("sleep", level=2).code == "ok"
        assert cache(worker)["ram_bytes"] == 0
        assert worker.call("wake").code == "ok"
        assert ask(worker, 2, PROMPT) == (tokens, 599)
        assert worker.call("reload_weights", path=str(other)).code == "ok"
        changed, cached = ask(worker, 3, PROMPT)
        assert cached == 0
        assert changed != tokens
        assert ask(worker, 4, PROMPT) == (changed, 599)


@pytest.mark.slow
def test_weights_that_changed_during_sleep_find_none_of_the_old_cache(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    """The files are others at wake: the answer is theirs, with nothing cached. Of another shape: no wake."""
    model = shutil.copytree(tiny_models["llama"], tmp_path / "model")
    other = build("llama", tmp_path / "other", seed=7)
    shape = build("llama", tmp_path / "shape", intermediate_size=80)
    with start(tmp_path, other, "b") as fresh:
        expected, _ = ask(fresh, 1, PROMPT)
    with start(tmp_path, model, "a") as worker:
        ask(worker, 1, PROMPT)
        assert worker.call("sleep", level=2).code == "ok"
        shutil.copytree(shape, model, dirs_exist_ok=True)
        refused = worker.call("wake")
        assert (refused.code, "same shape" in refused.message) == ("failed", True)
        shutil.copytree(other, model, dirs_exist_ok=True, copy_function=shutil.copyfile)
        assert worker.call("wake").code == "ok"
        assert ask(worker, 2, PROMPT) == (expected, 0)


@pytest.mark.slow
def test_a_session_pins_and_its_close_does_not_wait(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """Closing a session answers at once, also one that a request is running in."""
    with start(tmp_path, tiny_models["llama"], "a") as worker:
        ask(worker, 1, PROMPT, session_id="s")
        worker.add(2, PROMPT, 2000, session_id="s")
        until(lambda: worker.call("get_state").result["running"] == 1)
        began = time.monotonic()
        assert worker.call("close_session", id="s").code == "ok"
        assert time.monotonic() - began < 5
        assert worker.call("abort", all=True).code == "ok"


@pytest.mark.slow
def test_without_a_cache_nothing_is_kept(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """cache_ram_bytes 0: no hit, no file, and flush has nothing to do."""
    with start(tmp_path, tiny_models["llama"], "a", cache_ram_bytes=0) as worker:
        first, _ = ask(worker, 1, PROMPT)
        assert ask(worker, 2, PROMPT) == (first, 0)
        assert cache(worker) == {"enabled": False}
        assert worker.call("flush").result["durable"]
        assert not (tmp_path / "cache" / "kv").exists()


@pytest.mark.slow
def test_a_flush_that_cannot_write_fails_with_the_figures(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    """A cache directory that is a file: requests are served, flush says what is not durable."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kv").write_bytes(b"")
    with start(tmp_path, tiny_models["llama"], "a") as worker:
        first, _ = ask(worker, 1, PROMPT)
        assert ask(worker, 2, PROMPT) == (first, 599)
        reply = worker.call("flush")
        assert reply.code == "failed"
        assert "records are not on disk" in reply.message
        assert not reply.result["durable"]
        assert reply.result["missing"] == reply.result["entries"] > 0
