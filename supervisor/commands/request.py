"""What a `ctl` operation sends, and how it shows the answer."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WAIT_SECONDS = 300.0
MAX_WAIT_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Request:
    """One control call. `show` turns the reply's result into text."""

    op: str
    show: Callable[[dict[str, Any]], str]
    target: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    deadline_s: float = 10.0
    news_as_json: bool = False  # with --json, news are printed too, a line each


def model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name of the model, as `ctl status` shows it")


def timeout_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help="how long to wait for the end (default: %(default).0f); the operation itself goes on",
    )


def answers_text(result: dict[str, Any], line: Callable[[dict[str, Any]], str]) -> str:
    """`demo/0 <line>` for each process that did what was asked; the others are told as errors."""
    return "\n".join(
        f"{slot} {line(answer['result'])}"
        for slot, answer in result.get("replicas", {}).items()
        if answer["code"] == "ok"
    )


def waiting_arguments(parser: argparse.ArgumentParser) -> None:
    """For operations that take time."""
    model_argument(parser)
    timeout_argument(parser)
    parser.add_argument("--no-wait", action="store_true", help="return at once")


def waiting_request(op: str, args: argparse.Namespace) -> Request:
    return Request(op, states_text, args.model, {"wait": not args.no_wait}, args.timeout)


def states_text(result: dict[str, Any]) -> str:
    """`demo/0 drained` for each replica."""
    return "\n".join(f"{slot} {state}" for slot, state in result["replicas"].items())


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= MAX_WAIT_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to {MAX_WAIT_SECONDS:.0f}")
    return value
