"""`--models` text to specifications: `demo`, `/path/to/model:2`, `alias=path`. Looks at no model files."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxhost.supervisor.config.kinds import Choice, Duration, Number, Switch, Texts, Whole
from mlxhost.supervisor.config.table import option
from mlxhost.supervisor.console import printable
from mlxhost.supervisor.errors import UsageError
from mlxhost.wire.policies import ROUTINGS

MAX_REPLICAS = 64
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTISED = ("auto", "keep", "expand")
# A slot (`name/index`) and its epoch are a ZMQ identity, which holds 255 bytes.
MAX_NAME_BYTES = 200

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")


@dataclass(frozen=True, slots=True)
class Spec:
    """What one item of `--models` asks for. `alias` is empty when the user gave none, `replicas` 0.
    `settings` are fields of Model, from the model's table in mlxhost.toml."""

    source: str
    alias: str = ""
    replicas: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be served: where its files are, and the names it answers to.

    A field made by `option` is a key of the model's table in mlxhost.toml. Where it is unset (empty, 0), the
    fleet's setting of the same name holds.
    """

    name: str
    path: Path
    replicas: int = option(
        1, Whole(1, MAX_REPLICAS), "processes that serve the model; `:N` in --models is stronger"
    )
    aliases: tuple[str, ...] = option(
        (), Texts("NAMES", "a list of names"), "other names that it answers to", unset="none", live=True
    )
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    routing: str = option(
        "", Choice(ROUTINGS), "how a replica is chosen for a request", unset="the fleet's", live=True
    )
    dtype: str = option("", Choice(DTYPES), "compute dtype", unset="the fleet's")
    quantised: str = option("", Choice(QUANTISED), "what becomes of quantised weights", unset="the fleet's")
    context: int = option(
        0, Whole(0, metavar="TOKENS"), "longest prompt and answer together", unset="the fleet's"
    )
    max_rows: int = option(0, Whole(0), "requests that one replica decodes together", unset="the fleet's")
    lazy: bool = option(
        False, Switch(), "not loaded at the start: the first request for it loads it", live=True
    )
    pin: bool = option(False, Switch(), "never evicted once it is resident", live=True)
    priority: int = option(
        0,
        Whole(-100, 100),
        "of several models that could make room the one with the highest number goes first",
        live=True,
    )
    weight: float = option(
        1.0,
        Number(0.01, 100.0),
        "its share of the device's turns (`--gpu-lease`), relative to others'",
        live=True,
    )
    idle_ttl: float = option(
        0.0, Duration(), "unloaded after so long without a request", unset="the fleet's", live=True
    )


def parse(values: Iterable[str]) -> list[Spec]:
    """The specifications in the values of every `--models`. Raises UsageError."""
    items = [item.strip() for value in values for item in value.split(",")]
    specs = [parse_one(item) for item in items if item]
    if not specs:
        raise UsageError("--models names no model; try `--models demo`")
    return specs


def parse_one(item: str) -> Spec:
    """`[alias=]source[:replicas]`. A source that exists with its colon is taken whole."""
    alias, equals, source = item.partition("=")
    if not equals or _exists(item):
        alias, source = "", item
    elif not alias:
        raise UsageError(f"{item!r} has an empty name before '='; write name=path")
    head, colon, tail = source.rpartition(":")
    if not colon or _exists(source):
        return Spec(source, alias)
    if not (tail.isascii() and tail.isdigit() and 1 <= int(tail) <= MAX_REPLICAS):
        raise UsageError(
            f"{item!r}: the replica count after ':' is {tail!r}, not a whole number from 1 to {MAX_REPLICAS}"
        )
    return Spec(head, alias, int(tail))


def _exists(source: str) -> bool:
    return os.path.exists(os.path.expanduser(source))


def is_hub_id(source: str) -> bool:
    """Whether `source` has the form owner/name."""
    return _HUB_ID.fullmatch(source) is not None


def check_name(name: str) -> None:
    """Raises UsageError when `name` cannot name a model in requests and on a terminal."""
    if not name or name != printable(name) or name != name.strip() or len(name.encode()) > MAX_NAME_BYTES:
        raise UsageError(
            f"{name!r} cannot be a model's name (1 to {MAX_NAME_BYTES} bytes, no control characters, no "
            "space at either end); give one with name=path"
        )


def settle_names(models: Sequence[Model]) -> list[Model]:
    """`models` with unique names and unambiguous aliases.

    An alias that is another model's name, or that two models share, is dropped from all of them: it could
    only mislead. Raises UsageError when two models have one name.
    """
    names = Counter(m.name for m in models)
    for name, count in names.items():
        check_name(name)
        if count > 1:
            first, second, *_ = (m.path for m in models if m.name == name)
            raise UsageError(
                f"two models would be called {name!r} ({first} and {second}); "
                f"name one yourself: --models {name}={first},other-name={second}"
            )
    shared = Counter(alias for m in models for alias in set(m.aliases))
    return [
        replace(m, aliases=tuple(a for a in dict.fromkeys(m.aliases) if shared[a] == 1 and a not in names))
        for m in models
    ]
