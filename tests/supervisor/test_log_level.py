"""How much a fleet logs: at the start, live, and for processes that start later."""

import signal
from pathlib import Path

import pytest
from support.supervisor_up import gone, serving, wait_for


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


def levels(text: str) -> dict[str, str]:
    """`frontend/0 logs from debug on (before: info)` by process."""
    return {line.split()[0]: line.partition("(before: ")[2].rstrip(")") for line in text.splitlines()}


def test_the_level_holds_from_the_start_live_and_for_later_processes(tmp_path: Path, llama: Path) -> None:
    """Supervisor, frontend and worker begin with --log-level; a new frontend has what was set since."""
    script = {"answers": {"configure_logging": {"result": {"level": "x", "was": "x"}}}}
    with serving(tmp_path, f"m={llama}", "--log-level", "warning", script=script) as up:
        before = levels(up.ctl("log-level", "debug").stdout)
        assert (before["supervisor"], before["frontend/0"]) == ("warning", "warning")
        process = [p for p in up.descendants() if p.pid == up.status()["frontends"][0]["pid"]]
        process[0].send_signal(signal.SIGKILL)
        wait_for(lambda: gone(process))
        wait_for(lambda: up.status()["frontends"][0]["state"] == "ready", 20)
        assert levels(up.ctl("log-level", "frontend", "info").stdout) == {"frontend/0": "debug"}


@pytest.mark.slow
def test_the_supervisor_logs_what_its_level_lets_through(tmp_path: Path, llama: Path) -> None:
    """At debug each control call is told; at error the drain of a model is not."""
    with serving(tmp_path, f"m={llama}") as up:
        up.ctl("log-level", "supervisor", "debug")
        up.ctl("drain", "m")
        up.line("ctl drain m: ok")
        up.ctl("log-level", "supervisor", "error")
        at = len(up.lines)
        up.ctl("resume", "m")
        up.ctl("drain", "m")
        assert not [line for line in up.lines[at:] if "drain" in line]
        wrong = up.ctl("log-level", "nobody", "debug", check=False)
        assert (wrong.returncode, "no model or process 'nobody'" in wrong.stderr) == (4, True)
