"""Identities, socket files and boot lines."""

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from mlxhost.wire import sockets
from mlxhost.wire.boot import Boot, read_boot, write_boot
from mlxhost.wire.errors import ParentGone


def test_identity_round_trips_any_slot() -> None:
    """Slot names with colons and slashes come back whole."""
    assert sockets.parse_identity(sockets.identity("org/model:x/0", 12)) == ("org/model:x/0", 12)


@pytest.mark.parametrize("raw", [b"", b"ctl", b"a:b", b"a:-1", b"\xff\x00", "a:٣".encode()])
def test_other_identities_are_not_slots(raw: bytes) -> None:
    """A ctl client's identity, or garbage, is None and no exception."""
    assert sockets.parse_identity(raw) is None


def test_ipc_socket_is_private_from_the_start(tmp_path: Path) -> None:
    """The socket file is 0600 and its name is a hash of the slot's."""
    endpoint = sockets.ipc_endpoint(tmp_path, "data-" + "x" * 500)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    sockets.configure(router)
    sockets.bind_ipc(router, endpoint)
    mode = os.stat(endpoint.removeprefix("ipc://")).st_mode
    context.destroy(linger=0)
    assert stat.S_IMODE(mode) == 0o600


def test_too_long_a_directory_is_refused(tmp_path: Path) -> None:
    """A path that no socket address can hold is a clear error."""
    with pytest.raises(ValueError, match="too long for a socket path"):
        sockets.ipc_endpoint(tmp_path / ("d" * 100), "control")


def test_router_reports_unknown_peers() -> None:
    """A message to nobody raises instead of vanishing."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    sockets.configure(router)
    router.bind("inproc://here")
    with pytest.raises(zmq.ZMQError) as caught:
        router.send_multipart([b"nobody", b"x"])
    context.destroy(linger=0)
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_boot_line_leaves_the_pipe_open_as_a_lifeline() -> None:
    """After the boot line the pipe gives nothing, and end-of-file only when the parent's end closes."""
    read, write = os.pipe()
    boot = Boot("ipc:///x", "token", "demo/0", 3, "demo", "/run")
    write_boot(write, boot)
    assert read_boot(read) == boot
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)


def test_parent_gone_before_the_boot_line() -> None:
    """A pipe that closes early is a typed error."""
    read, write = os.pipe()
    os.write(write, b'{"control"')
    os.close(write)
    with pytest.raises(ParentGone):
        read_boot(read)
    os.close(read)


def test_files_are_limited_by_the_hard_limit_only() -> None:
    """A process that starts with few open files allowed raises its own limit, and its children's."""
    code = (
        "import resource, subprocess, sys; from mlxhost.wire import sockets\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "sockets.allow_many_files()\n"
        "told = 'import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', told]).returncode)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = sockets.MAX_FILES if hard == resource.RLIM_INFINITY else min(sockets.MAX_FILES, hard)
    assert 64 < int(done.stdout) <= most
