"""Control calls about residency: what frontends ask for waiting requests, and `ctl pin|unpin|explain`."""

from typing import Any

import msgspec

from mlxhost.supervisor.core import Core
from mlxhost.supervisor.residency.residency import Residency
from mlxhost.supervisor.residency.units import local
from mlxhost.supervisor.state import WAS_READY, Goal, Model, State
from mlxhost.wire.control import Ctl, News, Reply

WANT = "want"
MAX_WANT_SECONDS = 30.0
_KEEP_SECONDS = 2.0


class ResidencyCalls:
    """Answers `want`, `pin`, `unpin` and `explain`."""

    OPERATIONS = frozenset({WANT, "pin", "unpin", "explain"})

    def __init__(self, core: Core, residency: Residency) -> None:
        self._core, self._residency = core, residency

    async def answer(self, client: bytes, ctl: Ctl, model: Model) -> Reply:
        if ctl.op == WANT:
            return await self._want(client, ctl, model)
        self._residency.pin(model, ctl.op == "pin")
        self._core.events.event("", f"{ctl.op}ned {model.name}")
        return Reply(ctl.call_id, result={"model": model.name, "pinned": model.pinned})

    def explain(self, ctl: Ctl, model: Model | None) -> Reply:
        """The last decisions, of one model or of all, and where every model stands."""
        recent = [d for d in self._residency.log.recent if model is None or d.concerns(model.name)]
        result: dict[str, Any] = {
            "now": self._residency.status(),
            "decisions": msgspec.to_builtins(recent),
            "log": str(self._residency.log.path),
        }
        return Reply(ctl.call_id, result=result)

    async def _want(self, client: bytes, ctl: Ctl, model: Model) -> Reply:
        """A frontend has requests for `model`. Answered once it serves or never will, else `pending` at the
        deadline: then the frontend asks again, for as long as somebody waits. NEWS says how far it is."""
        told = ""

        def tell() -> None:
            nonlocal told
            line, data = self._progress(model)
            if line != told:
                told = line
                self._core.control.send(client, News(ctl.call_id, line, data))

        deadline_s = min(ctl.deadline_s, MAX_WANT_SECONDS)
        if done := self._over(ctl, model):
            return done
        self._residency.want(model, deadline_s + _KEEP_SECONDS)  # an earlier refusal is void with that
        await self._core.changes.until(lambda: self._outcome(ctl, model), deadline_s, tell)
        return self._outcome(ctl, model) or Reply(ctl.call_id, "pending", self._progress(model)[0])

    def _outcome(self, ctl: Ctl, model: Model) -> Reply | None:
        if (done := self._over(ctl, model)) is None and (refusal := self._residency.refusal(model)):
            return Reply(ctl.call_id, "refused", refusal.reason, {"code": refusal.code})
        return done

    def _over(self, ctl: Ctl, model: Model) -> Reply | None:
        """The answer when the model serves, or is not to be loaded by a request."""
        if any(r.state is State.READY for r in model.replicas):
            return Reply(ctl.call_id)
        if not self._core.state.accepting:
            return Reply(ctl.call_id, "failed", "the fleet is stopping")
        if model.goal in (Goal.UNLOAD, Goal.DRAIN):
            said = "unloaded" if model.goal is Goal.UNLOAD else "drained"
            return Reply(ctl.call_id, "failed", f"{model.name} was {said} by its operator")
        decisive = local(model) or model.replicas
        if decisive and all(r.state is State.FAILED for r in decisive):
            return Reply(ctl.call_id, "failed", decisive[0].reason)
        return None

    def _progress(self, model: Model) -> tuple[str, dict[str, Any]]:
        """For people, and for programs: {state, phase, done, total}, sizes in bytes."""
        for replica in model.replicas:
            if replica.state is State.LOADING and (progress := replica.progress):
                percent = f" {100 * progress.done // progress.total} %" if progress.total else ""
                data = {"phase": progress.phase, "done": progress.done, "total": progress.total}
                return f"{progress.phase}{percent}", {"state": "loading", **data}
            if replica.state in (State.STARTING, State.LOADING):
                return "starting", {"state": "starting"}
            if replica.state in WAS_READY:
                return "being unloaded; it is loaded again", {"state": "draining"}
        waiting = self._residency.waiting(model)
        return waiting or "waiting for its turn", {"state": "waiting", "reason": waiting}
