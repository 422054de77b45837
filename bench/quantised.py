"""A GGUF's weights kept quantised against expanded: bytes, and tokens a second, side by side.

python bench/quantised.py FILE.gguf [--dtype DTYPE] [--rounds N] [--tokens N] [--threads N]

Converts FILE both ways into a temporary folder, then measures in turns, each time in a process of its own:
prefill, and greedy decoding at 1 and 8 rows. Prints medians as a Markdown table.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = """
import sys, time
from pathlib import Path
import mlx.core as mx
from mlxhost.worker import backend
from mlxhost.worker.models.load import load_model
from mlxhost.worker.kv import RowKV
directory, dtype, tokens, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
blas = backend.detect().blas
blas and blas.set_threads(threads or backend.cores())
loaded = load_model(directory, dtype, expand_quantised=False, on_progress=lambda *_: None)
model = loaded.model

def prefill(count):
    row = RowKV.new(model)
    start = time.perf_counter()
    model(mx.zeros((1, count), dtype=mx.uint32) + 5, cache=row.caches)
    mx.eval(row.arrays())
    return count / (time.perf_counter() - start)

def decode(rows, limit):
    row = RowKV.new(model)
    y = mx.zeros((rows, 1), dtype=mx.uint32)
    start, steps = time.perf_counter(), -2
    while steps < 2 or (steps < 64 and time.perf_counter() - start < limit):
        y = mx.argmax(model(y, cache=row.caches)[:, -1], axis=-1)[:, None]
        mx.eval(y)
        steps += 1
        if steps == 0:
            start = time.perf_counter()
    return rows * steps / (time.perf_counter() - start)

prefill(tokens)
print(prefill(tokens), decode(1, 5), decode(8, 5), loaded.weights_bytes / 1e6)
"""


def converted(source: Path, directory: Path, dtype: str, *, keep: bool) -> float:
    """Convert; how many seconds it took."""
    command = [sys.executable, "-I", "-m", "mlxhost.worker.gguf", "convert", str(source), str(directory)]
    command += ["--dtype", dtype, *(["--keep-quantised"] if keep else [])]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure(directory: Path, dtype: str, tokens: int, threads: int) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), dtype, str(tokens), str(threads)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(figure) for figure in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of the prompt (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="of the BLAS; 1 on a busy machine")
    args = parser.parse_args()
    write = sys.stdout.write
    write(
        "| weights | converted in s | on disk MB | in memory MB | prefill tok/s | decode, 1 row | 8 rows |\n"
    )
    write("|---|---|---|---|---|---|---|\n")
    with tempfile.TemporaryDirectory() as folder:
        directories = {name: Path(folder, name) for name in ("expanded", "kept")}
        seconds = {
            name: converted(args.source, directory, args.dtype, keep=name == "kept")
            for name, directory in directories.items()
        }
        rounds: dict[str, list[list[float]]] = {name: [] for name in directories}
        for _ in range(args.rounds):
            for name, directory in directories.items():
                rounds[name].append(measure(directory, args.dtype, args.tokens, args.threads))
        for name, directory in directories.items():
            prefill, one, eight, memory = map(statistics.median, zip(*rounds[name], strict=True))
            disk = sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 1e6
            write(
                f"| {name} | {seconds[name]:.1f} | {disk:.0f} | {memory:.0f} | {prefill:.1f} | {one:.1f} "
                f"| {eight:.1f} |\n"
            )


if __name__ == "__main__":
    main()
