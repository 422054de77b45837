"""Plays supervisor and frontend for one real worker process."""

import array
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq
from msgspec import Struct

from mlxhost.wire import control, data, sockets
from mlxhost.wire.boot import Boot, write_boot
from mlxhost.wire.codec import decode, encode

MessageT = TypeVar("MessageT", bound=Struct)
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


ONE_THREAD = control.Lease(cpu_threads=1)


class WorkerProcess:
    """Start with a model, talk to it, and never leave it behind."""

    def __init__(
        self,
        runtime_dir: Path,
        model: Path,
        *,
        ready: bool = True,
        command: Sequence[str] = ("-m", "mlxhost.worker"),
        lease: control.Lease = ONE_THREAD,
        **config: Any,
    ) -> None:
        self.context = zmq.Context()
        self.control = self._router(sockets.ipc_endpoint(runtime_dir, "control"))
        self.data_endpoint = sockets.ipc_endpoint(runtime_dir, "data")
        self.data = self._router(self.data_endpoint)
        self.identity = sockets.identity("m/0", 1)
        self.received = 0  # data messages
        self.calls = 0
        self.process = subprocess.Popen(
            [sys.executable, "-I", *command],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **ALLOCATOR},
        )
        assert self.process.stdin is not None
        endpoint = sockets.ipc_endpoint(runtime_dir, "control")
        write_boot(self.process.stdin.fileno(), Boot(endpoint, "token", "m/0", 1, "m"))
        self.hello = self.expect(control.Hello)
        settings = control.WorkerConfig("m", str(model), **{"cache_dir": str(runtime_dir), **config})
        self.tell(control.Init(worker=settings, heartbeat_s=0.2, lease=lease))
        if ready:
            self.ready = self.expect(control.Ready, timeout_s=60)
            self.tell(control.Start())
            self.tell(control.Fleet(1, [control.FleetFrontend("frontend/0", 1, self.data_endpoint)], []))
            assert isinstance(self.receive(), data.Out)

    def _router(self, endpoint: str) -> "zmq.Socket[bytes]":
        router = self.context.socket(zmq.ROUTER)
        sockets.configure(router)
        router.setsockopt(zmq.RCVHWM, 10)
        router.bind(endpoint)
        return router

    def tell(self, message: Struct) -> None:
        """To the worker, as its supervisor."""
        self.control.send_multipart([self.identity, *encode(message)])

    def expect(self, kind: type[MessageT], timeout_s: float = 10.0) -> MessageT:
        """The next control message of `kind`; others are skipped."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.control.poll(max(0, (end - time.monotonic()) * 1000)):
                message, _ = decode(self.control.recv_multipart()[1:])
                if isinstance(message, kind):
                    return message
        raise TimeoutError(f"no {kind.__name__} within {timeout_s} s")

    def call(self, op: str, *, deadline_s: float = 20.0, **args: Any) -> control.Reply:
        """The answer to a control operation."""
        return self.answer(self.begin(op, deadline_s=deadline_s, **args), deadline_s)

    def begin(self, op: str, *, deadline_s: float = 20.0, **args: Any) -> str:
        """Call a control operation; its call id."""
        self.calls += 1
        call_id = f"call-{self.calls}"
        self.tell(control.Ctl(call_id, op, "", args, deadline_s))
        return call_id

    def answer(self, call_id: str, timeout_s: float = 20.0) -> control.Reply:
        """The REPLY to an earlier call, which must be the next one."""
        reply = self.expect(control.Reply, timeout_s)
        assert reply.call_id == call_id
        return reply

    def add(self, handle: int, prompt: Sequence[int], max_tokens: int | None = 8, **fields: Any) -> None:
        """Send a greedy ADD that only max_tokens ends."""
        add = data.Add(
            handle,
            handle,
            fields.pop("request_id", f"r{handle}"),
            sampling=fields.pop("sampling", data.Sampling(temperature=0.0)),
            limits=data.Limits(max_tokens=max_tokens, ignore_eos=True),
            **fields,
        )
        self.send(*encode(add, array.array("I", prompt).tobytes()))

    def send(self, *frames: Any) -> None:
        """Raw frames to the worker's data socket."""
        self.data.send_multipart([self.identity, *frames])

    def receive(self, timeout_s: float = 10.0) -> Any:
        """The next data message."""
        if not self.data.poll(timeout_s * 1000):
            raise TimeoutError(f"no data message within {timeout_s} s")
        self.received += 1
        return decode(self.data.recv_multipart()[1:])[0]

    def collect(self, handles: set[int], timeout_s: float = 30.0) -> dict[int, tuple[list[int], Any]]:
        """Until each handle has its terminal: handle -> (tokens, Finish or Reject)."""
        tokens: dict[int, list[int]] = {h: [] for h in handles}
        done: dict[int, Any] = {}
        end = time.monotonic() + timeout_s
        while done.keys() != handles:
            message = self.receive(max(0.0, end - time.monotonic()))
            if isinstance(message, data.Reject):
                assert message.handle not in done
                done[message.handle] = message
            elif isinstance(message, data.Out):
                at = 0
                columns = zip(message.handles, message.counts, message.finish, strict=True)
                for handle, count, finish in columns:
                    tokens[handle] += message.tokens[at : at + count]
                    at += count
                    if finish:
                        assert handle not in done
                        done[handle] = data.Finish(finish)
        return {h: (tokens[h], done[h]) for h in handles}

    def close(self) -> None:
        """Kill what is left."""
        self.process.kill()
        self.process.communicate()
        self.context.destroy(linger=0)

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
