"""`python -I -m mlxhost.worker.gguf convert SRC.gguf DEST_DIR --dtype float32|bfloat16|float16
[--keep-quantised]`.

Prints JSON lines: {"phase": "converting", "done": bytes, "total": bytes} at most ten a second, then
{"directory": ...} and exit 0, or {"error": code, "message": ...} and exit 1. When stdin is a pipe, its end
means that the parent is gone, and the process goes too.
"""

import argparse
import json
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mlxhost.wire.sockets import process_dies_with_parent
from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.cache import DTYPES
from mlxhost.worker.gguf.convert import convert

REPORT_EVERY_S = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mlxhost.worker.gguf")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("convert", help="convert a GGUF file into a model directory")
    command.add_argument("source", type=Path)
    command.add_argument("directory", type=Path)
    command.add_argument("--dtype", choices=DTYPES, required=True)
    command.add_argument("--keep-quantised", action="store_true", help="where MLX has a layout for it")
    arguments = parser.parse_args()
    _follow_parent()
    try:
        convert(
            arguments.source,
            arguments.directory,
            arguments.dtype,
            _Progress(),
            keep_quantised=arguments.keep_quantised,
        )
    except ModelError as error:
        _say({"error": error.code, "message": str(error)})
        return 1
    except MemoryError:
        _say(
            {"error": "conversion_failed", "message": f"{arguments.source}: not enough memory to convert it"}
        )
        return 1
    _say({"directory": str(arguments.directory)})
    return 0


class _Progress:
    def __init__(self) -> None:
        self.due = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self.due or (done == total and total):
            self.due = now + REPORT_EVERY_S
            _say({"phase": "converting", "done": done, "total": total})


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _follow_parent() -> None:
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return
    process_dies_with_parent()
    threading.Thread(target=_die_at_end_of_stdin, daemon=True).start()


def _die_at_end_of_stdin() -> None:
    while os.read(0, 64):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
