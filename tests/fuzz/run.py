"""Fuzzes the decoder and three live processes, reports what became of it, and fails on the first crash.

python tests/fuzz/run.py --frames 1000000

--frames go to the decoder, and as many again, in equal parts, to a worker's link, a frontend's data ROUTER
and a supervisor's control ROUTER. Every process must serve afterwards as it did before.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from fuzz.mutations import Fuzzer
from fuzz.targets import FrontendTarget, SupervisorTarget, Target, WorkerTarget

from mlxhost.wire.codec import decode
from mlxhost.wire.errors import DecodeError
from mlxhost.worker.models.architecture import install_seam

install_seam()  # before support.tiny_models imports an architecture of mlx-lm by itself


def fuzz_decode(count: int, seed: int) -> Counter[str]:
    """How many messages were decoded and refused. Any other exception is passed on."""
    fuzzer, outcomes = Fuzzer(seed), Counter[str]()
    for _ in range(count):
        try:
            decode(fuzzer.next())
        except DecodeError:
            outcomes["refused"] += 1
        else:
            outcomes["decoded"] += 1
    return outcomes


def fuzz_live(make: Callable[[], Target], count: int, seed: int) -> str:
    """A line about one live process. Raises AssertionError when it does not serve any more."""
    with make() as target:
        target.serves()
        before, start = target.memory(), time.monotonic()
        target.attack(Fuzzer(seed), count)
        target.settle()
        target.serves()
        seconds = time.monotonic() - start
        grown = (target.memory() - before) / 1e6
        counted = target.counted()
        assert counted
        return f"{target.name}: {count} messages in {seconds:.0f} s, memory {grown:+.1f} MB; {counted}"


def main() -> None:
    from support.tiny_models import build

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    start = time.monotonic()
    outcomes = fuzz_decode(args.frames, args.seed)
    _say(f"decode: {dict(outcomes)} in {time.monotonic() - start:.0f} s, no other exception")
    with tempfile.TemporaryDirectory(prefix="fz-") as directory:
        base = Path(directory)
        model = build("llama", base / "tiny-llama")
        for name in ("home", "run"):
            (base / name).mkdir()
        makers: list[Callable[[], Target]] = [
            lambda: WorkerTarget(model, base / "run"),
            FrontendTarget,
            lambda: SupervisorTarget(model, base / "home"),
        ]
        for make in makers:
            _say(fuzz_live(make, args.frames // len(makers), args.seed))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
