"""What a swap costs: first token of a model that another one must make room for, against a bare load.

python bench/swap.py --models MODEL_A MODEL_B [--rounds 5]

One fleet with room for one model. Rounds are interleaved: a load into empty memory (nothing is resident),
then a swap (the other one is resident and idle), each from the request to its first token; medians and their
ratio at the end. A swap is a load and, before it: drain, flush, exit, memory seen to be free.
"""

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

MLXHOST = Path(sys.executable).with_name("mlxhost")
START_S = 120.0


def started(home: str, models: list[str], log: Path) -> tuple["subprocess.Popen[bytes]", str]:
    """A fleet that holds one of `models` at a time, none at first; its process and its address."""
    named = ",".join(f"{name}={path}" for name, path in zip("ab", models, strict=True))
    process = subprocess.Popen(
        [MLXHOST, "up", "--models", named, "--port", "0", "--max-resident", "1", "--preload", "none"],
        env=os.environ | {"MLXHOST_HOME": home},
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
    )
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"Serving on (http://\S+)", log.read_text()):
            return process, found[1]
        time.sleep(0.1)
    process.kill()
    raise SystemExit(f"the fleet did not start:\n{log.read_text()}")


def first_token_s(url: str, model: str) -> float:
    """Seconds from sending a streaming request to its first token."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 2, "stream": True, "ignore_eos": True}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{model}: {response.status} {response.read().decode()}")
    for line in response:
        if line.startswith(b"data: {"):
            took = time.perf_counter() - began
            response.read()
            connection.close()
            return took
    raise SystemExit(f"{model}: no token came")


def unload(home: str, model: str) -> None:
    """Leave nothing resident."""
    subprocess.run(
        [MLXHOST, "ctl", "unload", model, "--until-needed"],
        env=os.environ | {"MLXHOST_HOME": home},
        check=True,
        capture_output=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs=2, required=True, metavar=("A", "B"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    bare: dict[str, list[float]] = {"a": [], "b": []}
    swap: dict[str, list[float]] = {"a": [], "b": []}
    with tempfile.TemporaryDirectory(prefix="mlxhost-swap-") as home:
        process, url = started(home, args.models, Path(home) / "log")
        try:
            for _ in range(args.rounds):
                for model, other in (("a", "b"), ("b", "a")):
                    bare[other].append(first_token_s(url, other))  # into empty memory
                    time.sleep(1.0)  # it is idle now, as a model that makes room is
                    swap[model].append(first_token_s(url, model))
                    unload(home, model)
        finally:
            process.terminate()
            process.wait(60)
    for model in "ab":
        alone, swapped = statistics.median(bare[model]), statistics.median(swap[model])
        figures = f"bare load {alone:.2f} s, swap {swapped:.2f} s, ratio {swapped / alone:.2f}"
        sys.stdout.write(f"{model}: {figures}\n")


if __name__ == "__main__":
    main()
