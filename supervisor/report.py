"""Fleet state as others see it: the FLEET message and the answer to `ctl status`. Pure."""

from typing import Any

import msgspec

from mlxhost.supervisor.state import RUNNING, FleetState, Frontend, Goal, Member, Model, Replica, State
from mlxhost.wire.control import Fleet, FleetFrontend, FleetModel, FleetReplica

ABSENT = "absent"  # no process; one is started when it is asked for


def fleet_message(state: FleetState) -> Fleet:
    return Fleet(
        version=state.version,
        frontends=[
            *(FleetFrontend(f.slot, f.epoch, f.endpoint) for f in state.frontends if f.endpoint),
            *state.joined_frontends,
        ],
        models=[_fleet_model(model) for model in state.models.values()],
        accepting=state.accepting,
    )


def _fleet_model(model: Model) -> FleetModel:
    reasons = [r.reason for r in model.replicas if r.reason and r.state is not State.READY]
    return FleetModel(
        name=model.name,
        aliases=list(model.spec.aliases),
        replicas=[_fleet_replica(r) for r in model.replicas],
        routing=model.routing,
        card=model.card,
        reason=reasons[0] if reasons else "",
        created=model.created,
        sampling_defaults=dict(model.spec.sampling_defaults),
        on_demand=may_load(model) and not all(r.state is State.FAILED for r in model.replicas),
    )


def shown_state(member: Member) -> str:
    """The state that others see: of a ready worker that stands still, why it does."""
    if member.state is State.READY and member.mode != RUNNING:
        return member.mode
    if member.state is State.UNLOADED and isinstance(member, Replica) and may_load(member.model):
        return ABSENT
    return member.state.value


def may_load(model: Model) -> bool:
    """Whether a request for the model makes it resident, if it is not."""
    return model.goal not in (Goal.UNLOAD, Goal.DRAIN) and any(not r.host for r in model.replicas)


def _fleet_replica(replica: Replica) -> FleetReplica:
    ready = replica.ready
    if ready is None:
        return FleetReplica(replica.slot, replica.index, replica.epoch, shown_state(replica))
    return FleetReplica(
        slot=replica.slot,
        index=replica.index,
        epoch=replica.epoch,
        state=shown_state(replica),
        max_model_len=ready.max_model_len,
        kv_capacity_tokens=ready.kv_capacity_tokens,
        max_rows=ready.max_rows,
        max_queued=ready.max_queued,
        tasks=ready.tasks,
    )


def status(state: FleetState, now: float) -> dict[str, Any]:
    """The whole fleet as JSON values. Times in seconds, sizes in bytes."""
    return {
        "fleet": state.name,
        "url": state.url,
        "accepting": state.accepting,
        "uptime_s": round(now - state.started_at, 1),
        "bad_messages": state.bad_messages,
        "models": [_model_status(model, now) for model in state.models.values()],
        "frontends": [_frontend_status(frontend, now) for frontend in state.frontends],
    }


def _model_status(model: Model, now: float) -> dict[str, Any]:
    return {
        "name": model.name,
        "aliases": list(model.spec.aliases),
        "path": str(model.spec.path),
        "routing": model.routing,
        "replicas": [_replica_status(r, now) for r in model.replicas],
    }


def _member_status(member: Member, now: float) -> dict[str, Any]:
    child = member.child
    return {
        "slot": member.slot,
        "host": member.host,
        "epoch": member.epoch,
        "state": shown_state(member),
        "reason": member.reason,
        "pid": child.pid if child else None,
        "uptime_s": round(now - member.spawned_at, 1) if child else None,
        "restarts": member.total_restarts,
        "in_flight": member.in_flight,
        "memory_bytes": member.held_bytes or (member.beat.resident_bytes if member.beat else 0),
        "last_lines": member.last_lines,
    }


def _frontend_status(frontend: Frontend, now: float) -> dict[str, Any]:
    return _member_status(frontend, now) | {"remote_endpoint": frontend.remote_endpoint}


def _replica_status(replica: Replica, now: float) -> dict[str, Any]:
    load, ready, progress = replica.load, replica.ready, replica.progress
    loading = replica.state is State.LOADING and progress is not None
    return _member_status(replica, now) | {
        "memory_bytes": replica.held_bytes
        or (replica.beat.resident_bytes if replica.beat else 0)
        or (ready.resident_bytes if ready else 0),
        "phase": progress.phase if loading and progress else "",
        "progress": [progress.done, progress.total] if loading and progress else [0, 0],
        "running": load.running,
        "queued": load.waiting,
        "kv_tokens": load.kv_tokens,
        "kv_capacity": load.kv_capacity or (ready.kv_capacity_tokens if ready else 0),
        "cached_tokens": load.cached_tokens,
        "tokens_per_s": round(load.tokens_per_s, 1),
        "memory": msgspec.to_builtins(replica.beat.memory) if replica.beat else {},
        "lease_bytes": replica.lease.memory_bytes,
        "kv_lease_bytes": replica.lease.kv_bytes,
        "shrink": replica.lease.shrink,
        "cpu_threads": replica.threads if replica.child else 0,
        "backend": ready.backend if ready else "",
        "dtype": ready.dtype if ready else "",
        "context": ready.max_model_len if ready else 0,
        "weights_bytes": ready.weights_bytes if ready else 0,
    }
