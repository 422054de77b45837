"""Converts one GGUF file into a model directory, once, whoever asks and however often.

The directory appears by a rename when everything is on disk, so a torn conversion is never used. One
process at a time converts (flock); the others wait, show its progress and use the result.
"""

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.architectures import plan
from mlxhost.worker.gguf.cache import is_complete, lock_path, partial_path
from mlxhost.worker.gguf.header import read_header
from mlxhost.worker.gguf.quantisation import quantisation
from mlxhost.worker.gguf.tensors import check_supported
from mlxhost.worker.gguf.tokenizer import tokenizer_files
from mlxhost.worker.gguf.weights import outputs, write_weights

Report = Callable[[int, int], None]  # bytes of the GGUF's tensors done, and in all (0: not known yet)

WAIT_STEP_S = 0.2
# A holder that shows no progress for so long is stuck (stopped, or its disk hangs).
STUCK_S = 300.0
SPARE_BYTES = 64 << 20  # tokenizer, config, and not to fill the disk to the last byte


def convert(
    source: Path, directory: Path, dtype: str, report: Report, *, keep_quantised: bool = False
) -> None:
    """Make `directory` hold `source` in `dtype`, or quantised as it is where `keep_quantised` and MLX has
    such a layout; return at once when it does already.

    `report` is called often, at least once a WAIT_STEP_S while waiting. Raises ModelError.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(directory, report) as note:
            if not is_complete(directory):
                _convert(source, directory, dtype, keep_quantised, note)
    except OSError as error:
        raise _cannot_write(directory, error) from None


def _convert(source: Path, directory: Path, dtype: str, keep_quantised: bool, report: Report) -> None:
    header = read_header(source)
    planned = plan(header)
    check_supported(header, (tensor.source for tensor in planned.tensors if tensor.source))
    context = int(planned.config["max_position_embeddings"])
    files = tokenizer_files(header.metadata, planned.vocabulary, context)
    written = outputs(planned.tensors, dtype, keep_quantised=keep_quantised)
    config = {**planned.config, **files.generation_config, "torch_dtype": dtype}
    if settings := quantisation(written):
        config["quantization"] = settings
    partial = partial_path(directory)
    if partial.exists():
        shutil.rmtree(partial)
    _check_room(directory.parent, sum(output.nbytes for output in written))
    partial.mkdir(mode=0o700)
    try:
        write_weights(source, written, partial, dtype, report)
        (partial / "tokenizer.json").write_text(files.tokenizer, encoding="utf-8")
        _write_json(partial / "tokenizer_config.json", files.tokenizer_config)
        _write_json(partial / "generation_config.json", files.generation_config)
        _write_json(partial / "config.json", config)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(directory)
        _sync(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _locked(directory: Path, report: Report) -> Iterator[Report]:
    """Hold the lock of `directory`. Yields `report`, made to tell those who wait as well."""
    lock = os.open(lock_path(directory), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait_for(lock, directory, report)

        def note(done: int, total: int) -> None:
            os.pwrite(lock, b"%020d %020d\n" % (done, total), 0)
            report(done, total)

        note(0, 0)
        yield note
    finally:
        os.close(lock)


def _wait_for(lock: int, directory: Path, report: Report) -> None:
    seen = b""
    changed = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        current = os.pread(lock, 64, 0)
        now = time.monotonic()
        if current != seen:
            seen, changed = current, now
        elif now - changed > STUCK_S:
            raise ModelError(
                "conversion_failed",
                f"another process has held {lock_path(directory)} for {STUCK_S:.0f} s without progress; "
                "end it and try again",
            )
        parts = current.split()
        report(*map(int, parts)) if len(parts) == 2 else report(0, 0)
        time.sleep(WAIT_STEP_S)


def _check_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed + SPARE_BYTES:
        raise ModelError(
            "cannot_write",
            f"{directory}: the converted model needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; "
            "make room, or set MLXHOST_HOME to a folder on a larger disk",
        )


def _cannot_write(directory: Path, error: OSError) -> ModelError:
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        reason = "the disk is full; make room, or set MLXHOST_HOME to a folder on a larger disk"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        reason += "; set MLXHOST_HOME to a folder that can be written"
    return ModelError("cannot_write", f"{error.filename or directory}: {reason}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
