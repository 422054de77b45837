"""`mlxhost ctl sessions`: List the sessions that a model's workers have seen, the latest first.

  mlxhost ctl sessions demo

On the wire: CTL {op: list_sessions, target: MODEL, args: {limit}} -> REPLY {replicas: {slot: answer}}.
"""

import argparse
import time
from typing import Any

from mlxhost.supervisor.commands.request import Request, answers_text, model_argument

HEADER = ("SESSION", "OPENED", "LAST USED", "REQUESTS", "RUNNING", "PROMPT TOKENS", "COMPLETION TOKENS")


def arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)


def request(args: argparse.Namespace) -> Request:
    return Request("list_sessions", _text, args.model)


def _text(result: dict[str, Any]) -> str:
    return answers_text(result, _block)


def _block(answer: dict[str, Any]) -> str:
    from mlxhost.supervisor.console import duration
    from mlxhost.supervisor.table import table

    if not answer["sessions"]:
        return "no sessions"
    rows = [
        (
            s["id"],
            "explicitly" if s["opened"] else "by a request",
            f"{duration(max(0.0, time.time() - s['last_used']))} ago",
            *(str(s[key]) for key in ("requests", "running", "prompt_tokens", "completion_tokens")),
        )
        for s in answer["sessions"]
    ]
    return "\n".join([f"{answer['known']} sessions", *table([HEADER, *rows])])
