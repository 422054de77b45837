"""The compiler process as its parent sees it: started when needed, killed when a grammar takes too long."""

import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from mlxhost.worker.grammar.messages import Failed, Job, Reply, Result, Up
from mlxhost.worker.grammar.xgr import GrammarError

_START_S = 120.0  # building a 262k vocabulary takes a few seconds, and on a busy machine many times that
_MAX_REPLY = 64 * 1024 * 1024


@dataclass(frozen=True)
class Tokenizer:
    """What a vocabulary is made from. `cache` is where it is kept, by the content of all of these."""

    path: Path
    cache: Path
    vocab_size: int
    stop_ids: tuple[int, ...]


class Cancelled(Exception):
    """Nobody waits for the result any more."""


class CompilerFailed(GrammarError):
    """The process gave no verdict on the grammar: it did not start, it ended, or it took too long. Another
    time it may."""


class Helper:
    """One compiler process. Used by one thread; only `begin` and `cancel` may be called by another."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False
        self._killed = False  # by a cancel that came when there was nothing left to end

    def begin(self) -> None:
        """What is cancelled from now on is the next `compile`; the two never overlap with `cancel`."""
        self._killed, self._cancelled = self._killed or self._cancelled, False

    def compile(self, kind: str, value: str, limit_s: float) -> Result:
        """Compile in the process, which is killed when it takes longer than `limit_s`.

        Raises GrammarError with the reason, CompilerFailed when there was no verdict, or Cancelled.
        """
        if self._killed:
            self._killed = False
            self.close()
        self.start()
        job = Job(kind, value, list(self._tokenizer.stop_ids))
        reply = self._ask(msgspec.msgpack.encode(job), limit_s)
        if isinstance(reply, Failed):
            raise GrammarError(reply.reason)
        assert isinstance(reply, Result)
        return reply

    def start(self) -> None:
        """Have the process running and its vocabulary loaded. Raises CompilerFailed or Cancelled."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        if self._cancelled:
            raise Cancelled
        t = self._tokenizer
        stops = ",".join(map(str, t.stop_ids))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-m", "mlxhost.worker.grammar", t.path, t.cache, str(t.vocab_size), stops],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        if self._cancelled:  # before there was a process to kill
            self._gone()
        reply = self._receive(_START_S, "the grammar compiler takes longer than {:g} s to start")
        if isinstance(reply, Failed):
            self.close()
            raise CompilerFailed(reply.reason)

    def cancel(self) -> None:
        """End the process in whatever it is doing for the job that has begun: `compile` raises Cancelled."""
        self._cancelled = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process; the next call starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _ask(self, data: bytes, limit_s: float) -> Reply:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            view = memoryview(len(data).to_bytes(4, "little") + data)
            while view:  # a raw pipe takes part of a large value
                view = view[process.stdin.write(view) :]
        except (OSError, ValueError):
            self._gone()
        return self._receive(limit_s, "compiling it takes longer than {:g} s")

    def _receive(self, limit_s: float, late: str) -> Reply:
        """The next reply. A process that is late is killed, and CompilerFailed raised."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        end = time.monotonic() + limit_s
        data = bytearray()
        size = None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while size is None or len(data) < size:
                if not selector.select(max(0.0, end - time.monotonic())):
                    self.close()
                    raise CompilerFailed(late.format(limit_s))
                block = os.read(process.stdout.fileno(), 1 << 20)
                if not block:
                    self._gone()
                data += block
                if size is None and len(data) >= 4:
                    size = int.from_bytes(data[:4], "little")
                    del data[:4]
                    if size > _MAX_REPLY:
                        self.close()
                        return Failed(f"written out it takes {size} bytes; {_MAX_REPLY} are allowed")
        reply: Reply = msgspec.msgpack.decode(bytes(data), type=Up | Result | Failed)
        return reply

    def _gone(self) -> NoReturn:
        """The process ended by itself or was cancelled."""
        self.close()
        if self._cancelled:
            self._cancelled = False
            raise Cancelled
        raise CompilerFailed("the grammar compiler failed on it (out of memory or stack)")
