"""A fleet for tests: `mlxhost up` as a subprocess, real frontend, fake workers unless asked otherwise."""

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil

ENTRY = Path(__file__).with_name("supervisor_entry.py")
MLXHOST = Path(sys.executable).with_name("mlxhost")
QUICK = {"heartbeat_s": 0.2, "tick_s": 0.05}
MARK = "MLXHOST_TEST_FLEET"
PROMPT = [40, 41, 42, 43]

_T = TypeVar("_T")


def wait_for(get: Callable[[], _T], timeout: float = 10.0, what: str = "") -> _T:
    """The first true value of `get`."""
    end = time.monotonic() + timeout
    while not (value := get()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} s: {what or get}")
        time.sleep(0.02)
    return value


def mlxhost(home: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command to its end."""
    return subprocess.run(
        [str(MLXHOST), *args],
        env=os.environ | {"MLXHOST_HOME": str(home)} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


class Up:
    """One running `mlxhost up`. As a context manager it leaves nothing behind, and fails if the fleet did."""

    def __init__(
        self,
        home: Path,
        models: str,
        *options: str,
        script: dict[str, Any] | None = None,
        timing: dict[str, float] | None = None,
        port: int = 0,
        worker_command: list[str] | None = None,
        output: int | None = None,
    ) -> None:
        self.home = home
        wanted: dict[str, Any] = {"timing": QUICK | (timing or {})}
        if worker_command:
            wanted["worker_command"] = worker_command
        self._mark = secrets.token_hex(8)
        self.env = os.environ | {
            MARK: self._mark,
            "MLXHOST_HOME": str(home),
            "MLXHOST_FAKE": json.dumps(script or {}),
            "MLXHOST_TEST_UP": json.dumps(wanted),
        }
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*self.prefix, sys.executable, str(ENTRY), *self.command(models, port), *options],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def prefix(self) -> list[str]:
        """What to run it under, such as another network namespace."""
        return []

    def command(self, models: str, port: int) -> list[str]:
        """The subcommand and what it always needs."""
        return ["up", *(["--models", models] if models else []), "--port", str(port)]

    def _read(self) -> None:
        if self.process.stdout is not None:
            with self.process.stdout as stream:
                for line in stream:
                    self.lines.append(line.rstrip("\n"))

    def __enter__(self) -> "Up":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        try:
            wait_for(lambda: not marked(self._mark), 3.0, "no process left")
        finally:
            for process in marked(self._mark):
                with contextlib.suppress(psutil.Error):
                    process.kill()

    # --- what it says

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def line(self, text: str, timeout: float = 15.0) -> str:
        """The first line of output that holds `text`."""

        def found() -> str | None:
            return next((line for line in list(self.lines) if text in line), None)

        def seen_or_over() -> str | None:
            return found() or ("" if self.process.poll() is None else "(ended)")

        line = wait_for(seen_or_over, timeout, f"{text!r} in:\n{self.output}")
        if line == "(ended)":
            self._reader.join(5)
            line = found() or ""
            assert line, f"ended without saying {text!r}:\n{self.output}"
        return line

    def url(self, timeout: float = 15.0) -> str:
        """Where it serves, once everything is ready."""
        found = re.search(r"http://\S+", self.line("Serving on", timeout))
        assert found
        return found[0]

    def exit_code(self, timeout: float = 15.0) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    # --- what runs

    def ctl(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = mlxhost(self.home, "ctl", *args)
        if check:
            assert done.returncode == 0, done.stderr + done.stdout
        return done

    def status(self) -> dict[str, Any]:
        return json.loads(self.ctl("status", "--json").stdout)

    def replica(self, slot: str) -> dict[str, Any]:
        replicas = [r for m in self.status()["models"] for r in m["replicas"]]
        return next(r for r in replicas if r["slot"] == slot)

    def descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def marked(mark: str) -> list[psutil.Process]:
    """Every process that was started by the fleet with this mark in its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get(MARK) == mark
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs (a zombie does not)."""
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


class Stream:
    """A streaming completion, read in a thread."""

    def __init__(self, url: str, model: str, max_tokens: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.status = 0
        self.ended_at = 0.0
        self.retry_after = ""
        self._url, self._model, self._max_tokens = url, model, max_tokens
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with posted(self._url, self._model, self._max_tokens, stream=True) as response:
                self.status = response.status
                self.retry_after = response.headers.get("Retry-After", "")
                for raw in response:
                    if raw.startswith(b"data: {"):
                        self.events.append(json.loads(raw[6:]))
        except (OSError, http.client.HTTPException) as error:
            self.events.append({"broken": repr(error)})
        self.ended_at = time.monotonic()

    def begun(self) -> "Stream":
        wait_for(lambda: self.events, what="first event of the stream")
        return self

    def join(self, timeout: float = 30.0) -> "Stream":
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the stream hangs"
        return self

    @property
    def finish(self) -> str | None:
        """finish_reason of the last choice, or None when the stream was cut."""
        choices = [c for e in self.events for c in e.get("choices", [])]
        return choices[-1].get("finish_reason") if choices else None

    @property
    def error(self) -> dict[str, Any] | None:
        return next((e["error"] for e in self.events if "error" in e), None)


@contextlib.contextmanager
def posted(
    url: str, model: str, max_tokens: int = 4, *, stream: bool = False
) -> Iterator[http.client.HTTPResponse]:
    """The response to a completion request."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield response


def status_of(url: str, model: str, max_tokens: int = 4) -> int:
    """HTTP status of one short completion."""
    with posted(url, model, max_tokens) as response:
        response.read()
        return response.status


@contextlib.contextmanager
def serving(home: Path, models: str, *options: str, **more: Any) -> Iterator[Up]:
    """A fleet that is ready."""
    with Up(home, models, *options, **more) as up:
        up.url()
        yield up
