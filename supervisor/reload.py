"""`ctl reload` and SIGHUP: the configuration is read again, and what differs is applied to the running fleet.

What differs is decided in config.diff. Models that did not change are not touched; a configuration with a
mistake changes nothing.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from mlxhost.supervisor import growth, loglevel
from mlxhost.supervisor.config.diff import Differences, differences, settled, taken
from mlxhost.supervisor.core import Core
from mlxhost.supervisor.errors import UserError
from mlxhost.supervisor.lifecycle import Lifecycle
from mlxhost.supervisor.modelspec import Model as ModelSpec
from mlxhost.supervisor.notify import READY, Notifier
from mlxhost.supervisor.remote.mirror import ELSEWHERE
from mlxhost.supervisor.report import shown_state
from mlxhost.supervisor.settings import Settings
from mlxhost.supervisor.source import Source
from mlxhost.supervisor.state import SETTLED, Goal, Model, Replica, State, new_model
from mlxhost.supervisor.workercalls import WorkerCalls
from mlxhost.wire.control import Ctl, Keys, News, Reply

OPERATION = "reload"
HANGUP_SECONDS = 3600.0  # how long a reload by signal is watched


class Reload:
    def __init__(self, core: Core, lifecycle: Lifecycle, workers: WorkerCalls, source: Source | None) -> None:
        self._core, self._lifecycle, self._workers, self._source = core, lifecycle, workers, source
        self._one = asyncio.Lock()

    async def run(self, client: bytes, ctl: Ctl) -> Reply:
        """Reload, and wait (unless told not to) until the models that changed have settled."""

        def tell(text: str) -> None:
            self._core.control.send(client, News(ctl.call_id, text))

        if self._source is None:
            return Reply(ctl.call_id, "unsupported", "this process has no configuration of a fleet")
        wait_s = ctl.deadline_s if ctl.args.get("wait", True) else 0.0
        return await self._reload(ctl.call_id, self._source, wait_s, tell)

    def hangup(self) -> None:
        """The same on a signal, with the outcome as an event."""
        if self._source is not None:
            self._core.background(self._by_signal(self._source))

    async def _by_signal(self, source: Source) -> None:
        reply = await self._reload("", source, HANGUP_SECONDS, lambda _: None)
        if reply.code != "ok":
            self._core.events.event("", f"reload: {reply.message}", "error")

    async def _reload(
        self, call_id: str, source: Source, wait_s: float, tell: Callable[[str], None]
    ) -> Reply:
        core = self._core
        async with self._one:
            # READY=1 ends it, which must not be said while the fleet still starts.
            with _reloading(source.told) if core.serving else contextlib.nullcontext():
                try:
                    after = await asyncio.to_thread(source.read)
                except UserError as error:
                    return Reply(call_id, "invalid", f"nothing was changed: {error}")
                found = differences(core.settings, after)
                if reason := growth.too_large(core, found, after):
                    return Reply(call_id, "invalid", f"nothing was changed: {reason}")
                working = await self._apply(found, after)
        result = {**asdict(found), "added": [m.name for m in found.added]}
        done = await self._settled(working, wait_s, tell)
        core.events.event("", f"reloaded: {summary(found)}")
        states = {r.slot: shown_state(r) for m in self._models(found) for r in m.replicas}
        result |= {"changed": bool(found), "replicas": states}
        if not done and wait_s:
            return Reply(call_id, "timeout", f"still under way after {wait_s:.0f} s", result)
        failed = [r for m in self._models(found) for r in m.replicas if r.state is State.FAILED]
        if failed:
            return Reply(call_id, "failed", "; ".join(f"{r.slot}: {r.reason}" for r in failed), result)
        return Reply(call_id, result=result)

    async def _settled(
        self, working: list["asyncio.Task[None]"], wait_s: float, tell: Callable[[str], None]
    ) -> bool:
        """Whether all of `working` ended in time; they go on in any case."""
        end = asyncio.get_running_loop().time() + wait_s
        for task in working:
            tell(f"waiting for {task.get_name()}")
            left = max(0.0, end - asyncio.get_running_loop().time())
            await asyncio.wait({task}, timeout=left)
        return all(task.done() for task in working)

    async def _apply(self, found: Differences, after: Settings) -> list["asyncio.Task[None]"]:
        """Change what changes at once; the tasks are of those that take time."""
        core, state = self._core, self._core.state
        core.settings = taken(core.settings, after, found)
        state.routing = core.settings.routing
        specs = {spec.name: spec for spec in after.models}
        if "log_level" in found.applied:
            level = {"level": core.settings.log_level}
            everyone = Ctl("", loglevel.OPERATION, args=level)
            await loglevel.configure_logging(core, self._workers, b"", everyone)
        if found.keys:
            for frontend in state.frontends:
                core.send((frontend.slot, frontend.epoch), Keys(list(core.settings.keys)))
        working = []
        for name, fields in {**found.live, **found.renewed}.items():
            model = state.models[name]
            crowded = "replicas" in fields and growth.crowded(core, model, specs[name].replicas)
            self._change(model, specs[name], fields)
            if name in found.renewed or crowded:
                working.append(self._task(f"{name} to be loaded anew", self._renew(model)))
            elif "replicas" in fields:
                count = f"{name} to have {specs[name].replicas} replicas"
                working.append(self._task(count, self._resized(model)))
        for name in found.removed:
            working.append(self._task(f"{name} to end", self._remove(state.models[name])))
        for spec in found.added:
            working.append(self._task(f"{spec.name} to load", self._add(specs[spec.name])))
        core.changed()
        return working

    def _task(self, name: str, work: Any) -> "asyncio.Task[None]":
        task = self._core.background(work)
        task.set_name(name)
        return task

    def _models(self, found: Differences) -> list[Model]:
        names = (*(m.name for m in found.added), *found.removed, *found.renewed, *found.live)
        return [m for name in names if (m := self._core.state.models.get(name))]

    # --- one model

    def _change(self, model: Model, spec: ModelSpec, fields: tuple[str, ...]) -> None:
        """Take over what needs no new process; processes that start later have all of it."""
        # What `ctl reload-weights` has read stays, unless the file names other weights now.
        model.spec = spec if "path" in fields else replace(spec, path=model.spec.path)
        if "routing" in fields:
            model.routing = settled(spec, self._core.settings).routing
        if "pin" in fields:
            model.pinned = spec.pin
        if "replicas" in fields:
            _resize(model, spec.replicas)

    async def _resized(self, model: Model) -> None:
        self._lifecycle.pursue(model)
        await self._core.changes.until(lambda: not any(_ending(r) for r in model.replicas))
        model.replicas = [r for r in model.replicas if not r.retiring]
        self._core.changed()
        await self._core.changes.until(lambda: _calm(model))

    async def _renew(self, model: Model) -> None:
        """End the model's processes, and start them again under its new settings if it is wanted. Requests
        for it wait meanwhile, as for any model that is not in memory."""
        wanted = model.goal
        if wanted in (Goal.UNLOAD, Goal.STANDBY) and all(_gone(r) for r in model.replicas):
            return
        model.goal = renewing = Goal.UNLOAD if wanted in (Goal.UNLOAD, Goal.DRAIN) else Goal.STANDBY
        self._core.changed()
        self._lifecycle.pursue(model)
        await self._core.changes.until(lambda: all(map(_gone, model.replicas)) or model.goal is not renewing)
        model.replicas = [r for r in model.replicas if not r.retiring]
        if model.goal is renewing and renewing is Goal.STANDBY:
            self._lifecycle.load(model)
            await self._core.changes.until(lambda: _calm(model))

    async def _remove(self, model: Model) -> None:
        """End this machine's replicas; others' go on serving the model."""
        for replica in model.replicas:
            replica.retiring = not replica.host
        if all(r.retiring for r in model.replicas):
            model.goal = Goal.UNLOAD
        self._core.changed()
        self._lifecycle.pursue(model)
        await self._core.changes.until(lambda: not any(_ending(r) for r in model.replicas))
        model.replicas = [r for r in model.replicas if not r.retiring]
        if model.replicas:
            model.spec = replace(model.spec, path=ELSEWHERE, replicas=0)
        else:
            self._core.state.models.pop(model.name, None)
        self._core.changed()

    async def _add(self, spec: ModelSpec) -> None:
        state = self._core.state
        if known := state.models.get(spec.name):  # it runs on another machine, or is still being removed
            await self._core.changes.until(lambda: not any(_ending(r) for r in known.replicas))
        model = state.models.get(spec.name) or state.models.setdefault(
            spec.name, new_model(spec, state.routing)
        )
        self._change(model, spec, ("path", "routing", "pin", "replicas"))
        self._core.changed()
        if not spec.lazy:
            self._lifecycle.load(model)
            await self._core.changes.until(lambda: _calm(model))


def summary(found: Differences) -> str:
    """What changed, on one line."""
    parts = [
        *(f"{model.name} is new" for model in found.added),
        *(f"{name} is gone" for name in found.removed),
        *(f"{name} is loaded anew ({', '.join(names)})" for name, names in found.renewed.items()),
        *(f"{name} changed ({', '.join(names)})" for name, names in found.live.items()),
        *(f"{name} is {after} (was {before})" for name, (before, after) in found.applied.items()),
        *(f"the key {name} changed" for name in found.keys),
        *(f"{name} needs a restart of the fleet" for name in found.waiting),
    ]
    return "; ".join(parts) or "nothing differs"


@contextlib.contextmanager
def _reloading(manager: Notifier) -> Iterator[None]:
    manager.reloading()
    try:
        yield
    finally:
        manager.tell(READY)


def _resize(model: Model, count: int) -> None:
    """As many replicas on this machine as `count`: new ones are added, the last ones retire."""
    here = [r for r in model.replicas if not r.host and not r.retiring]
    for replica in here[count:]:
        replica.retiring = True
    taken_slots = {r.slot for r in model.replicas}
    index = 0
    for _ in range(count - len(here)):
        while f"{model.name}/{index}" in taken_slots:
            index += 1
        slot = f"{model.name}/{index}"
        taken_slots.add(slot)
        model.replicas.append(Replica(slot=slot, role="worker", model=model, index=index))


def _gone(replica: Replica) -> bool:
    return bool(replica.host) or replica.state in (State.UNLOADED, State.FAILED)


def _ending(replica: Replica) -> bool:
    return replica.retiring and not _gone(replica)


def _calm(model: Model) -> bool:
    """Whether nothing of the model is under way: it serves, failed, or waits for room."""
    return all(r.host or r.state in SETTLED for r in model.replicas)
