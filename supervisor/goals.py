"""What a replica must do next to reach its model's goal. Pure."""

from enum import StrEnum

from mlxhost.supervisor.state import Goal, State


class Step(StrEnum):
    NOTHING = "nothing"
    START = "start"  # spawn a process
    CLOSE = "close"  # take nothing new
    OPEN = "open"  # take requests again
    STOP = "stop"  # end the process, which has nothing left to do
    FORGET = "forget"  # there is no process: drop its restart or failure


_STEPS: dict[tuple[Goal, State], Step] = {
    (Goal.SERVE, State.UNLOADED): Step.START,
    (Goal.SERVE, State.DRAINING): Step.OPEN,
    (Goal.SERVE, State.DRAINED): Step.OPEN,
    (Goal.DRAIN, State.READY): Step.CLOSE,
    (Goal.HOLD, State.READY): Step.CLOSE,
    **{
        (goal, state): step
        for goal in (Goal.UNLOAD, Goal.STANDBY)
        for state, step in {
            State.READY: Step.CLOSE,
            State.DRAINED: Step.STOP,
            State.STARTING: Step.STOP,
            State.LOADING: Step.STOP,
            State.BACKOFF: Step.FORGET,
        }.items()
    },
    (Goal.UNLOAD, State.FAILED): Step.FORGET,
}


def next_step(goal: Goal, state: State) -> Step:
    """A failed replica of a served model stays failed: only `ctl load` forgets a failure."""
    return _STEPS.get((goal, state), Step.NOTHING)
