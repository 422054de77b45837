"""Sockets with the options that every mlxhost socket needs, and where ipc sockets live.

ROUTER_MANDATORY is on (an unknown peer is otherwise dropped in silence), LINGER and MAXMSGSIZE are bounded.
"""

import contextlib
import hashlib
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any, TypeVar

import zmq

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
HIGH_WATER_MARK = 1_000  # messages waiting for one peer, at each end
# OUTs waiting at a frontend from one worker: few, so that a worker notices soon and merges what waits.
OUT_HIGH_WATER_MARK = 64
MAX_FILES = 65_536
# sun_path holds 104 bytes on macOS and 108 on Linux, the closing NUL included.
MAX_IPC_PATH = 103

ContextT = TypeVar("ContextT", bound="zmq.Context[Any]")


# The index of a slot holds no colon, so what follows it cannot be taken for a part of the slot.
_IDENTITY = re.compile(r"(.*/[^/:]+):([0-9]{1,18})(?::[0-9]{1,18})?", re.DOTALL)


def identity(slot: str, epoch: int, connection: int = 0) -> bytes:
    """The socket identity of one spawn of a slot: an orphan can never answer for its successor.

    A peer that redials over TCP numbers its connections: a ROUTER silently ignores a second connection of
    an identity while it believes the first, long cut, to be alive.
    """
    return f"{slot}:{epoch}:{connection}".encode() if connection else f"{slot}:{epoch}".encode()


def parse_identity(raw: bytes) -> tuple[str, int] | None:
    """(slot, epoch), or None when `raw` is not such an identity (a ctl client's, for example)."""
    match = _IDENTITY.fullmatch(raw.decode("utf-8", "replace"))
    return (match[1], int(match[2])) if match else None


def ipc_endpoint(directory: Path, name: str) -> str:
    """`ipc://` address for `name` in `directory`; the file name is a hash, so any slot name fits.

    Raises ValueError when the directory itself is too long for a socket path.
    """
    path = directory / hashlib.sha256(name.encode()).hexdigest()[:12]
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ValueError(f"runtime directory {directory} is too long for a socket path")
    return f"ipc://{path}"


def new_context(kind: type[ContextT], *, io_threads: int = 1) -> ContextT:
    """A context that allows more sockets than the default 1,023."""
    context = kind(io_threads)
    context.set(zmq.MAX_SOCKETS, min(16_384, int(context.get(zmq.SOCKET_LIMIT))))
    return context


def configure(socket: "zmq.Socket[Any]") -> None:
    """The options common to every socket; call before bind or connect."""
    socket.setsockopt(zmq.LINGER, 1_000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)


def bind_ipc(socket: "zmq.Socket[Any]", endpoint: str) -> None:
    """Bind with the socket file 0600 from the first moment."""
    previous = os.umask(0o177)
    try:
        socket.bind(endpoint)
        # zmq binds in this thread for ipc; the file exists once bind returns.
        os.chmod(endpoint.removeprefix("ipc://"), 0o600)
    finally:
        os.umask(previous)


def allow_many_files() -> None:
    """Raise this process's limit of open files, which its children inherit: one stream or peer takes one or
    two, and the usual limit is 256 (macOS) or 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a second, lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def process_dies_with_parent(parent: int = 0) -> None:
    """On Linux, ask the kernel to kill this process when the thread that spawned it ends.

    `parent` is that process's id (0: not known). A parent that had died before this call will send no
    signal, so with another parent now this process exits at once. The inherited pipe (see wire.boot) is the
    portable half of the same promise.
    """
    if sys.platform == "linux":
        import ctypes
        import signal

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)
