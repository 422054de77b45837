"""Starts the conversion of a GGUF file in a process of its own and follows it.

Imports nothing heavy: a worker that finds the converted model there pays nothing for this.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.cache import cached_directory, is_complete

OnProgress = Callable[[int, int], None]  # bytes of the GGUF done, and in all (0: not known yet)

# The converter reports ten times a second; building a large vocabulary is its longest silence.
SILENCE_S = 180.0


def ensure_converted(
    src: Path, dtype: str, cache_dir: Path, on_progress: OnProgress, *, keep_quantised: bool = False
) -> Path:
    """The model directory of GGUF file `src` in `dtype`, converted now if it is not cached yet. With
    `keep_quantised`, tensors that MLX has a layout for stay quantised.

    Blocks for as long as the conversion takes; `on_progress` is called about ten times a second, and the
    conversion is killed when it raises. Raises ModelError with the converter's code: bad_model,
    unsupported_architecture, unsupported_quantisation, unsupported_tokenizer, cannot_write, or
    conversion_failed.
    """
    directory = cached_directory(src, dtype, cache_dir, keep_quantised=keep_quantised)
    if is_complete(directory):
        return directory
    command = [sys.executable, "-I", "-m", "mlxhost.worker.gguf", "convert", str(src), str(directory)]
    command += ["--dtype", dtype, *(["--keep-quantised"] if keep_quantised else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            for message in _messages(process, src):
                if "phase" in message:
                    on_progress(message["done"], message["total"])
                elif "error" in message:
                    raise ModelError(message["error"], message["message"])
                elif "directory" in message:
                    return directory
            status = process.wait(timeout=10)
        finally:
            process.kill()
    raise ModelError("conversion_failed", f"{src}: the conversion ended without a result ({_ending(status)})")


def _messages(process: subprocess.Popen[bytes], src: Path) -> Iterator[dict[str, Any]]:
    """The converter's lines until it closes its stdout. Raises ModelError when it falls silent."""
    assert process.stdout is not None
    fd = process.stdout.fileno()
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        heard = time.monotonic()
        while True:
            if not selector.select(timeout=max(0.0, heard + SILENCE_S - time.monotonic())):
                raise ModelError(
                    "conversion_failed", f"{src}: the conversion said nothing for {SILENCE_S:.0f} s"
                )
            block = os.read(fd, 65536)
            if not block:
                return
            heard = time.monotonic()
            *lines, pending = (pending + block).split(b"\n")
            yield from map(json.loads, lines)


def _ending(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
