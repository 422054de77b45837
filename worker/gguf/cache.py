"""Where a converted model is kept, by name alone: no file is read. Imports nothing heavy."""

import hashlib
import re
from pathlib import Path

from mlxhost.worker.errors import ModelError

CONVERTER_VERSION = 1  # raise it when the output for the same file changes
DTYPES = ("float32", "bfloat16", "float16")


def cached_directory(src: Path, dtype: str, cache_dir: Path, *, keep_quantised: bool = False) -> Path:
    """The directory that holds, or will hold, `src` converted to `dtype`, its quantised tensors kept so or
    not.

    Named after the file and a hash of (resolved path, size, modification time, converter version), so a
    file that changed gets a new one. Raises ModelError when `src` cannot be looked at.
    """
    try:
        resolved = src.resolve(strict=True)
        stat = resolved.stat()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError("bad_model", f"{src}: {reason}") from None
    key = f"{resolved}\0{stat.st_size}\0{stat.st_mtime_ns}\0{CONVERTER_VERSION}"
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:10]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", src.stem).strip(".-")[:80] or "model"
    form = f"{dtype}-quantised" if keep_quantised else dtype
    return cache_dir / f"{stem}-{form}-{digest}"


def is_complete(directory: Path) -> bool:
    """Whether a finished conversion is there. The rename into place is the last step, so its presence is
    the proof."""
    return (directory / "config.json").is_file()


def lock_path(directory: Path) -> Path:
    """Held with flock while the conversion runs; its content is the holder's progress, for those who wait."""
    return directory.with_name(directory.name + ".lock")


def partial_path(directory: Path) -> Path:
    """Where the holder of the lock builds the directory. A leftover is what a killed conversion left."""
    return directory.with_name(directory.name + ".partial")
