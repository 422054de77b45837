"""A worker written from docs/wire.md alone serves in a real fleet."""

import ast
import signal
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.frontend_client import Answer, call, stream
from support.frontend_models import write_model
from support.frontend_served import ANSWER, ANSWER_IDS, TOKENIZER
from support.supervisor_up import serving, wait_for

FOREIGN = Path(__file__).parents[1] / "fakes" / "foreign_worker.py"
BACKWARDS = TOKENIZER.decode(ANSWER_IDS[::-1])


def model(tmp_path: Path) -> Path:
    """A directory that the supervisor takes for a model: its weights file holds no tensor."""
    directory = write_model(tmp_path / "foreign")
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return directory


def complete(url: str, prompt: object, **fields: object) -> Answer:
    return call(url, "/v1/completions", {"model": "foreign", "prompt": prompt} | fields)


def test_it_knows_nothing_of_mlxhost() -> None:
    """Its only imports beyond the standard library are ZeroMQ and MessagePack."""
    tree = ast.parse(FOREIGN.read_text())
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert {n.split(".")[0] for n in names if n} - sys.stdlib_module_names == {"zmq", "msgspec"}


def test_it_serves_in_a_real_fleet(tmp_path: Path) -> None:
    """`mlxhost up` starts it, a real frontend routes to it: whole and streamed answers, usage, max_tokens, an
    abort, refusals of ctl operations, and a clean exit at the end."""
    directory = model(tmp_path)
    command = [sys.executable, "-I", str(FOREIGN)]
    with serving(tmp_path / "home", f"foreign={directory}", worker_command=command) as up:
        url = up.url()
        whole = complete(url, ANSWER_IDS).json
        assert whole["choices"][0]["text"] == BACKWARDS
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == whole["usage"]["prompt_tokens"] == len(ANSWER_IDS)
        short = complete(url, ANSWER_IDS, max_tokens=3).json
        assert short["choices"][0]["finish_reason"] == "length"
        body = {"model": "foreign", "prompt": ANSWER_IDS}
        events = [e for _, e in stream(url, "/v1/completions", body) if e != "[DONE]"]
        assert "".join(c["text"] for e in events for c in e["choices"]) == BACKWARDS
        assert complete(url, ANSWER, stop="naïve").status == 200

        left = stream(url, "/v1/completions", {"model": "foreign", "prompt": [40] * 3000, "max_tokens": 3000})
        next(left)
        assert up.replica("foreign/0")["state"] == "ready"
        left.close()
        start = time.monotonic()
        assert complete(url, ANSWER_IDS).json["choices"][0]["text"] == BACKWARDS
        assert time.monotonic() - start < 3
        refused = up.ctl("flush", "foreign", check=False)
        assert refused.returncode != 0
        assert "unsupported" in refused.stdout + refused.stderr or "no operations" in refused.stderr
        up.signal(signal.SIGTERM)
        assert up.exit_code() == 0


def test_its_queue_is_bounded(tmp_path: Path) -> None:
    """More requests than it has room for: some are refused with 429 at once, all others are answered."""
    directory = model(tmp_path)
    command = [sys.executable, "-I", str(FOREIGN)]
    with serving(tmp_path / "home", f"foreign={directory}", worker_command=command) as up:
        url = up.url()
        with ThreadPoolExecutor(9) as pool:
            prompts = [[40 + i] * 200 for i in range(9)]
            answers = list(pool.map(lambda p: complete(url, p, max_tokens=200), prompts))
        statuses = [a.status for a in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 4
        wait_for(lambda: complete(url, ANSWER_IDS).status == 200)
