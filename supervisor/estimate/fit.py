"""Does a model fit, and how long a context? Pure, given an estimate for every context."""

from dataclasses import dataclass
from typing import Any

from mlxhost.supervisor.console import size
from mlxhost.supervisor.estimate.estimate import CACHE_STEP, Estimate, Sizer


@dataclass(frozen=True, slots=True)
class Fit:
    """`free_bytes` is what other models leave of the budget. A safe context of 0: not even the weights fit,
    or the model does not grow with it and fits (then it is the model's own bound)."""

    estimate: Estimate
    budget_bytes: int
    free_bytes: int
    safe_context: int  # the longest that fits the budget with no other model resident
    safe_context_now: int  # the longest that fits beside what is resident

    @property
    def fits(self) -> bool:
        """With nothing else resident."""
        return self._need <= self.budget_bytes

    @property
    def fits_now(self) -> bool:
        """Without unloading anything."""
        return self._need <= self.free_bytes

    @property
    def _need(self) -> int:
        return max(self.estimate.total_bytes, self.budget_bytes if self.estimate.plans_own_memory else 0)

    def as_json(self) -> dict[str, Any]:
        """Bytes and tokens."""
        found = self.estimate
        return {
            "fits": self.fits,
            "fits_now": self.fits_now,
            "budget_bytes": self.budget_bytes,
            "free_bytes": self.free_bytes,
            "total_bytes": found.total_bytes,
            "weights_bytes": found.weights_bytes,
            "kv_bytes": found.kv_bytes,
            "kv_bytes_per_token": found.kv_bytes_per_token,
            "kv_fixed_bytes": found.kv_fixed_bytes,
            "transient_bytes": found.transient_bytes,
            "process_bytes": found.process_bytes,
            "context": found.context,
            "max_context": found.max_context,
            "safe_context": self.safe_context,
            "safe_context_now": self.safe_context_now,
            "dtype": found.dtype,
            "backend": found.backend,
            "sized": found.sized,
            "plans_own_memory": found.plans_own_memory,
            "notes": list(found.notes),
        }


def fit(sizer: Sizer, context: int, budget: int, held: int = 0) -> Fit:
    """Whether the model fits `budget`, of which others hold `held`. Raises ModelError."""
    free = max(0, budget - held)
    return Fit(sizer.at(context), budget, free, _longest(sizer, budget), _longest(sizer, free))


def _longest(sizer: Sizer, room: int) -> int:
    """The longest context, in whole steps of a cache, whose total is within `room`; 0: none."""
    bound = sizer.at(1 << 30)
    if not bound.sized or bound.plans_own_memory or sizer.at(1).total_bytes > room:
        return 0
    if bound.total_bytes <= room:
        return bound.max_context
    low, high = 0, bound.max_context // CACHE_STEP
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sizer.at(middle * CACHE_STEP).total_bytes <= room else (low, middle)
    return low * CACHE_STEP or CACHE_STEP


def sentence(name: str, found: dict[str, Any]) -> str:
    """The answer for people, from `Fit.as_json`."""
    needs, budget = size(found["total_bytes"]), size(found["budget_bytes"])
    if found["plans_own_memory"]:
        return f"{name} plans its own memory: it is given the whole budget of {budget}"
    at = f"at {found['context']:,} tokens" if found["sized"] else "for its weights alone"
    if not found["fits"]:
        safe = found["safe_context"]
        way = f"; {safe:,} tokens would fit" if safe else "; no context would fit"
        return f"{name} does not fit: it needs {needs} {at}, and the budget is {budget}{way}"
    beside = "" if found["fits_now"] else f", once others make room (free now: {size(found['free_bytes'])})"
    longest = f"; safe up to {found['safe_context']:,} tokens" if found["sized"] else ""
    return f"{name} fits: it needs {needs} {at}, and the budget is {budget}{beside}{longest}"
