"""Who wants which model, and what became of it. Owned by the supervisor's event loop."""

from dataclasses import dataclass

from mlxhost.supervisor.residency.facts import Refuse, Wish

# A frontend asks again and again while requests wait; one that stops has no more of them, or has died.
KEEP_SECONDS = 2.0


@dataclass(slots=True)
class Open:
    """One wish. `keep_until`: it is dropped then unless it is renewed."""

    wish: Wish
    keep_until: float
    waiting: str = ""  # why it is not granted yet
    refused: Refuse | None = None


class Wishes:
    """At most one wish for a model, however many ask."""

    def __init__(self) -> None:
        self._open: dict[str, Open] = {}

    def ask(self, model: str, now: float, keep_s: float = KEEP_SECONDS, *, preload: bool = False) -> None:
        """Somebody wants `model`; a wish that is open keeps its turn."""
        known = self._open.get(model)
        if known is None or known.refused:
            self._open[model] = Open(Wish(model, now, preload), now + keep_s)
        else:
            known.keep_until = max(known.keep_until, now + keep_s)

    def find(self, model: str) -> Open | None:
        return self._open.get(model)

    def drop(self, model: str) -> None:
        self._open.pop(model, None)

    def expire(self, now: float) -> None:
        for model, known in list(self._open.items()):
            if now >= known.keep_until:
                del self._open[model]

    def pending(self) -> list[Wish]:
        """Those not refused, in no order."""
        return [known.wish for known in self._open.values() if not known.refused]
