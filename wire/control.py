"""Control-plane messages: everyone <-> supervisor. Map-encoded, so that fields may be added anywhere.

A worker's life: HELLO -> INIT -> PROGRESS* -> READY -> START, then HEARTBEAT each second, LEASE and CTL
from the supervisor, REPLY back, DEAD before a fatal exit where possible. A frontend does the same without
PROGRESS, and says FRONTEND_READY. FLEET goes to both whenever it changes. A `ctl` client sends CTL without a
HELLO (the socket is 0600) and gets REPLY (and NEWS with progress for long calls). The supervisor of another
machine (role "host") dials the tcp control ROUTER: HELLO -> INIT, then HOST_REPORT each second and whenever
its replicas change; it gets FLEET and CTL like a worker.
"""

from typing import Any

from msgspec import Struct, field

from mlxhost.wire.data import Load


class Lease(Struct, tag="lease", frozen=True):
    """What a worker may use. 0 means no limit was set."""

    cpu_threads: int = 0
    memory_bytes: int = 0  # all of MLX's memory
    cache_bytes: int = 0  # MLX's cache of freed buffers
    kv_bytes: int = 0  # KV cache of running rows
    # How far a worker that holds too much must go now, each including the ones before: clear_cache (MLX's
    # freed buffers), drop_prefixes (cached prefixes in memory), pause (admit nothing, preempt what runs).
    # Empty: it goes on.
    shrink: str = ""
    device_lease: str = ""  # file through which the workers of one device take turns; empty: they do not
    weight: float = 1.0  # its share of those turns, relative to the others'


class Hello(Struct, tag="hello"):
    """First message of a worker or frontend. `endpoint` is a frontend's data ROUTER."""

    protocol: tuple[int, int]  # major, minor
    schema: str  # wire.version.SCHEMA
    role: str  # worker, frontend, host
    slot: str
    epoch: int
    pid: int
    token: str
    build: str = ""
    model: str = ""
    rank: int = 0
    ranks: int = 1
    endpoint: str = ""


class Refused(Struct, tag="refused"):
    """The answer to a HELLO that is not let in; the process should print `message` and exit."""

    code: str  # protocol, schema, token, slot
    message: str


class WorkerConfig(Struct, frozen=True):
    """What to load and how, for one worker."""

    model: str  # name in the fleet
    path: str  # model directory or GGUF file
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    context: int = 0  # 0: what the model and the memory allow
    max_rows: int = 0  # rows decoded together; 0: the backend's default
    max_queued: int = 256
    max_gap_ms: float = 250.0  # largest gap wanted between two tokens of a running stream
    cache_dir: str = ""  # where converted models are kept
    quantised: str = "auto"  # quantised weights: keep, expand, or auto (expand on a CPU, keep elsewhere)
    cache_ram_bytes: int = -1  # prefix cache in RAM; -1: a share of the KV budget; 0: no prefix cache
    cache_disk_bytes: int = -1  # prefix cache on disk, of all models; -1: a share of what is free; 0: none
    jump_forward: bool = True  # several tokens in a step where a grammar leaves only one text


class RemoteListen(Struct, frozen=True):
    """Where a frontend binds its data ROUTER for remote workers, and the fleet's key pair (Z85)."""

    endpoint: str  # tcp://HOST:0
    advertise: str  # the host that other machines dial
    public_key: str
    secret_key: str


class ApiKey(Struct, frozen=True):
    """An API key as frontends know it: by its hash."""

    name: str
    sha256: str  # hex, of the key's bytes
    admin: bool = False  # whether it also opens /admin


class FrontendConfig(Struct, frozen=True):
    """How one frontend serves. `listen_fd` is an inherited, listening TCP socket."""

    listen_fd: int
    url: str
    max_body_bytes: int = 32 * 1024 * 1024
    cache_dir: str = ""  # where fetched card files are kept
    remote: RemoteListen | None = None
    replay_wait_s: float = 30.0  # how long a request whose worker was lost may wait for another
    admin_fd: int = -1  # an inherited, listening unix socket for /admin; -1: none
    keys: list[ApiKey] = []  # when there are any, every route but /health and /ready needs one
    load_wait_s: float = 300.0  # how long a request may wait for its model to be loaded
    max_waiting: int = 256  # requests that may wait so for one model


class Keys(Struct, tag="keys"):
    """The API keys from now on, sent to frontends when they change."""

    keys: list[ApiKey]


class AllowedPeer(Struct, frozen=True):
    """A machine that may connect: its name, which its slots begin with, and its public key (Z85)."""

    name: str
    public_key: str


class Allowed(Struct, tag="allowed"):
    """All machines that may connect, sent to frontends at the start and at each change."""

    peers: list[AllowedPeer]


class Init(Struct, tag="init"):
    """The answer to HELLO: what this process is to do."""

    heartbeat_s: float = 1.0
    worker: WorkerConfig | None = None
    frontend: FrontendConfig | None = None
    lease: Lease = Lease()
    log_level: str = "info"  # debug, info, warning, error


class Progress(Struct, tag="progress"):
    """Where loading stands. phase: converting, loading, warming up; done/total in bytes (0: unknown)."""

    phase: str
    done: int = 0
    total: int = 0


class CardFile(Struct, frozen=True):
    """A file a frontend needs to serve a model, by content."""

    name: str
    sha256: str
    size: int


class ModelCard(Struct, frozen=True):
    """All a frontend needs to know of a model: which files (tokenizer.json, tokenizer_config.json,
    chat_template.jinja, generation_config.json, config.json) and where they may be read on this host."""

    directory: str
    files: list[CardFile]
    architecture: str
    vocab_size: int
    eos_ids: list[int]

    @property
    def key(self) -> str:
        """Equal keys mean the same tokenizer, template and defaults."""
        return "-".join(f.sha256[:16] for f in self.files)


class Ready(Struct, tag="ready"):
    """The worker can serve. Measured figures replace what the supervisor estimated."""

    max_model_len: int
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    block_tokens: int
    dtype: str
    weights_bytes: int
    resident_bytes: int  # kernel's per-process truth (PSS on Linux, phys_footprint on macOS)
    device_working_set: int  # bytes; 0 where the device does not say
    max_rows: int
    max_queued: int
    operations: list[str]
    tasks: list[str]
    card: ModelCard
    backend: str = ""  # e.g. "cpu (scipy-openblas 0.3.30)", "metal", "cuda"
    notes: list[str] = []  # hints for the operator, e.g. that no fast BLAS was found


class FrontendReady(Struct, tag="frontend_ready"):
    """The frontend accepts HTTP connections, and workers on other machines at `remote_endpoint`."""

    url: str
    remote_endpoint: str = ""


class Start(Struct, tag="start"):
    """The answer to READY: go."""


class MemoryUse(Struct, frozen=True):
    """What a worker's memory is used for, as the worker counts it. Bytes, unless the name says otherwise."""

    active: int = 0  # MLX: live arrays, weights included
    buffers: int = 0  # MLX: freed and kept for reuse
    peak: int = 0  # MLX: the most that was ever active
    kv_limit: int = 0  # for rows' KV caches
    kv_reserved: int = 0  # of it, what running rows hold or may soon
    kv_held: int = 0  # of that, what they hold
    kv_scheme: str = ""  # what the live caches are, e.g. "full float32, window float32"
    preemptions: int = 0  # rows that had to wait again for want of memory, since the start
    yields: int = 0  # rows that had to wait again for another client or a better priority
    failed_steps: int = 0  # decode steps that raised, and whose rows began again alone


class Heartbeat(Struct, tag="heartbeat"):
    """Sent each interval, and at once when `busy` or `mode` changes. `load.tick` advances with every engine
    step. A worker whose mode keeps it from stepping is not busy, whatever waits in it."""

    busy: bool
    load: Load
    resident_bytes: int = 0
    in_flight: int = 0  # rows of every frontend that have no terminal message yet
    mode: str = "running"  # running, pausing, paused, sleeping, reloading
    memory: MemoryUse = MemoryUse()


class Dead(Struct, tag="dead"):
    """Last words. `code`: what the worker's ModelError says (bad_model, unsupported_architecture,
    unsupported_quantisation, unsupported_tokenizer, cannot_write, conversion_failed), out_of_memory,
    engine."""

    code: str
    message: str


class FleetFrontend(Struct, frozen=True):
    """A frontend and where its data ROUTER is: `endpoint` for the receiver's own workers, with the public key
    (Z85) of the frontend's machine when that is another one; `remote_endpoint` for workers elsewhere."""

    slot: str
    epoch: int
    endpoint: str
    public_key: str = ""
    remote_endpoint: str = ""


class FleetReplica(Struct, frozen=True):
    """state: absent, starting, loading, ready, draining, drained, unloaded, backoff, failed; and for a ready
    one whose worker does not step for now: pausing, paused, sleeping, reloading."""

    slot: str
    index: int
    epoch: int
    state: str
    max_model_len: int = 0
    kv_capacity_tokens: int = 0
    max_rows: int = 0
    max_queued: int = 0
    tasks: list[str] = []


class FleetModel(Struct, frozen=True):
    """One served model. `aliases` are the other names it answers to; `reason` says why it cannot serve."""

    name: str
    aliases: list[str]
    replicas: list[FleetReplica]
    routing: str
    card: ModelCard | None = None
    reason: str = ""
    created: int = 0  # unix time
    sampling_defaults: dict[str, float] = {}  # before those of generation_config.json
    on_demand: bool = False  # requests may wait for it: asking for it (WANT) makes it resident


class Fleet(Struct, tag="fleet"):
    """The whole fleet, sent whenever it changes. `accepting` is false once shutdown has begun."""

    version: int
    frontends: list[FleetFrontend]
    models: list[FleetModel]
    accepting: bool = True


class HostReplica(Struct, frozen=True):
    """A replica that runs under another machine's supervisor. `slot` begins with that machine's name."""

    slot: str
    epoch: int
    model: str
    aliases: list[str]
    state: str  # as in FleetReplica
    reason: str = ""
    progress: Progress | None = None
    ready: Ready | None = None
    beat: Heartbeat | None = None


class HostReport(Struct, tag="host_report"):
    """Everything that runs on a machine, whole each time, so that a lost report changes nothing for long.
    `leaving`: what runs is finished, and nothing new is taken."""

    replicas: list[HostReplica]
    leaving: bool = False


class Ctl(Struct, tag="ctl"):
    """Call an operation. `deadline_s` counts from receipt; `target` is a model name or empty for all."""

    call_id: str
    op: str
    target: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    deadline_s: float = 10.0


class Reply(Struct, tag="reply"):
    """The one answer to a CTL. code: ok, or an error name (unsupported, not_found, timeout, lost,
    failed, invalid). For an operation of workers `result` is {replicas: {slot: {code, message, result}}}."""

    call_id: str
    code: str = "ok"
    message: str = ""
    result: dict[str, Any] = field(default_factory=dict)


class News(Struct, tag="news"):
    """Progress of a long CTL, before its REPLY: words for people, `data` for programs."""

    call_id: str
    message: str
    data: dict[str, Any] = field(default_factory=dict)


class Stop(Struct, tag="stop"):
    """Finish what runs, then exit. Frontends answer new requests with 503 from here on."""

    deadline_s: float = 30.0


MESSAGES: tuple[type[Struct], ...] = (
    Hello,
    Refused,
    Init,
    Progress,
    Ready,
    FrontendReady,
    Start,
    Heartbeat,
    Dead,
    Lease,
    Keys,
    Allowed,
    Fleet,
    HostReport,
    Ctl,
    Reply,
    News,
    Stop,
)
