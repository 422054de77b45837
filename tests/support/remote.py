"""A fleet that other machines may join, and such machines: processes with homes of their own."""

import json
import os
from pathlib import Path
from typing import Any

from support.supervisor_up import Up, mlxhost, wait_for

# Cuts are noticed sooner than in earnest, so that tests need not wait.
QUICK_REMOTE = {"stale_s": 3.0}


def new_bundle(home: Path, name: str = "studio") -> Path:
    """Make keys for a machine at the fleet's home."""
    done = mlxhost(home, "keys", "new", name)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


class Fleet(Up):
    """`mlxhost up --listen`, on a free port unless `listen` says where."""

    def __init__(
        self, home: Path, models: str = "", *options: str, listen: str = "tcp://127.0.0.1:0", **more: Any
    ) -> None:
        timing = QUICK_REMOTE | more.pop("timing", {})
        super().__init__(home, models, "--listen", listen, *options, timing=timing, **more)

    @property
    def endpoint(self) -> str:
        """What other machines dial."""
        return next(w for w in self.line("machines join with").split() if w.startswith("tcp://"))

    def remote(self) -> dict[str, Any]:
        """What `ctl status` says of other machines."""
        return self.status()["remote"]

    def refused(self, reason: str) -> int:
        return self.remote()["refused"].get(reason, 0)

    def state_of(self, slot: str) -> str:
        """State of a replica, empty when it is not listed."""
        replicas = [r for m in self.status()["models"] for r in m["replicas"]]
        return next((r["state"] for r in replicas if r["slot"] == slot), "")

    def wait_ready(self, slot: str, timeout: float = 15.0) -> None:
        """Until the frontend can send requests there."""
        wait_for(lambda: self.state_of(slot) == "ready", timeout, f"{slot} ready in:\n{self.output}")


class Join(Up):
    """`mlxhost join`. `wrapped` is a command to run it under."""

    def __init__(
        self,
        home: Path,
        endpoint: str,
        bundle: Path | None,
        models: str,
        *options: str,
        wrapped: list[str] | None = None,
        **more: Any,
    ) -> None:
        self._endpoint, self._wrapped = endpoint, wrapped or []
        keys = ["--bundle", str(bundle)] if bundle else []
        timing = QUICK_REMOTE | more.pop("timing", {})
        super().__init__(home, models, *keys, *options, timing=timing, **more)

    @property
    def prefix(self) -> list[str]:
        return self._wrapped

    def command(self, models: str, port: int) -> list[str]:
        return ["join", self._endpoint, "--models", models]

    def refusal(self, timeout: float = 15.0) -> str:
        """What it says when it cannot join; it must end by itself, with code 1."""
        assert self.exit_code(timeout) == 1, self.output
        return next(line for line in self.lines if line.startswith("mlxhost:"))


def changed_bundle(bundle: Path, **fields: str) -> Path:
    """A copy of a bundle with other content."""
    copy = bundle.with_name(f"{bundle.name}-changed")
    copy.write_text(json.dumps(json.loads(bundle.read_text()) | fields))
    os.chmod(copy, 0o600)
    return copy
