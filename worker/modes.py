"""What keeps the engine from stepping, and the mode that this comes to. Pure."""

from enum import StrEnum


class Mode(StrEnum):
    """The values are those of the heartbeat."""

    RUNNING = "running"
    PAUSING = "pausing"  # admits nothing, finishes what runs
    PAUSED = "paused"  # computes nothing; requests wait in the queue
    SLEEPING = "sleeping"  # holds no memory; requests are refused
    RELOADING = "reloading"  # reads weights; requests wait in the queue


class Hold(StrEnum):
    """How the operator has paused the engine."""

    NONE = "none"
    QUIET = "quiet"  # admit nothing, let what runs finish
    FREEZE = "freeze"  # not one step more


STEPPING = frozenset({Mode.RUNNING, Mode.PAUSING})


class Holds:
    """Everything that may keep the engine still. Owned by the engine thread."""

    def __init__(self) -> None:
        self.hold = Hold.NONE
        self.asleep = False
        self.reloading = False
        self.out_of_memory = False  # a lease says to stand still
        self.awaiting_quiet = 0  # calls that wait until nothing runs

    def mode(self, running: int) -> Mode:
        """The mode while `running` rows are admitted."""
        if self.reloading:
            return Mode.RELOADING
        if self.asleep:
            return Mode.SLEEPING
        if self.hold is Hold.FREEZE or self.out_of_memory:
            return Mode.PAUSED
        if running and (self.awaiting_quiet or self.hold is Hold.QUIET):
            return Mode.PAUSING
        return Mode.PAUSED if self.hold is Hold.QUIET else Mode.RUNNING
