"""Which replica runs a request: pure policies over what is known of each replica's load."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxhost.frontend.errors import InternalError

ReplicaKey = tuple[str, int]  # slot, epoch


@dataclass(frozen=True)
class Candidate:
    """One replica that may be chosen. Figures are the worker's last report plus what was dispatched to it
    since; token counts include what rows have reserved. `kv_capacity` 0 means that it is not known."""

    key: ReplicaKey
    in_flight: int
    kv_tokens: int
    kv_capacity: int

    @property
    def kv_ratio(self) -> float:
        """Share of the KV cache in use, above 1 when more is queued than fits."""
        return self.kv_tokens / self.kv_capacity if self.kv_capacity else 0.0


def pick(policy: str, candidates: Sequence[Candidate], turn: int) -> Candidate:
    """The replica to use. `turn` counts requests for the model, so that equals take turns.

    `candidates` is not empty and in a stable order. Raises InternalError for a policy unknown here.
    """
    if policy == "round-robin":
        return candidates[turn % len(candidates)]
    cost = _COSTS.get(policy)
    if cost is None:
        raise InternalError(f"routing policy {policy!r} is not known to this frontend")
    costs = [cost(c) for c in candidates]
    best = min(costs)
    equals = [c for c, value in zip(candidates, costs, strict=True) if value == best]
    return equals[turn % len(equals)]


def _least_in_flight(candidate: Candidate) -> tuple[float, ...]:
    return (candidate.in_flight,)


def _minimum_kv_usage(candidate: Candidate) -> tuple[float, ...]:
    return (candidate.kv_ratio, candidate.in_flight)


_COSTS: dict[str, Callable[[Candidate], tuple[float, ...]]] = {
    "least-in-flight": _least_in_flight,
    "minimum-kv-usage": _minimum_kv_usage,
}
