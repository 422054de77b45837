"""Two real models in one fleet: neither feels what happens to the other."""

import concurrent.futures
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import NotFoundError, OpenAI
from support.real_fleet import client, fleet
from support.supervisor_up import Stream, Up, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]) -> Iterator[Up]:
    models = f"{tiny_models['llama']}:2,small={tiny_models['gemma3']},{tiny_models['llama-4bit']}"
    with fleet(tmp_path_factory.mktemp("home"), models) as running:
        running.url(60)
        yield running


@pytest.fixture(scope="module")
def openai(up: Up) -> OpenAI:
    return client(up)


def text(openai: OpenAI, model: str, prompt: str, tokens: int = 20) -> str:
    done = openai.completions.create(
        model=model, prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    return done.choices[0].text


def test_every_name_of_a_model_works(openai: OpenAI, tiny_models: dict[str, Path]) -> None:
    """Directory name, alias and full path name the same model; an unknown name is 404 model_not_found."""
    assert text(openai, "tiny-llama", "The") == text(openai, str(tiny_models["llama"]), "The")
    assert text(openai, "small", "The") == text(openai, "tiny-gemma3", "The")
    assert {m.id for m in openai.models.list()} == {"tiny-llama", "small", "tiny-llama-4bit"}
    with pytest.raises(NotFoundError) as caught:
        text(openai, "nonesuch", "The")
    assert caught.value.code == "model_not_found"


def test_models_and_replicas_serve_at_once(openai: OpenAI) -> None:
    """Thirty requests over three models and four workers give what they give one by one."""
    models = ["tiny-llama", "small", "tiny-llama-4bit"]
    jobs = [(models[i % 3], f"Request {i} comes in and", 30) for i in range(30)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda job: text(openai, *job), jobs))
    assert together == [text(openai, *job) for job in jobs]


def test_a_killed_worker_touches_only_its_own_streams(up: Up, openai: OpenAI) -> None:
    """SIGKILL: that worker's stream ends with worker_lost within a second, the other model's goes on, and
    the worker is ready again soon."""
    lost, kept = Stream(up.url(), "small", 3000).begun(), Stream(up.url(), "tiny-llama", 1500).begun()
    os.kill(up.replica("small/0")["pid"], signal.SIGKILL)
    killed = time.monotonic()
    lost.join()
    assert lost.ended_at - killed < 1.0
    assert lost.error is not None
    assert lost.error["code"] == "worker_lost"
    assert kept.join(60).error is None
    assert kept.finish == "length"
    wait_for(lambda: up.replica("small/0")["state"] == "ready", 20, "the worker to come back")
    assert text(openai, "small", "The")


def test_drain_resume_unload_load(up: Up, openai: OpenAI) -> None:
    """Each does what it says with a real worker, and the model serves again afterwards."""
    for stop, start in (("drain", "resume"), ("unload", "load")):
        up.ctl(stop, "tiny-llama-4bit")
        with pytest.raises(Exception, match=r"tiny-llama-4bit") as caught:
            text(openai, "tiny-llama-4bit", "The")
        assert getattr(caught.value, "status_code", 0) == 503
        assert text(openai, "tiny-llama", "The")
        up.ctl(start, "tiny-llama-4bit")
        wait_for(lambda: up.replica("tiny-llama-4bit/0")["state"] == "ready", 20, "ready")
        assert text(openai, "tiny-llama-4bit", "The")
    assert "durable" in up.ctl("flush", "--json").stdout
