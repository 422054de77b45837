"""A real worker process and its compiler processes."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.worker_harness import WorkerProcess
from tokenizers import Tokenizer

from mlxhost.wire import data

PROMPT = [50, 51, 52]
CHOICE = data.Grammar("choice", '["yes", "no"]')
SLOW = data.Grammar("json_schema", json.dumps({"enum": [f"value {i}" for i in range(30_000)]}))


@pytest.fixture
def worker(tiny_models: dict[str, Path], tmp_path: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(tmp_path, tiny_models["llama"]) as process:
        yield process


def helpers(worker: WorkerProcess, timeout_s: float = 20.0) -> list[psutil.Process]:
    """The worker's compiler processes, at least one."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if found := psutil.Process(worker.process.pid).children():
            return found
        time.sleep(0.01)
    raise AssertionError("no compiler process was started")


def test_a_worker_loads_the_compiler_when_it_is_wanted(
    worker: WorkerProcess, tiny_models: dict[str, Path]
) -> None:
    """No process and no library before the first constrained row, and the output is what was asked for."""
    process = psutil.Process(worker.process.pid)
    worker.add(1, PROMPT)
    worker.collect({1})
    assert process.children() == []
    assert not any("xgrammar" in m.path for m in process.memory_maps())
    worker.add(2, PROMPT, grammar=CHOICE)
    tokens, finish = worker.collect({2}, timeout_s=60)[2]
    assert finish is data.Finish.STOP
    tokenizer = Tokenizer.from_file(str(tiny_models["llama"] / "tokenizer.json"))
    assert tokenizer.decode(tokens) in ("yes", "no")


def test_a_killed_compiler_costs_its_grammar_only(worker: WorkerProcess) -> None:
    """The row is refused with the reason, and the next grammar compiles in another process."""
    worker.add(1, PROMPT, grammar=SLOW)
    for helper in helpers(worker):
        os.kill(helper.pid, signal.SIGKILL)
    outcome = worker.collect({1}, timeout_s=60)[1][1]
    assert isinstance(outcome, data.Reject)
    assert outcome.code == data.REJECT_GRAMMAR
    worker.add(2, PROMPT, grammar=CHOICE)
    assert worker.collect({2}, timeout_s=60)[2][1] is data.Finish.STOP


def test_compiler_processes_do_not_outlive_their_worker(worker: WorkerProcess) -> None:
    """Killed without warning in the middle of a compilation, it leaves nothing behind."""
    worker.add(1, PROMPT, grammar=SLOW)
    left = helpers(worker)
    worker.process.kill()
    _, alive = psutil.wait_procs(left, timeout=20)
    assert alive == []
