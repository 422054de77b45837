"""Live processes to fuzz. Each is attacked as its peers could, and must serve afterwards as it did before."""

import json
import random
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
from fuzz.mutations import Frames, Fuzzer
from support.frontend_client import call, chat, connect, raw_request
from support.frontend_harness import Host, host, wait_for
from support.frontend_models import write_model
from support.frontend_served import ANSWER, ANSWER_IDS
from support.supervisor_up import Up, serving, status_of
from support.worker_harness import WorkerProcess

from mlxhost.wire import control, data, sockets
from mlxhost.wire.codec import decode, encode
from mlxhost.wire.errors import DecodeError

RECONNECT_EVERY = 20_000  # messages, so that identities come and go
SEND_TIMEOUT_S = 30.0


def meaning(frames: Frames) -> msgspec.Struct | None:
    """What a message decodes to, if to anything."""
    try:
        message: msgspec.Struct = decode(frames)[0]
    except DecodeError:
        return None
    return message


class Target(ABC):
    """A process under attack. Use as a context manager."""

    name: str

    @abstractmethod
    def pid(self) -> int: ...

    @abstractmethod
    def attack(self, fuzzer: Fuzzer, count: int) -> None:
        """Send `count` messages."""

    @abstractmethod
    def serves(self) -> None:
        """Fails when the process does not do its work."""

    @abstractmethod
    def counted(self) -> str:
        """What the process says of the messages it dropped; empty when nothing."""

    def settle(self) -> None:
        """Return once the process has worked off what it was sent."""
        process, end = psutil.Process(self.pid()), time.monotonic() + 120
        while process.cpu_percent(0.3) > 15:
            assert time.monotonic() < end, f"{self.name} is still busy"

    def memory(self) -> int:
        """Resident bytes."""
        return int(psutil.Process(self.pid()).memory_info().rss)

    def __enter__(self) -> "Target":
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...


class Dealers:
    """Sockets of many identities on one endpoint, made anew from time to time; "{n}" in an identity becomes
    the number of the time. (An identity is not free again before its last connection has ended.)"""

    def __init__(self, endpoint: str, identities: list[bytes]) -> None:
        self._context = zmq.Context()
        self._endpoint, self._identities = endpoint, identities
        self._sockets: list[zmq.Socket[bytes]] = []
        self._sent = 0

    def send(self, rng: random.Random, frames: Frames) -> None:
        if self._sent % RECONNECT_EVERY == 0:
            self._connect()
        self._sent += 1
        end = time.monotonic() + SEND_TIMEOUT_S
        while time.monotonic() < end:
            try:
                rng.choice(self._sockets).send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:  # a double's messages are never read, and others' only so fast
                time.sleep(0.0002)
        raise AssertionError(f"{self._endpoint} takes nothing any more")

    def _connect(self) -> None:
        for socket in self._sockets:
            socket.close(linger=2_000)
        self._sockets = []
        for identity in self._identities:
            socket = self._context.socket(zmq.DEALER)
            number = str(1 + self._sent // RECONNECT_EVERY).encode()
            socket.setsockopt(zmq.IDENTITY, identity.replace(b"{n}", number))
            socket.setsockopt(zmq.SNDHWM, 1_000)
            socket.connect(self._endpoint)
            self._sockets.append(socket)

    def oversize(self) -> None:
        """One message larger than any socket takes; its connection is closed for it."""
        self._sockets[-1].send(bytes(sockets.MAX_MESSAGE_BYTES + 1), copy=False)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=5_000)
        self._context.destroy()


class FrontendTarget(Target):
    """A frontend's data ROUTER, attacked by strangers, by a double of its worker, by epochs that are over,
    and by a replica of a model "evil" that FLEET lists and clients ask for."""

    name = "frontend data ROUTER"

    def __init__(self) -> None:
        self._host = host()
        self._playing: Host = self._host.__enter__()
        self._files = tempfile.TemporaryDirectory()
        self._frontend = self._playing.start_frontend()
        model = write_model(Path(self._files.name) / "demo")
        self._worker = self._playing.start_worker("demo", model, answer=ANSWER_IDS)
        evil = control.FleetReplica("evil/0", 0, 7, "ready", 4096, 1 << 20, 64, 64, ["generate"])
        demo = self._playing.models["demo"]
        self._playing.models["evil"] = msgspec.structs.replace(demo, name="evil", replicas=[evil])
        self._playing.publish()
        self._playing.ready("demo")
        assert self._frontend.hello is not None
        identities = [
            b"evil/0:7:{n}",
            b"evil/0:7:9{n}",
            self._worker.identity,
            b"demo/0:99{n}",
            b"demo/1:{n}",
            b"ctl-{n}",
            b"\xff\xfe\x01{n}",
            b"evil/0:99999999999999999999{n}",
        ]
        self._dealers = Dealers(self._frontend.hello.endpoint, identities)

    def pid(self) -> int:
        return self._frontend.process.pid

    def attack(self, fuzzer: Fuzzer, count: int) -> None:
        rng = random.Random(count)
        clients = []
        for i in range(count):
            frames = fuzzer.next()
            message = meaning(frames)
            if isinstance(message, data.Out) and rng.random() < 0.5:  # otherwise most have a foreign epoch
                frames = encode(msgspec.structs.replace(message, epoch=7, handles=[rng.randint(1, 30), 9]))
            self._dealers.send(rng, frames)
            if i % 500 == 0 and len(clients) < 20:
                clients.append(connect(self._playing.url))
                body = {
                    "model": "evil",
                    "messages": [{"role": "user", "content": "hi"}],
                    "stream": i % 1000 == 0,
                }
                clients[-1].sendall(raw_request("/v1/chat/completions", body))
        self._dealers.oversize()
        self._playing.models.pop("evil", None)
        self._playing.publish()
        for client in clients:  # each request ends, however its worker behaved
            client.settimeout(30)
            while b"[DONE]" not in (chunk := client.recv(65536)) and b'"error"' not in chunk and chunk:
                pass
            client.close()

    def serves(self) -> None:
        assert self._frontend.process.poll() is None
        answer = wait_for(lambda: a if (a := chat(self._playing.url)).status == 200 else None, 60)
        assert answer.json["choices"][0]["message"]["content"] == ANSWER
        assert call(self._playing.url, "/ready").status == 200

    def counted(self) -> str:
        lines = [line for line in self._playing.log.read_text().splitlines() if "message_dropped" in line]
        assert "Traceback" not in self._playing.log.read_text()
        newest: dict[str, int] = {}
        for line in lines:
            fields = dict(part.split("=", 1) for part in line.split(" detail=")[0].split() if "=" in part)
            newest[fields["reason"]] = int(fields["count"])
        return ", ".join(f"{reason} >= {count}" for reason, count in sorted(newest.items()))

    def __exit__(self, *_: object) -> None:
        self._dealers.close()
        self._host.__exit__(None, None, None)
        self._files.cleanup()


class SupervisorTarget(Target):
    """The supervisor's control ROUTER, attacked by strangers, ctl clients, doubles and epochs that are over.

    Calls that a ctl client may make (and that would drain the model, say) are not sent."""

    name = "supervisor control ROUTER"

    def __init__(self, model: Path, home: Path) -> None:
        self._serving = serving(home, f"served={model}")
        self._up: Up = self._serving.__enter__()
        self._url = self._up.url()
        card = json.loads(next((home / "run").glob("*/fleet.json")).read_text())
        epoch = self._up.replica("served/0")["epoch"]
        identities = [
            f"served/0:{epoch}".encode(),
            b"served/0:99{n}",
            b"frontend/0:99{n}",
            b"other/0:{n}",
            b"client-{n}",
            b"\x01\xff{n}",
            b"host/x:{n}",
        ]
        self._dealers = Dealers(card["control"], identities)

    def pid(self) -> int:
        return self._up.process.pid

    def attack(self, fuzzer: Fuzzer, count: int) -> None:
        rng = random.Random(count)
        sent = 0
        while sent < count:
            frames = fuzzer.next()
            if isinstance(meaning(frames), control.Ctl):
                continue
            self._dealers.send(rng, frames)
            sent += 1
        self._dealers.oversize()

    def serves(self) -> None:
        assert self._up.process.poll() is None
        assert status_of(self._url, "served") == 200
        assert self._up.replica("served/0")["state"] == "ready"

    def counted(self) -> str:
        count = wait_for(lambda: self._up.status()["bad_messages"], 60)
        assert "Traceback" not in self._up.output
        return f"bad_messages {count}"

    def __exit__(self, *_: object) -> None:
        self._dealers.close()
        self._serving.__exit__(None, None, None)


class WorkerTarget(Target):
    """A real worker's link, attacked by its frontend with anything and by its supervisor with what cannot be
    decoded (what can, it would rightly obey)."""

    name = "worker link"

    def __init__(self, model: Path, runtime: Path) -> None:
        self._worker = WorkerProcess(runtime, model, max_rows=4, max_queued=8)
        self._log: list[str] = []
        threading.Thread(target=self._read_log, daemon=True).start()
        self._handle = 1_000_000
        self._rejected = 0
        self._expected = self._generate()

    def _read_log(self) -> None:
        assert self._worker.process.stderr is not None
        for line in self._worker.process.stderr:
            self._log.append(line.decode())

    def pid(self) -> int:
        return self._worker.process.pid

    def attack(self, fuzzer: Fuzzer, count: int) -> None:
        for i in range(count):
            frames = fuzzer.next()
            if i % 8 == 0 and meaning(frames) is None:
                self._worker.control.send_multipart([self._worker.identity, *frames])
            else:
                self._worker.send(*frames)
            if i % 64 == 0:
                self._drain()

    def _drain(self) -> None:
        while self._worker.data.poll(0):
            message = self._worker.receive()
            self._rejected += isinstance(message, data.Reject)
        while self._worker.control.poll(0):
            self._worker.control.recv_multipart()

    def _generate(self) -> list[int]:
        """Tokens of a fixed prompt, however many rows of the attack are still running."""
        end = time.monotonic() + 90
        while time.monotonic() < end:
            self._handle += 1
            self._worker.add(self._handle, [5, 6, 7, 8], 12)
            while True:
                message: Any = self._worker.receive(60)
                if isinstance(message, data.Reject) and message.handle == self._handle:
                    break
                if isinstance(message, data.Out) and self._handle in message.handles:
                    return self._rest(message)
            time.sleep(0.2)
        raise AssertionError("the worker takes no request any more")

    def _rest(self, first: data.Out) -> list[int]:
        tokens, out = [], first
        while True:
            at = 0
            for handle, count, finish in zip(out.handles, out.counts, out.finish, strict=True):
                if handle == self._handle:
                    tokens += out.tokens[at : at + count]
                    if finish:
                        return tokens
                at += count
            out = self._worker.receive(60)
            while not isinstance(out, data.Out):
                out = self._worker.receive(60)

    def serves(self) -> None:
        assert self._worker.process.poll() is None
        assert self._generate() == self._expected

    def counted(self) -> str:
        assert not [line for line in self._log if "Traceback" in line]
        newest = [line.split(",")[0] for line in self._log if "dropped message" in line][-1]
        return f"{newest.split()[-1]} or more undecodable, {self._rejected} ADDs rejected"

    def __exit__(self, *_: object) -> None:
        self._worker.close()
