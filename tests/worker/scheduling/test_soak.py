"""The short version of bench/soak_steps.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[3] / "bench" / "soak_steps.py"


@pytest.mark.slow
def test_memory_is_flat_over_decode_steps(tiny_models: dict[str, Path]) -> None:
    """Rows that come, go, are aborted and preempted leave no array, object or byte behind."""
    command = [str(SOAK), str(tiny_models["llama"]), "--steps", "1600", "--every", "200", "--json"]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["preemptions"] > 0
    assert report["grown"] == []
