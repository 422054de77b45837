"""What the engine costs over a bare MLX loop of the same model, side by side in one process.

    python bench/engine.py MODEL_DIRECTORY [--rows 1 4 8 16] [--steps 128] [--rounds 5]
    python bench/engine.py --random 8b --dtype bfloat16 --rows 1 8 32      # on a GPU
    python bench/engine.py MODEL_DIRECTORY --ragged       # seven short rows beside a long one

The bare loop feeds a (rows, 1) batch of equally long rows through mlx-lm's caches and takes the argmax, one
step ahead of what it reads. The engine runs real requests through admission, prefill, packs, sampling and
emission. Rounds alternate between the two; medians are printed. Both use the same BLAS and threads.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlxhost.wire import data
from mlxhost.worker.admission import Capacity
from mlxhost.worker.backend import Backend, cores, detect
from mlxhost.worker.engine import Engine
from mlxhost.worker.events import Aborted, Arrived, Event, Status
from mlxhost.worker.grammar.waiting import Grammars
from mlxhost.worker.kv import StepShape
from mlxhost.worker.models.architecture import import_architecture
from mlxhost.worker.models.load import DTYPES, load_model
from mlxhost.worker.selftest import self_test
from mlxhost.worker.threads import CpuThreads

_LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}
RANDOM: dict[str, dict[str, Any]] = {
    "tiny": {
        **_LLAMA,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


def random_model(name: str, dtype: mx.Dtype) -> tuple[Any, int]:
    """A model of one of RANDOM's shapes with random weights, and its vocabulary."""
    config = RANDOM[name]
    model_class, args_class = import_architecture(config)
    model = model_class(args_class.from_dict(config))
    for path, value in tree_flatten(model.parameters()):
        weight = mx.random.normal(value.shape, dtype=dtype) * 0.02 if value.ndim > 1 else value.astype(dtype)
        mx.eval(weight)
        model.update(tree_unflatten([(path, weight)]))
    model.eval()
    return model, config["vocab_size"]


def bare(model: Any, prompts: list[list[int]], steps: int) -> float:
    """Seconds a decode step takes in a plain loop."""
    if hasattr(model, "make_cache"):
        caches = model.make_cache()
    else:
        from mlx_lm.models.cache import KVCache

        caches = [KVCache() for _ in model.layers]
    ids = mx.array(prompts, dtype=mx.uint32)
    tokens = mx.argmax(model(ids, cache=caches)[:, -1], axis=-1)
    mx.eval(tokens)

    def step(tokens: mx.array) -> mx.array:
        drawn = mx.argmax(model(tokens[:, None], cache=caches)[:, -1], axis=-1)
        mx.async_eval(drawn)
        return drawn

    for _ in range(8):
        tokens = step(tokens)
    mx.eval(tokens)
    started = time.perf_counter()
    for _ in range(steps):
        following = step(tokens)
        tokens.tolist()
        tokens = following
    mx.eval(tokens)
    return (time.perf_counter() - started) / steps


class Requests:
    """An engine with `prompts` running, and what it says counted."""

    def __init__(
        self, model: Any, vocab_size: int, prompts: list[list[int]], shape: StepShape, backend: Backend
    ) -> None:
        tested = self_test(model, vocab_size, "float32" if backend.kind == "cpu" else "bfloat16", shape)
        self.emitted = 0
        inbox: SimpleQueue[Event] = SimpleQueue()
        longest = max(map(len, prompts)) + 4096
        self.engine = Engine(
            model,
            vocab_size=vocab_size,
            eos_ids=(),
            capacity=Capacity(1 << 40, longest, len(prompts), tested.cost),
            max_gap_s=0.25,
            epoch=1,
            threads=CpuThreads(backend.blas, cores()),
            inbox=inbox,
            outlet=self,
            grammars=Grammars(inbox.put, Path()),
            shape=tested.shape,
        )
        self._inbox, self._handles = inbox, range(len(prompts))
        greedy = data.Sampling(temperature=0.0)
        for handle, prompt in enumerate(prompts):
            limits = data.Limits(max_tokens=4000, ignore_eos=True)
            add = data.Add(handle, handle, f"r{handle}", sampling=greedy, limits=limits)
            inbox.put(Arrived("bench", add, prompt))

    def send(self, frontend: str | None, message: Any) -> None:
        if isinstance(message, data.Out):
            self.emitted += len(message.tokens)

    def publish(self, status: Status) -> None:
        pass

    def step_s(self, steps: int) -> float:
        """Seconds a decode step takes once every row decodes."""
        while len(self.engine.stepper.batch.rows) < len(self._handles):
            self.engine.step()
        for _ in range(8):
            self.engine.step()
        before, started = self.emitted, time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        took = (time.perf_counter() - started) / steps
        expected = steps * len(self._handles)
        if self.emitted - before != expected:
            raise SystemExit(f"{self.emitted - before} tokens in {steps} steps, expected {expected}")
        self._inbox.put(Aborted("bench", [(handle, "done") for handle in self._handles]))
        while self.engine.rows():
            self.engine.step()
        return took


def alternate(rounds: int, runs: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The median of each of `runs`, taken in turn."""
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seen[name].append(run())
            mx.clear_cache()
    return {name: statistics.median(values) for name, values in seen.items()}


def prompt_of(length: int, salt: int, vocab_size: int) -> list[int]:
    return [(7 * i + 31 * salt) % min(vocab_size, 1000) for i in range(length)]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--random", choices=sorted(RANDOM))
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--prompt", type=int, default=144)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ragged", action="store_true", help="a 4,000-token row beside seven of 150")
    args = parser.parse_args()
    backend = detect()
    CpuThreads(backend.blas, cores()).tune(lambda: None)
    if args.random:
        model, vocab = random_model(args.random, DTYPES[args.dtype])
    else:
        loaded = load_model(args.model, args.dtype, expand_quantised=True, on_progress=lambda *_: None)
        model, vocab = loaded.model, loaded.vocab_size

    def engine(lengths: list[int]) -> float:
        prompts = [prompt_of(length, i, vocab) for i, length in enumerate(lengths)]
        return Requests(model, vocab, prompts, backend.shape, backend).step_s(args.steps)

    runs: dict[str, Callable[[], float]]
    if args.ragged:
        runs = {"even": lambda: engine([150] * 8), "ragged": lambda: engine([150] * 7 + [4000])}
        alternate(1, runs)  # kernels compile, memory is touched
        seen = alternate(args.rounds, runs)
        rate = {name: round(8 / s, 1) for name, s in seen.items()}
        say(json.dumps({"tok_s": rate, "kept": round(seen["even"] / seen["ragged"], 3)}))
        return
    say(f"{backend.label}, {args.dtype}, prompt {args.prompt}, {args.steps} steps, {args.rounds} rounds")
    say(f"{'rows':>5} {'bare tok/s':>11} {'engine tok/s':>13} {'ratio':>6} {'engine - bare, ms a step':>25}")
    for rows in args.rows:
        prompts = [prompt_of(args.prompt, i, vocab) for i in range(rows)]
        runs = {
            "bare": lambda prompts=prompts: bare(model, prompts, args.steps),
            "engine": lambda rows=rows: engine([args.prompt] * rows),
        }
        alternate(1, runs)  # kernels compile, memory is touched
        seen = alternate(args.rounds, runs)
        ratio, more = seen["bare"] / seen["engine"], 1000 * (seen["engine"] - seen["bare"])
        say(f"{rows:5} {rows / seen['bare']:11.1f} {rows / seen['engine']:13.1f} {ratio:6.3f} {more:25.2f}")


if __name__ == "__main__":
    main()
