"""A real worker dies in the middle of an answer that nobody has seen: the client gets the same answer."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion
from support.real_fleet import client, fleet
from support.supervisor_up import Up, wait_for

pytestmark = pytest.mark.slow

TOKENS = 1500
CASES: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 11}]


@pytest.fixture(scope="module", params=[1, 2], ids=["one replica", "two replicas"])
def up(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]
) -> Iterator[Up]:
    models = f"m={tiny_models['llama']}:{request.param}"
    with fleet(tmp_path_factory.mktemp("home"), models, "--routing", "round-robin") as running:
        running.url(60)
        yield running


@pytest.fixture(scope="module")
def openai(up: Up) -> OpenAI:
    return client(up)


def ask(openai: OpenAI, **sampling: Any) -> Completion:
    more = {"ignore_eos": True, "return_token_ids": True}
    prompt = "A request comes in, waits its turn, and"
    return openai.completions.create(model="m", prompt=prompt, max_tokens=TOKENS, extra_body=more, **sampling)


def token_ids(answer: Completion) -> list[int]:
    ids: list[int] = answer.choices[0].model_dump()["token_ids"]
    return ids


def busy_pid(up: Up) -> int:
    """The worker that runs the one request, once it has answered some of it."""
    for replica in up.status()["models"][0]["replicas"]:
        if replica["in_flight"] and replica["tokens_per_s"] > 0:
            return int(replica["pid"])
    return 0


@pytest.mark.parametrize("sampling", CASES, ids=["greedy", "seeded"])
def test_killed_amid_an_answer(up: Up, openai: OpenAI, sampling: dict[str, Any]) -> None:
    """SIGKILL while it decodes: one answer, token for token that of an undisturbed run, counted once."""
    undisturbed = ask(openai, **sampling)
    wait_for(lambda: all(r["state"] == "ready" for r in up.status()["models"][0]["replicas"]), 30)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, openai, **sampling)
        pid = wait_for(lambda: busy_pid(up), 30)
        assert not answer.done()
        os.kill(pid, signal.SIGKILL)
        got = answer.result(90)
    assert token_ids(got) == token_ids(undisturbed)
    assert got.choices[0].text == undisturbed.choices[0].text
    assert got.usage is not None
    assert undisturbed.usage is not None
    # How much of the prompt was cached differs.
    assert got.usage.prompt_tokens == undisturbed.usage.prompt_tokens
    assert got.usage.completion_tokens == undisturbed.usage.completion_tokens
    assert sum(r["restarts"] for r in up.status()["models"][0]["replicas"]) > 0
    assert any("replayed" in line for line in up.lines)
