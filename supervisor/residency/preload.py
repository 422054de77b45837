"""What is loaded at the start. Pure."""

from collections.abc import Sequence

from mlxhost.supervisor.errors import UsageError
from mlxhost.supervisor.modelspec import Model
from mlxhost.supervisor.nearby import nearby
from mlxhost.supervisor.settings import ALL, NONE


def chosen(models: Sequence[Model], preload: Sequence[str]) -> list[tuple[Model, bool]]:
    """The models to load at the start, each with whether it must fit. Raises UsageError for a name that is
    none of theirs."""
    if list(preload) == [ALL]:
        return [(model, False) for model in models if not model.lazy]
    if list(preload) == [NONE]:
        return []
    found = []
    for name in preload:
        model = next((m for m in models if name in (m.name, *m.aliases)), None)
        if model is None:
            known = [m.name for m in models]
            raise UsageError(f"--preload {name}: no such model ({', '.join(known)}){nearby(name, known)}")
        found.append((model, True))
    return found


def order(models: Sequence[Model]) -> list[Model]:
    """Pinned ones first, then what matters more, then as they were given."""
    return sorted(models, key=lambda m: (not m.pin, m.priority))
