"""Card files of models whose directory is not on this machine: fetched once, kept by content.

cache/cards/<sha256>    a file, checked before it gets that name
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from mlxhost.frontend import logs
from mlxhost.frontend.errors import CardError
from mlxhost.wire.control import CardFile, ModelCard, Reply

OPERATION = "card_file"
CALL_S = 20.0  # for one piece of a file
MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_FILES = 16

# (operation, arguments, deadline in seconds) -> reply, or TimeoutError
Call = Callable[[str, dict[str, Any], float], Awaitable[Reply]]


def file_name(directory: Path, sha256: str) -> Path:
    """Where a file of that content is kept. Raises CardError for what is no SHA-256 in hex."""
    if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
        raise CardError(f"{sha256!r} in a model card is not a SHA-256")
    return directory / sha256


def read_regular(path: Path) -> bytes:
    """The content of a file. Raises OSError, also for what is no regular file: a path that another machine
    names may be anything here, and a device never ends."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise OSError(errno.EINVAL, "not a file that belongs to a model")
        return file.read()


def matches(path: Path, sha256: str) -> bytes | None:
    """The content of `path` if it is the one wanted."""
    try:
        data = read_regular(path)
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == sha256 else None


class CardStore:
    """Makes sure that every file of a card can be read on this machine."""

    def __init__(self, directory: Path, executor: Executor, call: Call) -> None:
        self.directory = directory
        self._executor, self._call = executor, call

    async def ensure(self, card: ModelCard) -> None:
        """Fetch what neither the card's directory nor the store has. Raises CardError."""
        if len(card.files) > MAX_FILES:
            raise CardError(f"a model card lists {len(card.files)} files; at most {MAX_FILES} are read")
        loop = asyncio.get_running_loop()
        for file in await loop.run_in_executor(self._executor, self._missing, card):
            data = await self._fetch(file)
            await loop.run_in_executor(self._executor, self._keep, file, data)
            logs.info("card_file_fetched", file=file.name, bytes=len(data))

    def _missing(self, card: ModelCard) -> list[CardFile]:
        return [
            file
            for file in card.files
            if matches(Path(card.directory) / file.name, file.sha256) is None
            and matches(file_name(self.directory, file.sha256), file.sha256) is None
        ]

    async def _fetch(self, file: CardFile) -> bytes:
        if file.size > MAX_FILE_BYTES:
            raise CardError(f"{file.name} has {file.size} bytes; at most {MAX_FILE_BYTES} are fetched")
        data = bytearray()
        while len(data) < file.size:
            args = {"sha256": file.sha256, "offset": len(data)}
            try:
                reply = await self._call(OPERATION, args, CALL_S)
            except TimeoutError:
                raise CardError(f"{file.name} could not be fetched: no answer in {CALL_S:.0f} s") from None
            piece = reply.result.get("data")
            if reply.code != "ok" or not isinstance(piece, bytes) or not piece:
                raise CardError(f"{file.name} could not be fetched: {reply.message or 'nothing came'}")
            data += piece
        if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
            raise CardError(f"{file.name} came with other content than its model card says")
        return bytes(data)

    def _keep(self, file: CardFile, data: bytes) -> None:
        path = file_name(self.directory, file.sha256)
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.write_bytes(data)
            os.replace(fresh, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise CardError(f"{path}: {error.strerror}") from None
