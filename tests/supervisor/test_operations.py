"""Control operations through a whole fleet: real supervisor, frontend and command line, fake workers."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.supervisor_up import Stream, Up, posted, serving, status_of, wait_for

from mlxhost.supervisor.workercalls import gathered
from mlxhost.wire.control import Ctl, Reply

SLOW_ROWS = {"length": 100_000, "step_ms": 20}
STAND_STILL = {
    "pause": {"mode": "paused", "result": {"mode": "paused", "frozen": 1}},
    "resume": {"mode": "running", "result": {"was": "paused"}},
    "sleep": {"mode": "sleeping", "result": {"resident_before": 5_000_000, "resident_after": 1_000_000}},
    "wake": {"mode": "running", "result": {"seconds": 0.5, "resident_after": 5_000_000}},
}


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


def refused(up: Up, model: str) -> tuple[int, str, str]:
    """Status, Retry-After and error code of a completion that cannot be served now."""
    with posted(up.url(), model) as response:
        body = json.loads(response.read())
        return response.status, response.headers.get("Retry-After", ""), body["error"]["code"]


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        (["ok", "ok"], "ok"),
        (["ok", "timeout"], "failed"),
        (["unsupported", "unsupported"], "unsupported"),
        (["lost", "lost"], "lost"),
        (["lost", "timeout"], "failed"),
    ],
)
def test_answers_are_gathered_by_slot(codes: list[str], code: str) -> None:
    """All parts are there; the whole has the parts' code where they agree, and is `failed` otherwise."""
    replies = {f"m/{i}": Reply("x", c, "" if c == "ok" else "why") for i, c in enumerate(codes)}
    whole = gathered(Ctl("id", "flush"), replies)
    assert (whole.call_id, whole.code) == ("id", code)
    assert [a["code"] for a in whole.result["replicas"].values()] == codes
    assert whole.message.count("why") == len(codes) - codes.count("ok")


def test_a_paused_model_is_shown_and_gets_nothing_new(tmp_path: Path, llama: Path) -> None:
    """503 with Retry-After while paused; the stream that was frozen goes on after resume."""
    with serving(tmp_path, f"m={llama}", script={"answers": STAND_STILL, **SLOW_ROWS}) as up:
        stream = Stream(up.url(), "m", 60).begun()
        assert up.ctl("pause", "m", "--mode", "keep").stdout == "m/0 paused, 1 frozen\n"
        assert up.replica("m/0")["state"] == "paused"
        assert refused(up, "m") == (503, "10", "model_paused")
        before = len(stream.events)
        time.sleep(0.5)
        assert len(stream.events) <= before + 1
        assert up.ctl("resume", "m").stdout == "m/0 ready\n"
        assert stream.join().finish == "length"
        assert status_of(up.url(), "m") == 200


def test_requests_go_round_a_sleeping_replica(tmp_path: Path, llama: Path) -> None:
    """One replica asleep: the other serves. Both asleep: 503 with Retry-After, until woken."""
    with serving(tmp_path, f"m={llama}:2", script={"answers": STAND_STILL}) as up:
        assert up.ctl("sleep", "m/0").stdout == "m/0 asleep: 5.0 MB before, 1.0 MB after\n"
        assert [up.replica(slot)["state"] for slot in ("m/0", "m/1")] == ["sleeping", "ready"]
        assert {status_of(up.url(), "m") for _ in range(4)} == {200}
        up.ctl("sleep", "m/1")
        assert refused(up, "m") == (503, "30", "model_sleeping")
        assert up.ctl("wake", "m").stdout.splitlines() == [
            "m/0 awake after 0.5 s: 5.0 MB",
            "m/1 awake after 0.5 s: 5.0 MB",
        ]
        assert status_of(up.url(), "m") == 200


@pytest.mark.parametrize("end", ["drain", "stop"])
def test_a_paused_model_can_be_drained_and_stopped(tmp_path: Path, llama: Path, end: str) -> None:
    """Frozen rows are let go on, so that they finish and the drain, or the fleet, ends."""
    with serving(tmp_path, f"m={llama}", script={"answers": STAND_STILL, **SLOW_ROWS}) as up:
        stream = Stream(up.url(), "m", 40).begun()
        up.ctl("pause", "m", "--mode", "keep")
        if end == "drain":
            assert up.ctl("drain", "m", "--timeout", "10").stdout.splitlines()[-1] == "m/0 drained"
        else:
            up.signal(signal.SIGTERM)
            assert up.exit_code() == 0
        assert stream.join().finish == "length"


def test_one_replica_can_fail_where_another_does_not(tmp_path: Path, llama: Path) -> None:
    """Both parts are shown, with JSON as well, and the exit code is 4."""
    script = {"a": {"answers": {"wake": STAND_STILL["wake"]}}, "b": {}}
    with serving(tmp_path, f"a={llama},b={llama}", script=script) as up:
        done = up.ctl("call", "a", "wake")
        assert json.loads(done.stdout)["replicas"]["a/0"]["code"] == "ok"
        refused = up.ctl("call", "b", "wake", check=False)
        assert refused.returncode == 4
        assert json.loads(refused.stdout)["replicas"]["b/0"]["code"] == "unsupported"
        both = up.ctl("log-level", "debug", "--json", check=False)
        assert both.returncode == 4
        answer = json.loads(both.stdout)
        codes = {slot: part["code"] for slot, part in answer["replicas"].items()}
        assert codes == {"a/0": "unsupported", "b/0": "unsupported", "frontend/0": "ok", "supervisor": "ok"}
        assert answer["error"]["code"] == "failed"


def test_arguments_reach_the_worker(tmp_path: Path, llama: Path) -> None:
    """What the command line says is what the worker is asked."""
    ops = ("get_state", "set_state", "abort", "reload_weights", "profile", "list_sessions", "pause")
    script = {"answers": {op: {} for op in ops}}

    def asked(up: Up, *command: str) -> dict[str, Any]:
        answer = json.loads(up.ctl(*command, "--json").stdout)["replicas"]["m/0"]["result"]
        return dict(answer["args"])

    with serving(tmp_path, f"m={llama}", script=script) as up:
        assert asked(up, "state", "m") == {}
        assert asked(up, "state", "m", "max_rows=4", "max_gap_ms=0.5", "x=y") == {
            "max_rows": 4,
            "max_gap_ms": 0.5,
            "x": "y",
        }
        assert asked(up, "abort", "m", "one", "two") == {"requests": ["one", "two"]}
        assert asked(up, "abort", "m", "--all") == {"all": True}
        assert asked(up, "reload-weights", "m") == {"path": "", "mode": "wait"}
        assert asked(up, "reload-weights", "m", "some/dir", "--abort") == {
            "path": str(Path.cwd() / "some/dir"),
            "mode": "abort",
        }
        assert asked(up, "profile", "m", "start") == {"action": "start"}
        assert asked(up, "pause", "m") == {"mode": "wait"}
        assert asked(up, "call", "m", "pause", '{"mode": "x"}') == {"mode": "x"}
        assert up.ctl("abort", "m", check=False).returncode == 2
        assert up.ctl("call", "m", "pause", "[1]", check=False).returncode == 2


def test_news_is_told_with_the_slot_it_comes_from(tmp_path: Path, llama: Path) -> None:
    """Lines for people; with --json the load watch prints a line of JSON for each report."""
    script = {"answers": {"watch_load": {"news": ["one", "two"], "result": {"reports": 2}}}}
    with serving(tmp_path, f"m={llama}", script=script) as up:
        assert up.ctl("load-watch", "m").stdout.splitlines() == ["m/0 one", "m/0 two"]
        lines = [json.loads(line) for line in up.ctl("load-watch", "m", "--json").stdout.splitlines()]
        assert lines[:2] == [{"slot": "m/0", "line": "one"}, {"slot": "m/0", "line": "two"}]
        assert lines[2]["replicas"]["m/0"]["result"] == {"reports": 2}


def test_late_answers_are_dropped_and_counted(tmp_path: Path, llama: Path) -> None:
    """The deadline is the caller's answer; what comes later changes nothing."""
    script = {"answers": {"wake": {"delay_s": 1.0}}}
    with serving(tmp_path, f"m={llama}", script=script) as up:
        late = up.ctl("wake", "m", "--timeout", "0.3", check=False)
        assert late.returncode == 4
        assert "m/0 did not answer wake" in late.stderr
        assert up.status()["late_replies"] == 0
        wait_for(lambda: up.status()["late_replies"] == 1)


def test_a_death_answers_for_the_dead_and_keeps_the_answers_of_the_living(
    tmp_path: Path, llama: Path
) -> None:
    """One of two replicas dies while a call waits for both: `lost` for it, the result of the other."""
    script = {"answers": {"wake": {"delay_s": 1.5, "result": {"seconds": 1, "resident_after": 5}}}}
    with serving(tmp_path, f"m={llama}:2", script=script) as up:
        results = []
        waiting = threading.Thread(target=lambda: results.append(up.ctl("wake", "m", "--json", check=False)))
        waiting.start()
        time.sleep(0.7)
        os.kill(up.replica("m/0")["pid"], signal.SIGKILL)
        waiting.join(10)
        assert results[0].returncode == 4
        parts = json.loads(results[0].stdout)["replicas"]
        assert (parts["m/0"]["code"], parts["m/1"]["code"]) == ("lost", "ok")


def test_processes_that_start_later_load_what_was_reloaded(tmp_path: Path, llama: Path) -> None:
    """The path that every replica took is the model's from then on; a partly failed one is not."""
    other = shutil.copytree(llama, tmp_path / "other")
    result = {"path": str(other), "seconds": 0.1, "weights_bytes": 7}
    good = {"answers": {"reload_weights": {"result": result}}}
    script = {"m/0": good, "n/0": good, "n/1": {"answers": {"reload_weights": {"code": "failed"}}}}
    with serving(tmp_path, f"m={llama},n={llama}:2", script=script) as up:
        assert up.ctl("reload-weights", "m").stdout == f"m/0 serves {other} after 0.1 s\n"
        assert up.ctl("reload-weights", "n", check=False).returncode == 4
        assert [m["path"] for m in up.status()["models"]] == [str(other), str(llama)]


def test_targets_that_do_not_exist_are_named(tmp_path: Path, llama: Path) -> None:
    """A wrong model or slot exits 4 and says what there is; a frontend answers for itself."""
    with serving(tmp_path, f"m={llama}") as up:
        for target in ("n", "m/7", "frontend/3"):
            wrong = up.ctl("pause", target, check=False)
            assert (wrong.returncode, f"no model {target!r}" in wrong.stderr) == (4, True)
        asked = up.ctl("call", "frontend", "pause", check=False)
        assert "a frontend has no operation 'pause'" in asked.stderr
        assert up.ctl("log-level", "frontend", "warning").stdout == (
            "frontend/0 logs from warning on (before: info)\n"
        )
