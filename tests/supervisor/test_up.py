"""`mlxhost up` with a real frontend and fake workers: what a user meets at the start."""

import json
import os
import signal
import socket
import stat
import time
from pathlib import Path

import pytest
from support.supervisor_up import ENTRY, Up, gone, serving, status_of, wait_for


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


def test_two_models_and_a_second_replica_are_served(tmp_path: Path, llama: Path) -> None:
    """Every replica is ready, both names answer, and the output is plain lines that end with the address."""
    with serving(tmp_path, f"a={llama}:2,b={llama}") as up:
        assert [status_of(up.url(), name) for name in ("a", "b")] == [200, 200]
        assert [r["slot"] for m in up.status()["models"] for r in m["replicas"]] == ["a/0", "a/1", "b/0"]
        assert {r["state"] for m in up.status()["models"] for r in m["replicas"]} == {"ready"}
        up.line("curl http://127.0.0.1:")
        assert "\x1b" not in up.output


def test_first_start_with_a_bad_model_says_why_once_and_exits_1(tmp_path: Path, llama: Path) -> None:
    """DEAD from a worker ends `up` with its message, exit 1, and the healthy worker beside it."""
    script = {"bad": {"boot_error": ["unsupported_architecture", "architecture 'mamba9' is not supported"]}}
    with Up(tmp_path, f"good={llama},bad={llama}", script=script) as up:
        wait_for(up.descendants)
        processes = up.descendants()
        assert up.exit_code() == 1
        assert [line for line in up.lines if "mamba9" in line] == [
            "mlxhost: bad: architecture 'mamba9' is not supported"
        ]
        assert "Traceback" not in up.output
        assert gone(processes)
        assert list((tmp_path / "run").iterdir()) == []


def test_a_worker_that_exits_silently_is_reported_by_its_exit_code(tmp_path: Path, llama: Path) -> None:
    """Without DEAD the exit code is the reason, and it is not tried again."""
    with Up(tmp_path, f"m={llama}", script={"boot_exit": 7}) as up:
        assert up.exit_code() == 1
        assert up.lines[-1] == "mlxhost: m: exited with code 7 before it was ready"


def test_a_worker_with_a_wrong_token_is_refused(tmp_path: Path, llama: Path) -> None:
    """A HELLO with another token is not let in, and the refusal is the reason given."""
    with Up(tmp_path, f"m={llama}", script={"hello_token": "stolen"}) as up:
        assert up.exit_code() == 1
        assert up.lines[-1] == "mlxhost: m: m/0: wrong join token"


def test_a_worker_of_another_protocol_is_refused(tmp_path: Path, llama: Path) -> None:
    """Another major version is refused with both versions named."""
    with Up(tmp_path, f"m={llama}", script={"hello_protocol": [9, 0]}) as up:
        assert up.exit_code() == 1
        assert up.lines[-1].startswith("mlxhost: m: the supervisor (mlxhost ")
        assert "speaks protocol 1" in up.lines[-1]
        assert "speaks 9" in up.lines[-1]


def test_a_worker_command_that_does_not_exist_is_one_message(tmp_path: Path, llama: Path) -> None:
    """A missing executable fails at once, without a traceback."""
    with Up(tmp_path, f"m={llama}", worker_command=["/nonexistent/python"]) as up:
        assert up.exit_code() == 1
        assert up.lines[-1] == "mlxhost: m: cannot start /nonexistent/python: No such file or directory"


def test_a_load_without_progress_is_given_up(tmp_path: Path, llama: Path) -> None:
    """A load that reports nothing for the deadline fails rather than hanging."""
    script = {"load_s": 60, "silent_load": True}
    with Up(tmp_path, f"m={llama}", script=script, timing={"progress_s": 0.5, "kill_s": 0.2}) as up:
        assert up.exit_code() == 1
        assert up.lines[-1].startswith("mlxhost: m: made no progress for 0 s")


def test_progress_renews_the_load_deadline(tmp_path: Path, llama: Path) -> None:
    """A load longer than the deadline succeeds while it reports progress."""
    with serving(tmp_path, f"m={llama}", script={"load_s": 1.2}, timing={"progress_s": 0.5}) as up:
        assert status_of(up.url(), "m") == 200


def test_a_port_in_use_by_another_program_is_named(tmp_path: Path, llama: Path) -> None:
    """The port and the way out are in the message, exit 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Up(tmp_path, f"m={llama}", port=port) as up:
            assert up.exit_code() == 1
            assert up.lines == [
                f"mlxhost: port {port} on 127.0.0.1 is in use by another program; "
                "take another with --port (0: any free)"
            ]


def test_a_port_in_use_by_another_fleet_says_which_and_how_to_stop_it(tmp_path: Path, llama: Path) -> None:
    """The other fleet's name and pid are given."""
    with serving(tmp_path, f"m={llama}") as first:
        port = int(first.url().rpartition(":")[2])
        with Up(tmp_path, f"m={llama}", port=port) as second:
            assert second.exit_code() == 1
            assert first.status()["fleet"] in second.output
            assert f"kill {first.process.pid}" in second.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_load_exits_0_at_once(
    tmp_path: Path, llama: Path, number: signal.Signals
) -> None:
    """Stopping does not wait for a model that is still loading."""
    with Up(tmp_path, f"m={llama}", script={"load_s": 60}) as up:
        up.line("m: loading")
        processes = up.descendants()
        began = time.monotonic()
        up.signal(number)
        assert up.exit_code() == 0
        assert time.monotonic() - began < 5
        assert "restart" not in up.output
        assert gone(processes)


def test_state_is_closed_to_other_users(tmp_path: Path, llama: Path) -> None:
    """Home, run directory and control socket are for this user alone."""
    with serving(tmp_path / "home", f"m={llama}"):
        (run,) = (tmp_path / "home" / "run").iterdir()
        control = Path(json.loads((run / "fleet.json").read_text())["control"].removeprefix("ipc://"))
        modes = [stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "home", run, control.parent, control)]
        assert modes == [0o700, 0o700, 0o700, 0o600]


def test_the_join_token_is_not_in_argv_or_environment(tmp_path: Path, llama: Path) -> None:
    """Children are told what to do through their stdin only."""
    with serving(tmp_path, f"m={llama}") as up:
        assert len(up.descendants()) == 2
        for process in up.descendants():
            added = {k: v for k, v in process.environ().items() if up.env.get(k) != v}
            assert set(added) <= {
                "MALLOC_ARENA_MAX",
                "MALLOC_MMAP_THRESHOLD_",
                "MALLOC_TRIM_THRESHOLD_",
                "OPENBLAS_NUM_THREADS",
            }
            assert process.cmdline()[1:] in (
                ["-I", "-m", "mlxhost.frontend"],
                ["-I", str(ENTRY.parents[1] / "fakes" / "worker.py")],
            )


def test_an_output_that_nobody_reads_does_not_stop_the_fleet(tmp_path: Path, llama: Path) -> None:
    """With stdout and stderr closed at their other end the fleet starts, serves and stops as ever."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with Up(tmp_path, f"m={llama}", output=write_end) as up:
        os.close(write_end)
        wait_for(lambda: up.ctl("status", check=False).returncode == 0, what="a fleet")
        wait_for(lambda: up.replica("m/0")["state"] == "ready", what="a ready replica")
        assert status_of(up.status()["url"], "m") == 200
        up.signal(signal.SIGTERM)
        assert up.exit_code() == 0


@pytest.mark.parametrize(("ignored", "stops"), [(signal.SIGINT, True), (signal.SIGHUP, False)])
def test_a_background_job_stops_on_sigint_and_nohup_is_respected(
    tmp_path: Path, llama: Path, ignored: signal.Signals, stops: bool
) -> None:
    """A signal that the parent ignored: SIGINT stops the fleet all the same, SIGHUP does not."""
    before = signal.signal(ignored, signal.SIG_IGN)
    try:
        up = Up(tmp_path, f"m={llama}")
    finally:
        signal.signal(ignored, before)
    with up:
        url = up.url()
        up.signal(ignored)
        if stops:
            assert up.exit_code() == 0
        else:
            time.sleep(0.5)
            assert status_of(url, "m") == 200
