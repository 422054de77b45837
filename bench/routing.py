"""What a routing decision costs, by policy and number of replicas; prompt hashing apart. CPU time, so that
a busy machine tells the same as an idle one.

python bench/routing.py
"""

import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from mlxhost.frontend.affinity import BLOCK_TOKENS, block_hashes
from mlxhost.frontend.hints import ANYWHERE, Hints
from mlxhost.frontend.replica import Replica
from mlxhost.frontend.router import Router
from mlxhost.frontend.routing import pick
from mlxhost.wire.control import Fleet, FleetFrontend, FleetModel, FleetReplica
from mlxhost.wire.data import Load
from mlxhost.wire.policies import ROUTINGS

SIZES = (1, 10, 100, 1000)
ROUNDS, CALLS = 9, 1000
REPORT = Load(3, 1, 5000, 100_000)
PROMPTS = [bytes(random.Random(n).randbytes(4 * BLOCK_TOKENS * 16)) for n in range(64)]  # 1,024 tokens each


def microseconds(work: Callable[[int], object]) -> float:
    """Median over rounds of the mean time of a call."""
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for n in range(CALLS):
            work(n)
        times.append((time.thread_time() - began) / CALLS * 1e6)
    return statistics.median(times)


def fleet(size: int, policy: str) -> tuple[Router, FleetModel, list[Replica]]:
    """A router over `size` busy replicas."""
    chance = random.Random(size)
    listed = [FleetReplica(f"m/{i}", i, 1, "ready", max_rows=64, max_queued=256) for i in range(size)]
    model = FleetModel("m", [], listed, policy)
    replicas = [Replica((f"m/{i}", 1), "m", connected=True) for i in range(size)]
    router = Router()
    router.update(Fleet(1, [FleetFrontend("frontend/0", 1, "x")], [model]), {r.key: r for r in replicas})
    for replica in replicas:
        replica.take_load(Load(chance.randint(1, 40), 0, chance.randint(0, 90_000), 100_000))
    return router, model, replicas


def row(name: str, figures: Sequence[float]) -> None:
    sys.stdout.write(f"{name:<44}" + "".join(f"{figure:>10.1f}" for figure in figures) + "\n")


def main() -> None:
    sys.stdout.write(
        f"microseconds of CPU a call, median of {ROUNDS} rounds of {CALLS} calls\n"
        f"{'replicas':<44}" + "".join(f"{size:>10,}" for size in SIZES) + "\n"
    )
    for policy in ROUTINGS[:3]:
        figures = []
        for size in SIZES:
            columns = fleet(size, policy)[0].columns("m")
            figures.append(microseconds(lambda n, c=columns, s=size, p=policy: pick(p, c, 0, s, n % s)))
        row(f"pick, {policy}", figures)
    for name, policy, hints in (
        *((policy, policy, ANYWHERE) for policy in ROUTINGS[:3]),
        ("prefix-affinity, known prefix", "prefix-affinity", ANYWHERE),
        ("a session", "least-in-flight", Hints(session="s")),
        ("a pinned replica", "least-in-flight", Hints(replica=0)),
        ("bootstrap-room", "bootstrap-room", Hints(room=12345)),
    ):
        figures = []
        for size in SIZES:
            router, model, _ = fleet(size, policy)
            # Choices of one request share the hashes of its prompt, so here only the first call hashes.
            prompt = PROMPTS[0]
            if chosen := router.choose(model, hints, prompt):
                router.sent(model, chosen, hints, prompt)
            figures.append(microseconds(lambda _, r=router, m=model, h=hints, p=prompt: r.choose(m, h, p)))
        row(f"decision, {name}", figures)
    figures = []
    for size in SIZES:
        router, model, replicas = fleet(size, "least-in-flight")

        def dispatch(n: int, r: Router = router, m: FleetModel = model) -> None:
            assert r.can_route(m, ANYWHERE)
            chosen = r.choose(m, ANYWHERE, b"")
            assert chosen is not None
            chosen.seq += 1
            chosen.add_pending(chosen.seq, 500)
            r.sent(m, chosen, ANYWHERE, b"")
            chosen.settle(chosen.seq)

        figures.append(microseconds(dispatch))
    row("a request's way in and out of the columns", figures)
    figures = []
    for size in SIZES:
        _, _, replicas = fleet(size, "least-in-flight")
        figures.append(microseconds(lambda n, r=replicas, s=size: r[n % s].take_load(REPORT)))
    row("a load report", figures)
    figures = []
    for size in SIZES:
        router, model, replicas = fleet(size, "least-in-flight")
        message, live = Fleet(1, [], [model]), {r.key: r for r in replicas}
        update = functools.partial(router.update, message, live)
        figures.append(statistics.median(_timed(update) for _ in range(ROUNDS)))
    row("a FLEET message", figures)
    router, model, replicas = fleet(1000, "prefix-affinity")
    sys.stdout.write("\nprompt hashing and remembering, microseconds a prompt\n")
    for tokens in (256, 1024, 8192, 65_536):
        prompts = [random.Random(n).randbytes(4 * tokens) for n in range(8)]
        hashing = statistics.median(_timed(lambda p=p: block_hashes(p)) for p in prompts * 3)
        for prompt in prompts:
            router.choose(model, ANYWHERE, prompt)  # hashes it
        remembering = statistics.median(
            _timed(lambda p=p: router.sent(model, replicas[0], ANYWHERE, p))
            - _timed(lambda p=p: block_hashes(p))
            for p in prompts * 3
        )
        sys.stdout.write(
            f"{tokens:>7,} tokens: hashing {hashing:>8.1f}   remembering {max(0.0, remembering):>8.1f}\n"
        )


def _timed(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return (time.thread_time() - began) * 1e6


if __name__ == "__main__":
    main()
