"""What a worker's process holds above its weights, as the kernel counts it.

python bench/memory.py MODEL

MODEL is anything that `mlxhost up --models` takes. Prints PSS minus weights at READY, after a 4,000-token
prefill, and one second after 16 concurrent streams that follow it.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
from load import load

MLXHOST = Path(sys.executable).with_name("mlxhost")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    args = parser.parse_args()
    fleet = subprocess.Popen(
        [MLXHOST, "up", "--models", f"m={args.model}", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert fleet.stdout is not None
        url = next(line for line in fleet.stdout if "Serving on " in line).split("Serving on ")[1].split()[0]
        status = json.loads(subprocess.check_output([MLXHOST, "ctl", "status", "--json"]))
        replica = status["models"][0]["replicas"][0]
        process, weights = psutil.Process(replica["pid"]), replica["weights_bytes"]

        def above() -> str:
            return f"{(process.memory_full_info().pss - weights) / 1e6:.1f} MB"

        sys.stdout.write(f"weights {weights / 1e6:.0f} MB\nat READY: weights + {above()}\n")
        asyncio.run(load(url, ["m"], 1, 4000, 2))
        sys.stdout.write(f"right after a 4k prefill: weights + {above()}\n")
        asyncio.run(load(url, ["m"], 16, 20, 16))
        time.sleep(1)
        sys.stdout.write(f"1 s after 16 streams: weights + {above()}\n")
    finally:
        fleet.terminate()
        fleet.communicate()


if __name__ == "__main__":
    main()
