"""deploy/: the container file and proxy examples say what the code does; streams pass the proxies."""

import contextlib
import http.client
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.supervisor_up import PROMPT, serving, wait_for

from mlxhost.supervisor.config.asked import OTHER_VARIABLES
from mlxhost.supervisor.config.tables import FLEET
from mlxhost.wire.control import FrontendConfig

Proxy = Callable[[int, str, Path], list[str]]

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
LIMIT_MIB = FrontendConfig(-1, "").max_body_bytes >> 20


def test_the_container_file_uses_what_exists() -> None:
    """Its variables are options, its files are in the tree, and its address is reached only with a key."""
    text = (DEPLOY / "Containerfile").read_text()
    variables = set(re.findall(r"MLXHOST_[A-Z_]+", text))
    assert variables <= {*(o.variable for o in FLEET.values()), *OTHER_VARIABLES}
    assert (ROOT / ".ci" / "constraints.txt").exists()


@pytest.mark.parametrize("name", ["nginx.conf", "Caddyfile"])
def test_proxies_take_bodies_as_large_as_a_frontend_and_no_admin(name: str) -> None:
    """The limits are the same, and /admin is closed."""
    text = (DEPLOY / name).read_text()
    assert re.search(rf"\b{LIMIT_MIB}(m;|MiB)", text)
    assert "/admin" in text


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def nginx(port: int, backend: str, directory: Path) -> list[str]:
    """The command that runs the example without TLS, as this user, out of `directory`."""
    text = (DEPLOY / "nginx.conf").read_text()
    text = re.sub(r"\n\s*ssl_certificate[^\n]*", "", text).replace("443 ssl", f"127.0.0.1:{port}")
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "\n".join(f"{name}_temp_path {directory}/{name};" for name in paths)
    (directory / "nginx.conf").write_text(
        f"pid {directory}/pid;\nerror_log {directory}/error.log;\ndaemon off;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}\n{text.replace('127.0.0.1:8080', backend)}\n}}\n"
    )
    return ["nginx", "-p", str(directory), "-e", f"{directory}/error.log", "-c", f"{directory}/nginx.conf"]


def caddy(port: int, backend: str, directory: Path) -> list[str]:
    text = (DEPLOY / "Caddyfile").read_text().replace("models.example.org {", f"http://127.0.0.1:{port} {{")
    path = directory / "Caddyfile"
    path.write_text("{\n\tadmin off\n}\n" + text.replace("127.0.0.1:8080", backend))
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(path)]


@contextlib.contextmanager
def running(command: list[str], port: int, directory: Path) -> Iterator[None]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=directory)
    try:
        wait_for(lambda: answers(port), 20, (directory / "output").read_text())
        yield
    finally:
        process.terminate()
        process.wait(20)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("proxy", [nginx, caddy], ids=["nginx", "caddy"])
def test_a_stream_passes_the_proxy_as_it_is_made(
    tmp_path: Path, tiny_models: dict[str, Path], proxy: Proxy
) -> None:
    """Tokens that are made 100 ms apart arrive apart, not all at the end; /admin is 404."""
    port = free_port()
    if shutil.which(proxy.__name__) is None:
        pytest.skip(f"{proxy.__name__} is not installed")
    script = {"step_ms": 100, "length": 10}
    with serving(tmp_path / "home", f"m={tiny_models['llama']}", script=script) as up:
        directory = tmp_path / "proxy"
        directory.mkdir()
        backend = up.url().removeprefix("http://")
        with running(proxy(port, backend, directory), port, directory):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            body = {"model": "m", "prompt": PROMPT, "max_tokens": 10, "stream": True, "ignore_eos": True}
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            assert response.status == 200
            at = [time.monotonic() for line in response if line.startswith(b"data: {")]
            assert len(at) >= 10
            # Collected by the proxy they would all come within a moment.
            assert at[-1] - at[0] > 0.5
            connection.request("GET", "/admin/status")
            assert connection.getresponse().status == 404
            connection.close()
