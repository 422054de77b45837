"""How long others wait while a long prompt is read in: gaps of running streams, first tokens, a flood.

python bench/scheduling.py MODEL_DIR [--rounds 3] [--long 4096] [--short 128] [--threads 2] [--json]

One real worker process over its real sockets. Each round measures, in turn: the time to first token (TTFT)
of a short prompt on an idle worker; the same in the middle of a long prompt's prefill; the largest gap
between two tokens of three running streams while a long prompt is read in; and the TTFT of one client's
short prompt while another client's requests fill every slot and the queue. Medians over the rounds, and the
worst gap of all. No prompt is used twice, so that the prefix cache helps nobody.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.worker_harness import WorkerProcess

from mlxhost.wire import control, data
from mlxhost.wire.codec import encode

STREAMS = 3
SETTLE_TOKENS = 4  # of each stream, before its gaps count
FLOOD = 24
WAIT_S = 300.0


class Client:
    """Requests to one worker, and when their tokens arrived."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self._rng = random.Random(1)
        self._handle = 0
        self.sent: dict[int, float] = {}
        self.arrivals: dict[int, list[float]] = {}
        self.ended: set[int] = set()

    def add(self, tokens: int, max_tokens: int, client: str = "") -> int:
        """Send a request with a prompt that nobody has sent before; its handle."""
        self._handle += 1
        self.arrivals[self._handle], self.sent[self._handle] = [], time.perf_counter()
        prompt = [self._rng.randrange(5, 400) for _ in range(tokens)]
        self.worker.add(self._handle, prompt, max_tokens, client=client)
        return self._handle

    def pump(self, timeout_s: float = 0.05) -> None:
        """Take in what has arrived."""
        if not self.worker.data.poll(timeout_s * 1000):
            return
        message, now = self.worker.receive(), time.perf_counter()
        if isinstance(message, data.Reject):
            raise SystemExit(f"rejected: {message.message}")
        if isinstance(message, data.Out):
            for handle, count, finish in zip(message.handles, message.counts, message.finish, strict=True):
                self.arrivals[handle] += [now] * count
                if finish:
                    self.ended.add(handle)

    def until(self, what: str, done: Any) -> None:
        """Pump until `done()`."""
        end = time.monotonic() + WAIT_S
        while not done():
            if time.monotonic() > end:
                raise SystemExit(f"{what}: not within {WAIT_S:.0f} s")
            self.pump()

    def ttft(self, handle: int) -> float:
        """Wait for the first token; seconds since the request was sent."""
        self.until("the first token", lambda: self.arrivals[handle])
        return self.arrivals[handle][0] - self.sent[handle]

    def clear(self) -> None:
        """Abort what runs, and wait until nothing does."""
        left = [h for h in self.arrivals if h not in self.ended]
        if left:
            self.worker.send(*encode(data.Abort([(h, "done") for h in left])))
        self.until("the aborts", lambda: self.ended >= self.arrivals.keys())


def idle(client: Client, short: int) -> float:
    handle = client.add(short, 1)
    return client.ttft(handle)


def beside_long(client: Client, short: int, long: int) -> float:
    """TTFT of a short prompt that arrives at some moment of a long one's prefill."""
    reading = client.add(long, 1)
    pause_until = time.monotonic() + random.uniform(0.5, 1.5)
    while time.monotonic() < pause_until:
        client.pump()
    handle = client.add(short, 1)
    took = client.ttft(handle)
    if client.arrivals[reading]:
        raise SystemExit("the long prompt was read in before the short one; take a longer one")
    client.clear()
    return took


def gaps(client: Client, long: int) -> tuple[float, float, float]:
    """Of running streams: median gap alone, largest gap while a long prompt is read in, and its TTFT."""
    streams = [client.add(16, 4000) for _ in range(STREAMS)]
    client.until("streams", lambda: all(len(client.arrivals[h]) > SETTLE_TOKENS + 20 for h in streams))
    alone = [b - a for h in streams for a, b in pairs(client.arrivals[h][SETTLE_TOKENS:])]
    before = {h: len(client.arrivals[h]) - 1 for h in streams}
    reading = client.add(long, 1)
    took = client.ttft(reading)
    beside = [b - a for h in streams for a, b in pairs(client.arrivals[h][before[h] :])]
    client.clear()
    return statistics.median(alone), max(beside), took


def flood(client: Client, short: int) -> tuple[float, float]:
    """TTFT of another client's short prompt beside a flood, and the flood's median gap before."""
    rows = [client.add(short, 400, "flood") for _ in range(FLOOD)]
    client.until("the flood", lambda: sum(len(client.arrivals[h]) > 2 for h in rows) >= 8)
    running = [h for h in rows if len(client.arrivals[h]) > 1]
    step = statistics.median(b - a for h in running for a, b in pairs(client.arrivals[h]))
    handle = client.add(short, 1, "other")
    took = client.ttft(handle)
    client.clear()
    return took, step


def pairs(times: list[float]) -> list[tuple[float, float]]:
    return list(itertools.pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=4096)
    parser.add_argument("--short", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-gap-ms", type=float, default=250.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, list[float]] = {}

    def note(**figures: float) -> None:
        for name, value in figures.items():
            found.setdefault(name, []).append(value)

    lease = control.Lease(cpu_threads=args.threads)
    with (
        tempfile.TemporaryDirectory() as directory,
        WorkerProcess(Path(directory), args.model, lease=lease, max_gap_ms=args.max_gap_ms) as worker,
    ):
        client = Client(worker)
        idle(client, args.short)
        for number in range(args.rounds):
            note(ttft_idle_s=idle(client, args.short))
            note(ttft_beside_long_s=beside_long(client, args.short, args.long))
            note(ttft_idle_s=idle(client, args.short))
            step, largest, took = gaps(client, args.long)
            note(step_s=step, largest_gap_s=largest, long_prefill_s=took)
            note(ttft_idle_s=idle(client, args.short))
            other, flood_step = flood(client, args.short)
            note(ttft_beside_flood_s=other, flood_step_s=flood_step)
            sys.stderr.write(f"round {number + 1} of {args.rounds}\n")
    medians = {name: statistics.median(values) for name, values in found.items()}
    base = medians["ttft_idle_s"]
    result = {
        **{name: round(value, 4) for name, value in medians.items()},
        "worst_gap_s": round(max(found["largest_gap_s"]), 4),
        "beside_long_over_idle": round(medians["ttft_beside_long_s"] / base, 2),
        "beside_flood_over_idle": round((medians["ttft_beside_flood_s"] - medians["flood_step_s"]) / base, 2),
    }
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    for name, value in result.items():
        sys.stdout.write(f"{name:24} {value}\n")


if __name__ == "__main__":
    main()
