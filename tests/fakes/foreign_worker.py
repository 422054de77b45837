"""A worker written from docs/wire.md alone, as one would in another language: MessagePack of plain lists and
maps, and ZeroMQ. It imports nothing of mlxhost.

It answers each request with its own prompt, back to front, one id a step.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import zmq
from msgspec import DecodeError, msgpack

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"
MAJOR, MINOR = 1, 0
RUNNING, STOP, LENGTH, ABORT = 0, 1, 2, 3
MAX_QUEUED, MAX_ROWS, CONTEXT = 4, 2, 4096
STEP_S = 0.002


class Row:
    def __init__(self, handle: int, prompt: list[int], limit: int) -> None:
        self.handle, self.prompt, self.limit = handle, prompt, limit
        self.answer = deque(reversed(prompt))
        self.sent = 0
        self.aborted: str | None = None


class Peer:
    """One frontend."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.queue: deque[Row] = deque()
        self.running: list[Row] = []
        self.last_seq = 0


def read_line() -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("the supervisor is gone")
        line += byte
    return json.loads(line)


class Worker:
    def __init__(self, boot: dict[str, Any]) -> None:
        self.boot = boot
        self.identity = f"{boot['slot']}:{boot['epoch']}".encode()
        self.context = zmq.Context()
        self.control = self.dial(boot["control"], 10_000)
        self.peers: dict[str, Peer] = {}
        self.step = 0
        self.heartbeat_s = 1.0
        self.next_beat = 0.0
        self.busy = False
        self.stop_at: float | None = None

    def dial(self, endpoint: str, high_water_mark: int) -> Any:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self.identity)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.connect(endpoint)
        return socket

    def tell(self, kind: str, **fields: Any) -> None:
        """A control message."""
        body = {"type": kind, **fields}
        self.control.send_multipart([msgpack.encode([kind, 0, ""]), msgpack.encode(body)])

    def send(self, peer: Peer, *message: Any) -> None:
        """A data message."""
        peer.socket.send_multipart([msgpack.encode([message[0], 0, ""]), msgpack.encode(message)])

    def load(self, last_seq: int = 0) -> list[Any]:
        running = [row for peer in self.peers.values() for row in peer.running]
        waiting = sum(len(peer.queue) for peer in self.peers.values())
        held = sum(len(row.prompt) + row.limit for row in running)
        return [len(running), waiting, held, MAX_ROWS * CONTEXT, 0, 0.0, last_seq, self.step]

    def out(self, peer: Peer, *columns: list[Any]) -> None:
        self.send(peer, "out", self.boot["epoch"], self.step, self.load(peer.last_seq), *columns)

    def handshake(self) -> None:
        schema = re.search(r"Schema hash of this version: `(\w+)`", DOCUMENT.read_text())
        assert schema
        self.tell(
            "hello",
            protocol=[MAJOR, MINOR],
            schema=schema[1],
            role="worker",
            slot=self.boot["slot"],
            epoch=self.boot["epoch"],
            pid=os.getpid(),
            token=self.boot["token"],
            build="foreign",
            model=self.boot["model"],
        )
        _, body = self.control.recv_multipart()
        answer = msgpack.decode(body)
        if answer["type"] != "init":
            sys.exit(answer.get("message", "no INIT"))
        self.heartbeat_s = answer.get("heartbeat_s", 1.0)
        self.tell("progress", phase="loading", done=1, total=2)
        self.tell(
            "ready",
            max_model_len=CONTEXT,
            kv_capacity_tokens=MAX_ROWS * CONTEXT,
            kv_bytes_per_token=0,
            block_tokens=1,
            dtype="none",
            weights_bytes=0,
            resident_bytes=0,
            device_working_set=0,
            max_rows=MAX_ROWS,
            max_queued=MAX_QUEUED,
            operations=[],
            tasks=["generate"],
            card=self.card(Path(answer["worker"]["path"])),
        )

    def card(self, directory: Path) -> dict[str, Any]:
        names = "tokenizer.json tokenizer_config.json chat_template.jinja generation_config.json config.json"
        files = [
            {"name": name, "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            for name in names.split()
            if (directory / name).is_file() and (content := (directory / name).read_bytes())
        ]
        config = json.loads((directory / "config.json").read_text())
        eos = config.get("eos_token_id", [])
        return {
            "directory": str(directory),
            "files": files,
            "architecture": config["model_type"],
            "vocab_size": config["vocab_size"],
            "eos_ids": eos if isinstance(eos, list) else [eos],
        }

    def on_control(self, body: bytes) -> None:
        message = msgpack.decode(body)
        if message["type"] == "fleet":
            endpoints = {f["endpoint"] for f in message["frontends"]}
            for endpoint in self.peers.keys() - endpoints:
                self.peers.pop(endpoint).socket.close(linger=0)
            for endpoint in endpoints - self.peers.keys():
                peer = self.peers[endpoint] = Peer(self.dial(endpoint, 64))
                self.out(peer, [], [], [], [])
        elif message["type"] == "ctl":
            self.tell("reply", call_id=message["call_id"], code="unsupported", message="no operations")
        elif message["type"] == "stop":
            self.stop_at = time.monotonic() + message.get("deadline_s", 30.0)

    def on_data(self, peer: Peer, frames: list[bytes]) -> None:
        header = msgpack.decode(frames[0])
        try:
            body = msgpack.decode(frames[1])
            if body[0] == "abt":
                reasons = dict(body[1])
                for row in [*peer.queue, *peer.running]:
                    row.aborted = reasons.get(row.handle, row.aborted)
            elif body[0] == "add":
                self.on_add(peer, body, frames[2])
        except (DecodeError, IndexError, TypeError, ValueError) as error:
            if header[0] == "add":
                self.send(peer, "rej", header[1], "bad_message", f"not understood: {error}")

    def on_add(self, peer: Peer, add: list[Any], prompt: bytes) -> None:
        _, handle, seq = add[:3]
        peer.last_seq = seq
        ids = memoryview(prompt).cast("I").tolist()
        asked = add[8][0] if len(add) > 8 and add[8] else None
        room = CONTEXT - len(ids)
        if any(row.handle == handle for row in [*peer.queue, *peer.running]):
            self.send(peer, "rej", handle, "duplicate_request", "this handle is running")
        elif len(add) > 4 and add[4] != "generate":
            self.send(peer, "rej", handle, "unsupported", f"task {add[4]} is not served")
        elif self.stop_at is not None:
            self.send(peer, "rej", handle, "draining", "shutting down", 1.0)
        elif room < 1:
            self.send(peer, "rej", handle, "context_length_exceeded", f"the context has {CONTEXT} tokens")
        elif sum(len(p.queue) for p in self.peers.values()) >= MAX_QUEUED:
            self.send(peer, "rej", handle, "queue_full", f"{MAX_QUEUED} requests wait", 1.0)
        else:
            peer.queue.append(Row(handle, ids, room if asked is None else min(asked, room)))

    def run_step(self) -> None:
        self.step += 1
        for peer in self.peers.values():
            while peer.queue and sum(len(p.running) for p in self.peers.values()) < MAX_ROWS:
                row = peer.queue.popleft()
                peer.running.append(row)
                self.send(peer, "acc", row.handle, 0, row.limit)
            ended = [row for row in peer.queue if row.aborted is not None]
            peer.queue = deque(row for row in peer.queue if row.aborted is None)
            rows = ended + peer.running
            new = [[] if row.aborted is not None else self.advance(row) for row in rows]
            finish = [self.finish(row) for row in rows]
            if rows:
                columns = [
                    [r.handle for r in rows],
                    [len(n) for n in new],
                    [i for n in new for i in n],
                    finish,
                ]
                detail = [row.aborted or "" for row in rows]
                told = [len(r.prompt) for r in rows], [r.sent for r in rows], [0] * len(rows)
                self.out(peer, *columns, detail, *told)
            peer.running = [row for row in peer.running if self.finish(row) == RUNNING]

    def advance(self, row: Row) -> list[int]:
        row.sent += 1
        return [row.answer.popleft()]

    def finish(self, row: Row) -> int:
        if row.aborted is not None:
            return ABORT
        if row.sent >= row.limit:
            return LENGTH
        return RUNNING if row.answer else STOP

    def beat(self, in_flight: int) -> None:
        now = time.monotonic()
        if now < self.next_beat and self.busy == bool(in_flight):
            return
        self.busy, self.next_beat = bool(in_flight), now + self.heartbeat_s
        self.tell("heartbeat", busy=self.busy, load=self.load(), resident_bytes=0, in_flight=in_flight)
        if not self.busy:
            for peer in self.peers.values():
                self.out(peer, [], [], [], [])

    def run(self) -> None:
        self.handshake()
        while True:
            in_flight = sum(len(p.queue) + len(p.running) for p in self.peers.values())
            self.beat(in_flight)
            if self.stop_at is not None and (not in_flight or time.monotonic() > self.stop_at):
                break
            self.receive(STEP_S if in_flight else 0.05)
            if any(p.queue or p.running for p in self.peers.values()):
                self.run_step()
        for peer in self.peers.values():
            for row in [*peer.queue, *peer.running]:
                row.aborted = "the worker is shutting down"
        self.run_step()
        self.context.destroy(linger=1000)

    def receive(self, wait_s: float) -> None:
        poller = zmq.Poller()
        for source in (0, self.control, *(p.socket for p in self.peers.values())):
            poller.register(source, zmq.POLLIN)
        ready = dict(poller.poll(wait_s * 1000))
        if 0 in ready and not os.read(0, 4096):
            os._exit(0)
        if self.control in ready:
            self.on_control(self.control.recv_multipart()[1])
        for peer in list(self.peers.values()):
            while not peer.socket.closed and peer.socket.poll(0):
                self.on_data(peer, peer.socket.recv_multipart())


if __name__ == "__main__":
    Worker(read_line()).run()
