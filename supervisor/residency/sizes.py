"""What a model is charged: an estimate before it was ever loaded, what was measured afterwards.

Both are for one replica with one request's cache at the serving context (8,192 tokens, or less where the
model or the settings say so). What a worker really takes counts as soon as it is more.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mlxhost.supervisor.errors import ModelError
from mlxhost.supervisor.estimate.estimate import SERVING_CONTEXT, Estimate, estimate
from mlxhost.supervisor.modelspec import Model as ModelSpec
from mlxhost.supervisor.settings import Settings
from mlxhost.supervisor.state import Model, Replica
from mlxhost.wire.control import Ready


class Size(NamedTuple):
    """Bytes of one replica; `transient` of them only while a long prompt is read. `whole_budget`: it plans
    its own memory and takes what it gets."""

    bytes: int
    transient: int = 0
    whole_budget: bool = False


_Basis = tuple[Path, str, str, int]  # what a size depends on: files, dtype, quantised, context
Estimator = Callable[[ModelSpec, Settings], Size]


def estimate_of(model: ModelSpec, settings: Settings) -> Estimate | None:
    """From its files' headers, as its worker will be told to load them. None: they cannot be read, which its
    worker will report."""
    try:
        return estimate(
            model.path,
            model.dtype or settings.dtype,
            model.context or settings.context,
            quantised=model.quantised or settings.quantised,
        )
    except ModelError:
        return None


def estimated(model: ModelSpec, settings: Settings) -> Size:
    """Its size before it was ever loaded; one that cannot be estimated counts nothing."""
    found = estimate_of(model, settings)
    if found is None:
        return Size(0)
    return Size(found.total_bytes, found.transient_bytes, found.plans_own_memory)


def measured(ready: Ready, transient: int) -> int:
    """What a worker that has loaded is charged: what it takes, a request's cache, and what reading a long
    prompt takes for a moment, which no worker has done when it has just loaded."""
    context = min(SERVING_CONTEXT, ready.max_model_len)
    return ready.resident_bytes + ready.kv_bytes_per_token * context + transient


class Sizes:
    """What each model needs, by what is known best."""

    def __init__(self, settings: Callable[[], Settings], estimator: Estimator = estimated) -> None:
        """`settings` are those of now: a reload replaces them."""
        self._settings, self._estimator = settings, estimator
        self._measured: dict[str, tuple[_Basis, int]] = {}

    def learn(self, replica: Replica) -> None:
        """A worker is ready: from now on its figures count."""
        if replica.ready:
            spec = replica.model.spec
            transient = self._estimator(spec, self._settings()).transient
            self._measured[spec.name] = self._basis(spec), measured(replica.ready, transient)

    def is_measured(self, model: Model) -> bool:
        return self._known(model) is not None

    def replica(self, model: Model, budget: int) -> int:
        """What one replica of `model` needs, loaded or not."""
        known = self._known(model)
        if known is not None:
            return known
        size = self._estimator(model.spec, self._settings())
        return max(size.bytes, budget) if size.whole_budget else size.bytes

    def _known(self, model: Model) -> int | None:
        """What was measured, if it still holds."""
        basis, size = self._measured.get(model.name, (None, 0))
        return size if basis == self._basis(model.spec) else None

    def _basis(self, model: ModelSpec) -> _Basis:
        settings = self._settings()
        return (
            model.path,
            model.dtype or settings.dtype,
            model.quantised or settings.quantised,
            model.context or settings.context,
        )
