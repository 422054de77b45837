"""The demo model through the real fleet: what a first user does."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from openai import OpenAI
from support.real_fleet import async_client, client, fleet
from support.supervisor_up import Up, gone, wait_for

pytestmark = [pytest.mark.demo, pytest.mark.slow]

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
MB = 1_000_000


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with fleet(tmp_path_factory.mktemp("home"), "demo", timing={"heartbeat_s": 1.0}) as running:
        running.url(180)
        yield running
        children = running.descendants()
        running.signal(signal.SIGINT)
        assert running.exit_code(20) == 0
        assert gone(children)


@pytest.fixture(scope="module")
def openai(up: Up) -> OpenAI:
    return client(up)


def test_paris(openai: OpenAI) -> None:
    """Asked for the capital of France it says Paris, and stops by itself."""
    answer = openai.chat.completions.create(model="demo", messages=FRANCE, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 37


def test_paris_with_default_settings(openai: OpenAI) -> None:
    """What the README asks, with no sampling settings at all, gets a short answer: the demo has defaults."""
    answer = openai.chat.completions.create(model="demo", messages=FRANCE, max_tokens=200)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_paris_streamed(openai: OpenAI) -> None:
    """The stream's pieces make up the answer given whole; usage comes last when asked for."""
    whole = openai.chat.completions.create(model="SmolLM2-135M-Instruct", messages=FRANCE, temperature=0)
    chunks = list(
        openai.chat.completions.create(
            model="demo", messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_sixteen_at_once_answer_like_one(up: Up, openai: OpenAI) -> None:
    """Sixteen concurrent greedy requests get what each gets alone."""
    questions = [f"Write one sentence about the number {n}." for n in range(16)]

    async def ask_all() -> list[str]:
        async with async_client(up) as openai_async:
            answers = await asyncio.gather(
                *(
                    openai_async.chat.completions.create(
                        model="demo",
                        messages=[{"role": "user", "content": q}],
                        temperature=0,
                        max_tokens=24,
                    )
                    for q in questions
                )
            )
        return [a.choices[0].message.content or "" for a in answers]

    together = asyncio.run(ask_all())
    differ = []
    for question, answer in zip(questions, together, strict=True):
        alone = openai.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=24,
        )
        if alone.choices[0].message.content != answer:
            differ.append(question)
    # Where the two best logits are closer than 1e-4, rounding may pick either.
    assert len(differ) <= 1


def test_seeded_sampling_repeats(openai: OpenAI) -> None:
    """The same seed gives the same text, another seed another one."""

    def tell(seed: int) -> str:
        answer = openai.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Tell me a story."}],
            temperature=1.0,
            top_p=0.95,
            seed=seed,
            max_tokens=24,
        )
        return answer.choices[0].message.content or ""

    assert tell(1) == tell(1)
    assert tell(1) != tell(2)


def test_leaving_a_stream_frees_the_row(up: Up, openai: OpenAI) -> None:
    """A client that goes away in the middle leaves nothing running."""
    stream = openai.completions.create(model="demo", prompt="Once upon a time", max_tokens=2000, stream=True)
    next(iter(stream))
    stream.close()
    wait_for(lambda: up.replica("demo/0")["in_flight"] == 0, 3, "the row to be freed")


def worker_process(up: Up) -> psutil.Process:
    return psutil.Process(up.replica("demo/0")["pid"])


def above_weights(up: Up) -> float:
    """The worker's PSS in MB without the weights (538,060,032 bytes in float32) and what the prefix cache
    keeps."""
    state = json.loads(up.ctl("state", "demo", "--json").stdout)["replicas"]["demo/0"]["result"]
    pss = worker_process(up).memory_full_info().pss
    return (pss - 538_060_032 - state["prefix_cache"]["ram_bytes"]) / MB


def test_the_worker_stays_lean(up: Up, openai: OpenAI) -> None:
    """At most 80 MB above its weights one second after a 4k prefill and sixteen streams."""
    openai.completions.create(model="demo", prompt=" word" * 4000, max_tokens=2)

    async def sixteen() -> None:
        async with async_client(up) as openai_async:
            await asyncio.gather(
                *(
                    openai_async.completions.create(model="demo", prompt=f"Number {n}:", max_tokens=16)
                    for n in range(16)
                )
            )

    asyncio.run(sixteen())
    time.sleep(1.0)
    assert above_weights(up) <= 80


def test_a_killed_worker_comes_back_and_answers(up: Up, openai: OpenAI) -> None:
    """SIGKILL mid-stream: the stream ends with an error within a second; the model serves again, as lean
    as at first."""
    stream = openai.completions.create(model="demo", prompt="Once upon a time", max_tokens=2000, stream=True)
    iterator = iter(stream)
    next(iterator)
    os.kill(up.replica("demo/0")["pid"], signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(Exception, match="worker"):
        for _ in iterator:
            pass
    assert time.monotonic() - killed < 1.0
    wait_for(lambda: up.replica("demo/0")["state"] == "ready", 30, "the worker to come back")
    wait_for(lambda: above_weights(up) <= 45, 10, "it to be lean")
    answer = openai.chat.completions.create(model="demo", messages=FRANCE, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")


def test_home_holds_the_converted_model_once(up: Up) -> None:
    """One GGUF and one converted directory in the cache; no wheel, no leftovers of the conversion."""
    cache: Path = up.home / "cache"
    assert len(list(cache.rglob("*.gguf"))) == 1
    assert len(list(cache.rglob("model*.safetensors"))) == 1
    assert not list(cache.rglob("*.whl"))
    assert not list(cache.rglob("*.part"))
