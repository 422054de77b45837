"""A fleet far larger than this machine: one real frontend, 1,000 workers, 10,000 streams at once.

python bench/simulation.py --workers 1000 --streams 10000

This process plays the supervisor, every worker (a DEALER socket of its own with an identity of its own) and
every client (a TCP connection of its own); the frontend is the real one, in a process of its own. All streams
are opened and held, then probes measure how long one more request takes to its worker, then all streams get
their tokens and end. Reported: memory, latency from request to ADD, streams a worker, errors, rates.
"""

import argparse
import json
import random
import resource
import select
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import zmq
from vocabulary import write_directory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.frontend_harness import Host, host

from mlxhost.wire import control, data, sockets
from mlxhost.wire.codec import decode, encode
from mlxhost.worker.card import model_card

CAPACITY = 1 << 20
CONNECTING = 200  # connections that may be under way at once
FIRST_WORD = 257


@dataclass
class Worker:
    """One replica: answers each ADD with ACCEPTED, and emits when told to."""

    index: int
    dealer: "zmq.Socket[bytes]"
    handles: list[int] = field(default_factory=list)
    taken: int = 0  # requests so far
    step: int = 0
    last_seq: int = 0
    kv: int = 0

    def load(self) -> data.Load:
        return data.Load(len(self.handles), 0, self.kv, CAPACITY, last_seq=self.last_seq, tick=self.step)

    def receive(self, now: float, arrived: dict[str, float]) -> int:
        """Take in requests; how many there were."""
        count = 0
        while self.dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            message, binary = decode(self.dealer.recv_multipart())
            if isinstance(message, data.Add):
                arrived[message.request_id] = now
                self.last_seq = message.seq
                self.handles.append(message.handle)
                self.taken += 1
                self.kv += len(binary[0]) // 4 + (message.limits.max_tokens or 0)
                self.dealer.send_multipart(encode(data.Accepted(message.handle, 0, 64)))
                count += 1
            elif isinstance(message, data.Abort):
                self._drop({handle for handle, _ in message.rows})
        if count:
            self.dealer.send_multipart(encode(data.Out(1, self.step, self.load(), [], [], [], [])))
        return count

    def _drop(self, handles: set[int]) -> None:
        gone = [h for h in self.handles if h in handles]
        self.handles = [h for h in self.handles if h not in handles]
        finish = [int(data.Finish.ABORT)] * len(gone)
        out = data.Out(1, self.step, self.load(), gone, [0] * len(gone), [], finish)
        self.dealer.send_multipart(encode(out))

    def emit(self, ids: list[int], last: bool) -> None:
        """One token for each row."""
        count = len(self.handles)
        if not count:
            return
        self.step += 1
        finish = [int(data.Finish.LENGTH if last else data.Finish.RUNNING)] * count
        out = data.Out(1, self.step, self.load(), self.handles, [1] * count, ids[:count], finish)
        if last:
            self.handles, self.kv = [], 0
        self.dealer.send_multipart(encode(out))


class Client:
    """One streaming request; counts its events and knows how it ended."""

    def __init__(self, address: tuple[str, int], request_id: str) -> None:
        self.events = 0
        self.begun = self.ended = self.failed = False
        self.request_id = request_id
        body = {
            "model": "many",
            "messages": [{"role": "user", "content": f"Say something, {request_id}."}],
            "stream": True,
            "max_tokens": 64,
        }
        text = json.dumps(body)
        self._request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nX-Request-Id: {request_id}\r\n"
            f"Connection: close\r\nContent-Length: {len(text)}\r\n\r\n{text}"
        ).encode()
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        self.sock.connect(address)
        self.sock.sendall(self._request)
        self.sent_at = time.perf_counter()
        self.sock.setblocking(False)

    def read(self) -> None:
        chunk = self.sock.recv(65_536)
        if not chunk:
            self.failed |= not self.ended
            self.ended = True
            return
        if (not self.begun and not chunk.startswith(b"HTTP/1.1 200")) or b'"error"' in chunk:
            self.failed = True
        self.begun = True
        self.events += chunk.count(b"[")  # every event holds one, no token does; [DONE] is one more
        self.ended |= b"[DONE]" in chunk


class Simulation:
    """The fleet and the loop that drives it."""

    def __init__(self, playing: Host, directory: Path, args: argparse.Namespace) -> None:
        self.args, self.playing = args, playing
        self.frontend = playing.start_frontend()
        self.process = psutil.Process(self.frontend.process.pid)
        self.bare = self.memory()
        self.context = sockets.new_context(zmq.Context)
        self.poll = select.epoll()
        self.by_fd: dict[int, Worker | Client] = {}
        self.arrived: dict[str, float] = {}
        self.workers = [self._dial(i) for i in range(args.workers)]
        replicas = [
            control.FleetReplica(f"many/{i}", i, 1, "ready", 4096, CAPACITY, 64, 64, ["generate"])
            for i in range(args.workers)
        ]
        card = model_card(directory)
        playing.models["many"] = control.FleetModel("many", [], replicas, args.routing, card)
        playing.publish()
        playing.ready("many")
        self.with_workers = self.memory()
        parts = urlsplit(playing.url)
        self.address = (str(parts.hostname), int(parts.port or 0))
        self.clients: list[Client] = []
        self.errors = 0

    def _dial(self, index: int) -> Worker:
        assert self.frontend.hello is not None
        dealer = self.context.socket(zmq.DEALER)
        sockets.configure(dealer)
        dealer.setsockopt(zmq.IDENTITY, sockets.identity(f"many/{index}", 1))
        dealer.connect(self.frontend.hello.endpoint)
        worker = Worker(index, dealer)
        dealer.send_multipart(encode(data.Out(1, 0, worker.load(), [], [], [], [])))
        self.poll.register(dealer.FD, select.EPOLLIN)
        self.by_fd[dealer.FD] = worker
        return worker

    def memory(self) -> float:
        """Resident MB of the frontend."""
        return self.process.memory_info().rss / 1e6

    def turn(self, wait_s: float) -> None:
        """Deal with what has arrived."""
        for fd, _ in self.poll.poll(wait_s):
            who = self.by_fd.get(fd)
            if isinstance(who, Worker):
                who.receive(time.perf_counter(), self.arrived)
            elif who is not None:
                who.read()
                if who.ended or who.failed:
                    self._close(who)

    def _close(self, client: Client) -> None:
        fd = client.sock.fileno()
        if fd in self.by_fd:
            self.errors += client.failed
            self.poll.unregister(fd)
            del self.by_fd[fd]
            client.sock.close()

    def open(self, request_id: str) -> Client:
        client = Client(self.address, request_id)
        self.poll.register(client.sock, select.EPOLLIN)
        self.by_fd[client.sock.fileno()] = client
        return client

    def open_all(self) -> float:
        """Every stream, until each has its first event; seconds."""
        start = time.perf_counter()
        for i in range(self.args.streams):
            self.clients.append(self.open(f"s{i}"))
            while len(self.clients) - len(self.arrived) > CONNECTING:
                self.turn(0.01)
        self.until(lambda: all(c.events or c.failed for c in self.clients), "every stream to begin")
        return time.perf_counter() - start

    def probe(self, count: int) -> list[float]:
        """One more request at a time: milliseconds from its last byte to its ADD at a worker."""
        times = []
        for i in range(count):
            name = f"p{i}-0"  # choice 0
            client = self.open(f"p{i}")
            self.until(lambda name=name: name in self.arrived, "a probe to reach a worker")
            times.append((self.arrived[name] - client.sent_at) * 1000)
            self.until(lambda client=client: client.events > 0, "a probe to begin")
            self._close(client)
        return times

    def emit_all(self, steps: int) -> float:
        """Tokens for everyone, then the end; seconds."""
        rng = random.Random(1)
        start = time.perf_counter()
        for step in range(steps):
            ids = [FIRST_WORD + rng.randrange(self.args.vocabulary - FIRST_WORD) for _ in range(256)]
            for worker in self.workers:
                worker.emit(ids, step == steps - 1)
            goal = self.args.streams * max(0, step - 3)
            while sum(c.events for c in self.clients) < goal and not self.errors:
                self.turn(0.01)
        self.until(lambda: all(c.ended or c.failed for c in self.clients), "every stream to end")
        return time.perf_counter() - start

    def until(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 120
        while not done():
            if time.monotonic() > end:
                raise SystemExit(f"waited 120 s for {what}")
            self.turn(0.02)

    def close(self) -> None:
        self.poll.close()
        self.context.destroy(linger=0)


def report(sim: Simulation, args: argparse.Namespace) -> None:
    """Run it and say how it went."""
    say = sys.stdout.write
    opened = sim.open_all()
    per_worker = [len(w.handles) for w in sim.workers]
    held = sim.memory()
    say(
        f"{args.streams} streams open over {args.workers} workers in {opened:.1f} s "
        f"({args.streams / opened:.0f} a second), routing {args.routing}\n"
        f"streams a worker: min {min(per_worker)}, median {statistics.median(per_worker):.0f}, "
        f"max {max(per_worker)}, standard deviation {statistics.pstdev(per_worker):.2f}\n"
        f"frontend memory: {sim.bare:.0f} MB bare, {sim.with_workers:.0f} MB with the workers, {held:.0f} MB "
        f"with the streams ({(held - sim.with_workers) * 1000 / args.streams:.1f} kB each); "
        f"this process {psutil.Process().memory_info().rss / 1e6:.0f} MB\n"
    )
    times = sorted(sim.probe(args.probes))
    say(
        f"request to ADD with all streams open: p50 {times[len(times) // 2]:.2f} ms, "
        f"p99 {times[len(times) * 99 // 100]:.2f} ms, max {times[-1]:.2f} ms ({len(times)} probes)\n"
    )
    cpu = sum(sim.process.cpu_times()[:2])
    seconds = sim.emit_all(args.tokens)
    cpu = sum(sim.process.cpu_times()[:2]) - cpu
    tokens = args.tokens * args.streams
    say(
        f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} a second, {cpu:.1f} CPU-s of the "
        f"frontend), {sim.memory():.0f} MB after\n"
        f"errors: {sim.errors}; ended well: {sum(c.ended and not c.failed for c in sim.clients)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=24, help="tokens for each stream")
    parser.add_argument("--probes", type=int, default=300)
    parser.add_argument("--routing", default="least-in-flight")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    args = parser.parse_args()
    needed = args.streams + 4 * args.workers + 500
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        if hard < needed:
            raise SystemExit(f"{needed} open files are needed, and ulimit -Hn is {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    with tempfile.TemporaryDirectory() as directory, host() as playing:
        write_directory(Path(directory), args.vocabulary)
        sim = Simulation(playing, Path(directory), args)
        report(sim, args)
        sim.close()


if __name__ == "__main__":
    main()
