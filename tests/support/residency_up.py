"""Fleets with more models than room, for the tests of residency."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.supervisor_up import Up, posted

# Quick enough for tests, and slow enough that a loaded machine does not turn the rules upside down.
RULES = {"min_resident_s": 1.0, "idle_s": 0.1, "patience_s": 0.3}


def models(path: Path, names: str) -> str:
    """`--models` for several fakes of one directory."""
    return ",".join(f"{name}={path}" for name in names)


def standing(up: Up) -> dict[str, dict[str, Any]]:
    """What `ctl status` says of every model's residency."""
    found: dict[str, dict[str, Any]] = up.status()["residency"]["models"]
    return found


def resident(up: Up) -> str:
    """The names of the models that have a process, in order."""
    return "".join(name for name, model in standing(up).items() if model["phase"] != "absent")


def decisions(up: Up, model: str = "") -> list[dict[str, Any]]:
    """The actions that the decision log has of a model, or of all, oldest first."""
    told = json.loads(up.ctl("explain", *([model] if model else []), "--json").stdout)
    return [action for decision in told["decisions"] for action in decision["actions"]]


def done(up: Up, verb: str, model: str = "") -> list[str]:
    """The models to which `verb` (load, evict, hold, refuse) was done, one for each time."""
    return [a["model"] for a in decisions(up, model) if a["do"] == verb and model in ("", a["model"])]


def answer_of(up: Up, model: str, max_tokens: int = 2) -> tuple[int, dict[str, Any], str]:
    """Status, body and Retry-After of one completion."""
    with posted(up.url(), model, max_tokens) as response:
        return response.status, json.loads(response.read()), response.headers.get("Retry-After", "")


def together(calls: Sequence[Callable[[], Any]], timeout: float = 60.0) -> list[Any]:
    """The results of calls that run at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a call hangs"
    return results
