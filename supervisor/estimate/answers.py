"""What a running fleet answers to `fit` and `library`: estimates against its own budget.

Headers are read in a thread, for a library may be large.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from mlxhost.supervisor.core import Core
from mlxhost.supervisor.errors import ModelError
from mlxhost.supervisor.estimate.estimate import sizer
from mlxhost.supervisor.estimate.fit import fit, sentence
from mlxhost.supervisor.estimate.library import Held, find, form_of, library
from mlxhost.supervisor.home import cache_dir
from mlxhost.supervisor.nearby import nearby
from mlxhost.supervisor.report import shown_state
from mlxhost.wire.control import Ctl, Reply

MAX_CONTEXT = 1 << 31

Room = Callable[[str], tuple[int, int]]  # a model's name -> the budget, and what other models hold of it


class Answers:
    """`fit` {model, context} and `library` {context}."""

    operations = ("fit", "library")

    def __init__(self, core: Core) -> None:
        self._core = core

    async def answer(self, ctl: Ctl) -> Reply:
        """The reply to `ctl`."""
        context = ctl.args.get("context", 0)
        if isinstance(context, bool) or not isinstance(context, int) or not 0 <= context < MAX_CONTEXT:
            return Reply(ctl.call_id, "invalid", f"context {context!r} is not a number of tokens")
        held = await asyncio.to_thread(library, self._fleet(), cache_dir())
        if ctl.op == "library":
            models = [await self._described(one, context) for one in held]
            return Reply(ctl.call_id, result={"models": models})
        name = str(ctl.args.get("model", ""))
        if (wanted := find(held, name)) is None:
            hint = nearby(name, [h.name for h in held])
            return Reply(ctl.call_id, "not_found", f"no model {name!r} is on this machine{hint}")
        described = await self._described(wanted, context)
        if "error" in described:
            return Reply(ctl.call_id, "failed", described["error"])
        return Reply(ctl.call_id, result=described)

    def _fleet(self) -> list[Held]:
        return [
            Held(m.name, m.spec.path, "fleet", form_of(m.spec.path), m.spec.aliases)
            for m in self._core.state.models.values()
            if any(not r.host for r in m.replicas)
        ]

    async def _described(self, held: Held, context: int) -> dict[str, Any]:
        """What is known of a model, and whether it fits; `error` says why that cannot be told."""
        model = self._core.state.models.get(held.name) if held.source == "fleet" else None
        settings, spec = self._core.settings, model.spec if model else None
        dtype = (spec.dtype if spec else "") or settings.dtype
        wanted = context or (spec.context if spec else 0) or settings.context
        described: dict[str, Any] = {
            "model": held.name,
            "source": held.source,
            "format": held.form,
            "disk_bytes": held.disk_bytes,
            "state": shown_state(model.replicas[0]) if model else "",
        }
        quantised = (spec.quantised if spec else "") or settings.quantised
        budget, taken = self._core.room(held.name)
        try:
            found = await asyncio.to_thread(_fit, held, dtype, quantised, wanted, budget, taken)
        except ModelError as error:
            # Clients know models by name; where their files are is no business of theirs.
            return described | {"error": str(error).replace(str(held.path), held.name)}
        return described | found | {"message": sentence(held.name, found)}


def _fit(held: Held, dtype: str, quantised: str, context: int, budget: int, taken: int) -> dict[str, Any]:
    return fit(sizer(held.path, dtype, quantised=quantised), context, budget, taken).as_json()
