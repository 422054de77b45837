"""A real worker process over real sockets."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.worker_harness import WorkerProcess

from mlxhost.wire import control, data
from mlxhost.wire.codec import encode
from mlxhost.wire.data import Finish


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


@pytest.fixture
def worker(runtime: Path, tiny_models: dict[str, Path]) -> Iterator[WorkerProcess]:
    with WorkerProcess(runtime, tiny_models["llama"], max_rows=4, max_queued=4) as process:
        yield process


def test_serves_concurrent_requests(worker: WorkerProcess) -> None:
    """Requests over the socket give the same tokens together and alone."""
    prompts = {h: [(h * 31 + i) % 400 + 3 for i in range(5 + 20 * h)] for h in range(1, 5)}
    for handle, prompt in prompts.items():
        worker.add(handle, prompt, 20)
    together = worker.collect(set(prompts))
    assert all(finish in (Finish.LENGTH, Finish.STOP) for _, finish in together.values())
    for handle, prompt in prompts.items():
        worker.add(handle + 100, prompt, 20)
        assert worker.collect({handle + 100})[handle + 100] == together[handle]


def test_heartbeats_tell_the_load(worker: WorkerProcess) -> None:
    """Busy is told at once, with the tick moving; idle again afterwards with nothing in flight."""
    worker.add(1, [5] * 50, 400)
    beat = worker.expect(control.Heartbeat)
    while not beat.busy:
        beat = worker.expect(control.Heartbeat)
    assert beat.in_flight == 1
    later = worker.expect(control.Heartbeat)
    assert later.load.tick > beat.load.tick
    assert 50 + 256 <= later.load.kv_tokens <= 450
    worker.collect({1})
    while beat.busy:
        beat = worker.expect(control.Heartbeat)
    assert beat.in_flight == 0
    assert beat.load.kv_tokens == 0


def test_undecodable_add_is_rejected_and_the_next_one_runs(worker: WorkerProcess) -> None:
    """Even an ADD whose body is garbage gets its terminal message."""
    header, _ = encode(data.Add(5, 1, "bad"))
    worker.send(header, b"\xc1\xc1")
    worker.send(*encode(data.Add(6, 2, "no prompt frame")))
    worker.send(*encode(data.Add(7, 3, "odd frame")), b"abc")
    worker.send(b"\x00garbage")
    worker.send(b"x", b"y", b"z")
    worker.add(8, [3, 4], 3)
    results = worker.collect({5, 6, 7, 8})
    for handle in (5, 6, 7):
        assert results[handle][1].code == data.REJECT_BAD_MESSAGE
    assert len(results[8][0]) == 3


def test_a_full_queue_is_refused_at_once(worker: WorkerProcess) -> None:
    """While a long prompt is being prefilled, the request too many is told so within 50 ms (the quickest of
    five: the machine may be busy with something else)."""
    for handle in range(1, 9):
        worker.add(handle, [5] * 3000, 1)
    time.sleep(0.2)
    took = []
    for handle in range(9, 14):
        started = time.monotonic()
        worker.add(handle, [3], 1)
        while not isinstance(result := worker.receive(), data.Reject):
            pass
        took.append(time.monotonic() - started)
        assert (result.handle, result.code) == (handle, data.REJECT_QUEUE_FULL)
        assert result.retry_after_s
    assert min(took) < 0.05


def test_duplicate_request_ids_are_refused(worker: WorkerProcess) -> None:
    """A request id that is running already is rejected; the running one goes on."""
    worker.add(1, [5, 6], 300, request_id="same")
    worker.add(2, [5, 6], 3, request_id="same")
    results = worker.collect({1, 2})
    assert results[2][1].code == data.REJECT_DUPLICATE
    assert len(results[1][0]) == 300


def test_abort_frees_the_row(worker: WorkerProcess) -> None:
    """ABORT ends a row within a quarter of a second, with one terminal."""
    worker.add(1, [5, 6], 4000)
    time.sleep(0.3)
    started = time.monotonic()
    worker.send(*encode(data.Abort([(1, "client disconnected")])))
    assert worker.collect({1})[1][1] == Finish.ABORT
    assert time.monotonic() - started < 0.25


@pytest.mark.slow
def test_a_slow_reader_gets_everything_in_fewer_messages(worker: WorkerProcess) -> None:
    """A frontend that does not read for a while loses no token, and the engine does not wait for it."""
    worker.add(1, [5, 6], 4000)
    while worker.expect(control.Heartbeat, 5).in_flight == 0:
        pass
    while worker.expect(control.Heartbeat, 5).busy:
        pass
    tokens, finish = worker.collect({1})[1]
    assert finish == Finish.LENGTH
    assert len(tokens) == 4000
    assert worker.received < 3900
    worker.add(2, tokens[:1], 5)
    assert len(worker.collect({2})[2][0]) == 5


def test_stop_finishes_what_runs_and_refuses_the_rest(worker: WorkerProcess) -> None:
    """After STOP the running request ends normally, a new one is refused, and the process exits 0."""
    worker.add(1, [5, 6], 300)
    while not worker.expect(control.Heartbeat).busy:
        pass
    worker.tell(control.Stop(10.0))
    time.sleep(0.1)
    worker.add(2, [5, 6], 3)
    results = worker.collect({1, 2})
    assert len(results[1][0]) == 300
    assert results[2][1].code == data.REJECT_DRAINING
    assert worker.process.wait(5) == 0


def test_stop_is_bounded(worker: WorkerProcess) -> None:
    """A request that outlives the deadline is ended, and the process still exits 0."""
    worker.add(1, [5, 6], 4000)
    while not worker.expect(control.Heartbeat).busy:
        pass
    worker.tell(control.Stop(0.2))
    assert worker.collect({1})[1][1] == Finish.ABORT
    assert worker.process.wait(5) == 0


def test_the_worker_goes_when_its_lifeline_closes(worker: WorkerProcess) -> None:
    """End-of-file on the inherited pipe ends the process within two seconds, busy or not."""
    worker.add(1, [5, 6], 4000)
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(2) == 0
    worker.process.stdin = None


def test_control_calls_are_answered_by_call_id(worker: WorkerProcess) -> None:
    """flush and health answer; an unknown operation is `unsupported` and says what there is."""
    worker.tell(control.Ctl("c1", "flush"))
    worker.tell(control.Ctl("c2", "no_such_thing"))
    first, second = worker.expect(control.Reply), worker.expect(control.Reply)
    assert (first.call_id, first.code, first.result["durable"]) == ("c1", "ok", True)
    assert (second.call_id, second.code) == ("c2", "unsupported")
    assert "flush" in second.message


FAILING = """
from mlxhost.worker import engine, errors, main
tick = engine.Engine.step
def step(self):
    if self.stepper.generated > 5:
        raise errors.EngineFailure("the device is gone")
    tick(self)
engine.Engine.step = step
main.main()
"""


def test_a_fatal_failure_leaves_open_rows_to_the_frontends(
    runtime: Path, tiny_models: dict[str, Path]
) -> None:
    """The worker says DEAD with the reason and exits 1; its open row gets no terminal message, so that it
    counts as lost with its worker and can be started anew."""
    with WorkerProcess(runtime, tiny_models["llama"], command=("-c", FAILING)) as worker:
        worker.add(1, [5, 6], 500)
        dead = worker.expect(control.Dead)
        assert worker.process.wait(5) == 1
        assert (dead.code, dead.message) == ("engine", "the device is gone")
        finishes = []
        with contextlib.suppress(TimeoutError):
            while True:
                message = worker.receive(0.5)
                finishes += message.finish if isinstance(message, data.Out) else []
        assert len(finishes) > 3
        assert set(finishes) == {Finish.RUNNING}


def copy(model: Path, to: Path) -> Path:
    shutil.copytree(model, to)
    return to


def edit_config(model: Path, **changes: object) -> Path:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))
    return model


def truncate(model: Path) -> Path:
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size // 2)
    return model


def garble(model: Path) -> Path:
    (model / "config.json").write_text('{"model_type": ')
    return model


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (truncate, "bad_model", ["model.safetensors", "truncated"]),
        (garble, "bad_model", ["config.json", "JSON"]),
        (lambda m: edit_config(m, model_type="nonesuch"), "unsupported_architecture", ["nonesuch"]),
        (lambda m: edit_config(m, model_type="../evil"), "bad_model", ["model_type"]),
        (lambda m: edit_config(m, num_hidden_layers=3), "bad_model", ["weights do not fit", "layers.2"]),
        (lambda m: edit_config(m, hidden_size="wide"), "bad_model", ["config.json"]),
        (lambda m: edit_config(m, model_file="x.py"), "unsupported_architecture", ["x.py"]),
        (
            lambda m: edit_config(m, quantization_config={"quant_method": "gptq"}),
            "unsupported_quantisation",
            ["gptq"],
        ),
        (lambda m: [p.unlink() for p in m.glob("*.safetensors")] and m, "bad_model", ["no *.safetensors"]),
        (lambda m: (m / "tokenizer.json").unlink() or m, "bad_model", ["tokenizer.json"]),
    ],
)
def test_a_bad_model_is_named_in_the_last_words(
    runtime: Path, tiny_models: dict[str, Path], tmp_path: Path, spoil, code: str, words: list[str]
) -> None:
    """DEAD names the file or field at fault, and the process exits 1."""
    model = spoil(copy(tiny_models["llama"], tmp_path / "model"))
    with WorkerProcess(runtime, model, ready=False) as worker:
        dead = worker.expect(control.Dead, 20)
        assert worker.process.wait(5) == 1
    assert dead.code == code
    for word in words:
        assert word in dead.message
