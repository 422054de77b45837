"""How a child process learns where to dial: one JSON line on an inherited pipe (its stdin).

The join token never shows in argv or the environment, and the pipe doubles as a lifeline: the parent keeps
its end open, so end-of-file means that the parent is gone and the child must go too.
"""

import os

import msgspec

from mlxhost.wire.errors import ParentGone

LIFELINE_FD = 0


class Boot(msgspec.Struct, frozen=True):
    control: str  # endpoint of the supervisor's control ROUTER
    token: str
    slot: str
    epoch: int
    model: str = ""
    runtime_dir: str = ""  # where a frontend binds its data ROUTER
    curve_public: str = ""  # key pair with which a worker dials frontends on another machine (Z85)
    curve_secret: str = ""
    parent: int = 0  # process id of the supervisor; 0: not told


def write_boot(fd: int, boot: Boot) -> None:
    """Parent's side: tell the child. The line is far below PIPE_BUF, so one write takes it all."""
    os.write(fd, msgspec.json.encode(boot) + b"\n")


def read_boot(fd: int = LIFELINE_FD) -> Boot:
    """Child's side: read byte by byte up to the newline, leaving the pipe at its end for the lifeline.

    Raises ParentGone when the pipe closes before a whole line came.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            raise ParentGone("the supervisor went away before it said what to do")
        line += byte
    return msgspec.json.decode(bytes(line), type=Boot)
