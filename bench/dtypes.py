"""Compute dtypes and BLAS on this machine: what the worker's defaults rest on.

python bench/dtypes.py MODEL_DIR [QUANTISED_MODEL_DIR]

Each line is a process of its own: prefill of 128 tokens, then decode at 1 and 8 rows. A Markdown table.
"""

import argparse
import subprocess
import sys

PROGRAM = """
import sys, time
from pathlib import Path
import mlx.core as mx
directory, dtype, expand, fast = sys.argv[1], sys.argv[2], sys.argv[3] == "1", sys.argv[4] == "1"
from mlxhost.worker import backend
if fast:
    blas = backend.detect().blas
    blas and blas.set_threads(backend.cores())
from mlxhost.worker.models.load import load_model
loaded = load_model(Path(directory), dtype, expand_quantised=expand, on_progress=lambda *_: None)
model = loaded.model
from mlxhost.worker.kv import RowKV

def settle(row):
    mx.eval(row.arrays())

def prefill(tokens):
    row = RowKV.new(model)
    start = time.perf_counter()
    model(mx.zeros((1, tokens), dtype=mx.uint32) + 5, cache=row.caches)
    settle(row)
    return tokens / (time.perf_counter() - start)

def decode(rows, limit):
    row = RowKV.new(model)
    y = mx.zeros((rows, 1), dtype=mx.uint32)
    start, steps = time.perf_counter(), -1
    while steps < 20 and (steps < 1 or time.perf_counter() - start < limit):
        y = mx.argmax(model(y, cache=row.caches)[:, -1], axis=-1)[:, None]
        mx.eval(y)
        if steps < 0:
            start = time.perf_counter()
        steps += 1
    return rows * steps / (time.perf_counter() - start)

tokens = 128 if fast else 32
prefill(8)
print(f"{prefill(tokens):.1f} {decode(1, 5):.1f} {decode(8, 5):.1f} {loaded.weights_bytes / 1e6:.0f}")
"""


def measure(directory: str, dtype: str, *, expand: bool, fast: bool) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, directory, dtype, str(int(expand)), str(int(fast))],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("quantised", nargs="?")
    args = parser.parse_args()
    cases = [
        ("float32, fast BLAS", args.directory, "float32", False, True),
        ("float32, MLX's own BLAS", args.directory, "float32", False, False),
        ("bfloat16", args.directory, "bfloat16", False, True),
        ("float16", args.directory, "float16", False, True),
    ]
    if args.quantised:
        cases += [
            ("4-bit, expanded to float32, fast BLAS", args.quantised, "float32", True, True),
            ("4-bit, float32 scales", args.quantised, "float32", False, True),
            ("4-bit, bfloat16 scales", args.quantised, "bfloat16", False, True),
        ]
    sys.stdout.write("| weights and compute | prefill tok/s | decode tok/s, 1 row | 8 rows | weights MB |\n")
    sys.stdout.write("|---|---|---|---|---|\n")
    for name, directory, dtype, expand, fast in cases:
        figures = " | ".join(measure(directory, dtype, expand=expand, fast=fast))
        sys.stdout.write(f"| {name} | {figures} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
