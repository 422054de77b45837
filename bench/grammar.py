"""What constrained output costs, and what jumping over forced text gains.

PYTHONPATH=tests python bench/grammar.py rate MODEL_DIR     decode tokens/s at B = 1 and 8, with and without
PYTHONPATH=tests python bench/grammar.py memory             PSS at first use with a 262k vocabulary
PYTHONPATH=tests python bench/grammar.py compile MODEL_DIR  seconds to compile, first and later

`rate` runs the engine in this process: free rows, rows under a nested schema, and the same with jumps over
forced text, in turns. It prints medians of each and of the ratios within a turn.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

SCHEMA = {
    "type": "object",
    "properties": {
        "orders": {
            "type": "array",
            "minItems": 40,
            "items": {
                "type": "object",
                "properties": {
                    "order_number": {"type": "integer"},
                    "customer": {
                        "type": "object",
                        "properties": {
                            "first_name": {"type": "string", "maxLength": 12},
                            "last_name": {"type": "string", "maxLength": 12},
                            "is_returning_customer": {"type": "boolean"},
                        },
                        "required": ["first_name", "last_name", "is_returning_customer"],
                    },
                    "status": {"enum": ["waiting for payment", "shipped", "delivered", "returned"]},
                },
                "required": ["order_number", "customer", "status"],
            },
        }
    },
    "required": ["orders"],
}
PROMPT = list(range(1000, 1064))
_VOCABULARY = 262_144
# What the supervisor sets for every worker.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("rate", "compile"):
        command = commands.add_parser(name)
        command.add_argument("model", type=Path)
        command.add_argument("--turns", type=int, default=5)
        command.add_argument("--tokens", type=int, default=64)
        command.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    commands.add_parser("memory")
    args = parser.parse_args()
    if args.command == "rate":
        rate(args.model, args.turns, args.tokens, args.rows)
    elif args.command == "compile":
        compile_times(args.model)
    else:
        memory()


def rate(model: Path, turns: int, tokens: int, row_counts: list[int]) -> None:
    """Free and constrained rows in turns."""
    from support.engine_driver import Driver

    from mlxhost.wire.data import Grammar
    from mlxhost.worker.backend import cores, detect
    from mlxhost.worker.card import model_card
    from mlxhost.worker.models.load import load_model

    backend = detect()
    if backend.blas is not None:
        backend.blas.set_threads(cores())
    loaded = load_model(model, backend.dtype, expand_quantised=True, on_progress=lambda *_: None)
    driver = Driver(loaded.model, loaded.vocab_size, model_card(model).eos_ids, grammars_of=model)
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    decoded_rate(driver, 1, 8, grammar)  # compiled and warm
    sys.stdout.write(
        "| rows | free tok/s | constrained | ratio | jumping | gain |\n|---|---|---|---|---|---|\n"
    )
    for rows in row_counts:
        turned = []
        for _ in range(turns):
            turn = [decoded_rate(driver, rows, tokens, None)]
            for jumps in (False, True):
                driver.engine.batch.jumps = jumps
                turn.append(decoded_rate(driver, rows, tokens, grammar))
            turned.append(turn)
        free, constrained, jumping = (statistics.median(column) for column in zip(*turned, strict=True))
        ratio = statistics.median(c / f for f, c, _ in turned)
        gain = statistics.median(j / c for _, c, j in turned)
        sys.stdout.write(
            f"| {rows} | {free:.1f} | {constrained:.1f} | {ratio:.3f} | {jumping:.1f} | {gain:.2f} |\n"
        )
        sys.stdout.flush()
    driver.grammars.close()


def decoded_rate(driver: Any, rows: int, tokens: int, grammar: Any) -> float:
    """Tokens a second from when all rows decode until each has `tokens` more."""
    from mlxhost.wire.data import Sampling

    driver.results.clear()
    handles = range(rows)
    for handle in handles:
        sampling = Sampling(temperature=1.0, seed=handle)
        limits = {"ignore_eos": True}
        driver.add(handle, PROMPT, tokens * 3, grammar=grammar, sampling=sampling, limits=limits)

    def produced() -> list[int]:
        return [len(driver.results[handle].tokens) for handle in handles]

    while min(produced()) < 4:
        driver.tick()
    before, started = sum(produced()), time.perf_counter()
    goal = [n + tokens for n in produced()]
    while any(n < g for n, g in zip(produced(), goal, strict=True)):
        driver.tick()
    measured = (sum(produced()) - before) / (time.perf_counter() - started)
    driver.abort(*handles)
    driver.tick(2)
    return measured


def compile_times(model: Path) -> None:
    """Seconds from asking to having, of the first grammar (processes start) and of others."""
    from queue import SimpleQueue

    from mlxhost.worker.card import model_card
    from mlxhost.worker.grammar.compiler import Compiler, tokenizer_of

    card = model_card(model)
    with tempfile.TemporaryDirectory() as directory:
        done: SimpleQueue[object] = SimpleQueue()
        compiler = Compiler(
            tokenizer_of(card, Path(directory), card.vocab_size), lambda key, outcome: done.put(outcome)
        )
        for label, kind, value in (
            ("first, the vocabulary built", "json_object", ""),
            ("nested schema", "json_schema", json.dumps(SCHEMA)),
            ("regex", "regex", r"[A-Z][a-z]+ \d{4}-\d{2}-\d{2}"),
        ):
            started = time.perf_counter()
            if compiler.ask((kind, value)) is None:
                done.get(timeout=60)
            sys.stdout.write(f"{label}: {time.perf_counter() - started:.3f} s\n")
        compiler.close()


def memory() -> None:
    """In a fresh process that holds what a worker holds: PSS before and after its first grammar."""
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), _VOCABULARY)
        os.environ.update(ALLOCATOR)
        process = multiprocessing.get_context("spawn").Process(target=first_use, args=(Path(directory),))
        process.start()
        process.join()


def first_use(directory: Path) -> None:
    """PSS of this process, and of the compiler process while it lives."""
    from queue import SimpleQueue

    import mlx.core as mx

    from mlxhost.wire.data import Grammar
    from mlxhost.worker.card import model_card
    from mlxhost.worker.events import Event
    from mlxhost.worker.grammar.waiting import Grammars

    for module in ("zmq", "mlxhost.worker.stepper", "mlxhost.worker.link"):  # what a worker holds anyway
        importlib.import_module(module)
    mx.eval(mx.zeros(1))
    me = psutil.Process()
    for use in ("first", "with the vocabulary in its file"):
        inbox: SimpleQueue[Event] = SimpleQueue()
        grammars = Grammars(inbox.put, directory)
        grammars.use(model_card(directory), _VOCABULARY)
        before = me.memory_full_info().pss
        rows = [_row(Grammar("json_schema", json.dumps(SCHEMA))), _row(Grammar("json_object"))]
        started = time.perf_counter()
        for row in rows:
            grammars.hold(row)
        helper = 0
        while len(grammars):
            grammars.take(inbox.get(timeout=120))
            helper = max(helper, sum(c.memory_full_info().pss for c in me.children()))
        from mlxhost.worker.grammar.masks import allowed_tokens

        mx.eval(allowed_tokens(rows, {}, _VOCABULARY))
        after = me.memory_full_info().pss
        sys.stdout.write(
            f"{use}: {time.perf_counter() - started:.1f} s for two grammars, the worker holds "
            f"{(after - before) / 1e6:.1f} MB more, its compiler processes {helper / 1e6:.1f} MB until idle\n"
        )
        sys.stdout.flush()
        if use == "first":  # only a fresh process tells what first use costs
            grammars.close()


def _row(grammar: Any) -> Any:
    from mlxhost.wire.data import Add, Limits
    from mlxhost.worker.row import Row

    return Row.of("f", Add(1, 1, "r", limits=Limits(5), grammar=grammar), [1], [0], 5, 0.0)


def write_tokenizer(directory: Path, size: int) -> None:
    """A byte-level tokenizer of `size` made-up words, and the config that goes with it."""
    draw = random.Random(1)
    letters, weights = "etaoinshrdlucmfwypvbgkjqxz", [12, 9, 8, 7, 7, 7, 6, 6, 6, 4, 4, *[2] * 15]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    tokens = dict.fromkeys(["<end>", *alphabet])
    while len(tokens) < size:
        word = "".join(draw.choices(letters, weights, k=draw.randint(2, 10)))
        kind = draw.random()
        if kind < 0.45:
            word = "\u0120" + word
        elif kind < 0.6:
            word = word.capitalize()
        elif kind < 0.7:
            word = "".join(draw.choices('"{}[]:,.()=<>/-_;0123456789\u010a\u0120', k=draw.randint(2, 6)))
        elif kind < 0.8:
            word = "".join(draw.choices(alphabet, k=draw.randint(2, 4)))
        tokens[word] = None
    vocabulary = {token: i for i, token in enumerate(tokens)}
    added = [{"id": 0, "content": "<end>", "special": True}]
    file = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        "added_tokens": added,
        "decoder": {"type": "ByteLevel"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(file))
    config = {"model_type": "llama", "vocab_size": size, "eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
