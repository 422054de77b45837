"""How many tokens a second one frontend process moves: chat route, one token a row a step, one server-sent
event a token, stop strings on, a large vocabulary; real processes and sockets.

python bench/frontend_rate.py --streams 256 --seconds 5 --window 4 --pin

This process plays supervisor, workers and clients, all as cheaply as Python allows, and counts the events
that arrive. A worker sends its next step when fewer than --window steps are on their way; --rate (tokens a
second) paces it instead. --pin gives the frontend the first core to itself and this process another one.
The figure that other load on the machine disturbs least is tokens per CPU-second of the frontend.
"""

import argparse
import json
import os
import random
import select
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import zmq
from vocabulary import write_directory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.frontend_harness import Child, Host, host

from mlxhost.wire import control, data, sockets
from mlxhost.wire.codec import decode, encode
from mlxhost.worker.card import model_card

STOPS = ["\n\nUser:", "###", "</s>"]
FIRST_WORD = 257  # ids below are special or single bytes


@dataclass
class Worker:
    """One replica's data socket at one frontend, with the rows that it has from there."""

    dealer: "zmq.Socket[bytes]"
    handles: list[int] = field(default_factory=list)
    step: int = 0
    last_seq: int = 0

    def send(self, ids: list[int]) -> None:
        """One step: one token for every row."""
        count = len(self.handles)
        self.step += 1
        load = data.Load(count, 0, count, 1 << 30, last_seq=self.last_seq, tick=self.step)
        out = data.Out(1, self.step, load, self.handles, [1] * count, ids, [0] * count)
        self.dealer.send_multipart(encode(out))

    def receive(self) -> None:
        """Take in new requests."""
        while self.dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            message, _ = decode(self.dealer.recv_multipart())
            if isinstance(message, data.Add):
                self.last_seq = message.seq
                self.handles.append(message.handle)
                accepted = data.Accepted(message.handle, 0, message.limits.max_tokens or 0)
                self.dealer.send_multipart(encode(accepted))


class Client:
    """One stream; `events` counts what came after the opening event. The bytes are kept when asked for."""

    def __init__(self, url: str, keep: bool) -> None:
        self.kept: list[bytes] | None = [] if keep else None
        self.events = -1  # the opening event holds the role alone
        self.reads = 0
        parts = urlsplit(url)
        self.sock = socket.create_connection((parts.hostname, parts.port))
        body = {
            "model": "bench",
            "messages": [{"role": "user", "content": "Say something long."}],
            "stream": True,
            "stop": STOPS,
            "max_tokens": 1_000_000,
        }
        text = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(text)}\r\n\r\n"
        self.sock.sendall(head.encode() + text)
        self.sock.setblocking(False)

    def read(self) -> int:
        """New events. Every event holds exactly one '[', which no token of the vocabulary does."""
        chunk = self.sock.recv(262_144)
        if not chunk:
            raise SystemExit("the frontend closed a stream")
        if self.kept is not None:
            self.kept.append(chunk)
        self.reads += 1
        count = chunk.count(b"[")
        self.events += count
        return count


def text_of(raw: bytes) -> str:
    """Content of a chunked event stream, which may end anywhere."""
    body = raw.partition(b"\r\n\r\n")[2]
    events = b""
    while b"\r\n" in body:
        size, _, body = body.partition(b"\r\n")
        events += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    lines = events.split(b"\n\n")[:-1]
    return "".join(json.loads(e[6:])["choices"][0]["delta"].get("content", "") for e in lines)


@dataclass
class Run:
    """What was measured, over the time after the warm-up."""

    seconds: float = 0.0
    events: int = 0
    reads: int = 0
    cpu_s: float = 0.0
    late: float = 0.0  # steps on their way at the end, for a paced run

    def __str__(self) -> str:
        rate, per_cpu = self.events / self.seconds, self.events / self.cpu_s
        return (
            f"{rate:8.0f} tokens/s  {per_cpu:8.0f} tokens/CPU-s  {1e6 / per_cpu:5.1f} CPU-ms/1,000 tokens  "
            f"{self.cpu_s / self.seconds:4.0%} of a core {self.events / max(1, self.reads):4.1f} events/read "
            f"{self.late:.0f} steps behind"
        )


class Bench:
    """The fleet, its streams and the loop that drives both."""

    def __init__(self, playing: Host, directory: Path, args: argparse.Namespace) -> None:
        self.args = args
        self.rng = random.Random(3)
        self.context = sockets.new_context(zmq.Context)
        self.frontends, urls = [], []
        for _ in range(args.frontends):
            self.frontends.append(playing.start_frontend())
            urls.append(playing.url)
        self.workers = [self._dial(f, f"bench/{i}") for f in self.frontends for i in range(args.workers)]
        replicas = [
            control.FleetReplica(f"bench/{i}", i, 1, "ready", 1 << 21, 1 << 30, 4096, 4096, ["generate"])
            for i in range(args.workers)
        ]
        card = model_card(directory)
        playing.models["bench"] = control.FleetModel("bench", [], replicas, "round-robin", card)
        playing.publish()
        for playing.url in urls:
            playing.ready("bench")
        self.pids = [f.process.pid for f in self.frontends]
        if args.pin:
            for pid in self.pids:
                for thread in os.listdir(f"/proc/{pid}/task"):  # zmq's own threads, too
                    os.sched_setaffinity(int(thread), {0})
            os.sched_setaffinity(0, set(range(1, os.cpu_count() or 1)) or {0})
        self.poll = select.epoll()
        self.clients: dict[int, Client] = {}
        self.ids: list[list[int]] = []  # of each kept stream
        for i in range(args.streams):
            client = Client(urls[i % len(urls)], keep=i == 0)
            self.clients[client.sock.fileno()] = client
            self.poll.register(client.sock, select.EPOLLIN)
        end = time.monotonic() + 30
        while any(c.events < 0 for c in self.clients.values()):
            if time.monotonic() > end:
                raise SystemExit("not every stream began")
            for worker in self.workers:
                worker.receive()
            self._read(0.01)
        # Zipf: the token of rank r comes with probability 1/r.
        size = args.vocabulary - FIRST_WORD
        count = self.args.streams // len(self.workers)
        self.steps = [
            [FIRST_WORD + int(size ** self.rng.random()) - 1 for _ in range(count)] for _ in range(2048)
        ]

    def _dial(self, frontend: Child, slot: str) -> Worker:
        hello = frontend.hello
        assert hello is not None
        dealer = self.context.socket(zmq.DEALER)
        sockets.configure(dealer)
        dealer.setsockopt(zmq.IDENTITY, sockets.identity(slot, 1))
        dealer.connect(hello.endpoint)
        dealer.send_multipart(encode(data.Out(1, 0, data.Load(), [], [], [], [])))
        return Worker(dealer)

    def run(self, seconds: float) -> Run:
        """Move tokens for that long, and wait for those on their way."""
        cpu, reads = self._cpu(), sum(c.reads for c in self.clients.values())
        streams, window, rate = self.args.streams, self.args.window, self.args.rate
        start = time.perf_counter()
        end = start + seconds
        sent = got = 0
        while (now := time.perf_counter()) < end:
            due = (now - start) * rate / streams if rate else got / streams + window
            while sent < due:
                for worker in self.workers:
                    worker.send(self.steps[worker.step % len(self.steps)])
                sent += 1
            got += self._read(0.001)
        late = sent - got / streams
        cpu = self._cpu() - cpu
        reads = sum(c.reads for c in self.clients.values()) - reads
        run = Run(time.perf_counter() - start, got, reads, cpu, late)
        while got < sent * streams:
            got += self._read(0.01)
            if time.perf_counter() > end + 20:
                raise SystemExit(f"{sent * streams - got} events never came")
        return run

    def check(self) -> None:
        """The kept stream's text is what its ids decode to."""
        client = next(c for c in self.clients.values() if c.kept is not None)
        text = text_of(b"".join(client.kept or []))
        worker = self.workers[0]
        ids = [self.steps[i % len(self.steps)] for i in range(worker.step)]
        decoded = {i: self.tokenizer.decode([row[i] for row in ids]) for i in range(len(ids[0]))}
        matches = [i for i, whole in decoded.items() if whole.startswith(text) and len(whole) - len(text) < 8]
        if len(matches) != 1:
            raise SystemExit(f"the kept stream's text is that of {len(matches)} rows")

    def _read(self, timeout: float) -> int:
        return sum(self.clients[fd].read() for fd, _ in self.poll.poll(timeout))

    def _cpu(self) -> float:
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return sum(t.user + t.system for t in times)

    tokenizer: Any = None

    def close(self) -> None:
        for client in self.clients.values():
            client.sock.close()
        self.poll.close()
        self.context.destroy(linger=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1, help="replicas")
    parser.add_argument("--frontends", type=int, default=1, help="served by the same replicas")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--window", type=int, default=4, help="steps on their way at most")
    parser.add_argument("--rate", type=float, default=0.0, help="tokens a second; 0: as fast as they go")
    parser.add_argument("--pin", action="store_true", help="the frontend alone on the first core")
    parser.add_argument("--hold", action="store_true", help="print the frontend's pid, for a profiler")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, host() as playing:
        tokenizer = write_directory(Path(directory), args.vocabulary)
        bench = Bench(playing, Path(directory), args)
        bench.tokenizer = tokenizer
        if args.hold:
            sys.stdout.write(f"frontend pid {bench.pids}\n")
            sys.stdout.flush()
        bench.run(2.0)  # warm-up
        runs = [bench.run(args.seconds) for _ in range(args.runs)]
        bench.check()
        bench.close()
    for run in runs:
        sys.stdout.write(f"{run}\n")
    rate = statistics.median(r.events / r.seconds for r in runs)
    per_cpu = statistics.median(r.events / r.cpu_s for r in runs)
    sys.stdout.write(f"median {rate:.0f} tokens/s, {per_cpu:.0f} tokens per CPU-second of the frontend\n")


if __name__ == "__main__":
    main()
