"""Two models under load on one device: what taking turns with prefill chunks buys, and what it costs.

python bench/two_models.py MODEL_DIR [--rounds 3] [--seconds 10]
python bench/two_models.py --random 1b        random weights of a llama's shape, for a GPU

One process answers short chats (decode), the other reads long prompts (prefill); then both do both. Each is
measured alone, then both together without turns and with them, interleaved, and medians are printed. `share`
is the sum of what each gets of its own rate alone: 1.00 means that the device is shared without loss.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

SHAPES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "num_attention_heads": 4},
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
    },
}
ROLES = {  # rows in flight, tokens of a prompt and of an answer
    "chat": [(4, 32, 64)],
    "read": [(2, 2048, 4)],
    "both": [(3, 32, 64), (1, 2048, 4)],
}
PAIRS = (("chat", "read"), ("both", "both"))


def random_model(shape: str, dtype: str) -> tuple[Any, int]:
    """A llama of that shape with random weights, and its vocabulary."""
    import mlx.core as mx
    from mlx.utils import tree_map

    from mlxhost.worker.models.architecture import import_architecture

    config = SHAPES[shape] | {
        "model_type": "llama",
        "vocab_size": 32768,
        "num_key_value_heads": max(2, SHAPES[shape]["num_attention_heads"] // 4),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    model_class, args_class = import_architecture(config)
    model = model_class(args_class.from_dict(config))
    model.update(
        tree_map(lambda p: (mx.random.normal(p.shape) * 0.02).astype(getattr(mx, dtype)), model.parameters())
    )
    mx.eval(model.parameters())
    return model, 32768


def worker(directory: str, shape: str) -> None:
    """A process with one model: reads a JSON order a line, prints a JSON result a line."""
    from support.engine_driver import Driver

    from mlxhost.wire.data import Out
    from mlxhost.worker.backend import detect
    from mlxhost.worker.device import take_turns
    from mlxhost.worker.models.load import load_model

    backend = detect()
    if shape:
        model, vocabulary = random_model(shape, backend.dtype)
    else:
        loaded = load_model(
            Path(directory), backend.dtype, expand_quantised=True, on_progress=lambda *_: None
        )
        model, vocabulary = loaded.model, loaded.vocab_size

    class Client(Driver):
        """Notes when each row got its tokens, and the gaps between them."""

        last: dict[int, float]
        gaps: list[float]

        def send(self, frontend: str | None, message: Any) -> None:
            if isinstance(message, Out):
                now = time.perf_counter()
                for handle in message.handles:
                    if handle in self.last:
                        self.gaps.append(now - self.last[handle])
                    self.last[handle] = now
            super().send(frontend, message)

    driver = Client(model, vocabulary, max_model_len=8192, kv_tokens=200_000)
    driver.last, driver.gaps = {}, []
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        result = run(driver, vocabulary, json.loads(line), take_turns)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def run(driver: Any, vocabulary: int, order: dict[str, Any], take_turns: Any) -> dict[str, float]:
    """Closed-loop load of one role for so many seconds."""
    device = take_turns(order["device"], 1.0)
    driver.engine.stepper.device = device
    driver.engine.threads.lease(order["threads"])
    driver.last, driver.gaps = {}, []
    kinds: dict[int, tuple[int, int]] = {}
    handle = max(driver.results, default=0)
    read = answered = 0
    end = time.perf_counter() + order["seconds"]
    started = time.perf_counter()
    while time.perf_counter() < end:
        for rows, prompt, tokens in ROLES[order["role"]]:
            for _ in range(rows - sum(kind == (prompt, tokens) for kind in kinds.values())):
                handle += 1
                kinds[handle] = (prompt, tokens)
                ids = [(handle * 7919 + i * 31) % (vocabulary - 1) + 1 for i in range(prompt)]
                driver.add(handle, ids, tokens)
        driver.tick()
        for done in [h for h in kinds if driver.results[h].terminals]:
            read += kinds.pop(done)[0]
            answered += driver.results.pop(done).completion_tokens
    took = time.perf_counter() - started
    for row in driver.engine.rows():
        read += row.prefilled
    answered += sum(len(driver.results[h].tokens) for h in kinds)
    driver.abort(*kinds)
    while driver.engine.rows():
        driver.tick()
    gaps = sorted(driver.gaps) or [0.0]
    if hasattr(device, "close"):
        driver.engine.stepper.device = take_turns("", 1.0)
        device.close()
    return {
        "read": read / took,
        "answered": answered / took,
        "p50": gaps[len(gaps) // 2],
        "p99": gaps[int(len(gaps) * 0.99)],
        "max": gaps[-1],
        "untimely": device.counts.untimely,
    }


class Process:
    """The other side of `worker`."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [
            sys.executable,
            __file__,
            "--worker",
            "--random",
            args.random,
            *([args.model] if args.model else []),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended")
        return line

    def order(self, role: str, seconds: float, device: str, threads: int) -> None:
        assert self._process.stdin is not None
        order = {"role": role, "seconds": seconds, "device": device, "threads": threads}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(
    processes: list[Process], roles: dict[int, str], seconds: float, device: str, cores: int
) -> list[dict[str, float]]:
    """What each of `roles`, by process, got."""
    for number, role in roles.items():
        processes[number].order(role, seconds, device, max(1, cores // len(roles)))
    return [json.loads(processes[number].read()) for number in roles]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="", help="a model directory")
    parser.add_argument("--random", choices=["", *SHAPES], default="")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.model, args.random)
        return
    if not args.model and not args.random:
        parser.error("give a model directory or --random")
    from mlxhost.worker.backend import cores as available

    cores = available()
    processes = [Process(args), Process(args)]
    try:
        for process in processes:
            process.read()
        with tempfile.TemporaryDirectory() as folder:
            for pair in PAIRS:
                compare(processes, pair, args, str(Path(folder) / "device"), cores)
    finally:
        for process in processes:
            process.end()


def compare(
    processes: list[Process], pair: tuple[str, str], args: argparse.Namespace, file: str, cores: int
) -> None:
    """One pair of roles, every condition in each round."""
    found: dict[str, list[list[dict[str, float]]]] = {"alone": [], "no turns": [], "turns": []}
    together = dict(enumerate(pair))
    measure(processes, together, min(args.seconds, 5.0), "", cores)  # compiles and learns chunk sizes
    for _ in range(args.rounds):
        alone = [measure(processes, {n: role}, args.seconds, "", cores)[0] for n, role in together.items()]
        found["alone"].append(alone)
        found["no turns"].append(measure(processes, together, args.seconds, "", cores))
        found["turns"].append(measure(processes, together, args.seconds, file, cores))

    def median(condition: str, who: int, what: str) -> float:
        return statistics.median(one[who][what] for one in found[condition])

    sys.stdout.write(f"\n{pair[0]} beside {pair[1]}, medians of {args.rounds}\n")
    header = f"{'':10}" + "".join(
        f"{w:>13}" for w in ("read tok/s", "answer tok/s", "gap p50 ms", "p99 ms", "max ms")
    )
    for condition in found:
        share = 0.0
        sys.stdout.write(header.replace(" " * 10, f"{condition:10}", 1) + "\n")
        for who, role in enumerate(pair):
            what = "read" if role == "read" else "answered"
            share += median(condition, who, what) / max(1e-9, median("alone", who, what))
            numbers = [median(condition, who, w) for w in ("read", "answered", "p50", "p99", "max")]
            cells = [*numbers[:2], *(1000 * n for n in numbers[2:])]
            sys.stdout.write(f"  {role:8}" + "".join(f"{cell:13.1f}" for cell in cells) + "\n")
        if condition != "alone":
            late = sum(one[w]["untimely"] for one in found[condition] for w in (0, 1))
            sys.stdout.write(
                f"  share {share:.2f}" + (f", chunks without a turn {late:.0f}" if late else "") + "\n"
            )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
