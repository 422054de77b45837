"""Control operations that a frontend answers. Each CTL gets one REPLY."""

from typing import Literal

import msgspec
from msgspec import Struct

from mlxhost.frontend import logs
from mlxhost.wire.control import Ctl, Reply

OPERATIONS = ("configure_logging", "health")


class Logging(Struct, forbid_unknown_fields=True):
    """How much is logged."""

    level: Literal["debug", "info", "warning", "error"]


def answer(ctl: Ctl) -> Reply:
    """The reply to `ctl`; `unsupported` for what only workers do."""
    match ctl.op:
        case "configure_logging":
            return _configure_logging(ctl)
        case "health":
            return Reply(ctl.call_id, result={"mode": "running"})
        case _:
            known = ", ".join(OPERATIONS)
            return Reply(
                ctl.call_id, "unsupported", f"a frontend has no operation {ctl.op!r}; it has: {known}"
            )


def _configure_logging(ctl: Ctl) -> Reply:
    try:
        level = msgspec.convert(ctl.args, Logging).level
    except msgspec.ValidationError as error:
        return Reply(ctl.call_id, "invalid", f"configure_logging: {error}")
    return Reply(ctl.call_id, result={"level": level, "was": logs.set_level(level)})
