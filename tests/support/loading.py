"""Tiny models in memory, each loaded once a session."""

from pathlib import Path

from mlxhost.worker.models.load import LoadedModel, load_model

_loaded: dict[Path, LoadedModel] = {}


def load(directory: Path) -> LoadedModel:
    """The model in `directory`, in float32, its quantised weights left as they are."""
    if directory not in _loaded:
        _loaded[directory] = load_model(
            directory, "float32", expand_quantised=False, on_progress=lambda _done, _total: None
        )
    return _loaded[directory]
