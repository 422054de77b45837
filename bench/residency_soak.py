"""Five models in a budget for two under mixed load, for as long as asked: does anything break, leak or hang?

python bench/residency_soak.py --minutes 30 --workers fake
python bench/residency_soak.py --minutes 30 --workers real

Clients ask for models at random, some far more often than others, for streams and whole answers, short and
long; some hang up in the middle, now and then a worker is killed. Checked all the time: what is charged stays
within the budget, no more models are resident than fit, no process is there that the fleet does not list. At
the end: every request had exactly one outcome, and one that is allowed; no process is left; supervisor and
frontend hold no more open files than before. Exit 1 when one of these fails.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.supervisor_up import Up, marked, mlxhost
from support.tiny_models import FAMILIES, build

NAMES = "abcde"
WEIGHTS = (8, 5, 3, 2, 1)  # how often each is asked for
REAL_WORKER = [sys.executable, "-I", "-m", "mlxhost.worker"]
FAKE = {"load_s": 0.3, "step_ms": 5, "length": 100_000, "max_queued": 256, "resident_bytes": 51_000_000}
RULES = {"min_resident_s": 3.0, "idle_s": 0.3, "patience_s": 1.0}
HANGS_S = 180.0  # a request that takes longer hangs
CHECK_S = 1.0
KILL_S = 20.0
# Outcomes that a client may meet; `cut` is its own doing.
FINE = frozenset({"200", "cut", "429", "503 worker_lost", "stream worker_lost"})


@dataclass
class Tally:
    """What the clients met. One entry in `outcomes` for each request."""

    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        with self.lock:
            self.sent += 1

    def end(self, outcome: str, seconds: float) -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            self.seconds.append(seconds)


class Client(threading.Thread):
    """One request after the other until `over`."""

    def __init__(self, url: str, seed: int, tally: Tally, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._host, self._random, self._tally, self._over = (
            urlsplit(url).netloc,
            random.Random(seed),
            tally,
            over,
        )

    def run(self) -> None:
        while not self._over.is_set():
            self._tally.begin()
            began = time.monotonic()
            try:
                outcome = self._request()
            except TimeoutError:
                outcome = "hangs"
            except (OSError, http.client.HTTPException) as error:
                outcome = f"broken {type(error).__name__}"
            self._tally.end(outcome, time.monotonic() - began)
            time.sleep(self._random.expovariate(4))

    def _request(self) -> str:
        pick = self._random
        stream = pick.random() < 0.6
        cut_after = pick.randrange(1, 6) if stream and pick.random() < 0.15 else 0
        body = {
            "model": pick.choices(NAMES, WEIGHTS)[0],
            "prompt": [pick.randrange(40, 90) for _ in range(pick.choice((4, 30, 200)))],
            "max_tokens": pick.choice((1, 8, 40, 120)),
            "stream": stream,
            "ignore_eos": True,
        }
        connection = http.client.HTTPConnection(self._host, timeout=HANGS_S)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if not stream or response.status != 200:
                answer = json.loads(response.read())
                if response.status in (200, 429):
                    return str(response.status)
                return f"{response.status} {answer['error']['code']}"
            return self._read(response, cut_after)

    def _read(self, response: http.client.HTTPResponse, cut_after: int) -> str:
        """The outcome of a stream: exactly one [DONE] or one error ends it."""
        events = ends = 0
        outcome = "stream without an end"
        for line in response:
            if not line.startswith(b"data: "):
                continue
            events += 1
            if line.startswith(b"data: [DONE]"):
                ends, outcome = ends + 1, "200"
            elif b'"error"' in line:
                ends, outcome = ends + 1, f"stream {json.loads(line[6:])['error']['code']}"
            elif events == cut_after:
                return "cut"
        return outcome if ends <= 1 else f"{ends} ends"


class Watch:
    """Looks at the fleet again and again."""

    def __init__(self, up: Up, budget: int) -> None:
        self._up, self._budget = up, budget
        self.faults: Counter[str] = Counter()
        self._strangers: set[int] = set()
        self.most_charged = self.most_resident = self.most_memory = 0
        self.fds: dict[str, list[int]] = {"supervisor": [], "frontend": []}
        self.memory: dict[str, list[int]] = {"supervisor": [], "frontend": []}

    def look(self) -> None:
        status = self._up.status()
        where = status["residency"]
        there = sum(m["phase"] not in ("absent", "out") for m in where["models"].values())
        self.most_charged = max(self.most_charged, where["charged_bytes"])
        self.most_resident = max(self.most_resident, there)
        if where["charged_bytes"] > self._budget:
            self.faults["over the budget"] += 1
        replicas = [r for m in status["models"] for r in m["replicas"]]
        workers = {r["pid"] for r in replicas if r["pid"]}
        self.most_memory = max(self.most_memory, sum(r["memory_bytes"] for r in replicas if r["pid"]))
        if where["resident"] > 2:
            self.faults["more than two models resident"] += 1
        frontend = status["frontends"][0]["pid"]
        listed = workers | {frontend, self._up.process.pid}
        strangers = {p.pid for p in self._up.descendants()} - listed
        # One that was spawned, or has ended, since the status was asked for is no stranger the second time.
        if strangers & self._strangers:
            self.faults["processes that the fleet does not list"] += 1
        self._strangers = strangers
        for name, pid in (("supervisor", self._up.process.pid), ("frontend", frontend)):
            with contextlib.suppress(psutil.Error, TypeError):
                process = psutil.Process(pid)
                self.fds[name].append(process.num_fds())
                self.memory[name].append(process.memory_info().rss)

    def growth(self, series: list[int]) -> tuple[float, float]:
        """Medians of the second and the last quarter: the first one warms up."""
        quarter = max(1, len(series) // 4)
        return statistics.median(series[quarter : 2 * quarter] or series), statistics.median(
            series[-quarter:]
        )


def kill_one(up: Up, pick: random.Random) -> None:
    """SIGKILL a worker that serves."""
    replicas = [r for m in up.status()["models"] for r in m["replicas"] if r["state"] == "ready" and r["pid"]]
    if replicas:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pick.choice(replicas)["pid"], signal.SIGKILL)


def need_of(home: Path, spec: str, **more: Any) -> int:
    """Bytes that the largest of the models needs, as the supervisor estimates it."""
    with Up(home, spec, "--preload", "none", **more) as up:
        up.url(60)
        needs = [m["need_bytes"] for m in up.status()["residency"]["models"].values()]
        up.signal(signal.SIGTERM)
        up.exit_code(30)
    return int(max(needs))


def soak(args: argparse.Namespace, home: Path) -> int:
    pick = random.Random(args.seed)
    families = list(FAMILIES)[:3]
    paths = [build(families[i % 3], home / f"tiny-{name}", seed=i) for i, name in enumerate(NAMES)]
    spec = ",".join(f"{name}={path}" for name, path in zip(NAMES, paths, strict=True))
    more: dict[str, Any] = {"timing": RULES}
    more |= {"worker_command": REAL_WORKER} if args.workers == "real" else {"script": FAKE}
    budget = int(2.4 * need_of(home, spec, **more))
    tally, over = Tally(), threading.Event()
    options = ("--budget", str(budget), "--log-level", "warning")
    with Up(home, spec, *options, **more) as up:
        url = up.url(120)
        clients = [Client(url, args.seed + i, tally, over) for i in range(args.clients)]
        for client in clients:
            client.start()
        watch, end = Watch(up, budget), time.monotonic() + 60 * args.minutes
        next_kill = time.monotonic() + KILL_S
        while time.monotonic() < end and up.process.poll() is None:
            watch.look()
            if time.monotonic() >= next_kill:
                kill_one(up, pick)
                next_kill = time.monotonic() + KILL_S
            time.sleep(CHECK_S)
        over.set()
        for client in clients:
            client.join(HANGS_S + 10)
        watch.look()
        told = json.loads(mlxhost(home, "ctl", "explain", "--json").stdout)["decisions"]
        done = Counter(a["do"] for d in read_decisions(home) for a in d["actions"])
        up.signal(signal.SIGTERM)
        code = up.exit_code(60)
        left = marked(up.env["MLXHOST_TEST_FLEET"])
    return report(args, tally, watch, done, budget, code, len(left), bool(told))


def read_decisions(home: Path) -> list[dict[str, Any]]:
    """All decisions of the run that the log still has."""
    files = [home / "decisions.jsonl.1", home / "decisions.jsonl"]
    return [json.loads(line) for f in files if f.exists() for line in f.read_text().splitlines()]


def report(
    args: argparse.Namespace,
    tally: Tally,
    watch: Watch,
    done: Counter[str],
    budget: int,
    code: int,
    left: int,
    logged: bool,
) -> int:
    """Print the figures; 1 when something is wrong."""
    faults = dict(watch.faults)
    if bad := {o: n for o, n in tally.outcomes.items() if o not in FINE}:
        faults["outcomes"] = sum(bad.values())
    if tally.sent != sum(tally.outcomes.values()):
        faults["requests without an outcome"] = tally.sent - sum(tally.outcomes.values())
    if code or left or not logged:
        faults["the end"] = 1
    lines = [
        f"{args.minutes:g} min, {args.workers} workers, {args.clients} clients, budget {budget / 1e6:.0f} MB",
        f"requests {tally.sent}, outcomes {dict(tally.outcomes.most_common())}",
        f"seconds a request: median {statistics.median(tally.seconds):.2f}, "
        f"p95 {sorted(tally.seconds)[int(0.95 * len(tally.seconds))]:.2f}, most {max(tally.seconds):.2f}",
        f"decisions {dict(done.most_common())}",
        f"most charged {watch.most_charged / 1e6:.0f} MB, most models with a process {watch.most_resident}, "
        f"workers' memory at most {watch.most_memory / 1e6:.0f} MB",
    ]
    for name in ("supervisor", "frontend"):
        files, memory = watch.growth(watch.fds[name]), watch.growth(watch.memory[name])
        grown = f"{memory[0] / 1e6:.0f} -> {memory[1] / 1e6:.0f} MB"
        lines.append(f"{name}: open files {files[0]:.0f} -> {files[1]:.0f}, {grown}")
        if files[1] > files[0] * 1.2 + 10:
            faults[f"{name}: files grow"] = int(files[1] - files[0])
    lines.append(f"exit code {code}, processes left {left}")
    lines.append(f"FAULTS {faults}" if faults else "no fault")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", choices=("fake", "real"), default="fake")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxh-", ignore_cleanup_errors=True) as home:
        return soak(args, Path(home))


if __name__ == "__main__":
    sys.exit(main())
