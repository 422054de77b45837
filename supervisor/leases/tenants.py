"""What a worker needs, from its estimate before it is ready and from its own figures afterwards. Pure."""

from mlxhost.supervisor.estimate.estimate import SERVING_CONTEXT, Estimate, rounded
from mlxhost.supervisor.leases.grant import Tenant
from mlxhost.supervisor.state import Replica
from mlxhost.wire.control import Ready

_ROWS = {"cpu": 16, "cuda": 64, "metal": 64}  # what a worker decodes together when nothing else is asked


def tenant(replica: Replica, estimated: Estimate | None, max_rows: int) -> Tenant:
    """`estimated` None: the files tell nothing, so that until READY only the least is known. `max_rows` as
    asked for; 0: the backend's."""
    importance = replica.model.spec.priority
    if replica.ready is not None:
        return _measured(replica.slot, replica.ready, estimated, importance)
    if estimated is None:
        return Tenant(replica.slot, 0, 0, 0, 0, 0, importance=importance)
    rows = max_rows or _ROWS[estimated.backend]
    longest = max(estimated.context, estimated.max_context)
    return Tenant(
        replica.slot,
        process=estimated.process_bytes,
        weights=estimated.weights_bytes,
        transient=estimated.transient_bytes,
        kv_wanted=estimated.kv_bytes,
        kv_useful=rows * (estimated.kv_bytes_per_token * rounded(longest) + estimated.kv_fixed_bytes),
        plans_own_memory=estimated.plans_own_memory,
        importance=importance,
    )


def _measured(slot: str, ready: Ready, estimated: Estimate | None, importance: int) -> Tenant:
    # A GPU's memory is not the process's as Linux counts it, so the weights may not be part of that figure.
    process = ready.resident_bytes - ready.weights_bytes
    fixed = estimated.kv_fixed_bytes if estimated else 0
    context = min(SERVING_CONTEXT, ready.max_model_len)
    return Tenant(
        slot,
        process=process if process > 0 else ready.resident_bytes,
        weights=ready.weights_bytes,
        transient=estimated.transient_bytes if estimated else 0,
        kv_wanted=ready.kv_bytes_per_token * rounded(context) + fixed,
        kv_useful=ready.max_rows * (ready.kv_bytes_per_token * rounded(ready.max_model_len) + fixed),
        plans_own_memory=bool(estimated and estimated.plans_own_memory),
        importance=importance,
    )
