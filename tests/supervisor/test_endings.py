"""What meets a process that is on its way out."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from mlxhost.supervisor.lifecycle import Lifecycle
from mlxhost.supervisor.modelspec import Model as ModelSpec
from mlxhost.supervisor.state import Goal, State, new_fleet


def test_a_load_waits_for_a_process_that_is_being_ended() -> None:
    """It is wanted, but its slot is not restarted before its process has been seen to be gone: that would
    make two processes for one slot, one of which nobody knows."""
    spec = ModelSpec("a", Path("/a"))
    state = new_fleet(name="f", url="", routing="round-robin", models=(spec,), frontends=0)
    wanted: list[Any] = []
    (replica,) = state.replicas()
    replica.state, replica.stopping, replica.restart_at = State.BACKOFF, True, math.inf
    core = SimpleNamespace(state=state, hosts=None, want=wanted.append)
    Lifecycle(cast(Any, core)).load(replica.model)
    assert replica.restart_at == math.inf
    assert (wanted, replica.model.goal) == ([replica.model], Goal.STANDBY)
