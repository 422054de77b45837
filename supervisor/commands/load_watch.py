"""`mlxhost ctl load-watch`: Show the load of a model's workers, again and again.

With --json, each report is one line of JSON.

  mlxhost ctl load-watch demo --interval 0.5 --count 20

On the wire: CTL {op: watch_load, target: MODEL, args: {interval_s, count}} -> NEWS {slot, load}* -> REPLY
{replicas: {slot: answer}}.
"""

import argparse
from typing import Any

from mlxhost.supervisor.commands.request import Request, model_argument, seconds


def arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="SECONDS", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--count", type=_count, default=10, metavar="N", help="reports of each (default: %(default)s)"
    )


def request(args: argparse.Namespace) -> Request:
    wanted = {"interval_s": args.interval, "count": args.count}
    deadline_s = args.interval * args.count + 5.0
    return Request("watch_load", _nothing_more, args.model, wanted, deadline_s, news_as_json=True)


def _nothing_more(result: dict[str, Any]) -> str:
    return ""


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 100_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 100000")
    return int(text)
