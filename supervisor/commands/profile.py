"""`mlxhost ctl profile`: Record where a worker's time goes, step by step.

`stop` prints the figures and writes a trace for chrome://tracing or Perfetto. MODEL may also be one
replica, `demo/0`.

  mlxhost ctl profile demo start
  mlxhost ctl profile demo stop

On the wire: CTL {op: profile, target: MODEL, args: {action}} -> REPLY {replicas: {slot: answer}}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request, answers_text, model_argument

COLUMNS = ("count", "total_ms", "mean_ms", "p50_ms", "p99_ms", "max_ms")


def arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument("action", choices=("start", "stop"), help="begin, or end and show")


def request(args: argparse.Namespace) -> Request:
    return Request("profile", _text, args.model, {"action": args.action}, 60.0)


def _text(result: dict[str, Any]) -> str:
    return answers_text(result, _block)


def _block(answer: dict[str, Any]) -> str:
    from mlxhost.supervisor.table import table

    if answer.get("recording"):
        return f"records, at most {answer['max_events']:,} events"
    header = ("lap", "", "", *COLUMNS)
    rows = [(name, "", "", *(f"{lap[c]:g}" for c in COLUMNS)) for name, lap in answer["laps"].items()]
    dropped = f", {answer['dropped']} older ones dropped" if answer["dropped"] else ""
    head = f"{answer['events']} events in {answer['seconds']:.1f} s{dropped}: {answer['path']}"
    return "\n".join([head, *table([header, *rows])])
