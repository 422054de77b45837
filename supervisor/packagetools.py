"""pip and uv as ways to a wheel: where it lies, or the wheel itself. The user's own index settings apply.

Nothing is installed and nothing of the package is run. `locate` asks a tool where the file is, so that it
can be fetched with resumption (supervisor.download); `obtain` lets the tool fetch it, which works on any
index that the tool can use (credentials, own certificates, odd protocols) but starts at zero each time.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

LOCATE_S = 90.0  # an index page takes a second or two
SILENCE_S = 120.0  # a download that brings no byte for so long is given up

OnBytes = Callable[[int, int], None]  # bytes so far, bytes in all (0: not known)


class ToolFailed(Exception):
    """The tool could not do it; the text is the tool's own last word."""


@dataclass(frozen=True)
class Located:
    """Where a wheel is; `sha256` is empty when the tool did not tell."""

    url: str
    sha256: str = ""


class Tool(Protocol):
    """A package tool at hand."""

    @property
    def name(self) -> str: ...

    def locate(self, requirement: str, wheel_prefix: str) -> Located | None:
        """Where the wheel is, or None when this tool cannot tell. Raises ToolFailed when the wheel cannot
        be had through it at all."""

    def obtain(self, requirement: str, directory: Path, on_bytes: OnBytes) -> Path:
        """The wheel, or a directory with its content, below `directory`. Raises ToolFailed."""


def tools() -> list[Tool]:
    """What is at hand: this Python's own pip, a uv, a pip elsewhere; at most one of each."""
    found: list[Tool] = []
    if importlib.util.find_spec("pip"):
        found.append(Pip((sys.executable, "-m", "pip")))
    if uv := _uv():
        found.append(Uv(uv))
    if pip := _pip_elsewhere():
        found.append(Pip(pip))
    return found


def _uv() -> tuple[str, ...] | None:
    beside = Path(sys.prefix).parent / ".uv/bin/uv"  # where this project's Makefile puts it
    for candidate in (os.environ.get("UV"), shutil.which("uv"), str(beside)):
        if candidate and os.access(candidate, os.X_OK):
            return (candidate,)
    return (sys.executable, "-m", "uv") if importlib.util.find_spec("uv") else None


def _pip_elsewhere() -> tuple[str, ...] | None:
    for name, *rest in (("pip",), ("pip3",), ("python3", "-m", "pip")):
        path = shutil.which(name)
        if path and _runs((path, *rest, "--version")):
            return (path, *rest)
    return None


def _runs(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@dataclass(frozen=True)
class Pip:
    """pip, of any Python. `pip download` says in its log where it found the file before it fetches it (no
    other command of pip's tells without fetching, on an index that serves no metadata files)."""

    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(self.command)

    def locate(self, requirement: str, wheel_prefix: str) -> Located | None:
        pattern = re.compile(
            rf"Found link (\S+/{re.escape(wheel_prefix)}[^/#\s]+\.whl)(?:#sha256=([0-9a-f]{{64}}))?"
        )
        with tempfile.TemporaryDirectory(prefix="mlxhost-pull-") as scratch:
            command = [*self._download(requirement, Path(scratch)), "-vv"]
            with _started(command, Path(scratch), subprocess.PIPE) as process, _deadline(process, LOCATE_S):
                assert process.stdout is not None
                said = []
                for raw in process.stdout:
                    line = raw.decode(errors="replace").strip()
                    if found := pattern.search(line):
                        url, sha256 = found.groups()
                        # pip hides passwords; such a place only pip itself can reach.
                        return None if "****" in url else Located(url, sha256 or "")
                    said.append(line)
                if process.wait(timeout=10) != 0:
                    raise ToolFailed(_last_word(said, "ERROR:"))
        return None

    def obtain(self, requirement: str, directory: Path, on_bytes: OnBytes) -> Path:
        _run_watched(self._download(requirement, directory), directory, on_bytes, "ERROR:")
        return _only_wheel(directory)

    def _download(self, requirement: str, directory: Path) -> list[str]:
        options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
        limits = ["--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
        return [*self.command, "download", *options, *limits, "--dest", str(directory), requirement]


@dataclass(frozen=True)
class Uv:
    """uv. Its lock format tells the file's address, size and hash without fetching it."""

    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(self.command)

    def locate(self, requirement: str, wheel_prefix: str) -> Located | None:
        options = ["--no-deps", "--no-header", "--quiet", "--python", sys.executable]
        command = [*self.command, "pip", "compile", "-", *options, "--format", "pylock.toml"]
        with tempfile.TemporaryDirectory(prefix="mlxhost-pull-") as scratch:
            try:
                answer = subprocess.run(
                    command,
                    input=requirement.encode(),
                    capture_output=True,
                    cwd=scratch,
                    timeout=LOCATE_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise ToolFailed(f"no answer within {LOCATE_S:.0f} s") from None
        said = answer.stderr.decode(errors="replace").splitlines()
        if answer.returncode != 0:
            if any("--format" in line for line in said):
                return None  # a uv from before this format
            raise ToolFailed(_last_word(said, "error:", "×", "╰─▶"))
        for package in tomllib.loads(answer.stdout.decode()).get("packages", []):
            for wheel in package.get("wheels", []):
                url = wheel.get("url") or Path(wheel.get("path", "")).absolute().as_uri()
                if url.rpartition("/")[2].startswith(wheel_prefix):
                    return Located(url, wheel.get("hashes", {}).get("sha256", ""))
        return None

    def obtain(self, requirement: str, directory: Path, on_bytes: OnBytes) -> Path:
        # uv has no download command; unpacking a wheel into a folder runs nothing of it.
        options = ["--no-deps", "--only-binary", ":all:", "--no-cache", "--quiet", "--python", sys.executable]
        target = directory / "unpacked"
        command = [*self.command, "pip", "install", *options, "--target", str(target), requirement]
        _run_watched(command, directory, on_bytes, "error:", "×", "╰─▶")
        return target


@contextmanager
def _started(command: Sequence[str], scratch: Path, stdout: int) -> Iterator["subprocess.Popen[bytes]"]:
    """`command`, its temporary files in `scratch`, killed at the end if it still runs. Raises ToolFailed when
    it does not start."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PIP_QUIET", "PIP_VERBOSE")}
    environment |= {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            cwd=scratch,
            env=environment,
        )
    except OSError as error:
        raise ToolFailed(str(error)) from None
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def _deadline(process: "subprocess.Popen[bytes]", seconds: float) -> Iterator[None]:
    """Kill `process` after so long; reading its output then ends."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _run_watched(command: Sequence[str], directory: Path, on_bytes: OnBytes, *marks: str) -> None:
    """Run `command` to its end, telling how much it has put below `directory`."""
    log = directory / "log"
    with log.open("wb") as out, _started(command, directory, out.fileno()) as process:
        size, grown = 0, time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            now = time.monotonic()
            current = bytes_below(directory)
            if current != size:
                size, grown = current, now
            elif now - grown > SILENCE_S:
                raise ToolFailed(f"no progress for {SILENCE_S:.0f} s")
            on_bytes(size, 0)
    if process.returncode != 0:
        raise ToolFailed(_last_word(log.read_text(errors="replace").splitlines(), *marks))


def bytes_below(directory: Path) -> int:
    """Size of all files below `directory`, which may change or vanish meanwhile."""
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue  # moved on meanwhile
    return total


def _only_wheel(directory: Path) -> Path:
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ToolFailed(f"left {len(wheels)} wheels")
    return wheels[0]


def _last_word(said: Sequence[str], *marks: str) -> str:
    """What a tool complained about: its last marked line and the cause below it, else its last line."""
    lines = [line.strip() for line in said if line.strip()] or ["no output"]
    marked = [line for line in lines if line.startswith(marks)]
    word = (marked or lines)[-1].lstrip("×╰─▶ ")
    if lines[-1].startswith("Caused by:"):
        word += f" ({lines[-1]})"
    if any("Retrying (" in line for line in lines):
        word += " (the index could not be reached)"  # pip's own last line does not say so
    return word
