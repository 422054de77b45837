"""One filled-in example of every message; the golden fixtures are their bytes.

`python tests/wire/samples.py` writes the fixtures of the current protocol version, and its schema hash into
docs/wire.md. Once a version has been released its file must not change.
"""

import json
import re
from pathlib import Path

from msgspec import Struct

from mlxhost.wire import control, data
from mlxhost.wire.codec import encode
from mlxhost.wire.version import PROTOCOL_MAJOR, PROTOCOL_MINOR, SCHEMA

GOLDEN = Path(__file__).parent / "golden"
DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"
SCHEMA_LINE = re.compile(r"(?<=Schema hash of this version: `)[0-9a-f]{16}(?=`)")

_LOAD = data.Load(3, 1, 4096, 100_000, 512, 87.5, 42, 1234)
_CARD = control.ModelCard(
    directory="/models/tiny",
    files=[control.CardFile("config.json", "ab" * 32, 478)],
    architecture="llama",
    vocab_size=512,
    eos_ids=[2, 0],
)
_KEY = control.ApiKey("alice", "5e" * 32, True)
_MEMORY = control.MemoryUse(
    active=700_000_000,
    buffers=33_000_000,
    peak=810_000_000,
    kv_limit=1 << 30,
    kv_reserved=95_000_000,
    kv_held=48_000_000,
    kv_scheme="full float32",
    preemptions=3,
    yields=1,
    failed_steps=1,
)
_LEASE = control.Lease(
    cpu_threads=2,
    memory_bytes=1 << 33,
    cache_bytes=1 << 28,
    kv_bytes=1 << 32,
    shrink="drop_prefixes",
    device_lease="/run/mlxhost/device",
    weight=2.0,
)

SAMPLES: dict[str, tuple[Struct, tuple[bytes, ...]]] = {
    "add": (
        data.Add(
            handle=7,
            seq=42,
            request_id="req-1",
            task="generate",
            n=2,
            siblings=[8],
            sampling=data.Sampling(0.7, 0.9, 40, 0.05, 123, 1.1, 0.2, 0.3, {5: -100.0}, 0.5, 0.2, True, 3, 1),
            limits=data.Limits(128, 4, [2], True, 30.0),
            priority=1,
            client="team-a",
            cache_salt="salt",
            session_id="s1",
            adapters=["lora-a"],
            grammar=data.Grammar("json_schema", "{}", True),
            trace="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            attachments=[data.Attachment("image", 5, 64, "cd" * 32, 1)],
        ),
        (b"\x01\x00\x00\x00\x02\x00\x00\x00", b"pixels"),
    ),
    "accepted": (data.Accepted(7, 512, 128), ()),
    "abort": (data.Abort([(7, "client_disconnected"), (9, "stop_string")]), ()),
    "out": (
        data.Out(
            epoch=3,
            step=99,
            load=_LOAD,
            handles=[7, 9],
            counts=[1, 2],
            tokens=[11, 12, 13],
            finish=[0, 1],
            detail=["", "eos"],
            prompt_tokens=[10, 20],
            completion_tokens=[5, 6],
            cached_tokens=[0, 16],
            logprobs=[[-0.5], [-1.0, -2.0]],
            top_logprobs=[[[(11, -0.5)]], [[(12, -1.0)], [(13, -2.0)]]],
            prompt_logprobs=[],
            spec_rounds=[1, 0],
            accepted_drafts=[2, 0],
        ),
        (),
    ),
    "reject": (data.Reject(7, data.REJECT_QUEUE_FULL, "256 requests wait already", 1.5), ()),
    "hello": (
        control.Hello(
            (1, 0), "0123456789abcdef", "worker", "demo/0", 3, 4711, "tok", "0.1.0", "demo", 0, 1, ""
        ),
        (),
    ),
    "refused": (control.Refused("token", "wrong join token"), ()),
    "init": (
        control.Init(
            heartbeat_s=1.0,
            worker=control.WorkerConfig(
                "demo",
                "/models/tiny",
                "float32",
                4096,
                8,
                64,
                250.0,
                "/cache",
                "keep",
                1 << 30,
                1 << 34,
                False,
            ),
            frontend=control.FrontendConfig(
                7,
                "http://127.0.0.1:8080",
                1 << 25,
                "/cache",
                control.RemoteListen("tcp://192.0.2.1:0", "fleet.example", "p" * 40, "s" * 40),
                20.0,
                8,
                [_KEY],
                120.0,
                64,
            ),
            lease=_LEASE,
            log_level="debug",
        ),
        (),
    ),
    "progress": (control.Progress("loading", 10, 100), ()),
    "ready": (
        control.Ready(
            max_model_len=8192,
            kv_capacity_tokens=200_000,
            kv_bytes_per_token=46_080,
            block_tokens=256,
            dtype="float32",
            weights_bytes=538_060_032,
            resident_bytes=580_000_000,
            device_working_set=0,
            max_rows=16,
            max_queued=256,
            operations=["flush", "health"],
            tasks=["generate"],
            card=_CARD,
            backend="cpu (scipy-openblas32)",
            notes=["a hint"],
        ),
        (),
    ),
    "frontend_ready": (control.FrontendReady("http://127.0.0.1:8080", "tcp://192.0.2.1:4711"), ()),
    "start": (control.Start(), ()),
    "keys": (control.Keys([_KEY]), ()),
    "allowed": (control.Allowed([control.AllowedPeer("studio", "k" * 40)]), ()),
    "host_report": (
        control.HostReport(
            [
                control.HostReplica(
                    "studio:demo/0",
                    1_764_000_000_000,
                    "demo",
                    ["SmolLM2-135M-Instruct"],
                    "loading",
                    "killed by SIGKILL",
                    control.Progress("loading", 10, 100),
                    None,
                    control.Heartbeat(False, _LOAD),
                )
            ],
            leaving=True,
        ),
        (),
    ),
    "heartbeat": (control.Heartbeat(True, _LOAD, 580_000_000, 4, "pausing", _MEMORY), ()),
    "dead": (control.Dead("bad_model", "model.safetensors: truncated"), ()),
    "lease": (_LEASE, ()),
    "fleet": (
        control.Fleet(
            version=5,
            frontends=[
                control.FleetFrontend("frontend/0", 1, "ipc:///run/x", "p" * 40, "tcp://192.0.2.1:4711")
            ],
            models=[
                control.FleetModel(
                    name="demo",
                    aliases=["SmolLM2-135M-Instruct"],
                    replicas=[
                        control.FleetReplica("demo/0", 0, 3, "ready", 8192, 200_000, 16, 256, ["generate"])
                    ],
                    routing="least-in-flight",
                    card=_CARD,
                    reason="",
                    created=1_764_000_000,
                    sampling_defaults={"temperature": 0.2},
                    on_demand=True,
                )
            ],
            accepting=True,
        ),
        (),
    ),
    "ctl": (control.Ctl("c1", "drain", "demo", {"timeout_s": 30}, 30.0), ()),
    "reply": (control.Reply("c1", "ok", "", {"drained": True}), ()),
    "news": (control.News("c1", "waiting for 3 requests", {"running": 3}), ()),
    "stop": (control.Stop(30.0), ()),
}


def fixture(name: str) -> list[str]:
    """Hex of every frame of a sample."""
    message, binary = SAMPLES[name]
    return [bytes(frame).hex() for frame in encode(message, *binary)]


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    path = GOLDEN / f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}.json"
    path.write_text(json.dumps({name: fixture(name) for name in SAMPLES}, indent=1) + "\n")
    DOCUMENT.write_text(SCHEMA_LINE.sub(SCHEMA, DOCUMENT.read_text()))
