"""The unix socket on which frontends answer operators: bound here and inherited, as the HTTP port is."""

import os
import socket
from pathlib import Path

from mlxhost.supervisor.port import BACKLOG

NAME = "admin.sock"


def bind_admin(directory: Path) -> socket.socket:
    """A listening socket in `directory`, 0600 from the first moment. The directory is new, and one whose ipc
    sockets fit, so this one's path fits as well."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        bound.bind(str(directory / NAME))
    finally:
        os.umask(previous)
    bound.listen(BACKLOG)
    bound.setblocking(False)
    return bound
