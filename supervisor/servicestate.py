"""Keeps the service manager told, from the event loop that its watchdog watches."""

import time
from collections import Counter

from mlxhost.supervisor.core import Core
from mlxhost.supervisor.notify import READY, STOPPING, WATCHDOG, Notifier
from mlxhost.supervisor.report import shown_state
from mlxhost.supervisor.state import FleetState

_IDLE_SECONDS = 3600.0


async def keep_told(core: Core, notifier: Notifier) -> None:
    """Until cancelled. A loop that hangs feeds no watchdog, which is the point."""
    told_ready = told_stopping = False
    told, feed_at = "", 0.0
    while True:
        if core.serving and not told_ready:
            told_ready = True
            notifier.tell(READY)
        if not core.state.accepting and not told_stopping:
            told_stopping = True
            notifier.tell(STOPPING)
        if (text := status_line(core.state)) != told:
            told = text
            notifier.status(text)
        now = time.monotonic()
        if notifier.watchdog_s and now >= feed_at:
            feed_at = now + notifier.watchdog_s
            notifier.tell(WATCHDOG)
        await core.changes.next(max(0.0, feed_at - now) if notifier.watchdog_s else _IDLE_SECONDS)


def status_line(state: FleetState) -> str:
    """What the fleet does, on one line: `http://... ready: 2 ready, 1 loading`."""
    counts = Counter(shown_state(replica) for replica in state.replicas())
    what = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no model"
    return f"{'serving' if state.accepting else 'stopping'} on {state.url}: {what}"
