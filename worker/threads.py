"""How many threads the BLAS uses: never more than the lease, and fewer while the cores are contended.

OpenBLAS splits each product among its threads and waits for the slowest. When another process takes one of
the cores, that wait is a scheduler's time slice for every product of every layer: with 2 threads on 2 cores
and one busy stranger a decode step takes 4 to 20 times what it takes with one thread. So the lease is an
upper limit, and small probes find out what pays now.
"""

import ctypes
import time
from collections.abc import Callable, Mapping

from mlxhost.worker.blas import Blas

PROBE_EVERY_S = 0.5
_PROBE_CALLS = 12
_PROBE_LIMIT_S = 0.02  # a setting this slow has lost, and need not be measured further
_GAIN = 0.85  # a setting must take less than this share of the other's time to be worth a change
_COLLAPSE = 0.6  # below this share the cores are contended, and the change cannot wait
_WINS_TO_RISE = 6
_MOST_WINS_TO_RISE = 24
_LOSSES_TO_FALL = 2
_MOST_PATIENCE = 7
_STEADY = 60  # probes without a fall after which earlier falls are forgotten
# Rows, inner size and columns of a probe's product, like a layer's of a small model.
_M, _K, _N = 16, 256, 1024


def candidates(current: int, limit: int) -> list[int]:
    """Settings worth timing beside `current`: half and double, within 1 and `limit`."""
    return sorted({max(1, current // 2), min(current, limit), min(current * 2, limit)})


class Choice:
    """Decides from probes. Down at once when the cores are contended, else after two losses in a row; up
    after several wins in a row, and more of them after each fall."""

    def __init__(self, limit: int) -> None:
        self.threads = self.limit = max(1, limit)
        self._wins = self._losses = self._steady = 0
        self._wins_to_rise = _WINS_TO_RISE
        self.collapses = 0  # probes in a row in which more threads were far slower than what is set

    def set_limit(self, limit: int) -> None:
        """A new lease. A rise is left to the probes, unless only the old lease was in the way."""
        only_lease_held_it = self.threads == self.limit
        self.limit = max(1, limit)
        self.threads = self.limit if only_lease_held_it else min(self.threads, self.limit)
        self._wins = self._losses = 0

    def decide(self, seconds: Mapping[int, float]) -> int:
        """Take in how long each candidate took; the setting to use from now on."""
        now = seconds[self.threads]
        fewer = [n for n in seconds if n < self.threads and seconds[n] < now * _GAIN]
        more = [n for n in seconds if n > self.threads and seconds[n] < now * _GAIN]
        slower = [n for n in seconds if n > self.threads and now < seconds[n] * _COLLAPSE]
        self.collapses = self.collapses + 1 if slower else 0
        self._losses = self._losses + 1 if fewer else 0
        self._wins = self._wins + 1 if more and not fewer else 0
        self._steady += 1
        if fewer and (self._losses >= _LOSSES_TO_FALL or seconds[fewer[0]] < now * _COLLAPSE):
            self._move(fewer[0])
            self._wins_to_rise = min(self._wins_to_rise * 2, _MOST_WINS_TO_RISE)
        elif self._wins >= self._wins_to_rise:
            self._move(more[-1])
        elif self._steady >= _STEADY:
            self._wins_to_rise = _WINS_TO_RISE
        return self.threads

    def _move(self, threads: int) -> None:
        self.threads = threads
        self._wins = self._losses = self._steady = 0


class CpuThreads:
    """Keeps a BLAS at the best thread count. Owned by the engine thread; without a BLAS it does nothing."""

    def __init__(self, blas: Blas | None, limit: int) -> None:
        self._blas = blas
        self._choice = Choice(limit)
        self._next_probe = 0.0
        if blas is not None:
            self._product = _product(blas)
            blas.set_threads(self._choice.threads)

    @property
    def threads(self) -> int:
        return self._choice.threads

    def lease(self, threads: int) -> None:
        """Use at most `threads` from now on."""
        self._choice.set_limit(threads)
        self._next_probe = 0.0
        if self._blas is not None:
            self._blas.set_threads(self._choice.threads)

    def tune(self, settle: Callable[[], None]) -> None:
        """Probe when it is time to; `settle` waits until the BLAS is idle. Takes a few milliseconds."""
        now = time.monotonic()
        if self._blas is None or self._choice.limit == 1 or now < self._next_probe:
            return
        settle()
        seconds = {}
        for threads in candidates(self._choice.threads, self._choice.limit):
            self._blas.set_threads(threads)
            seconds[threads] = self._time()
        self._blas.set_threads(self._choice.decide(seconds))
        # On contended cores a probe of more threads waits for a time slice itself: ask less often.
        patience = 1 + min(self._choice.collapses, _MOST_PATIENCE)
        self._next_probe = time.monotonic() + PROBE_EVERY_S * patience

    def _time(self) -> float:
        """Seconds that a probe's products take, an early end counted in full."""
        self._product()
        started = time.perf_counter()
        for done in range(1, _PROBE_CALLS + 1):
            self._product()
            took = time.perf_counter() - started
            if took > _PROBE_LIMIT_S:
                return took * _PROBE_CALLS / done
        return took


def _product(blas: Blas) -> Callable[[], None]:
    """One (M, K) by (K, N) product in float32 on buffers of its own."""
    a, b, c = ((ctypes.c_float * size)() for size in (_M * _K, _K * _N, _M * _N))
    sgemm = getattr(blas.library, f"{blas.prefix}cblas_sgemm")
    row_major, no_transpose = 101, 111
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def run() -> None:
        sgemm(row_major, no_transpose, no_transpose, _M, _N, _K, one, a, _K, b, _N, zero, c, _N)

    return run
