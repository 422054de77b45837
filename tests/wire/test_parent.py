"""A process whose parent is gone does not outlive it, whenever that happened."""

import os
import subprocess
import sys

CHECK = """
import os, sys
from mlxhost.wire.sockets import process_dies_with_parent
process_dies_with_parent(int(sys.argv[1]))
print("alive")
"""


def run(parent: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(parent)], capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()


def test_another_parent_than_was_told_means_that_the_first_is_gone() -> None:
    """It died before the kernel was asked to tell: the child leaves by itself, at once."""
    assert run(os.getpid()) == "alive"
    assert run(2**22 + 1) == ""


def test_without_a_parent_told_nothing_is_checked() -> None:
    """A process started by hand runs."""
    assert run(0) == "alive"
