"""What a changed configuration means for a fleet that runs. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mlxhost.supervisor.config.tables import FLEET, MODEL, MODELS
from mlxhost.supervisor.modelspec import Model
from mlxhost.supervisor.settings import Settings

REPLICAS = "replicas"
SAMPLING = "sampling_defaults"
# Fields of a model that change without a new process, beside the options that say so.
_LIVE = frozenset({SAMPLING, REPLICAS})


@dataclass(frozen=True, slots=True)
class Differences:
    """From one configuration to the next. Models that are in none of these are not touched.

    `renewed` are models whose processes must be started anew, `live` those that change while they run: each
    with the names of the fields that differ. `applied` and `waiting` are options of the fleet, before and
    after; the latter need a restart of the fleet. `keys` are names of API keys that came, went or changed.
    """

    added: tuple[Model, ...] = ()
    removed: tuple[str, ...] = ()
    renewed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    live: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    applied: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    waiting: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, item.name) for item in fields(self))


def differences(before: Settings, after: Settings) -> Differences:
    """Everything that differs. A model that the fleet's settings change counts as changed itself."""
    old = {m.name: settled(m, before) for m in before.models}
    new = {m.name: settled(m, after) for m in after.models}
    changed = {n: names for n in new if n in old and (names := _differing(old[n], new[n]))}
    renewed = {n: names for n, names in changed.items() if not all(map(_is_live, names))}
    options = {
        name: (getattr(before, name), getattr(after, name))
        for name in FLEET
        if name != MODELS.name and getattr(before, name) != getattr(after, name)
    }
    at_once = {name for name in options if FLEET[name].live or name in MODEL}
    return Differences(
        added=tuple(new[n] for n in new if n not in old),
        removed=tuple(n for n in old if n not in new),
        renewed=renewed,
        live={n: names for n, names in changed.items() if n not in renewed},
        applied={name: pair for name, pair in options.items() if name in at_once},
        waiting={name: pair for name, pair in options.items() if name not in at_once},
        keys=_keys(before, after),
    )


def settled(model: Model, settings: Settings) -> Model:
    """`model` with the fleet's value for every shared option that it does not set itself."""
    unset = {
        name: getattr(settings, name)
        for name in MODEL
        if name in FLEET and not getattr(model, name) and getattr(settings, name)
    }
    return replace(model, **unset)


def taken(before: Settings, after: Settings, found: Differences) -> Settings:
    """`before` with all of `after` that can be had without a restart of the fleet."""
    now = {name: pair[1] for name, pair in found.applied.items()}
    return replace(before, models=after.models, keys=after.keys, **now)


def _is_live(name: str) -> bool:
    return name in _LIVE or (name in MODEL and MODEL[name].live)


def _differing(old: Model, new: Model) -> tuple[str, ...]:
    return tuple(f.name for f in fields(Model) if getattr(old, f.name) != getattr(new, f.name))


def _keys(before: Settings, after: Settings) -> tuple[str, ...]:
    old, new = ({key.name: key for key in settings.keys} for settings in (before, after))
    return tuple(sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)))
