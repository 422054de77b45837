"""Control operations of a real worker process: each answers once, and the streams are what they promise."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from support.tiny_models import build
from support.worker_harness import WorkerProcess

from mlxhost.wire import control, data
from mlxhost.wire.data import Finish
from mlxhost.worker.unsupported import REASONS

PROMPT = [(7 * i) % 400 + 3 for i in range(40)]


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


@pytest.fixture
def worker(runtime: Path, tiny_models: dict[str, Path]) -> Iterator[WorkerProcess]:
    with WorkerProcess(runtime, tiny_models["llama"], max_rows=4, max_queued=4) as process:
        yield process


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture as the tiny llama, with other weights."""
    return build("llama", tmp_path_factory.mktemp("other") / "llama-2", seed=99)


def answer(worker: WorkerProcess, handle: int, tokens: int = 60) -> list[int]:
    """What the worker says to PROMPT, greedily."""
    worker.add(handle, PROMPT, tokens)
    got, finish = worker.collect({handle})[handle]
    assert finish == Finish.LENGTH
    return got


def started(worker: WorkerProcess, handle: int, tokens: int = 3000) -> list[int]:
    """Begin a long row and return once it has produced something: its first tokens."""
    worker.add(handle, PROMPT, tokens)
    while True:
        message = worker.receive()
        if isinstance(message, data.Out) and message.tokens:
            return list(message.tokens)


def until_load(worker: WorkerProcess, **wanted: int) -> None:
    """Control and data are two sockets: wait until the worker has what was sent on the other."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        load = worker.call("get_load").result["load"]
        if all(load[name] == value for name, value in wanted.items()):
            return
    raise TimeoutError(f"the load never became {wanted}")


def test_frozen_rows_go_on_exactly_where_they_were(worker: WorkerProcess) -> None:
    """pause keep stops every token; after resume the output is that of an undisturbed run."""
    expected = answer(worker, 1, 400)
    first = started(worker, 2, 400)
    paused = worker.call("pause", mode="keep")
    assert paused.result == {"mode": "paused", "frozen": 1, "waiting": 0}
    while worker.data.poll(100):  # what was sent before the pause
        message = worker.receive()
        first += message.tokens
    assert len(first) < 400
    tick = worker.call("health").result["tick"]
    time.sleep(0.3)
    assert worker.call("health").result["tick"] == tick
    assert worker.call("is_paused").result == {"paused": True}
    assert worker.call("resume").result["was"] == "paused"
    rest, finish = worker.collect({2})[2]
    assert finish == Finish.LENGTH
    assert first + rest == expected


def test_pause_wait_finishes_what_runs_and_queues_the_rest(worker: WorkerProcess) -> None:
    """The answer comes once the running row has ended; later requests wait until resume."""
    started(worker, 1, 800)
    call = worker.begin("pause", mode="wait")
    news = worker.expect(control.News)
    assert (news.call_id, news.data) == (call, {"running": 1})
    worker.add(2, PROMPT, 5)
    assert worker.answer(call).result["mode"] == "paused"
    assert worker.collect({1})[1][1] == Finish.LENGTH
    load = worker.call("get_load").result["load"]
    assert (load["mode"], load["running"], load["waiting"]) == ("paused", 0, 1)
    worker.call("resume")
    assert len(worker.collect({2})[2][0]) == 5


def test_pause_abort_ends_running_rows_and_keeps_waiting_ones(worker: WorkerProcess) -> None:
    """Four running rows end with CANCELLED; the one that waited runs after resume."""
    for handle in range(1, 5):
        worker.add(handle, PROMPT, 3000)
    worker.add(5, PROMPT, 5)
    until_load(worker, running=4, waiting=1)
    assert worker.call("pause", mode="abort").result == {"mode": "paused", "aborted": 4, "waiting": 1}
    ended = worker.collect({1, 2, 3, 4})
    assert {finish for _, finish in ended.values()} == {Finish.CANCELLED}
    worker.call("resume")
    assert len(worker.collect({5})[5][0]) == 5


def test_resume_answers_the_pause_that_was_still_waiting(worker: WorkerProcess) -> None:
    """A pause overtaken by resume fails and says so; the row goes on."""
    started(worker, 1, 1500)
    pause = worker.begin("pause", mode="wait")
    resume = worker.begin("resume")
    overtaken, resumed = worker.expect(control.Reply), worker.expect(control.Reply)
    assert (overtaken.call_id, overtaken.code) == (pause, "failed")
    assert (resumed.call_id, resumed.result["mode"]) == (resume, "running")
    assert worker.collect({1})[1][1] == Finish.LENGTH


def test_deadlines_go_on_while_rows_are_frozen(worker: WorkerProcess) -> None:
    """A frozen row whose deadline passes ends; it does not wait for resume."""
    worker.call("pause", mode="keep")
    add = data.Add(1, 1, "late", limits=data.Limits(5, deadline_s=0.3))
    worker.send(*data_frames(add))
    assert worker.collect({1}, 5)[1] == ([], Finish.ABORT)


def test_stop_lets_frozen_rows_finish(worker: WorkerProcess) -> None:
    """STOP while paused: what runs goes on to its end, and the process exits 0."""
    started(worker, 1, 500)
    worker.call("pause", mode="keep")
    worker.tell(control.Stop(10.0))
    assert worker.collect({1})[1][1] == Finish.LENGTH
    assert worker.process.wait(5) == 0


def test_a_sleeping_worker_refuses_and_is_the_same_when_woken(worker: WorkerProcess) -> None:
    """Requests are rejected `sleeping` with a time to retry; after wake the output is token-equal."""
    expected = answer(worker, 1)
    slept = worker.call("sleep")
    assert slept.code == "ok"
    assert slept.result["resident_after"] <= slept.result["resident_before"]
    assert worker.call("is_sleeping").result == {"sleeping": True}
    worker.add(2, PROMPT, 5)
    reject = worker.collect({2})[2][1]
    assert (reject.code, reject.retry_after_s) == (data.REJECT_SLEEPING, 30.0)
    assert worker.call("sleep").code == "invalid"
    assert worker.call("get_weights_by_name", name="model.norm.weight").code == "invalid"
    woken = worker.call("wake")
    assert woken.result["read_weights"] is True
    assert answer(worker, 3) == expected
    assert worker.call("wake").code == "invalid"


def test_sleep_refuses_what_waits_with_one_terminal_each(worker: WorkerProcess) -> None:
    """Running rows finish, waiting ones are rejected, and nothing is left in flight."""
    for handle in range(1, 5):
        worker.add(handle, PROMPT, 400)
    until_load(worker, running=4)
    call = worker.begin("sleep")
    worker.add(5, PROMPT, 5)
    assert worker.answer(call).code == "ok"
    results = worker.collect({1, 2, 3, 4, 5})
    assert [results[h][1] for h in range(1, 5)] == [Finish.LENGTH] * 4
    assert results[5][1].code == data.REJECT_SLEEPING
    beat = worker.expect(control.Heartbeat)
    while beat.mode != "sleeping" or beat.in_flight:
        beat = worker.expect(control.Heartbeat)


def test_waking_fails_while_the_files_are_gone_and_works_once_they_are_back(
    runtime: Path, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """A failed wake names the file and leaves the worker asleep, not dead."""
    model = shutil.copytree(tiny_models["llama"], tmp_path / "model")
    with WorkerProcess(runtime, model) as worker:
        expected = answer(worker, 1)
        worker.call("sleep")
        (model / "model.safetensors").rename(tmp_path / "away")
        failed = worker.call("wake")
        assert failed.code == "failed"
        assert "no *.safetensors" in failed.message
        assert worker.call("is_sleeping").result == {"sleeping": True}
        (tmp_path / "away").rename(model / "model.safetensors")
        assert worker.call("wake").code == "ok"
        assert answer(worker, 2) == expected


def test_reloaded_weights_serve_in_the_same_process(
    runtime: Path, worker: WorkerProcess, other_weights: Path
) -> None:
    """A row that runs finishes with the old weights, the next one gets the new ones, the card is told."""
    old = answer(worker, 1, 300)
    first = started(worker, 2, 300)
    call = worker.begin("reload_weights", path=str(other_weights))
    assert worker.expect(control.News).data == {"running": 1}
    worker.add(3, PROMPT, 60)
    reply = worker.answer(call)
    assert (reply.code, reply.result["path"]) == ("ok", str(other_weights))
    assert reply.result["card"]["directory"] == str(other_weights)
    both = worker.collect({2, 3})
    assert first + both[2][0] == old
    with WorkerProcess(other_weights.parent, other_weights) as fresh:
        expected = answer(fresh, 1)
    assert both[3][0] == expected
    assert expected != old[:60]


def spoiled(source: Path, target: Path, how: str) -> Path:
    """A copy of the model that cannot take its place."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    weights = target / "model.safetensors"
    match how:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "another architecture":
            (target / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
        case "fewer layers":
            (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
        case "another shape":  # told by no field that is compared beforehand
            tensors = mx.load(str(weights))
            assert isinstance(tensors, dict)
            wide = {k: mx.concatenate([v, v]) if "gate" in k or "up" in k else v for k, v in tensors.items()}
            wide = {k: mx.concatenate([v, v], axis=1) if "down" in k else v for k, v in wide.items()}
            mx.save_safetensors(str(weights), wide)
            (target / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
        case "no tokenizer":
            (target / "tokenizer.json").unlink()
    return target


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", "truncated"),
        ("another architecture", "model_type 'qwen3' differs"),
        ("fewer layers", "num_hidden_layers 1 differs"),
        ("another shape", "mlp.down_proj.weight has the shape (64, 256)"),
        ("no tokenizer", "no tokenizer.json"),
    ],
)
def test_a_failed_reload_leaves_the_weights_that_serve(
    worker: WorkerProcess, tiny_models: dict[str, Path], tmp_path: Path, how: str, words: str
) -> None:
    """The answer names what is wrong, and the output stays the same."""
    expected = answer(worker, 1)
    reply = worker.call("reload_weights", path=str(spoiled(tiny_models["llama"], tmp_path / "m", how)))
    assert reply.code == "failed"
    assert words in reply.message
    assert answer(worker, 2) == expected
    assert worker.call("get_state").result["path"] == str(tiny_models["llama"])


def test_weights_are_not_changed_under_frozen_rows(worker: WorkerProcess, other_weights: Path) -> None:
    """A frozen row's KV cache belongs to its weights: the reload is refused, the row unharmed."""
    expected = answer(worker, 1, 300)
    first = started(worker, 2, 300)
    worker.call("pause", mode="keep")
    refused = worker.call("reload_weights", path=str(other_weights))
    assert (refused.code, "frozen" in refused.message) == ("invalid", True)
    worker.call("resume")
    assert first + worker.collect({2})[2][0] == expected


def test_settings_change_while_the_worker_serves(worker: WorkerProcess) -> None:
    """max_rows and max_queued hold from the next request on; wrong ones are named and change nothing."""
    changed = worker.call("set_state", max_rows=1, max_queued=1, max_gap_ms=80)
    assert changed.code == "ok"
    state = worker.call("get_state").result
    assert (state["max_rows"], state["max_queued"], state["max_gap_ms"]) == (1, 1, 80.0)
    for handle in (1, 2, 3):
        worker.add(handle, PROMPT, 200)
    results = worker.collect({1, 2, 3})
    assert results[3][1].code == data.REJECT_QUEUE_FULL
    for args, words in (
        ({"max_rows": 0}, "max_rows"),
        ({"max_rows": "many"}, "max_rows"),
        ({"max_rwos": 3}, "unknown argument max_rwos; it takes max_rows, max_queued, max_gap_ms"),
    ):
        wrong = worker.call("set_state", **args)
        assert wrong.code == "invalid"
        assert words in wrong.message
    assert worker.call("get_state").result["max_rows"] == 1


def test_a_profile_says_where_the_time_went(worker: WorkerProcess, runtime: Path) -> None:
    """Every lap of the steps is counted, and the file is a Chrome trace readable by its owner only."""
    assert worker.call("profile", action="stop").code == "invalid"
    assert worker.call("profile", action="start").code == "ok"
    assert worker.call("profile", action="start").code == "invalid"
    answer(worker, 1, 50)
    stopped = worker.call("profile", action="stop").result
    laps = stopped["laps"]
    assert laps["launch"]["count"] == laps["sample"]["count"] == laps["wait"]["count"] == 50
    assert laps["prefill"]["count"] >= 1
    assert laps["emit"]["count"] >= 50
    path = Path(stopped["path"])
    assert path.parent == runtime / "profiles"
    assert path.stat().st_mode & 0o777 == 0o600
    events = json.loads(path.read_text())["traceEvents"]
    assert len(events) == stopped["events"]
    assert {e["name"] for e in events} == {"launch", "sample", "wait", "emit", "prefill"}
    assert all(e["ph"] == "X" and e["dur"] >= 0 for e in events)


def test_a_profile_keeps_the_newest_events(worker: WorkerProcess) -> None:
    """The buffer is bounded and says what it dropped."""
    worker.call("profile", action="start", max_events=10)
    answer(worker, 1, 30)
    stopped = worker.call("profile", action="stop").result
    assert stopped["events"] == 10
    assert stopped["dropped"] > 0


def test_sessions_are_recorded_with_their_tokens(worker: WorkerProcess) -> None:
    """Requests of a session are counted, whether it was opened or not; closing tells the last figures."""
    assert worker.call("open_session", id="mine").result["opened"] is True
    assert worker.call("open_session", id="mine").code == "invalid"
    for handle, session in ((1, "mine"), (2, "mine"), (3, "theirs")):
        worker.add(handle, PROMPT, 10, session_id=session)
        worker.collect({handle})
    listed = {s["id"]: s for s in worker.call("list_sessions").result["sessions"]}
    mine, theirs = listed["mine"], listed["theirs"]
    assert (mine["requests"], mine["running"]) == (2, 0)
    assert (mine["prompt_tokens"], mine["completion_tokens"]) == (80, 20)
    assert (theirs["opened"], theirs["completion_tokens"]) == (False, 10)
    assert worker.call("close_session", id="mine").result["requests"] == 2
    assert worker.call("close_session", id="mine").code == "not_found"
    assert len(worker.call("open_session").result["id"]) == 16


def test_weights_can_be_looked_at(worker: WorkerProcess, tiny_models: dict[str, Path]) -> None:
    """Shape, dtype and values are the file's; a wrong name gets similar ones."""
    name = "model.layers.1.self_attn.q_proj.weight"
    seen = worker.call("get_weights_by_name", name=name, count=3).result
    tensors = mx.load(str(tiny_models["llama"] / "model.safetensors"))
    assert isinstance(tensors, dict)
    assert seen["shape"] == list(tensors[name].shape)
    assert seen["first_values"] == tensors[name].reshape(-1)[:3].tolist()
    assert len(seen["sha256"]) == 64
    wrong = worker.call("get_weights_by_name", name="layers.1.self_attn.q_proj")
    assert wrong.code == "not_found"
    assert name in wrong.message
    assert worker.call("get_weights_by_name", name=name, count=10_000).code == "invalid"


def test_requests_are_aborted_by_id(worker: WorkerProcess) -> None:
    """The named request ends, all its choices with it; others go on; unknown ids are told."""
    for handle, name in ((1, "one-0"), (2, "one-1"), (3, "two-0")):
        worker.add(handle, PROMPT, 3000, request_id=name)
    until_load(worker, running=3)
    done = worker.call("abort", requests=["one", "three"]).result
    assert done == {"aborted": ["one-0", "one-1"], "not_found": ["three"]}
    assert {f for _, f in worker.collect({1, 2}).values()} == {Finish.CANCELLED}
    assert worker.call("abort", all=True).result["aborted"] == ["two-0"]
    assert worker.collect({3})[3][1] == Finish.CANCELLED
    assert worker.call("abort").code == "invalid"


def test_load_is_reported_while_the_engine_is_busy(worker: WorkerProcess) -> None:
    """watch_load sends the reports that were asked for, then one REPLY."""
    started(worker, 1)
    call = worker.begin("watch_load", interval_s=0.1, count=3)
    reports = [worker.expect(control.News) for _ in range(3)]
    assert all(news.call_id == call for news in reports)
    assert all(news.data["load"]["running"] == 1 for news in reports)
    ticks = [news.data["load"]["tick"] for news in reports]
    assert ticks == sorted(set(ticks))
    assert worker.answer(call).result["reports"] == 3


def test_a_watch_without_a_count_ends_before_its_deadline(worker: WorkerProcess) -> None:
    """The REPLY is there in time."""
    began = time.monotonic()
    reply = worker.call("watch_load", deadline_s=1.0, interval_s=0.2)
    assert reply.code == "ok"
    assert reply.result["reports"] >= 3
    assert time.monotonic() - began < 1.0


def test_log_level_changes_while_it_runs(worker: WorkerProcess) -> None:
    """The level before is told; a level that does not exist is refused."""
    assert worker.call("configure_logging", level="warning").result == {"level": "warning", "was": "info"}
    assert worker.call("configure_logging", level="info").result["was"] == "warning"
    assert worker.call("configure_logging", level="loud").code == "invalid"


@pytest.mark.parametrize("op", sorted(REASONS))
def test_what_one_device_cannot_do_says_why(worker: WorkerProcess, op: str) -> None:
    """Typed `unsupported` with the reason, never silence."""
    reply = worker.call(op)
    assert reply.code == "unsupported"
    assert REASONS[op] in reply.message


def test_every_declared_operation_answers_nonsense_arguments(worker: WorkerProcess) -> None:
    """Whatever the arguments, each operation gives exactly one typed answer, and the worker serves on."""
    for op in worker.ready.operations:
        for args in ({"nonsense": 1}, {"mode": 5}, {"level": [], "name": {}, "action": None}):
            assert worker.call(op, **args).code in ("ok", "invalid", "failed", "not_found")
    worker.call("resume")
    assert len(answer(worker, 1)) == 60


def data_frames(add: data.Add) -> list[bytes | memoryview]:
    from mlxhost.wire.codec import encode

    return encode(add, bytes(4 * len(PROMPT)))
