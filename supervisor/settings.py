"""What one `mlxhost up` was asked for: parsed once, frozen, passed down.

A field made by `option` is a setting of the fleet: it has the flag `--its-name`, the variable
MLXHOST_ITS_NAME and the key `its_name` under [fleet] in mlxhost.toml, with one precedence (see
supervisor.config). Adding the field adds all of them, also to `config init` and docs/configuration.md.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxhost.supervisor.config.kinds import Choice, Duration, Memory, Size, Switch, Text, Texts, Whole
from mlxhost.supervisor.config.table import option
from mlxhost.supervisor.modelspec import DTYPES, QUANTISED, Model
from mlxhost.wire.policies import ROUTINGS

if TYPE_CHECKING:
    from mlxhost.wire.control import ApiKey  # at run time it would make `--help` slow

MAX_FRONTENDS = 64
GPU_LEASES = ("auto", "on", "off")
LEVELS = ("debug", "info", "warning", "error")
ALL, NONE = "all", "none"  # of `preload`


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines and intervals of the supervisor, in seconds."""

    heartbeat_s: float = 1.0
    tick_s: float = 0.1  # how often deadlines are looked at
    hello_s: float = 60.0  # from spawn to HELLO: importing MLX on a busy machine takes a while
    progress_s: float = 120.0  # from one PROGRESS to the next while loading
    stale_s: float = 8.0  # without a heartbeat; with tick and heartbeat interval below 10 s in all
    disconnect_s: float = 3.0  # without a control connection, though the process lives
    stuck_s: float = 60.0  # busy, heartbeats coming, and not one engine step
    kill_s: float = 2.0  # from SIGABRT (a stack dump) to SIGKILL
    replay_s: float = 30.0  # how long a request whose worker was lost may wait for another
    drain_s: float = 30.0  # what shutdown gives to requests in flight
    exit_s: float = 5.0  # from STOP to the exit of an idle process
    # A heartbeat sooner than this after admission was closed may not know of a request sent just before.
    settle_s: float = 0.2
    flush_s: float = 10.0  # what a worker that is unloaded gets to make its cache durable
    freed_s: float = 1.0  # from the exit of a worker until its memory is seen to be free
    min_resident_s: float = 10.0  # these three: see supervisor.residency.facts.Budget
    idle_s: float = 0.5
    patience_s: float = 2.0
    load_wait_s: float = 300.0  # how long a request may wait for its model


@dataclass(frozen=True, slots=True)
class Settings:
    models: tuple[Model, ...]
    host: str = option(
        "127.0.0.1", Text("HOST", "an address or name of this machine"), "address to listen on"
    )
    port: int = option(8080, Whole(0, 65_535, "PORT"), "port to listen on; 0 takes a free one")
    routing: str = option(
        "least-in-flight",
        Choice(ROUTINGS),
        "how a replica is chosen for a request; `ctl routing` changes it live",
        live=True,
    )
    dtype: str = option("auto", Choice(DTYPES), "compute dtype; auto takes the fast one of the backend")
    quantised: str = option(
        "auto",
        Choice(QUANTISED),
        "what becomes of quantised weights (GGUF or MLX): keep is smaller, expand is faster on a CPU; auto "
        "expands on a CPU and keeps elsewhere",
    )
    context: int = option(
        0,
        Whole(0, metavar="TOKENS"),
        "longest prompt and answer together",
        unset="what the model and the memory allow",
    )
    max_rows: int = option(
        0, Whole(0), "requests that one replica decodes together", unset="what suits the backend"
    )
    max_gap_ms: int = option(
        250,
        Whole(1, 60_000, metavar="MS"),
        "largest gap wanted between two tokens of a running answer while another prompt is read in; shorter "
        "is smoother, longer reads prompts a little faster (`ctl state` changes it live)",
    )
    jump_forward: str = option(
        "on",
        Choice(("on", "off")),
        "several tokens in a step where a grammar or schema leaves only one text; the tokens are the same",
    )
    frontends: int = option(1, Whole(1, MAX_FRONTENDS), "HTTP processes that share the port")
    listen: str = option(
        "",
        Text("tcp://HOST:PORT", "tcp://HOST:PORT"),
        "let machines with keys (`mlxhost keys`) join here; port 0 takes a free one",
        unset="none may join",
    )
    advertise: str = option(
        "",
        Text("HOST", "an address or name"),
        "what joining machines dial when it is not the HOST of --listen (a container, several networks)",
        unset="the HOST of --listen",
    )
    without_keys: bool = option(
        False,
        Switch(),
        "listen beyond this machine though there is no API key; anyone there may use the models",
    )
    log_level: str = option(
        "info", Choice(LEVELS), "how much processes log; `ctl log-level` changes it live", live=True
    )
    budget: float = option(
        0.0,
        Memory(),
        "memory for all models together: bytes, or a part of what the device or the RAM offers",
        unset="70% of the device's working set, or of 75% of the RAM",
        live=True,
    )
    max_resident: int = option(0, Whole(0), "models in memory at once", unset="as many as fit", live=True)
    idle_ttl: float = option(
        0.0, Duration(), "unload a model after so long without a request", unset="never", live=True
    )
    preload: tuple[str, ...] = option(
        (ALL,),
        Texts("all|none|MODEL[,MODEL...]", "all, none or a list of models"),
        "what is loaded at the start, as far as it fits in their order (what is named here must fit); the "
        "rest is loaded by the first request for it",
        unset=ALL,
    )
    gpu_lease: str = option(
        "auto",
        Choice(GPU_LEASES),
        "whether workers take turns with prefill chunks and loads on their device; auto: on Metal only "
        "(docs/fit.md has what that buys and costs)",
    )
    cache_ram: int = option(
        -1,
        Size(),
        "prefix cache of one worker in memory; 0: no prefix cache",
        unset="a share of its KV budget",
    )
    cache_ssd: int = option(
        -1,
        Size(),
        "prefix cache of all models on disk; 0: none",
        unset="a tenth of what is free, 32 GiB at most",
    )
    keys: "tuple[ApiKey, ...]" = ()
    worker_command: tuple[str, ...] = (sys.executable, "-I", "-m", "mlxhost.worker")
    frontend_command: tuple[str, ...] = (sys.executable, "-I", "-m", "mlxhost.frontend")
    timing: Timing = Timing()
