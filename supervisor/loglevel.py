"""How much processes log: `configure_logging` for the supervisor and for all processes at once."""

from typing import Any

import msgspec

from mlxhost.supervisor.core import Core
from mlxhost.supervisor.settings import LEVELS
from mlxhost.supervisor.workercalls import WorkerCalls
from mlxhost.wire.control import Ctl, Reply

OPERATION = "configure_logging"
SUPERVISOR = "supervisor"  # as a target: this process


async def configure_logging(core: Core, workers: WorkerCalls, client: bytes, ctl: Ctl) -> Reply:
    """Answers for a target of any kind. Without one, processes that start later have the level, too."""
    level = ctl.args.get("level")
    if level not in LEVELS:
        return Reply(ctl.call_id, "invalid", f"{OPERATION}: level {level!r} is none of {', '.join(LEVELS)}")
    members = [] if ctl.target == SUPERVISOR else workers.targets(ctl)
    if members is None:
        return Reply(ctl.call_id, "not_found", f"no model or process {ctl.target!r} in this fleet")
    if ctl.target not in ("", SUPERVISOR):
        return await workers.run(client, ctl, members)
    own = {SUPERVISOR: _own(core, level)}
    if not ctl.target:
        core.log_level = level
        reply = await workers.run(client, ctl, members)
    else:
        reply = Reply(ctl.call_id)
    return msgspec.structs.replace(reply, result={"replicas": own | reply.result.get("replicas", {})})


def _own(core: Core, level: str) -> dict[str, Any]:
    was = core.events.set_level(level)
    return {"code": "ok", "message": "", "result": {"level": level, "was": was}}
