"""What a user sees of `mlxhost up`: progress while models load, then the address, then events.

On a terminal progress is a live block; elsewhere it is one plain line for each change.
"""

import sys
import time
from collections.abc import Sequence

from mlxhost.supervisor.console import duration, err, out, printable
from mlxhost.supervisor.liveview import LiveBlock
from mlxhost.supervisor.rows import ON_DEMAND, WAITING, Row, progress_row, rows
from mlxhost.supervisor.settings import LEVELS
from mlxhost.supervisor.state import FleetState

# In plain output a phase that takes long says again how far it is.
PLAIN_SECONDS = 10.0


class View:
    """Implements supervisor.events.Events for a terminal (`live`) or a log."""

    def __init__(self, *, live: bool) -> None:
        self._block = LiveBlock(sys.stdout) if live else None
        self._began = time.monotonic()
        self._level = "info"
        self._serving = False
        self._told: dict[str, tuple[str, float]] = {}  # label -> phase and when it was told, plain only
        self._fetch_phase, self._fetch_since = "", 0.0

    def fetching(self, label: str, phase: str, done: int, total: int) -> None:
        """A model's files are being fetched, before there is a fleet."""
        now = time.monotonic()
        if phase != self._fetch_phase:
            self._fetch_phase, self._fetch_since = phase, now
        self._show([progress_row(printable(label), phase, done, total, now - self._fetch_since)])

    def changed(self, state: FleetState) -> None:
        if not state.accepting:
            self.close()  # stopped while it started: what becomes of the loads is of no interest
        elif not self._serving:
            self._show(list(rows(state, time.monotonic())))

    def set_level(self, level: str) -> str:
        was, self._level = self._level, level
        return was

    def event(self, slot: str, text: str, level: str = "info") -> None:
        if LEVELS.index(level) < LEVELS.index(self._level):
            return
        self._line(f"{_clock()} {_prefix(slot)}{printable(text)}", error=False)

    def output(self, slot: str, line: str) -> None:
        self._line(f"[{printable(slot)}] {printable(line)}", error=True)

    def serving(self, state: FleetState) -> None:
        ready = list(rows(state, time.monotonic()))
        if self._block:
            self._block.finish(ready)
        else:
            self._show(ready)
        self._serving = True
        if state.joined:
            out(f"Serving for {state.joined}. `mlxhost ctl status` shows what runs here; Ctrl-C stops it.")
            return
        model = next(iter(state.models), "")
        if model:
            out(f"Serving on {state.url} after {duration(time.monotonic() - self._began)}. Try:")
            out(example(state.url, model))
        else:
            out(f"Serving on {state.url} with no model until a machine joins.")
        out("`mlxhost ctl status` shows the fleet; Ctrl-C stops it.")

    def close(self) -> None:
        """Leave the terminal as ordinary lines."""
        self._serving = True
        if self._block:
            self._block.clear()

    def _show(self, lines: Sequence[Row]) -> None:
        if self._block:
            self._block.draw(lines)
            return
        now = time.monotonic()
        for row in lines:
            phase, at = self._told.get(row.label, ("", 0.0))
            if row.phase in (WAITING, ON_DEMAND):
                continue
            if row.phase != phase or (row.fraction is not None and now - at >= PLAIN_SECONDS):
                self._told[row.label] = row.phase, now
                detail = f" ({row.detail})" if row.detail and not row.detail.startswith("0.0 s") else ""
                out(f"{_clock()} {row.label}: {row.phase}{detail}")

    def _line(self, text: str, *, error: bool) -> None:
        if self._block:
            self._block.clear()
        (err if error else out)(text)


def example(url: str, model: str) -> str:
    """A request that works as it stands, for `model`."""
    name = model.replace("'", "'\\''")
    return (
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{\n"
        f'    "model": "{name}",\n'
        '    "messages": [{"role": "user", "content": "What is the capital of France?"}]}\'\n'
    ).rstrip("\n")


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def _prefix(slot: str) -> str:
    return f"{printable(slot)}: " if slot else ""
