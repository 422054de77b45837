"""/admin on the unix socket of a real fleet: what `ctl` does, over HTTP."""

import contextlib
import hashlib
import http.client
import json
import os
import secrets
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from support.supervisor_up import Stream, Up, gone, serving, wait_for


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


class UnixConnection(http.client.HTTPConnection):
    """What `curl --unix-socket` does."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(self._path)


def ask(up: Up, method: str, path: str, body: object = None, **headers: str) -> tuple[int, str]:
    with contextlib.closing(UnixConnection(up.status()["admin_socket"])) as connection:
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        with connection.getresponse() as response:
            return response.status, response.read().decode()


def operate(up: Up, op: str, **body: Any) -> tuple[int, dict[str, Any]]:
    status, text = ask(up, "POST", f"/admin/{op}", body)
    return status, json.loads(text)


def test_operations_answer_as_ctl_does_and_only_this_user_may_call(tmp_path: Path, llama: Path) -> None:
    """Status, operations of the fleet and of processes; codes become HTTP status; the socket is 0600."""
    with serving(tmp_path, f"m={llama}") as up:
        path = Path(up.status()["admin_socket"])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_uid == os.getuid()
        status, text = ask(up, "GET", "/admin/status")
        told = json.loads(text)
        assert (status, told["code"], told["result"]["models"][0]["name"]) == (200, "ok", "m")
        assert operate(up, "drain", target="m")[1]["result"]["replicas"] == {"m/0": "drained"}
        assert up.replica("m/0")["state"] == "drained"
        assert operate(up, "resume", target="m")[0] == 200
        code, body = operate(up, "log-level", target="supervisor", args={"level": "warning"})
        assert (code, body["result"]["replicas"]["supervisor"]["result"]["was"]) == (200, "info")
        assert operate(up, "log-level", args={"level": "loud"})[0] == 400
        assert operate(up, "drain", target="nobody")[0] == 404
        assert operate(up, "rebalance_experts", target="m")[0] == 501
        assert ask(up, "POST", "/admin/drain", {"goal": "x"})[0] == 400
        assert ask(up, "GET", "/v1/models")[0] == 200


@pytest.mark.slow
def test_news_come_before_the_answer(tmp_path: Path, llama: Path) -> None:
    """A drain that waits tells how many are left, a line each, then answers."""
    script = {"step_ms": 50, "length": 100}
    with serving(tmp_path, f"m={llama}", script=script) as up:
        stream = Stream(up.url(), "m", 40).begun()
        status, text = ask(up, "POST", "/admin/drain", {"target": "m"}, Accept="application/x-ndjson")
        *news, answer = map(json.loads, text.splitlines())
        assert (status, answer["code"], answer["result"]["replicas"]) == (200, "ok", {"m/0": "drained"})
        assert any("m/0 draining, 1 in flight" in line["news"] for line in news)
        assert stream.join().finish == "length"


@pytest.mark.slow
def test_a_deadline_is_kept(tmp_path: Path, llama: Path) -> None:
    """504 when the drain is not over in time; it goes on."""
    script = {"step_ms": 50, "length": 200}
    with serving(tmp_path, f"m={llama}", script=script) as up:
        stream = Stream(up.url(), "m", 120).begun()
        status, body = operate(up, "drain", target="m", timeout_s=0.3)
        assert (status, body["code"]) == (504, "timeout")
        assert "is not drained after" in body["message"]
        assert stream.join().finish == "length"
        wait_for(lambda: up.replica("m/0")["state"] == "drained")


@pytest.mark.slow
def test_the_socket_outlives_a_frontend(tmp_path: Path, llama: Path) -> None:
    """After one of two is killed the other answers, and so does its successor."""
    with serving(tmp_path, f"m={llama}", "--frontends", "2") as up:
        pids = [f["pid"] for f in up.status()["frontends"]]
        for pid in pids:
            process = [p for p in up.descendants() if p.pid == pid]
            process[0].kill()
            wait_for(lambda process=process: gone(process))
            wait_for(lambda: ask(up, "GET", "/admin/status")[0] == 200)


def test_over_tcp_only_the_admin_key_operates(tmp_path: Path, llama: Path) -> None:
    """The key is in none of status, output and processes' arguments and boot lines."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    value = secrets.token_hex(16)
    (home / "root").write_text(value)
    (home / "root").chmod(0o600)
    (home / "mlxhost.toml").write_text(
        f'[keys.root]\nfile = "root"\nadmin = true\n[models.m]\npath = "{llama}"\n'
    )
    with Up(home, "") as up:
        url = up.url(30).removeprefix("http://")

        def over_tcp(**headers: str) -> int:
            with contextlib.closing(http.client.HTTPConnection(url, timeout=30)) as connection:
                connection.request("POST", "/admin/resume", json.dumps({"target": "m"}), headers)
                return connection.getresponse().status

        assert [
            over_tcp(),
            over_tcp(Authorization="Bearer no"),
            over_tcp(Authorization=f"Bearer {value}"),
        ] == [
            401,
            401,
            200,
        ]
        seen = up.output + json.dumps(up.status())
        for process in up.descendants():
            seen += " ".join(process.cmdline()) + json.dumps(process.environ())
        assert value not in seen
        assert hashlib.sha256(value.encode()).hexdigest() not in seen


@pytest.mark.slow
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_reach_needs_a_key(tmp_path: Path, llama: Path, host: str) -> None:
    """Without one it is refused with both ways out; --without-keys lets it be."""
    if host == "::" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with Up(tmp_path, f"m={llama}", "--host", host) as up:
        assert up.exit_code() == 1
        assert "[keys.NAME]" in up.output
        assert "--without-keys" in up.output
    with serving(tmp_path, f"m={llama}", "--host", host, "--without-keys") as up:
        assert up.status()["accepting"]


@pytest.mark.slow
def test_an_aborted_request_says_so_to_its_client(tmp_path: Path, llama: Path) -> None:
    """`aborted`, not to be retried, with what had come; not worker_lost."""
    from support import real_fleet

    with real_fleet.fleet(tmp_path, f"m={llama}") as up:
        url = up.url(60)
        stream = Stream(url, "m", 4000).begun()
        ended = threading.Thread(target=stream.join)
        ended.start()
        up.ctl("abort", "m", "--all")
        ended.join(30)
        assert stream.error
        assert (stream.error["code"], stream.error["retryable"]) == ("aborted", False)
        assert stream.error["tokens_emitted"] > 0
