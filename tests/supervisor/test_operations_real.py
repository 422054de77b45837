"""Control operations on a fleet with nothing replaced: real workers, their weights and their memory."""

import json
import os
import signal
from pathlib import Path

import pytest
from support import real_fleet
from support.supervisor_up import Up, posted, wait_for
from support.tiny_models import build


def text(up: Up, prompt: str = "Every morning the baker") -> str:
    """A greedy completion."""
    answer = real_fleet.client(up).completions.create(
        model="m", prompt=prompt, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text


@pytest.mark.slow
def test_sleep_wake_and_reload_end_to_end(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """Asleep 503, awake the same text; reloaded another text, which a respawned worker gives, too."""
    other = build("llama", tmp_path / "other", seed=99)
    with real_fleet.fleet(tmp_path, f"m={tiny_models['llama']}") as up:
        before = text(up)
        pid = up.replica("m/0")["pid"]
        assert up.ctl("sleep", "m").stdout.startswith("m/0 asleep: ")
        with posted(up.url(), "m") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "30")
            assert json.loads(response.read())["error"]["code"] == "model_sleeping"
        up.ctl("wake", "m")
        assert text(up) == before
        up.ctl("reload-weights", "m", str(other))
        after = text(up)
        assert after != before
        assert up.replica("m/0")["pid"] == pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: up.replica("m/0")["pid"] not in (None, pid), 20)
        wait_for(lambda: up.replica("m/0")["state"] == "ready", 20)
        assert text(up) == after


@pytest.mark.slow
def test_every_operation_of_a_real_worker_answers_through_ctl(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    """Each command prints something and exits 0; what is not done here exits 4 with the reason."""
    with real_fleet.fleet(tmp_path, f"m={tiny_models['llama']}") as up:
        up.url(60)
        for command in (
            ("flush",),
            ("pause", "m", "--mode", "keep"),
            ("resume", "m"),
            ("pause", "m"),
            ("resume", "m"),
            ("sleep", "m", "--level", "1"),
            ("wake", "m"),
            ("reload-weights", "m"),
            ("state", "m"),
            ("state", "m", "max_rows=2"),
            ("abort", "m", "--all"),
            ("sessions", "m"),
            ("load-watch", "m", "--count", "2", "--interval", "0.1"),
            ("profile", "m", "start"),
            ("profile", "m", "stop"),
            ("log-level", "debug"),
            ("call", "m/0", "health"),
        ):
            assert up.ctl(*command).stdout, command
        refused = up.ctl("call", "m", "rebalance_experts", check=False)
        assert refused.returncode == 4
        assert "nothing to balance" in refused.stderr
        assert up.replica("m/0")["state"] == "ready"
        assert text(up)
