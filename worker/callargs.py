"""Arguments of the control operations, each a struct that refuses what it does not know."""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from mlxhost.wire.control import Ctl
from mlxhost.worker.errors import CallError
from mlxhost.worker.parameters import MAX_VALUES
from mlxhost.worker.profile import DEFAULT_EVENTS, MAX_EVENTS
from mlxhost.worker.sessions import MAX_SESSIONS


class Nothing(Struct, forbid_unknown_fields=True):
    """No arguments."""


class Pause(Struct, forbid_unknown_fields=True):
    """abort: end what runs. wait: let it finish. keep: freeze it where it is."""

    mode: Literal["abort", "wait", "keep"] = "wait"


class Abort(Struct, forbid_unknown_fields=True):
    """By request id, or everything."""

    requests: list[str] = []
    all: bool = False


class Settings(Struct, forbid_unknown_fields=True):
    """The settings that can be changed while the worker serves; None leaves one as it is."""

    max_rows: Annotated[int, Meta(ge=1, le=1024)] | None = None  # rows decoded together
    max_queued: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None  # requests that may wait
    max_gap_ms: Annotated[float, Meta(ge=1, le=60_000)] | None = None  # between two tokens of a stream


class Sleep(Struct, forbid_unknown_fields=True):
    """level 1 frees caches and buffers, level 2 the weights, too. mode is for what runs."""

    level: Literal[1, 2] = 2
    mode: Literal["wait", "abort"] = "wait"


class Reload(Struct, forbid_unknown_fields=True):
    """path: a model directory or GGUF file; empty: the one that is served. mode is for what runs."""

    path: str = ""
    mode: Literal["wait", "abort"] = "wait"


class ProfileArgs(Struct, forbid_unknown_fields=True):
    """Start recording, or stop and write what was recorded."""

    action: Literal["start", "stop"]
    max_events: Annotated[int, Meta(ge=1, le=MAX_EVENTS)] = DEFAULT_EVENTS


class Session(Struct, forbid_unknown_fields=True):
    """A session by id; empty lets the worker choose one."""

    id: str = ""


class Listing(Struct, forbid_unknown_fields=True):
    """At most `limit` entries."""

    limit: Annotated[int, Meta(ge=1, le=MAX_SESSIONS)] = 100


class Weight(Struct, forbid_unknown_fields=True):
    """A parameter by its path in the model, e.g. model.layers.0.self_attn.q_proj.weight."""

    name: str
    count: Annotated[int, Meta(ge=0, le=MAX_VALUES)] = 8


class Watch(Struct, forbid_unknown_fields=True):
    """NEWS with the load each `interval_s`, `count` times (0: until the call's deadline)."""

    interval_s: Annotated[float, Meta(ge=0.05, le=3600)] = 1.0
    count: Annotated[int, Meta(ge=0)] = 0


class Logging(Struct, forbid_unknown_fields=True):
    """How much is logged."""

    level: Literal["debug", "info", "warning", "error"]


ArgsT = TypeVar("ArgsT", bound=Struct)


def parse(ctl: Ctl, kind: type[ArgsT]) -> ArgsT:
    """The arguments of `ctl`. Raises CallError invalid, naming what is unknown or wrong."""
    known = kind.__struct_fields__
    if unknown := sorted(ctl.args.keys() - set(known)):
        there_is = f"it takes {', '.join(known)}" if known else "it takes none"
        raise CallError("invalid", f"{ctl.op}: unknown argument {', '.join(unknown)}; {there_is}")
    try:
        return msgspec.convert(ctl.args, kind)
    except msgspec.ValidationError as error:
        raise CallError("invalid", f"{ctl.op}: {error}") from None
