"""Control operations: what `mlxhost ctl` and other clients may ask of a running fleet.

Each call gets NEWS while it runs and exactly one REPLY. Operations that are not the supervisor's own go to
the processes of the target (see workercalls).
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from mlxhost.supervisor import adminsocket, loglevel, reload
from mlxhost.supervisor.core import Core
from mlxhost.supervisor.estimate.answers import Answers
from mlxhost.supervisor.lifecycle import Lifecycle
from mlxhost.supervisor.nearby import nearby
from mlxhost.supervisor.reload import Reload
from mlxhost.supervisor.report import shown_state, status
from mlxhost.supervisor.residency.calls import ResidencyCalls
from mlxhost.supervisor.residency.residency import Residency
from mlxhost.supervisor.state import SETTLED, Goal, Model, Replica, State
from mlxhost.supervisor.workercalls import WorkerCalls
from mlxhost.wire.control import Ctl, News, Reply
from mlxhost.wire.policies import ROUTINGS

# A deadline that a client leaves out or overdoes must not keep a call for ever.
MAX_DEADLINE_SECONDS = 24 * 3600.0


class Operations:
    def __init__(self, core: Core, lifecycle: Lifecycle, residency: Residency) -> None:
        self._core, self._lifecycle, self._residency = core, lifecycle, residency
        calls = self._residency_calls = ResidencyCalls(core, residency)
        self._workers = WorkerCalls(core)
        self._answers = Answers(core)
        self.reload = Reload(core, lifecycle, self._workers, core.source)
        self._own: dict[str, Callable[[bytes, Ctl, Model], Awaitable[Reply]]] = {
            "drain": self._drain,
            "resume": self._resume,
            "unload": self._unload,
            "load": self._load,
            **dict.fromkeys(calls.OPERATIONS, calls.answer),
        }

    async def run(self, client: bytes, ctl: Ctl) -> None:
        """Do what `ctl` asks, and answer it."""
        ctl = msgspec.structs.replace(ctl, deadline_s=min(max(ctl.deadline_s, 0.0), MAX_DEADLINE_SECONDS))
        reply = await self._answer(client, ctl)
        self._core.events.event("", f"ctl {ctl.op} {ctl.target}: {reply.code}", "debug")
        self._core.control.send(client, reply)

    async def _answer(self, client: bytes, ctl: Ctl) -> Reply:
        state = self._core.state
        if ctl.op == "status":
            late = {"late_replies": self._core.calls.late}
            admin = self._core.rundir.sockets / adminsocket.NAME
            where = {
                "residency": self._residency.status(),
                "admin_socket": str(admin) if admin.exists() else "",
            }
            return Reply(ctl.call_id, result=status(state, time.monotonic()) | where | late | self._remote())
        if not state.accepting:
            return Reply(ctl.call_id, "failed", "the fleet is stopping")
        model = state.find_model(ctl.target)
        if ctl.op == loglevel.OPERATION:
            return await loglevel.configure_logging(self._core, self._workers, client, ctl)
        if ctl.op == reload.OPERATION:
            return await self.reload.run(client, ctl)
        if ctl.op == "explain" and (model or not ctl.target):
            return self._residency_calls.explain(ctl, model)
        if ctl.op in Answers.operations:
            return await self._answers.answer(ctl)
        if ctl.op == "routing" and (model or not ctl.target):
            return self._routing(ctl, model)
        if ctl.op not in self._own and (asked := self._workers.targets(ctl)) is not None:
            return await self._workers.run(client, ctl, asked)
        if ctl.target and model is None:
            known = ", ".join(state.models)
            hint = nearby(ctl.target, state.models)
            return Reply(ctl.call_id, "not_found", f"no model {ctl.target!r} in this fleet ({known}){hint}")
        if model is None:
            return Reply(ctl.call_id, "invalid", f"{ctl.op} needs a model: {', '.join(state.models)}")
        return await self._own[ctl.op](client, ctl, model)

    def _routing(self, ctl: Ctl, model: Model | None) -> Reply:
        """Show the routing policy of a model, or of all; with `policy`, change it for what comes next."""
        state, policy = self._core.state, ctl.args.get("policy")
        models = list(state.models.values()) if model is None else [model]
        if policy is not None:
            if policy not in ROUTINGS:
                known = ", ".join(ROUTINGS)
                return Reply(ctl.call_id, "invalid", f"no routing policy {policy!r}; there is {known}")
            if model is None:
                state.routing = policy
            for changed in models:
                changed.routing = policy
            self._core.events.event("", f"routing of {', '.join(m.name for m in models)}: {policy}")
            self._core.changed()
        return Reply(ctl.call_id, result={"routing": {m.name: m.routing for m in models}})

    def _remote(self) -> dict[str, Any]:
        return {"remote": self._core.hosts.status()} if self._core.hosts else {}

    async def _drain(self, client: bytes, ctl: Ctl, model: Model) -> Reply:
        """Send the model nothing new, and wait until what runs has finished."""
        if model.goal is Goal.UNLOAD:
            return Reply(ctl.call_id, "invalid", f"{model.name} is unloaded, or about to be")
        model.goal = Goal.DRAIN
        self._core.events.event("", f"draining {model.name}")
        self._lifecycle.pursue(model)
        return await self._wait_for(
            client, ctl, model, "drained", lambda r: r.state not in (State.READY, State.DRAINING)
        )

    async def _resume(self, client: bytes, ctl: Ctl, model: Model) -> Reply:
        """Send the model requests again, also after `pause`."""
        if model.goal is Goal.UNLOAD:
            return Reply(
                ctl.call_id,
                "invalid",
                f"{model.name} is unloaded, or about to be; `mlxhost ctl load {model.name}` loads it",
            )
        if model.goal is Goal.DRAIN:
            model.goal = Goal.SERVE if any(r.child or r.host for r in model.replicas) else Goal.STANDBY
        self._core.events.event("", f"resumed {model.name}")
        self._core.changed()
        self._lifecycle.pursue(model)
        if bad := await self._workers.resume(model, ctl.deadline_s):
            return Reply(ctl.call_id, "failed", bad, self._states(model))
        return self._done(ctl, model)

    async def _unload(self, client: bytes, ctl: Ctl, model: Model) -> Reply:
        """Drain the model, then end its processes. `until_needed`: the next request loads it again."""
        model.goal = Goal.STANDBY if ctl.args.get("until_needed") else Goal.UNLOAD
        self._residency.forget(model)  # who still waits for it asks again
        self._core.changed()
        self._core.events.event("", f"unloading {model.name}")
        self._lifecycle.pursue(model)

        def gone(replica: Replica) -> bool:
            kept = model.goal is Goal.STANDBY and (replica.host or replica.state is State.FAILED)
            return replica.state is State.UNLOADED or bool(kept)

        return await self._wait_for(client, ctl, model, "unloaded", gone)

    async def _load(self, client: bytes, ctl: Ctl, model: Model) -> Reply:
        """Load the model, also after it failed, and wait until it serves; other models make room for it by
        the rules of residency."""
        self._core.events.event("", f"asked to load {model.name}")
        self._lifecycle.load(model)
        if ctl.args.get("wait", True):
            began = time.monotonic()
            if refused := await self._room_for(client, ctl, model):
                return refused
            ctl = msgspec.structs.replace(ctl, deadline_s=ctl.deadline_s - (time.monotonic() - began))
        elif refusal := self._residency.refusal(model):
            return Reply(ctl.call_id, "failed", f"{model.name}: {refusal.reason}")
        return await self._wait_for(client, ctl, model, "ready", lambda r: r.state in SETTLED)

    async def _room_for(self, client: bytes, ctl: Ctl, model: Model) -> Reply | None:
        """Wait until the model may be loaded; the reply when it may not."""
        told = ""

        def tell() -> None:
            nonlocal told
            if (news := self._residency.waiting(model)) and news != told:
                told = news
                self._core.control.send(client, News(ctl.call_id, f"{model.name}: {news}"))

        def over() -> bool:
            asked = model.goal is Goal.STANDBY and self._core.state.accepting
            return not asked or self._residency.refusal(model) is not None

        if not await self._core.changes.until(over, ctl.deadline_s, tell):
            why = self._residency.waiting(model)
            return Reply(
                ctl.call_id, "timeout", f"{model.name} has no room after {ctl.deadline_s:.0f} s: {why}"
            )
        if refusal := self._residency.refusal(model):
            return Reply(ctl.call_id, "failed", f"{model.name}: {refusal.reason}")
        return None

    async def _wait_for(
        self, client: bytes, ctl: Ctl, model: Model, wanted: str, reached: Callable[[Replica], bool]
    ) -> Reply:
        if not ctl.args.get("wait", True):
            return self._done(ctl, model)
        goal, told = model.goal, ""

        def tell() -> None:
            nonlocal told
            news = progress_line(model)
            if news != told:
                told = news
                self._core.control.send(client, News(ctl.call_id, news))

        def over() -> bool:
            return (
                all(map(reached, model.replicas)) or model.goal is not goal or not self._core.state.accepting
            )

        in_time = await self._core.changes.until(over, ctl.deadline_s, tell)
        if not self._core.state.accepting:
            return Reply(ctl.call_id, "failed", "the fleet is stopping")
        if model.goal is not goal:
            return Reply(
                ctl.call_id, "failed", f"{model.name}: overtaken by another call ({model.goal.value})"
            )
        if not in_time:
            return Reply(
                ctl.call_id,
                "timeout",
                f"{model.name} is not {wanted} after {ctl.deadline_s:.0f} s ({progress_line(model)}); "
                "it goes on without you waiting",
            )
        failed = [r for r in model.replicas if r.state is State.FAILED]
        if failed and goal is Goal.SERVE:
            reasons = "; ".join(f"{r.slot}: {r.reason}" for r in failed)
            return Reply(ctl.call_id, "failed", reasons, self._states(model))
        return self._done(ctl, model)

    def _done(self, ctl: Ctl, model: Model) -> Reply:
        return Reply(ctl.call_id, result=self._states(model))

    def _states(self, model: Model) -> dict[str, Any]:
        return {"model": model.name, "replicas": {r.slot: shown_state(r) for r in model.replicas}}


def progress_line(model: Model) -> str:
    """Where the replicas of `model` stand, on one line."""
    return ", ".join(_progress(r) for r in model.replicas)


def _progress(replica: Replica) -> str:
    if replica.state is State.DRAINING:
        return f"{replica.slot} draining, {replica.in_flight} in flight"
    if replica.state is State.LOADING and (progress := replica.progress):
        percent = f" {100 * progress.done // progress.total} %" if progress.total else ""
        return f"{replica.slot} {progress.phase}{percent}"
    return f"{replica.slot} {replica.state.value}"
