"""Two models under load on one machine's cores: with the supervisor's thread leases, and without.

python bench/cpu_threads.py MODEL_DIR

Starts a fleet of two workers on MODEL_DIR and measures one under load alone, then both. Then runs the same
model in bare processes that each use every core, as they do when nobody arbitrates.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path

from load import load

BARE = """
import sys, time
from pathlib import Path
import mlx.core as mx
from mlxhost.worker.backend import cores, detect
from mlxhost.worker.models.load import load_model
backend = detect()
backend.blas and backend.blas.set_threads(cores())
model = load_model(Path(sys.argv[1]), "float32", expand_quantised=True, on_progress=lambda *_: None).model
streams, seconds = int(sys.argv[2]), float(sys.argv[3])
from mlx_lm.models.cache import KVCache
caches = [KVCache() for _ in model.layers]
y = mx.zeros((streams, 1), dtype=mx.uint32)
mx.eval(model(y, cache=caches))
print("ready", flush=True)
sys.stdin.readline()
start, steps = time.perf_counter(), 0
while time.perf_counter() - start < seconds:
    y = mx.argmax(model(y, cache=caches)[:, -1], axis=-1)[:, None]
    mx.eval(y)
    steps += 1
print(streams * steps / (time.perf_counter() - start), flush=True)
"""


def bare(directory: str, processes: int, streams: int, seconds: float) -> float:
    """Summed tokens a second of `processes` bare loops, each with all the cores."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", BARE, directory, str(streams), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    outputs = []
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        outputs.append(float(process.communicate()[0]))
    return sum(outputs)


def wait_ready(process: "subprocess.Popen[str]") -> str:
    """The fleet's URL, once it serves."""
    assert process.stdout is not None
    for line in process.stdout:
        if "Serving on " in line:
            return line.split("Serving on ")[1].split()[0]
    raise SystemExit("the fleet did not start")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", help="a model directory")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    mlxhost = Path(sys.executable).with_name("mlxhost")
    fleet = subprocess.Popen(
        [mlxhost, "up", "--models", f"a={args.directory},b={args.directory}", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        url = wait_ready(fleet)

        def rate(models: list[str]) -> float:
            results = asyncio.run(load(url, models, args.streams, 20, args.tokens, args.rounds))
            return sum(r.rate for r in results.values())

        rate(["a", "b"])
        for turn in range(2):
            alone, together = rate(["a"]), rate(["a", "b"])
            sys.stdout.write(
                f"leases, run {turn + 1}: one model alone {alone:.1f} tok/s, "
                f"two together {together:.1f} tok/s in sum, ratio {together / alone:.2f}\n"
            )
            sys.stdout.flush()
    finally:
        fleet.terminate()
        fleet.communicate()
    time.sleep(1)
    alone, together = bare(args.directory, 1, args.streams, 8), bare(args.directory, 2, args.streams, 8)
    sys.stdout.write(
        f"no leases: one bare loop alone {alone:.1f} tok/s, two together {together:.1f} tok/s in sum, "
        f"ratio {together / alone:.2f}\n"
    )


if __name__ == "__main__":
    main()
