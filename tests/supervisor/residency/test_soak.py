"""The soak, short: the long one is a command of its own (bench/residency_soak.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[3] / "bench" / "residency_soak.py"


@pytest.mark.slow
def test_five_models_in_a_budget_for_two_break_nothing() -> None:
    """A quarter of a minute of mixed load: no fault is found, and there were swaps."""
    done = subprocess.run(
        [sys.executable, str(SOAK), "--minutes", "0.25", "--workers", "fake"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'evict':" in done.stdout
