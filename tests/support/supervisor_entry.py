"""The real `mlxhost` command line, with fake workers and short intervals for `up` and `join`.

$MLXHOST_TEST_UP is a JSON object: `timing` holds fields of supervisor.settings.Timing, `worker_command`
replaces the fake worker.
"""

import json
import os
import sys
from pathlib import Path

from mlxhost.supervisor import cli
from mlxhost.supervisor.commands import join, up
from mlxhost.supervisor.settings import Timing

FAKE_WORKER = Path(__file__).parents[1] / "fakes" / "worker.py"

if __name__ == "__main__":
    wanted = json.loads(os.environ.get("MLXHOST_TEST_UP", "{}"))
    command = tuple(wanted.get("worker_command", (sys.executable, "-I", str(FAKE_WORKER))))
    timing = Timing(**wanted.get("timing", {}))
    up.run = lambda args: up.start(args, worker_command=command, timing=timing)
    join.run = lambda args: join.start(args, worker_command=command, timing=timing)
    sys.exit(cli.main())
