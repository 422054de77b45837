"""A second network namespace with a cable to this one. Needs root and the `ip` command (Linux)."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Elsewhere:
    """`here` and `there` are the addresses of the cable's two ends; `prefix` runs a command there."""

    name: str
    cable: str
    here: str
    there: str

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def pull_cable(self) -> None:
        """Nothing gets through any more, and no one is told."""
        ip("link", "set", self.cable, "down")

    def plug_in(self) -> None:
        ip("link", "set", self.cable, "up")


def ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip()}")


@contextmanager
def elsewhere() -> Iterator[Elsewhere]:
    """Skips the test where namespaces are not permitted, with the reason."""
    if sys.platform != "linux" or not shutil.which("ip"):
        pytest.skip("network namespaces need Linux and the `ip` command")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    tag = secrets.token_hex(3)
    net = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(256)}"
    place = Elsewhere(f"mlxh-{tag}", f"mh{tag}a", f"{net}.1", f"{net}.2")
    far = f"mh{tag}b"
    try:
        ip("netns", "add", place.name)
        ip("link", "add", place.cable, "type", "veth", "peer", "name", far, "netns", place.name)
        ip("addr", "add", f"{place.here}/24", "dev", place.cable)
        ip("link", "set", place.cable, "up")
        ip("-n", place.name, "addr", "add", f"{place.there}/24", "dev", far)
        ip("-n", place.name, "link", "set", far, "up")
        ip("-n", place.name, "link", "set", "lo", "up")
    except OSError as error:
        subprocess.run(["ip", "netns", "del", place.name], capture_output=True, timeout=10)
        pytest.skip(f"network namespaces are not permitted here: {error}")
    try:
        yield place
    finally:
        subprocess.run(["ip", "netns", "del", place.name], capture_output=True, timeout=10)
