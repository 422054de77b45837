"""Many decode steps with rows that come, go, are aborted, leave for want of memory and come back.

python bench/soak_steps.py MODEL_DIR [--steps 50000] [--rows 4] [--every 500] [--json]

Is memory flat? Runs the engine in this process, under a KV limit that rows outgrow, with greedy, seeded and
penalised rows. Every so many steps all rows are let finish, and what is left is measured: MLX's active bytes
and the number of its live arrays, Python objects, and the process's memory by the kernel's account (PSS).
Each must not grow between the first quarter of the measurements and the last; exits with 1 when one does.
"""

import argparse
import gc
import json
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import mlx.core as mx
from support.engine_driver import Driver
from support.loading import load

from mlxhost.wire import data
from mlxhost.worker import admission
from mlxhost.worker.backend import release_memory, resident_bytes

GROWTH_TOKENS = 32  # so that rows outgrow their reservations often
ALLOWED = {"active_bytes": 64 << 10, "arrays": 16, "objects": 300, "pss_bytes": 8 << 20}


class Soak:
    """Keeps `rows` requests open, and counts."""

    def __init__(self, model: Path, rows: int) -> None:
        loaded = load(model)
        self.driver = Driver(loaded.model, loaded.vocab_size, max_rows=rows, kv_tokens=100 * rows)
        self.driver.engine.threads.lease(1)
        self._rows, self._rng, self._next = rows, random.Random(1), 0
        self.ended = self.lost = 0

    def run(self, steps: int) -> None:
        """So many ticks with the queue kept filled."""
        driver = self.driver
        until = driver.engine.stepper.ticks + steps
        while driver.engine.stepper.ticks < until:
            while len(driver.results) < self._rows + 2:
                self._add()
            driver.tick()
            self._forget()
            if self._rng.random() < 0.002:
                driver.abort(self._rng.choice(list(driver.results)))

    def settle(self) -> dict[str, int]:
        """Let everything finish, and look at what is left."""
        while self.driver.results:
            self.driver.tick()
            self._forget()
        release_memory()
        gc.collect()
        objects = gc.get_objects()
        return {
            "active_bytes": mx.get_active_memory(),
            "arrays": sum(type(o) is mx.array for o in objects) + _held_arrays(objects),
            "objects": len(objects),
            "pss_bytes": resident_bytes(),
        }

    def _add(self) -> None:
        rng, handle = self._rng, self._next
        self._next += 1
        sampling = rng.choice(
            [
                data.Sampling(temperature=0.0),
                data.Sampling(temperature=1.0, top_p=0.9, seed=handle),
                data.Sampling(temperature=0.7, seed=handle, frequency_penalty=0.2, logprobs=True),
            ]
        )
        prompt = [rng.randrange(5, 400) for _ in range(rng.randrange(1, 80))]
        self.driver.add(handle, prompt, rng.randrange(1, 150), sampling=sampling, client=str(handle % 3))

    def _forget(self) -> None:
        """Drop what has ended, as a frontend does."""
        self.driver.messages.clear()
        for handle, result in list(self.driver.results.items()):
            if result.terminals:
                self.ended += 1
                self.lost += result.terminals != 1
                del self.driver.results[handle]


def _held_arrays(objects: list[object]) -> int:
    """Arrays in lists and dicts (MLX's arrays are not tracked by the garbage collector themselves)."""
    found = 0
    for each in objects:
        values = each.values() if type(each) is dict else each if type(each) in (list, tuple) else ()
        found += sum(type(value) is mx.array for value in list(values))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    admission.GROWTH_TOKENS = GROWTH_TOKENS
    soak = Soak(args.model, args.rows)
    soak.run(args.every)
    soak.settle()  # what is made once is there now
    seen: list[dict[str, int]] = []
    for _ in range(max(4, args.steps // args.every)):
        soak.run(args.every)
        seen.append(soak.settle())
    quarter = max(1, len(seen) // 4)
    report: dict[str, object] = {}
    grown = []
    for name, allowed in ALLOWED.items():
        first = statistics.median(figures[name] for figures in seen[:quarter])
        last = statistics.median(figures[name] for figures in seen[-quarter:])
        report[name] = {"first": first, "last": last, "allowed_growth": allowed}
        if last - first > allowed:
            grown.append(name)
    stepper = soak.driver.engine.stepper
    report |= {
        "ticks": stepper.ticks,
        "requests": soak.ended,
        "requests_without_exactly_one_end": soak.lost,
        "preemptions": stepper.preemptions,
        "yields": stepper.yields,
        "grown": grown,
    }
    if args.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        for name, value in report.items():
            sys.stdout.write(f"{name:34} {value}\n")
    sys.exit(1 if grown or soak.lost else 0)


if __name__ == "__main__":
    main()
