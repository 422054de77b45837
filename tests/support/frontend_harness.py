"""A test that plays supervisor: one real frontend process, fake workers, and a fleet the test controls."""

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
from support.frontend_client import call

from mlxhost.wire import control, sockets
from mlxhost.wire.boot import Boot, write_boot
from mlxhost.wire.codec import decode, encode

T = TypeVar("T")

FAKE = Path(__file__).parent.parent / "fakes" / "worker.py"
TOKEN = "join-token"


def wait_for(what: Callable[[], T | None], timeout_s: float = 15.0) -> T:
    """Poll until `what` gives something true; fail the test after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.01)
    raise AssertionError(f"nothing came of {what} within {timeout_s} s")


@dataclass
class Child:
    """One started process and what it has told."""

    process: subprocess.Popen[bytes]
    boot: Boot
    path: Path = Path()
    hello: control.Hello | None = None
    ready: control.Ready | None = None
    heartbeat: control.Heartbeat | None = None
    messages: list[Any] = field(default_factory=list)

    @property
    def identity(self) -> bytes:
        return sockets.identity(self.boot.slot, self.boot.epoch)


class Host:
    """Plays supervisor. Start with `host()`, which cleans up."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.children: dict[bytes, Child] = {}
        self.models: dict[str, control.FleetModel] = {}
        self.accepting = True
        self.url = ""
        self.log = directory / "frontend.log"
        self._version = 0
        self._epoch = 0
        self._outbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._endpoint = sockets.ipc_endpoint(directory, "control")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # --- processes ------------------------------------------------------------------------------------

    def start_frontend(self, **config: Any) -> Child:
        """A frontend on a free port, up and with a link to this host."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.listen_fd, self.frontend_config = listener.fileno(), config
        with self.log.open("ab") as log:
            child = self._spawn(
                [sys.executable, "-I", "-m", "mlxhost.frontend"],
                "frontend/0",
                pass_fds=(self.listen_fd,),
                stderr=log,
            )
        wait_for(lambda: any(isinstance(m, control.FrontendReady) for m in child.messages))
        listener.close()
        self.publish()
        return child

    def start_worker(
        self, model: str, path: Path, *, index: int = 0, aliases: tuple[str, ...] = (), **script: Any
    ) -> Child:
        """A fake worker for a replica of `model`, ready and listed in the fleet."""
        env = os.environ | {"MLXHOST_FAKE": json.dumps(script)}
        child = self._spawn(
            [sys.executable, "-I", str(FAKE)], f"{model}/{index}", path=path, model=model, env=env
        )
        ready = wait_for(lambda: child.ready)
        replica = control.FleetReplica(
            slot=child.boot.slot,
            index=index,
            epoch=child.boot.epoch,
            state="ready",
            max_model_len=ready.max_model_len,
            kv_capacity_tokens=ready.kv_capacity_tokens,
            max_rows=ready.max_rows,
            max_queued=ready.max_queued,
            tasks=ready.tasks,
        )
        old = self.models.get(model)
        replicas = [r for r in old.replicas if r.index != index] if old else []
        self.models[model] = control.FleetModel(
            name=model,
            aliases=list(aliases),
            replicas=[*replicas, replica],
            routing=old.routing if old else "least-in-flight",
            card=ready.card,
            created=1_700_000_000,
        )
        self.publish()
        return child

    def reap(self, child: Child) -> None:
        """What a supervisor does when a worker has died: a FLEET without it."""
        child.process.wait(10)
        for name, model in self.models.items():
            replicas = [
                msgspec.structs.replace(r, state="backoff") if r.slot == child.boot.slot else r
                for r in model.replicas
            ]
            self.models[name] = msgspec.structs.replace(model, replicas=replicas, reason="its worker died")
        self.publish()

    def set_state(self, model: str, state: str, reason: str = "") -> None:
        """Move all replicas of a model to `state`."""
        old = self.models[model]
        replicas = [msgspec.structs.replace(r, state=state) for r in old.replicas]
        self.models[model] = msgspec.structs.replace(old, replicas=replicas, reason=reason)
        self.publish()

    def set_routing(self, model: str, routing: str) -> None:
        """Change a model's policy."""
        self.models[model] = msgspec.structs.replace(self.models[model], routing=routing)
        self.publish()

    # --- messages -------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Send the present fleet to everyone."""
        self._version += 1
        frontends = [
            control.FleetFrontend(c.boot.slot, c.boot.epoch, c.hello.endpoint)
            for c in self.children.values()
            if c.hello and c.hello.role == "frontend"
        ]
        fleet = control.Fleet(self._version, frontends, list(self.models.values()), self.accepting)
        for child in list(self.children.values()):
            if child.hello and child.process.poll() is None:
                self.send(child, fleet)

    def send(self, child: Child, message: msgspec.Struct) -> None:
        """Send a control message to a child."""
        self._outbox.put([child.identity, *encode(message)])

    def ready(self, *models: str) -> None:
        """Wait until the frontend says that it can serve these models."""

        def served() -> bool:
            state = call(self.url, "/ready").json["models"]
            return all(state.get(m, {}).get("ready") for m in models)

        wait_for(served)

    def close(self) -> None:
        """Kill what is left and free the sockets."""
        for child in self.children.values():
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGCONT)
                child.process.kill()
            child.process.wait(10)
            if child.process.stdin:
                child.process.stdin.close()
        self._closing.set()
        self._thread.join(10)
        self._context.destroy(linger=0)

    def _spawn(
        self, command: list[str], slot: str, *, path: Path = Path(), model: str = "", **popen: Any
    ) -> Child:
        self._epoch += 1
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **popen)
        boot = Boot(self._endpoint, TOKEN, slot, self._epoch, model=model, runtime_dir=str(self.directory))
        child = Child(process, boot, path)
        self.children[child.identity] = child
        assert process.stdin is not None
        write_boot(process.stdin.fileno(), boot)
        return child

    def _run(self) -> None:
        router = self._context.socket(zmq.ROUTER)
        sockets.configure(router)
        sockets.bind_ipc(router, self._endpoint)
        while not self._closing.is_set():
            while not self._outbox.empty():
                with suppress(zmq.ZMQError):  # the child is gone: what many tests are about
                    router.send_multipart(self._outbox.get())
            if router.poll(5):
                frames = router.recv_multipart()
                self._on_message(router, self.children[frames[0]], decode(frames[1:])[0])
        router.close(linger=0)

    def _on_message(self, router: "zmq.Socket[bytes]", child: Child, message: Any) -> None:
        match message:
            case control.Hello():
                assert message.token == TOKEN
                child.hello = message
                if message.role == "frontend":
                    config = control.FrontendConfig(self.listen_fd, self.url, **self.frontend_config)
                    init = control.Init(frontend=config)
                else:
                    worker = control.WorkerConfig(model=child.boot.model, path=str(child.path))
                    init = control.Init(worker=worker)
                router.send_multipart([child.identity, *encode(init)])
            case control.Ready():
                router.send_multipart([child.identity, *encode(control.Start())])
                child.ready = message
            case control.Heartbeat():
                child.heartbeat = message
            case _:
                child.messages.append(message)


@contextmanager
def host() -> Iterator[Host]:
    """A Host in a short-named private directory (socket paths are limited to about 100 bytes)."""
    directory = Path(tempfile.mkdtemp(prefix="mlxh-"))
    playing = Host(directory)
    try:
        yield playing
    finally:
        playing.close()
        shutil.rmtree(directory, ignore_errors=True)
