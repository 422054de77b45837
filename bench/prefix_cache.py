"""What the prefix cache is worth, and what it costs: real worker processes, side by side, medians.

  python bench/prefix_cache.py MODEL_DIRECTORY [turn] [restart] [write-behind] [shared]

turn: time to the first token of a 64-token second turn after a long conversation, warm against cold (a new
salt), interleaved. restart: the same after kill -9 and a new process. write-behind: decode with records being
written and without, interleaved. shared: eight prompts at once that begin alike, with the cache and without.
"""

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.worker_harness import WorkerProcess

from mlxhost.wire import control, data

TURN = 64
SHARED, STREAMS = 1000, 8
WAIT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("parts", nargs="*", help="default: all")
    parser.add_argument("--conversation", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="BLAS threads of each worker")
    args = parser.parse_args()
    parts = {"turn": turn, "restart": restart, "write-behind": write_behind, "shared": shared}
    for name in args.parts or parts:
        directory = Path(tempfile.mkdtemp(prefix="mlxhost-"))
        try:
            parts[name](args, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


class Client:
    """Asks one worker for one stream at a time and times it."""

    def __init__(self, args: argparse.Namespace, directory: Path, name: str = "a", **config: Any) -> None:
        run = directory / f"run-{name}"
        run.mkdir()
        self.worker = WorkerProcess(
            run,
            args.model,
            lease=control.Lease(cpu_threads=args.threads),
            cache_dir=str(directory / config.pop("cache", "cache")),
            **config,
        )
        self.handle = 0

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()

    def ask(self, prompt: list[int], tokens: int, **fields: Any) -> tuple[float, float, list[int], int]:
        """Seconds to the first token and for each after it, the tokens, and how many were cached."""
        self.handle += 1
        started = time.perf_counter()
        self.worker.add(self.handle, prompt, tokens, **fields)
        out: list[int] = []
        first = last = started
        while True:
            message = self.worker.receive(WAIT_S)
            if isinstance(message, data.Reject):
                raise RuntimeError(message.message)
            if not isinstance(message, data.Out) or self.handle not in message.handles:
                continue
            now = time.perf_counter()
            if message.tokens and not out:
                first = now
            out += message.tokens
            last = now
            if any(message.finish):
                rest = (last - first) / max(1, len(out) - 1)
                return first - started, rest, out, message.cached_tokens[0]


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def turn(args: argparse.Namespace, directory: Path) -> None:
    """Warm against cold, each pair with its own conversation."""
    cold, warm = [], []
    with Client(args, directory) as client:
        client.ask(words(300, 0), 4)
        for i in range(args.rounds):
            conversation = words(args.conversation, 100 + i)
            _, _, answer, _ = client.ask(conversation, 32)
            prompt = conversation + answer + words(TURN, 200 + i)
            settle(client)
            seconds, _, tokens, cached = client.ask(prompt, 8)
            warm.append(seconds)
            seconds, _, reference, none = client.ask(prompt, 8, cache_salt=f"cold-{i}")
            cold.append(seconds)
            equal = "equal" if tokens == reference else "DIFFERENT"
            tell(f"  {cached} of {len(prompt)} cached: {warm[-1]:.3f} s warm, {cold[-1]:.3f} s cold, {equal}")
            assert none == 0
    ratio(f"second turn of {TURN} tokens after {args.conversation}", warm, cold)


def restart(args: argparse.Namespace, directory: Path) -> None:
    """A flush, kill -9, a new process, the second turn."""
    cold, warm = [], []
    for i in range(args.rounds):
        conversation = words(args.conversation, 300 + i)
        with Client(args, directory, f"before-{i}") as client:
            _, _, answer, _ = client.ask(conversation, 32)
            report = client.worker.call("flush", deadline_s=60).result
            assert report["durable"], report
            client.worker.process.kill()
            client.worker.process.wait()
        with Client(args, directory, f"after-{i}") as client:
            client.ask(words(300, 0), 4)
            prompt = conversation + answer + words(TURN, 400 + i)
            seconds, _, tokens, cached = client.ask(prompt, 8)
            warm.append(seconds)
            seconds, _, reference, _ = client.ask(prompt, 8, cache_salt=f"cold-{i}")
            cold.append(seconds)
            equal = "equal" if tokens == reference else "DIFFERENT"
            tell(f"  {cached} of {len(prompt)} cached: {warm[-1]:.3f} s, {cold[-1]:.3f} s cold, {equal}")
    ratio("second turn after kill -9 and restart", warm, cold)


def write_behind(args: argparse.Namespace, directory: Path) -> None:
    """Decode while thousands of tokens of records wait to be written, against a worker without a disk tier.

    Both workers live at once and take turns, so that whatever else the machine does hits both.
    """
    on, off = [], []
    with (
        Client(args, directory, "on", cache="on") as writing,
        Client(args, directory, "off", cache="off", cache_disk_bytes=0) as silent,
    ):
        for client in (writing, silent):
            client.ask(words(300, 0), 4)
        for i in range(args.rounds * 2):
            for client, times in ((writing, on), (silent, off)) if i % 2 else ((silent, off), (writing, on)):
                _, step, _, _ = client.ask(words(2048, 500 + i), 160)
                times.append(step)
            settle(writing)
        written = figures(writing)["spills"]
    tell(f"  {written} records were written")
    ratio("a decode step with write-behind against one without", on, off)


def shared(args: argparse.Namespace, directory: Path) -> None:
    """Eight prompts that share their first thousand tokens, sent at once."""
    with_cache, without = [], []
    with Client(args, directory, "on") as on, Client(args, directory, "off", cache_ram_bytes=0) as off:
        for i in range(args.rounds):
            for client, times in ((on, with_cache), (off, without)):
                times.append(streams(client, i))
    ratio(f"{STREAMS} streams sharing {SHARED} tokens, until all have 16 tokens", with_cache, without)


def streams(client: Client, seed: int) -> float:
    base = words(SHARED, 600 + seed)
    handles = set(range(client.handle + 1, client.handle + 1 + STREAMS))
    client.handle += STREAMS
    started = time.perf_counter()
    for handle in handles:
        client.worker.add(handle, base + words(32, 1000 * seed + handle), 16)
    client.worker.collect(handles, WAIT_S)
    return time.perf_counter() - started


def settle(client: Client) -> None:
    """Until what is pending has been written."""
    end = time.monotonic() + 60
    while figures(client)["pending_spills"] and time.monotonic() < end:
        time.sleep(0.05)


def figures(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.worker.call("get_state").result["prefix_cache"]
    return found


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def ratio(what: str, ours: list[float], theirs: list[float]) -> None:
    a, b = statistics.median(ours), statistics.median(theirs)
    ratios = sorted(x / y for x, y in zip(ours, theirs, strict=True))
    tell(
        f"{what}: {a:.4f} s against {b:.4f} s, ratio {statistics.median(ratios):.4f} "
        f"({ratios[0]:.4f} to {ratios[-1]:.4f}, {len(ratios)} pairs)"
    )


if __name__ == "__main__":
    main()
