"""Calls to the fleet's processes: one CTL to each process of the target, the answers gathered by slot.

A part that fails is shown beside the parts that did not. What an answer changes in the fleet as others see
it (a new model card, other limits) is taken over here.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from mlxhost.supervisor.calls import OnNews
from mlxhost.supervisor.core import Core
from mlxhost.supervisor.state import PAUSED, WAS_READY, Member, Model, Replica
from mlxhost.wire.control import Ctl, ModelCard, News, Reply

FRONTENDS = "frontend"  # as a target: all of them
# Operations that concern every process, not only those of models.
_FOR_ALL = frozenset({"configure_logging"})


class WorkerCalls:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._effects: dict[str, Callable[[Replica, dict[str, Any]], None]] = {
            "reload_weights": self._take_card,
            "set_state": self._take_limits,
        }

    def targets(self, ctl: Ctl) -> list[Member] | None:
        """The slots that `ctl` is for; None when its target names nothing. A target is a model, an alias, a
        slot (`demo/0`), `frontend`, or empty for every model."""
        state = self._core.state
        if not ctl.target:
            return [*state.replicas(), *(state.frontends if ctl.op in _FOR_ALL else ())]
        if model := state.find_model(ctl.target):
            return list(model.replicas)
        if ctl.target == FRONTENDS:
            return list(state.frontends)
        member = state.member(ctl.target)
        return [member] if member else None

    async def run(self, client: bytes, ctl: Ctl, members: Sequence[Member]) -> Reply:
        """Call the operation on every one of `members` that runs."""
        running = [m for m in members if m.state in WAS_READY]
        if not running:
            names = ", ".join(m.slot for m in members)
            return Reply(ctl.call_id, "invalid", f"nothing of {names} is running")
        replies = await asyncio.gather(*(self._call(client, ctl, m) for m in running))
        if ctl.op == "reload_weights" and all(r.code == "ok" for r in replies):
            self._keep_path([m for m in running if isinstance(m, Replica)], replies)
        return gathered(ctl, dict(zip((m.slot for m in running), replies, strict=True)))

    async def resume(self, model: Model, deadline_s: float) -> str:
        """Let every paused replica go on; what went wrong, if anything."""
        paused = [r for r in model.replicas if r.state in WAS_READY and r.mode in PAUSED]
        calls = self._core.calls
        replies = await asyncio.gather(
            *(calls.call((r.slot, r.epoch), "resume", {}, deadline_s) for r in paused)
        )
        bad = [(r, reply) for r, reply in zip(paused, replies, strict=True) if reply.code != "ok"]
        return "; ".join(f"{r.slot}: {reply.message or reply.code}" for r, reply in bad)

    async def _call(self, client: bytes, ctl: Ctl, member: Member) -> Reply:
        def tell(news: News) -> None:
            line = f"{member.slot} {news.message}"
            self._core.control.send(client, News(ctl.call_id, line, {"slot": member.slot, **news.data}))

        return await self.ask(member, ctl, tell)

    async def ask(self, member: Member, ctl: Ctl, tell: OnNews) -> Reply:
        """One process's answer to `ctl`, and what it changes here."""
        peer = (member.slot, member.epoch)
        reply = await self._core.calls.call(peer, ctl.op, ctl.args, ctl.deadline_s, tell)
        if reply.code == "ok" and isinstance(member, Replica) and (effect := self._effects.get(ctl.op)):
            effect(member, reply.result)
        return reply

    def _take_card(self, replica: Replica, result: dict[str, Any]) -> None:
        """Frontends must tokenize for the weights that are served now."""
        if replica.ready is None or not result.get("card"):
            return
        card = msgspec.convert(result["card"], ModelCard)
        weights = int(result.get("weights_bytes", replica.ready.weights_bytes))
        replica.ready = msgspec.structs.replace(replica.ready, card=card, weights_bytes=weights)
        replica.model.card = card
        self._core.changed()

    def _take_limits(self, replica: Replica, result: dict[str, Any]) -> None:
        if replica.ready is not None:
            known = ("max_rows", "max_queued")
            limits = {name: int(result[name]) for name in known if name in result}
            replica.ready = msgspec.structs.replace(replica.ready, **limits)
            self._core.changed()

    def _keep_path(self, replicas: Sequence[Replica], replies: Sequence[Reply]) -> None:
        """Processes that start later must load what the present ones serve."""
        for replica, reply in zip(replicas, replies, strict=True):
            if path := reply.result.get("path"):
                replica.model.spec = replace(replica.model.spec, path=Path(path))


def gathered(ctl: Ctl, replies: dict[str, Reply]) -> Reply:
    """One answer for all: ok, the code that all failed with, or `failed` when only some did."""
    answers = {
        slot: {"code": reply.code, "message": reply.message, "result": reply.result}
        for slot, reply in replies.items()
    }
    bad = [f"{slot}: {r.message or r.code}" for slot, r in replies.items() if r.code != "ok"]
    codes = {reply.code for reply in replies.values()}
    code = codes.pop() if len(codes) == 1 else "failed"
    return Reply(ctl.call_id, code, "; ".join(bad), {"replicas": answers})
