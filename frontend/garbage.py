"""When Python looks for garbage in cycles. A full search holds up all streams: 0.6 s with 10,000 of them.

Reference counting frees almost everything; what is left in cycles (errors and their frames, mostly) can wait
until nobody does.
"""

import gc
import time

# Young objects are searched every so many allocations, and only these: the last number is out of reach.
_THRESHOLDS = (10_000, 50, 1_000_000)
# With requests in flight all the time, a full search is due after so many seconds all the same.
OVERDUE_S = 600.0


class Garbage:
    """Puts full searches off until nothing is in flight. Create it once everything is loaded: what exists by
    then is never searched again."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)
        self._worked = False
        self._searched_at = time.monotonic()

    def tick(self, in_flight: int) -> None:
        """Call each second."""
        now = time.monotonic()
        if in_flight and now - self._searched_at < OVERDUE_S:
            self._worked = True
        elif in_flight or self._worked:
            gc.collect()
            self._worked, self._searched_at = bool(in_flight), now
