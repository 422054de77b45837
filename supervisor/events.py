"""What the event loop tells whoever shows the fleet to a user."""

from typing import Protocol

from mlxhost.supervisor.state import FleetState


class Events(Protocol):
    def changed(self, state: FleetState) -> None:
        """Something in the fleet changed (also called while a load advances)."""

    def event(self, slot: str, text: str, level: str = "info") -> None:
        """Something happened that a user may want to read later. `slot` is empty for the whole fleet."""

    def set_level(self, level: str) -> str:
        """Show events of `level` (debug, info, warning, error) and above from now on; the level before."""
        ...

    def output(self, slot: str, line: str) -> None:
        """A child process wrote a line."""

    def serving(self, state: FleetState) -> None:
        """Everything asked for at the start is ready."""
