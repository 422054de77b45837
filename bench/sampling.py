"""Drawing one token a row: this engine's vectorised sampler beside mlx-lm's samplers, row by row.

    python bench/sampling.py [--rows 8] [--vocab 49152 151936] [--rounds 7]

Random logits; rounds alternate between the three, medians in milliseconds are printed. `list` draws among the
likeliest tokens (what a CPU worker does), `whole` over the whole vocabulary.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from mlxhost.worker.backend import cores, detect
from mlxhost.worker.sampling import RowSampling, Sampler
from mlxhost.worker.threads import CpuThreads

CASES = {
    "temperature": RowSampling(1.0, 1.0, 0, 0.0, 1),
    "top_p": RowSampling(1.0, 0.9, 0, 0.0, 1),
    "top_k": RowSampling(1.0, 1.0, 50, 0.0, 1),
    "top_k, top_p": RowSampling(1.0, 0.9, 50, 0.0, 1),
    "min_p": RowSampling(1.0, 1.0, 0, 0.05, 1),
}


def runs_of(row: RowSampling, logits: mx.array) -> dict[str, Callable[[], object]]:
    rows, vocab = logits.shape
    whole = Sampler([row] * rows, vocab)
    short = Sampler([row] * rows, vocab, narrow=True)
    theirs = make_sampler(temp=row.temperature, top_p=row.top_p, top_k=row.top_k, min_p=row.min_p)
    positions = [5] * rows

    def row_by_row() -> list[mx.array]:
        normalised = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return [theirs(normalised[i : i + 1]) for i in range(rows)]

    return {
        "list": lambda: short.draw(logits, positions).arrays(),
        "whole": lambda: whole.draw(logits, positions).arrays(),
        "mlx-lm": row_by_row,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    backend = detect()
    CpuThreads(backend.blas, cores()).tune(lambda: None)
    sys.stdout.write(f"{backend.label}, {args.rows} rows, ms a draw\n")
    for vocab in args.vocab:
        logits = mx.random.normal((args.rows, vocab), key=mx.random.key(0)) * 3
        for name, row in CASES.items():
            seen: dict[str, list[float]] = {}
            for _ in range(args.rounds):
                for kind, run in runs_of(row, logits).items():
                    started = time.perf_counter()
                    mx.eval(run())
                    seen.setdefault(kind, []).append(1000 * (time.perf_counter() - started))
            figures = "  ".join(f"{kind} {statistics.median(ms):7.1f}" for kind, ms in seen.items())
            sys.stdout.write(f"{vocab:7} {name:14} {figures}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
