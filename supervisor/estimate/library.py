"""Models that are on this machine: those of the fleet, of the local hub cache, and of mlxhost's own cache.

A model is found by its name here, never by a path. Never goes online.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxhost.supervisor.modelfiles import GGUF_SUFFIX

MAX_MODELS = 1000  # of one source; more would take longer than a client waits


@dataclass(frozen=True, slots=True)
class Held:
    """`source`: fleet, hub or cache. `form`: directory, gguf, or converted (by a worker, from a GGUF)."""

    name: str
    path: Path
    source: str
    form: str
    aliases: tuple[str, ...] = ()

    @property
    def disk_bytes(self) -> int:
        """What its weights take on disk; 0 when they cannot be looked at."""
        try:
            if self.path.is_dir():
                return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))
            return self.path.stat().st_size
        except OSError:
            return 0


def form_of(path: Path) -> str:
    return "gguf" if path.suffix.lower() == GGUF_SUFFIX else "directory"


def library(fleet: Iterable[Held], cache: Path) -> list[Held]:
    """All of them, by name; of two with one name the fleet's, then the hub's."""
    found: dict[str, Held] = {}
    for held in (*fleet, *in_hub_cache(hub_cache()), *in_own_cache(cache)):
        found.setdefault(held.name, held)
    return list(found.values())


def find(held: Iterable[Held], name: str) -> Held | None:
    """By name, else by alias."""
    known = list(held)
    return next((h for h in known if h.name == name), None) or next(
        (h for h in known if name in h.aliases), None
    )


def hub_cache() -> Path:
    """Where the Hugging Face client keeps what it fetched (its documented environment variables)."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return Path(home).expanduser() / "hub"


def in_hub_cache(root: Path) -> Iterator[Held]:
    """`models--OWNER--NAME/snapshots/REVISION`, the revision that refs/main names."""
    for folder in _listed(root, "models--*"):
        try:
            revision = (folder / "refs" / "main").read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        snapshot = folder / "snapshots" / Path(revision).name
        if (snapshot / "config.json").is_file():
            name = folder.name.removeprefix("models--").replace("--", "/", 1)
            yield Held(name, snapshot, "hub", "directory")


def in_own_cache(root: Path) -> Iterator[Held]:
    """GGUF files that were pulled, and what workers converted."""
    for path in _listed(root, "*"):
        if path.suffix.lower() == GGUF_SUFFIX and path.is_file():
            yield Held(path.name, path, "cache", "gguf")
        elif path.is_dir() and (path / "config.json").is_file():
            yield Held(path.name, path, "cache", "converted")


def _listed(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(root.glob(pattern))[:MAX_MODELS]
    except OSError:
        return []
