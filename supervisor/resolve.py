"""Specifications to models: where each one's files are. All cheap checks come before anything is fetched or
spawned, so that a typing mistake costs no download."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mlxhost.supervisor.embedded import EMBEDDED
from mlxhost.supervisor.errors import ModelError
from mlxhost.supervisor.modelfiles import GGUF_SUFFIX, check_model
from mlxhost.supervisor.modelspec import Model, Spec, is_hub_id, settle_names
from mlxhost.supervisor.nearby import nearby

# Stands for the files of an embedded model until they are fetched.
_UNFETCHED = Path("(embedded)")
_SHOWN = 300  # characters of a path in a message


def locate(specs: Sequence[Spec]) -> list[Model]:
    """The models of `specs`, files checked; embedded ones have no files yet (see `fetch_embedded`).

    Raises ModelError or UsageError.
    """
    return settle_names([_locate(spec) for spec in specs])


def fetch_embedded(
    models: Sequence[Model], specs: Sequence[Spec], fetch: Callable[[str, str], Path]
) -> list[Model]:
    """`models` with the files of embedded ones fetched by `fetch(embedded name, model name)`."""
    return [
        replace(model, path=fetch(spec.source, model.name)) if model.path == _UNFETCHED else model
        for model, spec in zip(models, specs, strict=True)
    ]


def _locate(spec: Spec) -> Model:
    if embedded := EMBEDDED.get(spec.source):
        name, defaults = spec.alias or spec.source, embedded.sampling_defaults
        return _made(spec, name, _UNFETCHED, (spec.source, *embedded.aliases), defaults)
    path = Path(os.path.expanduser(spec.source)).absolute()
    aliases: tuple[str, ...]
    if _is_there(spec.source, path):
        path = path.resolve() if path.is_dir() else path
        own = path.stem if path.suffix.lower() == GGUF_SUFFIX else path.name
        aliases = (own, str(path))
    elif is_hub_id(spec.source) and (cached := _from_hub_cache(spec.source)):
        path, own = cached, spec.source.rpartition("/")[2]
        aliases = (own, spec.source, str(path))
    else:
        raise ModelError(_unknown(spec.source, path))
    check_model(path)
    return _made(spec, spec.alias or own, path, aliases, {})


def _made(
    spec: Spec, name: str, path: Path, aliases: tuple[str, ...], defaults: Mapping[str, float]
) -> Model:
    """The model, with what its table in mlxhost.toml says of it."""
    settings = dict(spec.settings)
    return Model(
        name=name,
        path=path,
        replicas=spec.replicas or settings.pop("replicas", 1),
        aliases=(*settings.pop("aliases", ()), *aliases),
        sampling_defaults={**defaults, **settings.pop("sampling_defaults", {})},
        **{key: value for key, value in settings.items() if key != "replicas"},
    )


def _is_there(source: str, path: Path) -> bool:
    """Raises ModelError for a path that cannot be looked at, or that cannot be one."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        shown = repr(source if len(source) <= _SHOWN else source[:_SHOWN] + "...")
        raise ModelError(f"model {shown} cannot be looked at: {reason}") from None
    return True


def _from_hub_cache(repo: str) -> Path | None:
    """The newest snapshot of `repo` in the local Hugging Face cache. Never goes online."""
    from huggingface_hub import try_to_load_from_cache  # slow to import, and few need it

    config = try_to_load_from_cache(repo, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def _siblings(directory: Path) -> list[str]:
    """What might have been meant; nothing where the directory may not be listed."""
    try:
        return [p.name for p in directory.iterdir() if p.is_dir() or p.suffix.lower() == GGUF_SUFFIX]
    except OSError:
        return []


def _unknown(source: str, path: Path) -> str:
    if is_hub_id(source) and not path.parent.exists():
        return (
            f"model {source!r} is neither a path nor in the local Hugging Face cache; "
            f"fetch it first with `hf download {source}`, or give a directory"
        )
    siblings = _siblings(path.parent)
    if "/" in source:
        reason = "no such file or directory" if path.parent.is_dir() else f"{path.parent} does not exist"
        return f"model {source!r} not found: {reason}{nearby(path.name, siblings)}"
    return (
        f"unknown model {source!r}: not embedded ({', '.join(EMBEDDED)}) and no such directory or file here"
        f"{nearby(source, [*EMBEDDED, *siblings])}"
    )
