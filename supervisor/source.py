"""Where the settings of a running fleet come from."""

from collections.abc import Callable
from dataclasses import dataclass

from mlxhost.supervisor.notify import Notifier
from mlxhost.supervisor.settings import Settings


@dataclass(frozen=True, slots=True)
class Source:
    """`read` looks at the configuration anew (a thread may run it) and raises UserError. `told`, a service
    manager, hears of reloads."""

    read: Callable[[], Settings]
    told: Notifier
