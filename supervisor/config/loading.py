"""From what was asked to settings with models; cheap checks come first, so a mistake costs no download."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mlxhost.supervisor import resolve
from mlxhost.supervisor.config import effective
from mlxhost.supervisor.config.asked import Asked
from mlxhost.supervisor.config.effective import Config
from mlxhost.supervisor.errors import UsageError
from mlxhost.supervisor.modelspec import Model
from mlxhost.supervisor.settings import Settings
from mlxhost.wire.curve import parse_endpoint

NO_MODEL = (
    "--models names no model, and mlxhost.toml has none; try `--models demo`, or see `mlxhost config init`"
)
_EVERYWHERE = ("0.0.0.0", "::", "*")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration whose models were found; the embedded ones among them are not fetched yet."""

    config: Config
    models: tuple[Model, ...]

    def settings(self, fetch: Callable[[str, str], Path]) -> Settings:
        """With every model's files; `fetch(embedded name, model name)` gets those of embedded ones."""
        models = resolve.fetch_embedded(self.models, self.config.specs, fetch)
        return replace(self.unfetched, models=tuple(models))

    @property
    def unfetched(self) -> Settings:
        return Settings(models=self.models, keys=self.config.keys, **self.config.values())


def load(asked: Asked) -> Loaded:
    """Raises UserError: of mlxhost.toml with all its mistakes, else of the first thing that is wrong."""
    config = effective.read(asked)
    settings = Settings(models=(), **config.values())
    check_listen(settings)
    if not config.specs and not settings.listen:
        raise UsageError(NO_MODEL)
    return Loaded(config, tuple(resolve.locate(config.specs)))


def check_listen(settings: Settings) -> None:
    """Raises UsageError for a --listen that cannot be, or that says too little."""
    try:
        host = parse_endpoint(settings.listen)[0] if settings.listen else ""
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None
    if host in _EVERYWHERE and not settings.advertise:
        raise UsageError(
            f"--listen {settings.listen} takes every address; --advertise says which one to dial"
        )
    if settings.advertise and not settings.listen:
        raise UsageError("--advertise says how to reach --listen, which is not given")
