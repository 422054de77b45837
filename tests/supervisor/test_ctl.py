"""`mlxhost ctl` against a running fleet, through the real command line."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.supervisor_up import Stream, mlxhost, serving, status_of, wait_for

SLOW_ROWS = {"length": 100_000, "step_ms": 20}


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


def test_status_is_a_table_and_json(tmp_path: Path, llama: Path) -> None:
    """Both forms show every replica and the frontend, with load while a request runs."""
    with serving(tmp_path, f"a={llama}:2,b={llama}", script=SLOW_ROWS) as up:
        stream = Stream(up.url(), "b", 2000).begun()
        wait_for(lambda: up.replica("b/0")["in_flight"] == 1)
        replica = up.replica("b/0")
        assert replica["kv_tokens"] > 0
        assert replica["memory_bytes"] > 0
        lines = up.ctl("status").stdout.splitlines()
        assert lines[0].startswith(f"fleet {up.status()['fleet']} on {up.url()}, up ")
        assert lines[1].startswith("2 of 2 models resident, ")
        assert " ".join(lines[3].split()) == (
            "MODEL REPLICA STATE PID UPTIME RESTARTS IN FLIGHT QUEUED KV USED TOK/S MEMORY THREADS"
        )
        assert [line.split()[:3] for line in lines[4:]] == [
            ["a", "0", "ready"],
            ["a", "1", "ready"],
            ["b", "0", "ready"],
            ["(frontend)", "0", "ready"],
        ]
    stream.join()


def test_drain_waits_for_running_rows_and_resume_serves_again(tmp_path: Path, llama: Path) -> None:
    """Drain returns after the row's end, tells its progress, and answers 503 until resumed."""
    with serving(tmp_path, f"m={llama}", script=SLOW_ROWS) as up:
        stream = Stream(up.url(), "m", 60).begun()
        done = up.ctl("drain", "m")
        assert stream.join().finish == "length"
        assert done.stdout.splitlines()[0] == "m/0 draining, 1 in flight"
        assert done.stdout.splitlines()[-1] == "m/0 drained"
        assert status_of(up.url(), "m") == 503
        assert up.ctl("resume", "m").stdout == "m/0 ready\n"
        assert status_of(up.url(), "m") == 200


def test_drain_that_takes_too_long_exits_4_and_goes_on(tmp_path: Path, llama: Path) -> None:
    """The timeout ends the wait, not the drain."""
    with serving(tmp_path, f"m={llama}", script=SLOW_ROWS) as up:
        stream = Stream(up.url(), "m", 100).begun()
        late = up.ctl("drain", "m", "--timeout", "0.5", check=False)
        assert late.returncode == 4
        assert "not drained after 0 s (m/0 draining, 1 in flight)" in late.stderr
        assert stream.join().finish == "length"
        wait_for(lambda: up.replica("m/0")["state"] == "drained")


def test_no_wait_returns_at_once(tmp_path: Path, llama: Path) -> None:
    """`--no-wait` answers with the state as it is."""
    with serving(tmp_path, f"m={llama}", script=SLOW_ROWS) as up:
        stream = Stream(up.url(), "m", 60).begun()
        assert up.ctl("drain", "m", "--no-wait").stdout == "m/0 draining\n"
        assert stream.join().finish == "length"


def test_unload_ends_the_process_and_load_brings_it_back(tmp_path: Path, llama: Path) -> None:
    """Unloaded means no process; load spawns one under a new epoch."""
    with serving(tmp_path, f"m={llama}:2") as up:
        assert up.ctl("unload", "m").stdout.splitlines()[-2:] == ["m/0 unloaded", "m/1 unloaded"]
        assert up.replica("m/0")["pid"] is None
        assert len(up.descendants()) == 1
        assert status_of(up.url(), "m") == 503
        refused = up.ctl("resume", "m", check=False)
        assert refused.returncode == 4
        assert "`mlxhost ctl load m`" in refused.stderr
        assert up.ctl("load", "m").stdout.splitlines()[-2:] == ["m/0 ready", "m/1 ready"]
        assert up.replica("m/1")["epoch"] == 2
        assert status_of(up.url(), "m") == 200


@pytest.mark.slow
def test_unload_during_a_load_stops_it(tmp_path: Path, llama: Path) -> None:
    """A worker that still loads has nothing to finish."""
    with serving(tmp_path, f"m={llama}", script={"load_s": 2.0}) as up:
        up.ctl("unload", "m")
        up.ctl("load", "m", "--no-wait")
        wait_for(lambda: up.replica("m/0")["state"] == "loading")
        began = time.monotonic()
        up.ctl("unload", "m")
        assert time.monotonic() - began < 1.5
        assert up.replica("m/0")["state"] == "unloaded"


def test_a_drain_overtaken_by_resume_is_told_so(tmp_path: Path, llama: Path) -> None:
    """Two operators: the one whose goal was replaced gets an error, not silence."""
    with serving(tmp_path, f"m={llama}", script=SLOW_ROWS) as up:
        stream = Stream(up.url(), "m", 120).begun()
        results = []
        waiting = threading.Thread(target=lambda: results.append(up.ctl("drain", "m", check=False)))
        waiting.start()
        wait_for(lambda: up.replica("m/0")["state"] == "draining")
        up.ctl("resume", "m")
        waiting.join(10)
        assert results[0].returncode == 4
        assert "overtaken by another call" in results[0].stderr
        assert stream.join().finish == "length"


def report(flushed: int, missing: int = 0) -> dict[str, Any]:
    """What a worker answers to flush."""
    counts = ("pending_snapshots", "pending_spills", "dropped", "failed")
    return {
        "durable": not missing,
        "flushed": flushed,
        "missing": missing,
        **dict.fromkeys(counts, 0),
        "bytes": 2_000_000,
        "entries": 512,
        "longest_durable_prefix_tokens": 1024,
        "elapsed_s": 0.25,
    }


def test_flush_prints_what_each_worker_says(tmp_path: Path, llama: Path) -> None:
    """The figures are the workers' own, a line for each; all models unless one is named."""
    script = {"a": {"flush_result": report(512)}, "b": {"flush_result": report(0, missing=3)}}
    with serving(tmp_path, f"a={llama},b={llama}", script=script) as up:
        header, a, b = (line.split() for line in up.ctl("flush").stdout.splitlines())
        assert header[:4] == ["REPLICA", "DURABLE", "FLUSHED", "MISSING"]
        assert a[:4] == ["a/0", "yes", "512", "0"]
        assert b[:4] == ["b/0", "no", "0", "3"]
        assert len(up.ctl("flush", "a").stdout.splitlines()) == 2
        answers = json.loads(up.ctl("flush", "--json").stdout)["replicas"]
        assert answers["a/0"]["result"] == report(512)


@pytest.mark.slow
def test_partly_failed_flush_exits_4_and_shows_both(tmp_path: Path, llama: Path) -> None:
    """One worker does not answer in time: the other's result is shown, the failure named."""
    script = {"a": {"flush_result": report(512)}, "b": {"late_reply_s": 60}}
    with serving(tmp_path, f"a={llama},b={llama}", script=script) as up:
        done = up.ctl("flush", "--timeout", "3", check=False)
        assert done.returncode == 4
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["REPLICA", "a/0"]
        assert "b/0 did not answer flush within 3 s" in done.stderr


def test_a_death_fails_the_calls_that_wait_for_it(tmp_path: Path, llama: Path) -> None:
    """Killed while a flush waits: the call ends at once with the reason."""
    with serving(tmp_path, f"m={llama}", script={"late_reply_s": 60}) as up:
        results = []
        waiting = threading.Thread(target=lambda: results.append(up.ctl("flush", check=False)))
        waiting.start()
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(up.replica("m/0")["pid"], signal.SIGKILL)
        waiting.join(10)
        assert time.monotonic() - began < 2
        assert results[0].returncode == 4
        assert "m/0 died before it answered" in results[0].stderr


def test_an_unknown_model_names_those_that_exist(tmp_path: Path, llama: Path) -> None:
    """A wrong name exits 4 and suggests the right one; an alias works."""
    with serving(tmp_path, f"small={llama}") as up:
        wrong = up.ctl("drain", "smal", check=False)
        assert wrong.returncode == 4
        assert wrong.stderr == ("mlxhost: no model 'smal' in this fleet (small); did you mean small?\n")
        assert up.ctl("drain", str(llama)).returncode == 0


def test_without_a_fleet_exit_3(tmp_path: Path) -> None:
    """Every operation says that no fleet is running."""
    for command in (["status"], ["drain", "m"], ["flush"], ["load", "m"]):
        done = mlxhost(tmp_path, "ctl", *command)
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.startswith("mlxhost: no fleet is running")


def test_two_fleets_must_be_told_apart(tmp_path: Path, llama: Path) -> None:
    """Without --fleet both are listed, exit 3; name and port each choose one."""
    with serving(tmp_path, f"a={llama}") as first, serving(tmp_path, f"b={llama}") as second:
        both = first.ctl("status", check=False)
        assert both.returncode == 3
        assert first.url() in both.stderr
        assert second.url() in both.stderr
        port = second.url().rpartition(":")[2]
        by_port = json.loads(first.ctl("status", "--json", "--fleet", port).stdout)
        assert [m["name"] for m in by_port["models"]] == ["b"]
        by_name = json.loads(first.ctl("status", "--json", "--fleet", by_port["fleet"]).stdout)
        assert [m["name"] for m in by_name["models"]] == ["b"]
        assert first.ctl("status", "--fleet", "nope", check=False).returncode == 3


def test_json_answers_are_json_also_when_they_fail(tmp_path: Path, llama: Path) -> None:
    """A failure is an object with an error, on stdout, exit 4."""
    with serving(tmp_path, f"m={llama}") as up:
        done = up.ctl("drain", "other", "--json", check=False)
        assert done.returncode == 4
        assert json.loads(done.stdout)["error"]["code"] == "not_found"
